/* SPDX-License-Identifier: Apache-2.0 */

/* Reads the key file, and refuses it if a user other than root and the daemon's user can read or write it. */

#include "daemon/link/key-file.h"

#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/acl.h"
#include "core/base/base.h"
#include "daemon/link/secure-stream.h"

static const char *user_name(uid_t uid)
{
    const struct passwd *entry = getpwuid(uid);
    static char number[16]; /* getpwuid() has a static result, too */

    snprintf(number, sizeof(number), "%u", uid);
    return entry ? entry->pw_name : number;
}

/* Writes to why the file's owner and mode, and the command that corrects them. Return: -EPERM. */
static int refuse_key_file(const struct stat *st, const char *path, char *why, size_t why_size)
{
    int n = snprintf(why, why_size, "world.key_file %s: it belongs to %s, mode %04o; ", path, user_name(st->st_uid),
                     (unsigned)st->st_mode & 07777);
    size_t at = MIN((size_t)MAX(n, 0), why_size);

    snprintf(why + at, why_size - at,
             "the daemon's user has to own it, and nobody else may read it: chown %s %s && chmod 0400 %s%s",
             user_name(geteuid()), path, path,
             st->st_mode & (S_IRWXG | S_IRWXO) ? " (and make a new key, if somebody may have read this one)" : "");
    return -EPERM;
}

/* Checks the file's type, owner, access and size. Return: 0, or -errno with a sentence in why. */
static int check_key_file(int fd, const char *path, char *why, size_t why_size)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode)) {
        snprintf(why, why_size, "world.key_file %s: this is not a file", path);
        return -EINVAL;
    }
    /*
     * Reads the ACL, because systemd grants a credential to the unit's user by an ACL. The group digit of the mode is
     * then the ACL's mask, not the group's access.
     */
    if ((st.st_uid != geteuid() && st.st_uid != 0) || acl_lets_others(fd, st.st_mode))
        return refuse_key_file(&st, path, why, why_size);
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
    struct stat st;

    *why = '\0';
    if (r == -EACCES && stat(path, &st) == 0)
        r = refuse_key_file(&st, path, why, why_size);
    if (r == 0)
        r = check_key_file(fd, path, why, why_size);
    if (r == 0)
        r = make_key(key, fd, path, why, why_size);
    if (r < 0 && !*why)
        snprintf(why, why_size, "world.key_file %s: %s", path, strerror(-r));
    return r;
}
