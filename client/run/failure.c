/* SPDX-License-Identifier: Apache-2.0 */

/* Describes the first failure of a run in one line. */

#include "client/run/failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/run/plain.h"
#include "client/run/process.h"
#include "core/base/base.h"

void failure_note(struct failure *failure, int exit_code, const struct process *process, const char *format, ...)
{
    _cleanup_free_ char *cause = NULL;
    va_list args;

    if (failure->exit_code != 0)
        return;
    failure->exit_code = exit_code;
    failure->process = process;
    va_start(args, format);
    if (vasprintf(&cause, format, args) < 0)
        cause = NULL;
    va_end(args);
    if (cause)
        plain_text(failure->cause, sizeof(failure->cause), cause, strlen(cause));
}

void failure_describe(const struct failure *failure, char *text, size_t size)
{
    const char *said = failure->process ? process_last_message(failure->process) : "";

    snprintf(text, size, *said ? "%s; its last message: \"%s\"" : "%s", failure->cause, said);
}
