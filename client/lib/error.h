/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The last error of a handle, as zerod_error() shows it. The struct owns all strings that the public part points to.
 * All zero is the empty value.
 */

#include <stdarg.h>

#include "core/wire/wire.h"
#include "zerod/client.h"

struct client_error {
    struct zerod_error public;
    char *text, *cause_class;
    char *params[DIAGNOSTIC_MAX_PARAMS];
    struct zerod_field fields[DIAGNOSTIC_MAX_FIELDS];
};

void error_reset(struct client_error *error);

/* Sets a local error: status and a sentence. */
void error_print(struct client_error *error, int status, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/* Sets a refusal of the daemon. Strings are copied. */
void error_from_diagnostic(struct client_error *error, int status, const struct wire_diagnostic *d);
