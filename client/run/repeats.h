/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Prints texts that several processes print only once: diagnostics of ranks and of the daemon, Python's tracebacks and
 * warnings.
 *
 * A text is a headline ("... E1001 duplicate gradient ...", "Traceback (most recent call last):" or the exception at
 * its end) and the indented lines below it. The headline is always emitted, because it names the rank. The other lines
 * are compared with earlier texts of the same kind. If they repeat one of these, a single line that names the earlier
 * text's source is emitted instead. If any line differs, all lines are emitted. The headline of a warning ("train.py:7:
 * UserWarning: ...") names no rank, so it is compared too.
 *
 * Torch's "[rank3]: " at the start of a line is removed if the label names the same rank, so tracebacks of different
 * ranks compare equal. Lines that may still become a repetition are held until their process pauses for
 * REPEATS_HOLD_MS. No I/O, no clock.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/run/lines.h"

enum {
    REPEATS_MAX_TEXTS = 32,         /* picked: remembered texts; a new one replaces the oldest */
    REPEATS_TEXT_BYTES = 16 * 1024, /* picked: a longer text is never a repetition */
    REPEATS_HOLD_MS = 300,          /* picked: far more than between two lines of a text, even under load */
    REPEATS_KEEP_MS = 60 * 1000,    /* picked: an older text is too far up to be called "above" */
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
    uint64_t n_texts; /* number of all texts so far */
    struct repeats_source *sources;
};

/* One stream of a process, in which the struct is embedded. */
struct repeats_source {
    struct repeats *repeats;
    struct repeats_source *next;
    lines_fn *emit;
    void *context;
    char label[REPEATS_LABEL_BYTES];
    char kind[8];              /* kind of the present text; "": none */
    bool in_traceback;         /* the next line without indent names the exception; notes may follow */
    struct repeats_text *text; /* the present text's entry, unless its writer is no longer this source */
    char *held;                /* n_held of REPEATS_TEXT_BYTES; owned */
    size_t n_held;
    unsigned n_held_lines;
};

/* Call it after repeats_source_deinit() of all sources. All zero is an empty struct. */
void repeats_deinit(struct repeats *repeats);

/* label: the prefix of the source's lines, like "0". repeats and context must outlive the source. */
void repeats_source_init(struct repeats_source *source, struct repeats *repeats, const char *label, lines_fn *emit,
                         void *context);
/* Ends the source. Call repeats_release() first. */
void repeats_source_deinit(struct repeats_source *source);

/* Adds a line, or a piece of a line, as in lines_fn. The call may make other sources emit their held lines. */
void repeats_feed(struct repeats_source *source, const char *text, size_t n_bytes, bool continued, uint64_t now_ms);

static inline bool repeats_holds(const struct repeats_source *source)
{
    return source->n_held > 0;
}

/*
 * Call it when the stream pauses or ends. Emits the held lines or, if they repeat a text, the line that names its
 * source.
 */
void repeats_release(struct repeats_source *source, uint64_t now_ms);
