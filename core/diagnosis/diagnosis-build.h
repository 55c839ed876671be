/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Functions for the makers of diagnostics, core/diagnosis/cause-*.c. Between diagnostic_new() and diagnostic_finish() a
 * diagnostic is changed through these functions and those of diagnosis.h, never directly, because a spare is shared and
 * must not change.
 */

#include "core/diagnosis/diagnosis.h"

struct strbuf;

void diagnostic_class(struct diagnostic *d, const char *cause_class);
void diagnostic_warn(struct diagnostic *d);
void diagnostic_pushes(struct diagnostic *d, const struct diagnostic_push *first,
                       const struct diagnostic_push *second); /* copied; NULL leaves out */
/* The structured part of diagnostic_params(), without the field. */
void diagnostic_param_ids(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n);

/* Adds the text of buf as a field, nothing when it is empty, and deinits it. */
void diagnostic_field_take(struct diagnostic *d, const char *label, struct strbuf *buf);

/* ---- names (diagnosis-names.c) ------------------------------------------------------------------------- */

enum { NAME_GROUPS_MAX = DIAGNOSTIC_MAX_PARAMS };

/* Parameters of a set that share a prefix of their names. */
struct name_group {
    uint32_t first;    /* parameter id of the first in the order of the set */
    size_t prefix_len; /* bytes of that parameter's name, without the dot; all of it: one parameter */
    size_t n;          /* how many of the set */
    bool whole;        /* every trainable parameter under the prefix is in the set */
};

/*
 * Groups by common prefix: as many groups as show the set exactly, if there is room for them; else one, or,
 * without a common prefix, one for each first component.
 * Ids that the layout does not have are left out. *n_groups <= NAME_GROUPS_MAX.
 * Return: how many parameters are in none of the groups.
 */
size_t name_groups(struct name_group groups[NAME_GROUPS_MAX], size_t *n_groups, const struct layout *layout,
                   const uint32_t *ids, size_t n);

/* "a.b, a.c" up to five names, else "a.b.w and 431 more under a.b.*", a line for each group. */
void name_list_print(struct strbuf *buf, const struct layout *layout, const uint32_t *ids, size_t n);
void name_print(struct strbuf *buf, const char *name, size_t name_len);
