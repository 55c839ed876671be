/* SPDX-License-Identifier: Apache-2.0 */

/* Logs a diagnostic as its text, with fields for searches in the journal. */

#include "core/diagnosis/diagnosis-log.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <syslog.h>

#include "core/base/log.h"
#include "core/base/notify.h"
#include "core/diagnosis/diagnosis.h"

struct fields {
    struct notify_field list[NOTIFY_MAX_FIELDS];
    size_t n;
};

static void add_log_field(struct fields *fields, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add_log_field(struct fields *fields, const char *name, const char *format, ...)
{
    struct notify_field *field = &fields->list[fields->n++];
    va_list args;

    assert(fields->n <= NOTIFY_MAX_FIELDS);
    field->name = name;
    va_start(args, format);
    vsnprintf(field->value, sizeof(field->value), format, args);
    va_end(args);
}

void log_diagnostic(const struct diagnostic *d)
{
    struct fields fields = {.n = 0};

    add_log_field(&fields, "ZEROD_CODE", "E%d", d->code);
    if (d->cause_class[0])
        add_log_field(&fields, "ZEROD_CLASS", "%s", d->cause_class);
    if (d->n_params_named > 0)
        add_log_field(&fields, "ZEROD_PARAM", "%s", d->params[0]);
    if (d->has_rank)
        add_log_field(&fields, "ZEROD_RANK", "%" PRIu32, d->rank);
    if (d->has_step)
        add_log_field(&fields, "ZEROD_STEP", "%" PRIu64, d->step);
    if (d->has_micro_batch)
        add_log_field(&fields, "ZEROD_MICRO_BATCH", "%" PRIu32, d->micro_batch);
    log_entry(d->warning ? LOG_WARNING : LOG_ERR, d->text, fields.list, fields.n);
}
