/* SPDX-License-Identifier: Apache-2.0 */

/* Reading files that a user names. */

#include "core/base/read-file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "core/base/base.h"

enum { FIRST_BYTES = 64 * 1024 };

int read_file_open(const char *path)
{
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);

    if (fd < 0 || fcntl(fd, F_SETFL, 0) < 0)
        return -errno;
    return steal_fd(&fd);
}

/* Makes room for at least one byte and a NUL. Return: 0 or -ENOMEM. */
static int grow_text(char **text, size_t *n_allocated)
{
    size_t n = MAX(*n_allocated * 2, (size_t)FIRST_BYTES);
    char *more = realloc(*text, n);

    if (!more)
        return -ENOMEM;
    *text = more;
    *n_allocated = n;
    return 0;
}

int read_file(const char *path, size_t max_bytes, char **text, size_t *n_bytes)
{
    _cleanup_close_ int fd = read_file_open(path);
    _cleanup_free_ char *buffer = NULL;
    size_t n = 0, n_allocated = 0;
    ssize_t got = 1;
    int r = MIN(fd, 0);

    while (r == 0 && got != 0) {
        if (n + 1 >= n_allocated)
            r = grow_text(&buffer, &n_allocated);
        if (r < 0)
            break;
        got = read(fd, buffer + n, n_allocated - 1 - n);
        if (got < 0 && errno != EINTR)
            r = -errno;
        n += (size_t)MAX(got, (ssize_t)0);
        if (n > max_bytes)
            r = -EFBIG;
    }
    if (r < 0)
        return r;
    assert(n < n_allocated);
    buffer[n] = '\0';
    *text = steal_ptr(buffer);
    *n_bytes = n;
    return 0;
}
