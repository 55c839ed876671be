/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/log.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base.h"
#include "daemon/diagnosis.h"
#include "daemon/notify.h"

static struct {
    const char *job;
    int level;
    bool journal;
} sink = {.job = "", .level = LOG_INFO};

/* systemd names stderr's device and inode in JOURNAL_STREAM; a redirected stderr has others. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    uintmax_t device, inode;
    struct stat st;

    return stream && sscanf(stream, "%" SCNuMAX ":%" SCNuMAX, &device, &inode) == 2 && fstat(STDERR_FILENO, &st) == 0 &&
           st.st_dev == device && st.st_ino == inode;
}

void log_init(const char *job, int level)
{
    sink.job = job;
    sink.level = level;
    sink.journal = stderr_is_journal();
}

void log_line(int level, const char *format, ...)
{
    char text[2048];
    va_list args;

    if (level > sink.level)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (!sink.journal || !notify_journal(&(struct notify_entry){.level = level, .job = sink.job, .text = text}))
        fprintf(stderr, "zerod[%s]: %s\n", sink.job, text);
}

void log_diagnostic(const struct diagnostic *diagnostic)
{
    int level = diagnostic->warning ? LOG_WARNING : LOG_ERR;

    if (level > sink.level)
        return;
    if (!sink.journal || !notify_journal(&(struct notify_entry){
                             .level = level, .job = sink.job, .text = diagnostic->text, .diagnostic = diagnostic}))
        fprintf(stderr, "zerod[%s]: %s\n", sink.job, diagnostic->text);
}
