/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/engines/last-words.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "core/base/base.h"

int last_words_init(struct last_words *words)
{
    int fds[2];

    *words = LAST_WORDS_NULL;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    words->fd = fds[0];
    words->child_fd = fds[1];
    /* Only our end: the child writes as it would to a terminal. */
    return fcntl(words->fd, F_SETFL, O_NONBLOCK) < 0 ? -errno : 0;
}

/* A line that is too long keeps its beginning, which names the program. */
static void keep_line(struct last_words *words, const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        if (text[i] == '\n') {
            words->line_ended = true;
            continue;
        }
        if (words->line_ended)
            words->n_bytes = 0;
        words->line_ended = false;
        if (words->n_bytes < LAST_WORDS_MAX_BYTES)
            words->line[words->n_bytes++] = text[i];
        words->line[words->n_bytes] = '\0';
    }
}

bool last_words_read(struct last_words *words)
{
    char text[4096];
    ssize_t n = 0;

    while (words->fd >= 0 && ((n = read(words->fd, text, sizeof(text))) > 0 || (n < 0 && errno == EINTR))) {
        if (n < 0)
            continue;
        keep_line(words, text, (size_t)n);
        if (write(STDERR_FILENO, text, (size_t)n) < 0)
            continue; /* nobody reads our own log either */
    }
    return n < 0 && errno == EAGAIN;
}

void last_words_deinit(struct last_words *words)
{
    (void)last_words_read(words);
    closep(&words->fd);
    closep(&words->child_fd);
}
