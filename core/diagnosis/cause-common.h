/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Parts that the texts in core/diagnosis/texts/ share: positions, pushes, partitions, remedies, and the names of calls
 * in the caller's language.
 */

#include "core/base/strbuf.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis-build.h"

/* The caller's language, which is the syntax of fixes. */
enum caller {
    CALLER_C,       /* zerod/client.h */
    CALLER_TORCH,   /* the program's own loop with zerod.Optimizer */
    CALLER_TRAINER, /* Hugging Face's Trainer: keywords */
    CALLER_SWIFT,   /* ms-swift: command line */
};

/* Return: the caller's language, from the client's name, else from the suffix of push's call site. push may be NULL. */
enum caller caller_of(const struct evidence_at *at, const struct diagnostic_push *push);

const char *caller_abort(enum caller caller); /* Return: the call that aborts the step */
const char *caller_clear(enum caller caller); /* Return: the call that clears the fault */

/*
 * Return: the setting that makes checkpointing not reentrant; the setting that makes DDP look for unused parameters;
 * the setting that stops DDP from looking for them. For C, torch's setting.
 */
const char *caller_not_reentrant(enum caller caller);
const char *caller_finding(enum caller caller);
const char *caller_not_finding(enum caller caller);

struct diagnostic *cause_new(const struct evidence_at *at, enum diagnostic_code code, const char *title);

/* One line of advice. note is printed in parentheses, in a column of its own; it may be NULL. */
struct remedy {
    const char *label; /* such as "fix" or "or" */
    const char *what;
    const char *note;
};

/* Adds the remedies as fields. Skips entries without `what`. */
void cause_remedies(struct diagnostic *d, const struct remedy *remedies, size_t n);

/*
 * Adds a push as a field: "nested backward 29, layers.26 call 2, forward at model.py:98". full: adds all facts, and the
 * names of unknown facts.
 */
void cause_push_field(struct diagnostic *d, const char *label, const struct diagnostic_push *push, bool full);

/* Adds a field whose text comes from a client, an engine or another node. */
void cause_foreign_field(struct diagnostic *d, const char *label, const char *text);

/* Adds "bucket 12 of 96, owned by rank 1". Adds nothing if the parameter is in no bucket of the layout. */
void cause_partition(struct diagnostic *d, const struct layout *layout, uint32_t param);

/* Prints the ranks whose entry of set is true, as "0 to 3, 5". */
void cause_print_ranks(struct strbuf *buf, const bool *set, unsigned world_size);

/* Prints the value with the fewest digits that read back as the same number. */
void cause_print_double(struct strbuf *buf, double value);
