/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/link/key-file.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "daemon/link/secure-stream.h"

/* Return: 0, or -errno with a sentence. */
static int check(int fd, const char *path, char *why, size_t why_size)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode)) {
        snprintf(why, why_size, "world.key_file %s: this is not a file", path);
        return -EINVAL;
    }
    if (st.st_mode & (S_IROTH | S_IWOTH)) {
        snprintf(why, why_size,
                 "world.key_file %s: others can read or write it (mode %04o); make a new key, and chmod 0640 it", path,
                 (unsigned)st.st_mode & 07777);
        return -EPERM;
    }
    if (st.st_size > KEY_FILE_MAX_BYTES) {
        snprintf(why, why_size, "world.key_file %s: has more than %d bytes, which is no key", path, KEY_FILE_MAX_BYTES);
        return -EFBIG;
    }
    return 0;
}

static ssize_t read_all(int fd, uint8_t *bytes, size_t size)
{
    size_t n_bytes = 0;
    ssize_t n;

    while (n_bytes < size) {
        n = read(fd, bytes + n_bytes, size - n_bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        n_bytes += (size_t)n;
    }
    return (ssize_t)n_bytes;
}

static int make_key(struct secure_stream_key *key, int fd, const char *path, char *why, size_t why_size)
{
    uint8_t bytes[KEY_FILE_MAX_BYTES];
    ssize_t n_bytes = read_all(fd, bytes, sizeof(bytes));
    int r;

    if (n_bytes > 0 && bytes[n_bytes - 1] == '\n')
        n_bytes--;
    if (n_bytes < 0) {
        r = (int)n_bytes;
    } else if (n_bytes < KEY_FILE_MIN_BYTES) {
        snprintf(why, why_size, "world.key_file %s: has %zd bytes, a key has at least %d", path, n_bytes,
                 KEY_FILE_MIN_BYTES);
        r = -EINVAL;
    } else {
        r = secure_stream_key_init(key, bytes, (size_t)n_bytes);
    }
    sodium_memzero(bytes, sizeof(bytes));
    return r;
}

int key_file_read(struct secure_stream_key *key, const char *path, char *why, size_t why_size)
{
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    int r = fd < 0 ? -errno : 0;

    *why = '\0';
    if (r == 0)
        r = check(fd, path, why, why_size);
    if (r == 0)
        r = make_key(key, fd, path, why, why_size);
    if (r < 0 && !*why)
        snprintf(why, why_size, "world.key_file %s: %s", path, strerror(-r));
    return r;
}
