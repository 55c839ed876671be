/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The log: lines on stderr. A healthy job logs a handful of lines in its life. Diagnostics are logged with all their
 * text; when stderr is connected to the journal, each of them is a structured entry with the fields ZEROD_JOB,
 * ZEROD_CODE, ZEROD_PARAM, ZEROD_RANK, ZEROD_STEP, ZEROD_MICRO_BATCH, ZEROD_CLASS. The log sink is the one global of
 * the daemon.
 *
 * A reader of stderr that stops reading must not stop the daemon. Between log_start() and log_stop() a thread writes. A
 * caller waits at most 50 ms for the thread, and not at all while the reader is behind. While the queue is full, lines
 * are dropped; when there is room again, a line gives their number. Any thread may log.
 */

#include <stddef.h>
#include <syslog.h>

struct notify_field;

/* Sets the log up. job: its name, borrowed for the life of the process. level: LOG_ERR .. LOG_DEBUG. */
void log_init(const char *job, int level);

/* Starts the thread. Before log_start(), after log_stop(), and if the thread cannot be started, each caller writes its
 * own lines. Return: 0 or -errno. */
int log_start(void);
/* Waits at most a second for the queued lines, then ends the thread. A thread that is blocked in a write stays. */
void log_stop(void);

void log_line(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Logs a text of several lines, with fields for the journal (notify.h). */
void log_entry(int level, const char *text, const struct notify_field *fields, size_t n_fields);

#define log_error(...) log_line(LOG_ERR, __VA_ARGS__)
#define log_notice(...) log_line(LOG_NOTICE, __VA_ARGS__)
#define log_info(...) log_line(LOG_INFO, __VA_ARGS__)
