/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A text that several processes print stands once: the ranks' and the daemon's diagnostics, Python's tracebacks and
 * warnings.
 *
 * Such a text is a headline ("... E1001 duplicate gradient ...", "Traceback (most recent call last):" or the exception
 * at its end) and the indented lines below it. The headline is always handed out, because it names the rank. The lines
 * below are handed out as they come, unless they repeat the lines of an earlier text of the same kind: then one line
 * says whose lines they repeat. If only one line differs, all are handed out. The headline of a warning
 * ("train.py:7: UserWarning: ...") names no rank, so it is one of the compared lines.
 *
 * Torch's "[rank3]: " at the start of a line is dropped if the label says the same: a traceback is known, and compared,
 * without it.
 * Lines that may become a repetition are held until their process pauses for REPEATS_HOLD_MS: another process has
 * printed the same ones.
 * Pure: lines and times in, lines out.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/run/lines.h"

enum {
    REPEATS_MAX_TEXTS = 32,         /* picked: that are remembered; the oldest one makes room */
    REPEATS_TEXT_BYTES = 16 * 1024, /* picked: a longer text is never a repetition */
    REPEATS_HOLD_MS = 300,          /* picked: a process prints a line of a text much faster, also under load */
    REPEATS_KEEP_MS = 60 * 1000,    /* picked: so long a text is near enough to be called "above" */
    REPEATS_LABEL_BYTES = 24,
};

struct repeats_source;

/* The lines below a headline. */
struct repeats_text {
    char kind[8]; /* "E1001"; "": nothing is remembered here */
    char label[REPEATS_LABEL_BYTES];
    char *body; /* n_bytes of REPEATS_TEXT_BYTES; owned */
    size_t n_bytes;
    unsigned n_lines;
    const struct repeats_source *writer; /* that may add lines; NULL: it is complete */
    uint64_t begun_ms;
};

struct repeats {
    struct repeats_text texts[REPEATS_MAX_TEXTS];
    uint64_t n_texts; /* so far */
    struct repeats_source *sources;
};

/* One stream of a process. Plain, embedded in the stream. */
struct repeats_source {
    struct repeats *repeats;
    struct repeats_source *next;
    lines_fn *emit;
    void *context;
    char label[REPEATS_LABEL_BYTES];
    char kind[8];              /* of the text that it is in; "": none */
    bool in_traceback;         /* the next line that is not indented names the exception, perhaps with notes below it */
    struct repeats_text *text; /* that it writes; its writer may have changed since */
    char *held;                /* n_held of REPEATS_TEXT_BYTES; owned */
    size_t n_held;
    unsigned n_held_lines;
};

/* {} is empty. The sources come first. */
void repeats_deinit(struct repeats *repeats);

/* label: as in the prefix of its lines, "0". repeats and context must outlive the source. */
void repeats_source_init(struct repeats_source *source, struct repeats *repeats, const char *label, lines_fn *emit,
                         void *context);
/* The stream has ended: repeats_release() came before. */
void repeats_source_deinit(struct repeats_source *source);

/* A line, or a piece of one, as lines_fn has it. During the call other sources may hand out lines that they held. */
void repeats_feed(struct repeats_source *source, const char *text, size_t n_bytes, bool continued, uint64_t now_ms);

static inline bool repeats_holds(const struct repeats_source *source)
{
    return source->n_held > 0;
}

/* The stream pauses or ends: hands out what is held, or the line that says whose lines it repeats. */
void repeats_release(struct repeats_source *source, uint64_t now_ms);
