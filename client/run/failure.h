/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The first failure of a run. It decides zerodrun's exit status, and zerodrun's last line describes it. */

#include <stddef.h>

struct process;

enum {
    FAILURE_CAUSE_BYTES = 256,
    FAILURE_TEXT_BYTES = 640, /* the cause and the process's last message */
};

/* Zero-initialised: nothing has failed. */
struct failure {
    int exit_code; /* 0: none */
    char cause[FAILURE_CAUSE_BYTES];
    const struct process *process; /* the process that failed; NULL: zerodrun itself */
};

/* Records the first failure; later calls do nothing. exit_code: not 0. The process must outlive the failure. */
void failure_note(struct failure *failure, int exit_code, const struct process *process, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Prints the cause, with the process's last message, as one line without control characters. Call it after the end of
 * the process's output. */
void failure_describe(const struct failure *failure, char *text, size_t size);
