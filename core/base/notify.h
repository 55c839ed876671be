/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The interface to systemd: readiness, status line, watchdog, journal entries. keep.h has what systemd passes
 * to this process. Builds without libsystemd have notify-fallback.c: the watchdog and the journal are absent there.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct notify_message;

struct notify_field {
    const char *name; /* a field of the journal, in capital letters */
    char value[256];
};

enum { NOTIFY_MAX_FIELDS = 6 };

struct notify_entry {
    int level; /* LOG_* of syslog.h */
    const char *job, *text;
    const struct notify_field *fields; /* n_fields of them, at most NOTIFY_MAX_FIELDS */
    size_t n_fields;
};

/* Sends "READY=1", "STOPPING=1", "WATCHDOG=1", "STATUS=..." to the service manager. Does nothing without one. */
void notify_state(const char *state);

/* Return: microseconds within which WATCHDOG=1 is expected; 0: no watchdog. */
uint64_t notify_watchdog_us(void);

/*
 * An entry for the journal, made by the caller and sent by any thread; sending waits for a journal that is slow.
 * notify_message_new() returns NULL when there is no journal to write to, and copies what it needs.
 */
struct notify_message *notify_message_new(const struct notify_entry *entry);
bool notify_message_send(const struct notify_message *message); /* false if it was not sent */
void notify_message_free(struct notify_message *message);       /* NULL is fine */
