/* SPDX-License-Identifier: Apache-2.0 */

#define SD_JOURNAL_SUPPRESS_LOCATION

/* notify.h with libsystemd. */

#include "core/base/notify.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

#include <systemd/sd-daemon.h>
#include <systemd/sd-journal.h>

#include "core/base/base.h"

void notify_state(const char *state)
{
    (void)sd_notify(0, state);
}

uint64_t notify_watchdog_us(void)
{
    uint64_t us = 0;

    return sd_watchdog_enabled(0, &us) > 0 ? us : 0;
}

/* The socket of libsystemd. A container or a chroot may inherit stderr from outside without this socket. */
#define JOURNAL_SOCKET "/run/systemd/journal/socket"

enum { MAX_FIELDS = 3 + NOTIFY_MAX_FIELDS };

struct notify_message {
    struct iovec iov[MAX_FIELDS];
    char *texts[MAX_FIELDS];
    int n;
};

static void add_assignment(struct notify_message *message, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add_assignment(struct notify_message *message, const char *name, const char *format, ...)
{
    char *value = NULL, *text = NULL;
    va_list args;
    int r;

    assert(message->n < MAX_FIELDS);
    va_start(args, format);
    r = vasprintf(&value, format, args);
    va_end(args);
    if (r < 0)
        return;
    r = asprintf(&text, "%s=%s", name, value);
    free(value);
    if (r < 0)
        return;
    message->texts[message->n] = text;
    message->iov[message->n++] = (struct iovec){.iov_base = text, .iov_len = strlen(text)};
}

struct notify_message *notify_message_new(const struct notify_entry *entry)
{
    struct notify_message *message;

    if (access(JOURNAL_SOCKET, F_OK) < 0) /* without the socket, sd_journal_sendv() returns success */
        return NULL;
    message = calloc(1, sizeof(*message));
    if (!message)
        return NULL;
    add_assignment(message, "MESSAGE", "%s", entry->text);
    add_assignment(message, "PRIORITY", "%d", entry->level);
    add_assignment(message, "ZEROD_JOB", "%s", entry->job);
    for (size_t i = 0; i < entry->n_fields; i++)
        add_assignment(message, entry->fields[i].name, "%s", entry->fields[i].value);
    return message;
}

bool notify_message_send(const struct notify_message *message)
{
    return sd_journal_sendv(message->iov, message->n) >= 0;
}

void notify_message_free(struct notify_message *message)
{
    for (int i = 0; message && i < message->n; i++)
        free(message->texts[i]);
    free(message);
}
