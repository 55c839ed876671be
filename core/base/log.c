/* SPDX-License-Identifier: Apache-2.0 */

/* The log sink: a queue of entries, and the thread that writes them to stderr or to the journal. */

#include "core/base/log.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/notify.h"

enum {
    LOG_QUEUE_BYTES = 256 << 10, /* lines that wait for a slow reader; picked, not measured */
    LOG_PATIENCE_MS = 50,        /* the longest wait for one line; no wait while the reader is behind */
    LOG_LAST_MS = 1000,          /* the longest wait for the queue when the process ends */
    LOG_PREFIX_BYTES = 128,      /* for "zerod[JOB]: " */
};

/* A line that waits to be written; text ends with a newline. */
struct log_entry {
    struct log_entry *next;
    struct notify_message *journal; /* NULL: written to stderr */
    size_t n_bytes;
    char text[];
};

static struct {
    const char *job;
    int level;
    bool journal;
    bool threaded; /* a thread writes, for which callers wait only briefly */
    pthread_mutex_t mutex;
    pthread_cond_t work, empty;
    struct log_entry *first, **last; /* guarded by mutex, like the fields below */
    size_t n_bytes;
    uint64_t n_dropped;
    bool writing, stopping;
} sink = {.job = "", .level = LOG_INFO, .mutex = PTHREAD_MUTEX_INITIALIZER, .last = &sink.first};

/* Return: true if stderr is the journal. systemd names its device and inode in JOURNAL_STREAM; a redirected stderr has
 * another device or inode. */
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

/* ---- writing ------------------------------------------------------------------------------------------- */

/* Return: prefix, with what stands before the text of a line on stderr: the job, or the level as systemd reads it. */
static const char *line_prefix(char prefix[LOG_PREFIX_BYTES], int level)
{
    if (sink.journal)
        snprintf(prefix, LOG_PREFIX_BYTES, "<%d>", level);
    else
        snprintf(prefix, LOG_PREFIX_BYTES, "zerod[%s]: ", sink.job);
    return prefix;
}

/* Writes a text. If the reader is gone, the text is lost. */
static void write_to_stderr(const char *text, size_t n_bytes)
{
    while (n_bytes > 0) {
        ssize_t n = write(STDERR_FILENO, text, n_bytes);

        if (n >= 0) {
            text += n;
            n_bytes -= (size_t)n;
        } else if (errno == EAGAIN) { /* another process has made stderr non-blocking */
            (void)poll(&(struct pollfd){.fd = STDERR_FILENO, .events = POLLOUT}, 1, -1);
        } else if (errno != EINTR) {
            return;
        }
    }
}

static void write_entry(struct log_entry *entry)
{
    if (!entry->journal || !notify_message_send(entry->journal))
        write_to_stderr(entry->text, entry->n_bytes);
}

static void write_dropped(uint64_t n_dropped)
{
    char text[256], prefix[LOG_PREFIX_BYTES];
    int n = snprintf(text, sizeof(text), "%s%" PRIu64 " lines of this log were dropped: nobody read it in time\n",
                     line_prefix(prefix, LOG_WARNING), n_dropped);

    if (n_dropped > 0)
        write_to_stderr(text, MIN((size_t)n, sizeof(text) - 1));
}

static void entry_free(struct log_entry *entry)
{
    notify_message_free(entry->journal);
    free(entry);
}

/* Waits for an entry. The caller holds the lock. Return: the oldest entry, or NULL if the log stops. */
static struct log_entry *take_entry(void)
{
    struct log_entry *entry;

    sink.writing = false;
    while (!sink.first) {
        pthread_cond_broadcast(&sink.empty);
        if (sink.stopping)
            return NULL;
        pthread_cond_wait(&sink.work, &sink.mutex);
    }
    entry = sink.first;
    sink.first = entry->next;
    if (!sink.first)
        sink.last = &sink.first;
    assert(sink.n_bytes >= entry->n_bytes);
    sink.n_bytes -= entry->n_bytes;
    sink.writing = true;
    return entry;
}

static void *write_entries(void *unused)
{
    struct log_entry *entry;

    (void)unused;
    pthread_mutex_lock(&sink.mutex);
    while ((entry = take_entry())) {
        uint64_t n_dropped = sink.first ? 0 : sink.n_dropped; /* reported after the last queued entry */

        sink.n_dropped -= n_dropped;
        pthread_mutex_unlock(&sink.mutex);
        write_entry(entry);
        write_dropped(n_dropped);
        entry_free(entry);
        pthread_mutex_lock(&sink.mutex);
    }
    pthread_mutex_unlock(&sink.mutex);
    return NULL;
}

/* The caller holds the lock. */
static bool is_behind(void)
{
    return sink.first || sink.writing;
}

/* The caller holds the lock. */
static void wait_until_written(unsigned ms)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    while (is_behind() && pthread_cond_timedwait(&sink.empty, &sink.mutex, &until) == 0)
        ;
}

/* Queues an entry, and waits a short time until the entry is written, so that the log has it before a client gets its
 * answer. */
static void queue_entry(struct log_entry *entry)
{
    bool was_behind;

    pthread_mutex_lock(&sink.mutex);
    was_behind = is_behind();
    /*
     * After one entry is dropped, all are dropped until the reader has caught up, so that the log has one gap at a
     * known place.
     */
    if (!entry || (sink.n_dropped > 0 && sink.first) || sink.n_bytes + entry->n_bytes > LOG_QUEUE_BYTES) {
        sink.n_dropped++;
        if (entry)
            entry_free(entry);
    } else {
        *sink.last = entry;
        sink.last = &entry->next;
        sink.n_bytes += entry->n_bytes;
        pthread_cond_signal(&sink.work);
    }
    if (!was_behind)
        wait_until_written(LOG_PATIENCE_MS);
    pthread_mutex_unlock(&sink.mutex);
}

/* ---- lines --------------------------------------------------------------------------------------------- */

static struct log_entry *entry_new(const struct notify_entry *from)
{
    char prefix[LOG_PREFIX_BYTES];
    size_t n_bytes = strlen(line_prefix(prefix, from->level)) + strlen(from->text) + 1;
    struct log_entry *entry = malloc(sizeof(*entry) + n_bytes + 1);

    if (!entry)
        return NULL;
    *entry = (struct log_entry){.n_bytes = n_bytes};
    snprintf(entry->text, n_bytes + 1, "%s%s\n", prefix, from->text);
    /*
     * journald finds the unit of a structured entry by the sender's pid, and finds none if the sender has ended. For
     * stderr it knows the unit beforehand. So the reason why a start is refused, a line without fields, goes there.
     */
    if (sink.journal && from->n_fields > 0)
        entry->journal = notify_message_new(from);
    return entry;
}

static void put_entry(const struct notify_entry *from)
{
    struct log_entry *entry = entry_new(from);

    if (sink.threaded) {
        queue_entry(entry);
    } else if (entry) {
        write_entry(entry);
        entry_free(entry);
    }
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
    put_entry(&(struct notify_entry){.level = level, .job = sink.job, .text = text});
}

void log_entry(int level, const char *text, const struct notify_field *fields, size_t n_fields)
{
    assert(n_fields <= NOTIFY_MAX_FIELDS);
    if (level <= sink.level)
        put_entry(&(struct notify_entry){
            .level = level, .job = sink.job, .text = text, .fields = fields, .n_fields = n_fields});
}

/* ---- the thread ---------------------------------------------------------------------------------------- */

int log_start(void)
{
    pthread_condattr_t monotonic;
    pthread_t thread;
    int r;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&sink.work, NULL);
    pthread_cond_init(&sink.empty, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sink.stopping = false;
    r = pthread_create(&thread, NULL, write_entries, NULL);
    if (r == 0)
        pthread_detach(thread); /* the thread may block in a write for ever */
    sink.threaded = r == 0;
    return -r;
}

void log_stop(void)
{
    if (!sink.threaded)
        return;
    pthread_mutex_lock(&sink.mutex);
    wait_until_written(LOG_LAST_MS);
    sink.stopping = true;
    pthread_cond_signal(&sink.work);
    pthread_mutex_unlock(&sink.mutex);
    sink.threaded = false;
}
