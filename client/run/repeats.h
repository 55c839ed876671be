/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Prints a text once that several processes print: diagnostics of ranks and of the daemon, Python's tracebacks and
 * warnings.
 *
 * Such a text is a headline ("... E1001 duplicate gradient ...", "Traceback (most recent call last):" or the exception
 * at its end) and the indented lines below it. The headline is always emitted, because it names the rank. The lines
 * below are emitted as they come. If they repeat the lines of an earlier text of the same kind, one line names the
 * source of that text instead. If a single line differs, all lines are emitted. The headline of a warning ("train.py:7:
 * UserWarning: ...") names no rank, so it is one of the compared lines.
 *
 * Torch's "[rank3]: " at the start of a line is removed if the label names the same rank, so tracebacks of different
 * ranks compare equal. Lines that equal another process's lines so far may become a repetition. They are held until
 * their process pauses for REPEATS_HOLD_MS. Pure: lines and times in, lines out.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/run/lines.h"

enum {
    REPEATS_MAX_TEXTS = 32,         /* picked: remembered texts; a new text replaces the oldest */
    REPEATS_TEXT_BYTES = 16 * 1024, /* picked: a longer text is never a repetition */
    REPEATS_HOLD_MS = 300,          /* picked: much longer than between two lines of a text, also under load */
    REPEATS_KEEP_MS = 60 * 1000,    /* picked: an older text is too far away to be called "above" */
    REPEATS_LABEL_BYTES = 24,
};

struct repeats_source;

/* The lines below a headline. */
struct repeats_text {
    char kind[8]; /* "E1001"; "": the entry is empty */
    char label[REPEATS_LABEL_BYTES];
    char *body; /* n_bytes of REPEATS_TEXT_BYTES; owned */
    size_t n_bytes;
    unsigned n_lines;
    const struct repeats_source *writer; /* the source that may add lines; NULL: the text is complete */
    uint64_t begun_ms;
};

struct repeats {
    struct repeats_text texts[REPEATS_MAX_TEXTS];
    uint64_t n_texts; /* ever begun */
    struct repeats_source *sources;
};

/* One stream of a process. Plain, embedded in the stream. */
struct repeats_source {
    struct repeats *repeats;
    struct repeats_source *next;
    lines_fn *emit;
    void *context;
    char label[REPEATS_LABEL_BYTES];
    char kind[8];              /* of the present text; "": none */
    bool in_traceback;         /* the next line without indent names the exception; notes may follow */
    struct repeats_text *text; /* that this source writes; its writer may have changed since */
    char *held;                /* n_held of REPEATS_TEXT_BYTES; owned */
    size_t n_held;
    unsigned n_held_lines;
};

/* {} is an empty struct. The sources are deinitialized first. */
void repeats_deinit(struct repeats *repeats);

/* label: the prefix of the source's lines, like "0". repeats and context must outlive the source. */
void repeats_source_init(struct repeats_source *source, struct repeats *repeats, const char *label, lines_fn *emit,
                         void *context);
/* Ends the source. The caller has called repeats_release(). */
void repeats_source_deinit(struct repeats_source *source);

/* Adds a line, or a piece of a line, as in lines_fn. During the call other sources may emit lines that they held. */
void repeats_feed(struct repeats_source *source, const char *text, size_t n_bytes, bool continued, uint64_t now_ms);

static inline bool repeats_holds(const struct repeats_source *source)
{
    return source->n_held > 0;
}

/* The stream pauses or ends: emits the held lines, or the line that names the text they repeat. */
void repeats_release(struct repeats_source *source, uint64_t now_ms);
