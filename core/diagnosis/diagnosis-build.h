/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Functions for core/diagnosis/texts/, which makes diagnostics. Between diagnostic_new() and diagnostic_finish(), only
 * these functions and those of diagnosis.h change a diagnostic, because a spare is shared and must not change.
 */

#include "core/diagnosis/diagnosis.h"

struct strbuf;

void diagnostic_class(struct diagnostic *d, const char *cause_class);
void diagnostic_warn(struct diagnostic *d);
void diagnostic_pushes(struct diagnostic *d, const struct diagnostic_push *first,
                       const struct diagnostic_push *second); /* copies both pushes; NULL: no push */
/* Sets the ids and names of parameters as diagnostic_params() does, but adds no field. */
void diagnostic_param_ids(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n);

/* Adds the text of buf as a field, unless the text is empty. Frees the text of buf. */
void diagnostic_field_take(struct diagnostic *d, const char *label, struct strbuf *buf);

/* ---- names (diagnosis-names.c) ------------------------------------------------------------------------- */

enum { NAME_GROUPS_MAX = DIAGNOSTIC_MAX_PARAMS };

/* Parameters of a set that share a prefix of their names. */
struct name_group {
    uint32_t first;    /* id of the group's first parameter, in the order of the set */
    size_t prefix_len; /* length of the prefix in bytes, without the dot; the length of the name: one parameter */
    size_t n;          /* number of parameters of the set in the group */
    bool whole;        /* all trainable parameters under the prefix are in the set */
};

/*
 * Groups parameters by common prefix, so that the groups show the set exactly, if NAME_GROUPS_MAX groups suffice. Else
 * makes one group; without a common prefix, one group for each first component. Skips ids that the layout does not
 * have. *n_groups <= NAME_GROUPS_MAX. Return: the number of parameters in no group.
 */
size_t name_groups(struct name_group groups[NAME_GROUPS_MAX], size_t *n_groups, const struct layout *layout,
                   const uint32_t *ids, size_t n);

/* Prints up to five names as "a.b, a.c". Prints more names as "a.b.w and 431 more under a.b.*", with a line for each
 * group. */
void name_list_print(struct strbuf *buf, const struct layout *layout, const uint32_t *ids, size_t n);
void name_print(struct strbuf *buf, const char *name, size_t name_len);
