/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A connection to a daemon, with role CONTROL. It sends commands, receives the parts of each answer and joins them. The
 * calls block. They fail if the daemon is silent for too long, or at the deadline that control_init_within() sets.
 *
 * Errors. A call returns 0 or a negative code of sysexits.h. After an error control->error is a sentence for people,
 * and only control_deinit() may be called.
 */

#include <stdbool.h>
#include <stddef.h>

#include "core/wire/frame.h"
#include "core/wire/wire.h"

enum {
    CONTROL_SILENCE_MS = 30 * 1000, /* picked: a daemon whose loop is blocked for longer is ended by its watchdog */
    CONTROL_NOTICE_MS = 3 * 1000,   /* picked: calls without a deadline then tell the waiting person of the silence */
};

/* Another descriptor that is served while the program waits for the daemon: when it is readable, call() reads it. */
struct control_idle {
    int fd;
    int (*call)(void *userdata); /* Return: 0; or not 0 to end the wait with -EX_TEMPFAIL */
    void *userdata;
};

struct control {
    int fd;
    const char *path;  /* not owned */
    uint64_t until_ms; /* CLOCK_MONOTONIC, the deadline of all calls; 0: no limit */
    const struct control_idle *idle; /* not owned; NULL: no other descriptor */
    bool told_silence;
    struct wire_arena arena;
    struct frame_buffer buffer;
    char error[1024];
};

/* An answer: JSON, and whether it is an error. */
struct answer {
    char *json; /* NUL-terminated, owned */
    size_t n_bytes;
    unsigned exit_code; /* 0, or sysexits.h; json is then {"error": text} */
};

#define ANSWER_NULL ((struct answer){.json = NULL})

/* Connects and sends Hello. path must outlive the connection; if it is NULL, the call fails. */
int control_init(struct control *control, const char *path);
/* As control_init(). All calls on the connection, this one included, must end within timeout_ms, or fail. */
int control_init_within(struct control *control, const char *path, unsigned timeout_ms);
/* As control_init_within(). idle must outlive the connection. idle->fd is not served while the kernel connects. */
int control_init_idle(struct control *control, const char *path, unsigned timeout_ms, const struct control_idle *idle);
void control_deinit(struct control *control);

/* Milliseconds of CLOCK_MONOTONIC. */
uint64_t control_clock_ms(void);

/* Connects, asks and disconnects. On an error it prints "prefix: sentence" on stderr. Return: as control_ask(). */
int control_ask_once(const char *prefix, const char *path, const char *command, struct answer *answer);
/* On success the caller owns *answer and frees it with answer_deinit(). */
int control_ask(struct control *control, const char *command, struct answer *answer);
void answer_deinit(struct answer *answer);
