/* SPDX-License-Identifier: Apache-2.0 */

/* The standard error of a child process, line by line. */

#include "daemon/engines/last-words.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "core/base/base.h"
#include "core/base/log.h"

enum { READS_AT_ONCE = 16 }; /* reads of 4 KiB; more are left to the next call, so that the loop does not block */

int last_words_init(struct last_words *words)
{
    int fds[2];

    *words = LAST_WORDS_NULL;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    words->fd = fds[0];
    words->child_fd = fds[1];
    /* The child's end blocks, because programs expect that of standard error. */
    return fcntl(words->fd, F_SETFL, O_NONBLOCK) < 0 ? -errno : 0;
}

/* Logs the line through the log's thread, because a stopped reader of our standard error must not stop the loop. */
static void end_line(struct last_words *words)
{
    if (words->line_ended || words->n_bytes == 0)
        return;
    words->line_ended = true;
    log_notice("engine: %s", words->line);
}

/* Adds a character. A line that is too long keeps its beginning, which names the program. */
static void keep(struct last_words *words, char c)
{
    if (c == '\n') {
        end_line(words);
        return;
    }
    if (words->line_ended)
        words->n_bytes = 0;
    words->line_ended = false;
    if (words->n_bytes < LAST_WORDS_MAX_BYTES)
        words->line[words->n_bytes++] =
            (unsigned char)c < ' ' || c == 0x7f ? ' ' : c; /* no control characters for a terminal */
    words->line[words->n_bytes] = '\0';
}

bool last_words_read(struct last_words *words)
{
    char text[4096];
    ssize_t n = 1;

    for (unsigned i = 0; words->fd >= 0 && n != 0 && i < READS_AT_ONCE; i++) {
        n = read(words->fd, text, sizeof(text));
        if (n < 0 && errno != EINTR)
            return errno == EAGAIN;
        for (ssize_t k = 0; k < n; k++)
            keep(words, text[k]);
    }
    return words->fd >= 0 && n != 0;
}

void last_words_deinit(struct last_words *words)
{
    (void)last_words_read(words);
    end_line(words);
    closep(&words->fd);
    closep(&words->child_fd);
}
