/* SPDX-License-Identifier: Apache-2.0 */

/* Errors of a handle: the library's own sentences, and diagnostics from the daemon. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/lib/error.h"
#include "core/base/base.h"

void error_reset(struct client_error *error)
{
    free(error->text);
    free(error->cause_class);
    for (size_t i = 0; i < ARRAY_SIZE(error->params); i++)
        free(error->params[i]);
    for (size_t i = 0; i < ARRAY_SIZE(error->fields); i++) {
        free((char *)error->fields[i].label);
        free((char *)error->fields[i].text);
    }
    memset(error, 0, sizeof(*error));
}

static void error_publish(struct client_error *error, int status)
{
    struct zerod_error *e = &error->public;

    e->status = status;
    e->text = error->text ? error->text : "out of memory";
    e->cause_class = error->cause_class ? error->cause_class : "";
    e->params = (const char *const *)error->params;
    e->fields = error->fields;
}

void error_print(struct client_error *error, int status, const char *format, va_list args)
{
    error_reset(error);
    error->public.rank = error->public.micro_batch = -1;
    error->public.step = -1;
    if (vasprintf(&error->text, format, args) < 0)
        error->text = NULL;
    error_publish(error, status);
}

void error_from_diagnostic(struct client_error *error, int status, const struct wire_diagnostic *d)
{
    struct zerod_error *e = &error->public;
    size_t n = strlen(d->text);

    error_reset(error);
    while (n > 0 && d->text[n - 1] == '\n')
        n--;
    error->text = strndup(d->text, n);
    error->cause_class = strdup(d->cause_class);
    e->code = (int)d->code;
    e->rank = d->has_rank ? (long)d->rank : -1;
    e->step = d->has_step ? (int64_t)d->step : -1;
    e->micro_batch = d->has_micro_batch ? (long)d->micro_batch : -1;
    for (size_t i = 0; i < MIN(d->n_params_named, ARRAY_SIZE(error->params)); i++)
        error->params[i] = strdup(d->params[i]);
    e->n_params = d->n_params_total;
    for (size_t i = 0; i < MIN(d->n_fields, ARRAY_SIZE(error->fields)); i++) {
        error->fields[i].label = strdup(d->fields[i].label);
        error->fields[i].text = strdup(d->fields[i].text);
        e->n_fields++;
    }
    error_publish(error, status);
}
