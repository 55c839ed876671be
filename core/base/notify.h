/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The interface to systemd: readiness, status line, watchdog, journal entries. Descriptors that systemd passes are in
 * keep.h. Builds without libsystemd use notify-fallback.c, which has neither watchdog nor journal.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct notify_message;

struct notify_field {
    const char *name; /* name of a field of the journal, in capital letters */
    char value[256];
};

enum { NOTIFY_MAX_FIELDS = 6 };

struct notify_entry {
    int level; /* LOG_* of syslog.h */
    const char *job, *text;
    const struct notify_field *fields; /* array of n_fields, at most NOTIFY_MAX_FIELDS */
    size_t n_fields;
};

/* Sends a state, such as "READY=1" or "STATUS=...", to the service manager, if there is one. */
void notify_state(const char *state);

/* Return: the interval in microseconds at which systemd expects WATCHDOG=1; 0: no watchdog. */
uint64_t notify_watchdog_us(void);

/*
 * An entry for the journal, made by the caller and sent by any thread; sending waits for a journal that is slow.
 * notify_message_new() copies the entry's texts. It returns NULL if there is no journal.
 */
struct notify_message *notify_message_new(const struct notify_entry *entry);
bool notify_message_send(const struct notify_message *message); /* Return: false if it was not sent */
void notify_message_free(struct notify_message *message);       /* NULL is fine */
