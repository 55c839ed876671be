/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Parts that the texts of core/diagnosis/cause-*.c share: place, pushes, partitions, remedies, and the names of calls
 * in the caller's language.
 */

#include "core/base/strbuf.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis-build.h"

/* In whose syntax a fix is given. */
enum caller {
    CALLER_C,       /* zerod/client.h */
    CALLER_TORCH,   /* a loop of its own around zerod.Optimizer */
    CALLER_TRAINER, /* Hugging Face Trainer: keywords */
    CALLER_SWIFT,   /* ms-swift: command line */
};

/* push may be NULL; where the client does not say what it is, the call site's suffix does. */
enum caller caller_of(const struct evidence_at *at, const struct diagnostic_push *push);

const char *caller_abort(enum caller caller); /* what aborts the step */
const char *caller_clear(enum caller caller); /* what clears the fault */

/* Switches, for C that of torch: what makes checkpointing not reentrant; what has DDP look for unused parameters,
 * or not. */
const char *caller_not_reentrant(enum caller caller);
const char *caller_finding(enum caller caller);
const char *caller_not_finding(enum caller caller);

struct diagnostic *cause_new(const struct evidence_at *at, enum diagnostic_code code, const char *title);

/* One line of advice; note, in parentheses and in a column of its own, may be NULL. */
struct remedy {
    const char *label; /* "fix", "or" */
    const char *what;
    const char *note;
};

/* Entries without what are left out. */
void cause_remedies(struct diagnostic *d, const struct remedy *remedies, size_t n);

/* "nested backward 29, layers.26 call 2, forward at model.py:98"; full: everything, and what is not known. */
void cause_push_field(struct diagnostic *d, const char *label, const struct diagnostic_push *push, bool full);

/* A field of words that are not zerod's: a client's, an engine's, or another node's. */
void cause_foreign_field(struct diagnostic *d, const char *label, const char *text);

/* "bucket 12 of 96, owned by rank 1"; nothing when the layout does not have the parameter in a bucket. */
void cause_partition(struct diagnostic *d, const struct layout *layout, uint32_t param);

/* "0 to 3, 5" of the ranks that are set. */
void cause_print_ranks(struct strbuf *buf, const bool *set, unsigned world_size);

/* The fewest digits that read back as the same number. */
void cause_print_double(struct strbuf *buf, double value);
