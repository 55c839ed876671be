/* SPDX-License-Identifier: Apache-2.0 */

#define SD_JOURNAL_SUPPRESS_LOCATION

#include "daemon/notify.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <systemd/sd-daemon.h>
#include <systemd/sd-journal.h>

#include "daemon/base.h"
#include "daemon/diagnosis.h"

void notify_state(const char *state)
{
    (void)sd_notify(0, state);
}

uint64_t notify_watchdog_us(void)
{
    uint64_t us = 0;

    return sd_watchdog_enabled(0, &us) > 0 ? us : 0;
}

int notify_listen_fd(void)
{
    int n = sd_listen_fds(1);

    if (n <= 0)
        return n < 0 ? n : -1;
    if (n > 1 || sd_is_socket(SD_LISTEN_FDS_START, AF_UNIX, SOCK_SEQPACKET, 1) <= 0)
        return -EINVAL;
    return SD_LISTEN_FDS_START;
}

/* Where libsystemd sends to. A container or a chroot may have stderr from outside, but not this. */
#define JOURNAL_SOCKET "/run/systemd/journal/socket"

enum { MAX_FIELDS = 10 };

struct fields {
    struct iovec iov[MAX_FIELDS];
    char *texts[MAX_FIELDS];
    int n;
};

static void add(struct fields *fields, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void add(struct fields *fields, const char *name, const char *format, ...)
{
    char *value = NULL, *text = NULL;
    va_list args;
    int r;

    va_start(args, format);
    r = vasprintf(&value, format, args);
    va_end(args);
    if (r < 0)
        return;
    r = asprintf(&text, "%s=%s", name, value);
    free(value);
    if (r < 0)
        return;
    fields->texts[fields->n] = text;
    fields->iov[fields->n++] = (struct iovec){.iov_base = text, .iov_len = strlen(text)};
}

static void add_diagnostic(struct fields *fields, const struct diagnostic *d)
{
    add(fields, "ZEROD_CODE", "E%d", d->code);
    if (d->cause_class[0])
        add(fields, "ZEROD_CLASS", "%s", d->cause_class);
    if (d->n_params_named > 0)
        add(fields, "ZEROD_PARAM", "%s", d->params[0]);
    if (d->has_rank)
        add(fields, "ZEROD_RANK", "%" PRIu32, d->rank);
    if (d->has_step)
        add(fields, "ZEROD_STEP", "%" PRIu64, d->step);
    if (d->has_micro_batch)
        add(fields, "ZEROD_MICRO_BATCH", "%" PRIu32, d->micro_batch);
}

bool notify_journal(const struct notify_entry *entry)
{
    struct fields fields = {.n = 0};
    int r;

    if (access(JOURNAL_SOCKET, F_OK) < 0) /* sd_journal_sendv() would say that all is well */
        return false;
    add(&fields, "MESSAGE", "%s", entry->text);
    add(&fields, "PRIORITY", "%d", entry->level);
    add(&fields, "ZEROD_JOB", "%s", entry->job);
    if (entry->diagnostic)
        add_diagnostic(&fields, entry->diagnostic);
    r = sd_journal_sendv(fields.iov, fields.n);
    for (int i = 0; i < fields.n; i++)
        free(fields.texts[i]);
    return r >= 0;
}
