/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The last error of a handle, which zerod_error() returns. The struct owns all strings that the public part points to.
 * All zero means no error.
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

/* Sets an error of the library itself, with a status and a sentence. */
void error_print(struct client_error *error, int status, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/* Sets a refusal of the daemon, and copies its strings. */
void error_from_diagnostic(struct client_error *error, int status, const struct wire_diagnostic *d);
