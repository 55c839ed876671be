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
                       const struct diagnostic_push *second); /* copies them; NULL: none */
/* Sets the structured part of diagnostic_params(), without adding the field. */
void diagnostic_param_ids(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n);

/* Adds the text of buf as a field, unless it is empty. Deinits buf. */
void diagnostic_field_take(struct diagnostic *d, const char *label, struct strbuf *buf);

/* ---- names (diagnosis-names.c) ------------------------------------------------------------------------- */

enum { NAME_GROUPS_MAX = DIAGNOSTIC_MAX_PARAMS };

/* Parameters of a set that share a prefix of their names. */
struct name_group {
    uint32_t first;    /* id of the first parameter, in the order of the set */
    size_t prefix_len; /* bytes of its name in the prefix, without the dot; all bytes: one parameter */
    size_t n;          /* number of parameters of the set */
    bool whole;        /* every trainable parameter under the prefix is in the set */
};

/*
 * Groups parameters by common prefix. If enough groups fit to show the set exactly, these are used. Else there is one
 * group; without a common prefix, one group for each first component. Ids that the layout does not have are skipped.
 * *n_groups <= NAME_GROUPS_MAX. Return: the number of parameters in no group.
 */
size_t name_groups(struct name_group groups[NAME_GROUPS_MAX], size_t *n_groups, const struct layout *layout,
                   const uint32_t *ids, size_t n);

/* Prints up to five names as "a.b, a.c". Prints more names as "a.b.w and 431 more under a.b.*", one line per group. */
void name_list_print(struct strbuf *buf, const struct layout *layout, const uint32_t *ids, size_t n);
void name_print(struct strbuf *buf, const char *name, size_t name_len);
