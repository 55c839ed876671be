/* SPDX-License-Identifier: Apache-2.0 */

/* Prints zerodrun's own messages. */

#include "client/run/run-inside.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"

__attribute__((format(printf, 3, 0))) static void run_vsay(struct run *run, bool is_error, const char *format,
                                                           va_list args)
{
    _cleanup_free_ char *text = NULL;

    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    else
        output_say(run->output.err, is_error, text);
}

void run_note(struct run *run, const char *format, ...)
{
    va_list args;

    if (run->options->quiet)
        return;
    va_start(args, format);
    run_vsay(run, false, format, args);
    va_end(args);
}

void run_complain(struct run *run, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    run_vsay(run, true, format, args);
    va_end(args);
}

void run_error(struct run *run, int exit_code, const char *format, ...)
{
    _cleanup_free_ char *text = NULL;
    va_list args;

    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    va_end(args);
    run_complain(run, "%s", text ? text : strerror(ENOMEM));
    failure_note(&run->failure, exit_code, NULL, "%s", text ? text : strerror(ENOMEM));
}

void run_describe_end(const struct process *process, char *text, size_t size)
{
    if (process->term_signal)
        snprintf(text, size, "was killed by signal %d (%s)", process->term_signal, strsignal(process->term_signal));
    else
        snprintf(text, size, "exited with %d", (int)process->exit_status);
}
