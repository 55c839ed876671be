/* SPDX-License-Identifier: Apache-2.0 */

#include "engine/gloo-pages.h"

#include <cerrno>

#include <map>
#include <mutex>

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace
{

struct Range {
    uint64_t n_bytes;
    int fd;
};

struct Ranges {
    std::mutex mutex;
    std::map<const char *, Range> by_start;
};

Ranges &ranges()
{
    static auto *ranges = new Ranges; /* outlives every thread */

    return *ranges;
}

/* Finds the file and the offset of an address. Return: false if the address is in no range. */
bool find(const void *address, int *fd, off_t *offset)
{
    const char *at = static_cast<const char *>(address);
    Ranges &all = ranges();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto next = all.by_start.upper_bound(at);

    if (next == all.by_start.begin())
        return false;
    const auto &[start, range] = *std::prev(next);
    if (at >= start + range.n_bytes)
        return false;
    *fd = range.fd;
    *offset = at - start;
    return true;
}

/* Sends the bytes from the file. Return: like write() to the socket. */
ssize_t send_pages(int socket, const struct iovec &bytes, int fd, off_t offset)
{
    ssize_t n = sendfile(socket, fd, &offset, bytes.iov_len);

    if (n < 0 && (errno == EINVAL || errno == ENOSYS)) /* this kernel cannot send from this file or to this socket */
        return write(socket, bytes.iov_base, bytes.iov_len);
    return n;
}

ssize_t send_header(int socket, const struct iovec *parts, int n_parts)
{
    struct msghdr message = {};

    message.msg_iov = const_cast<struct iovec *>(parts);
    message.msg_iovlen = static_cast<size_t>(n_parts);
    return sendmsg(socket, &message, MSG_MORE);
}

} // namespace

void pages_add(const char *map, uint64_t n_bytes, int fd)
{
    std::lock_guard<std::mutex> lock(ranges().mutex);

    ranges().by_start[map] = {n_bytes, fd};
}

void pages_remove(const char *map)
{
    std::lock_guard<std::mutex> lock(ranges().mutex);

    ranges().by_start.erase(map);
}

/* Replaces writev() for gloo. The parts are a header of a few bytes, unless gloo has already sent the header, and the
 * bytes of one move. */
extern "C" __attribute__((visibility("default"))) ssize_t writev(int socket, const struct iovec *parts, int n_parts)
{
    ssize_t n_header = 0, n;
    off_t offset;
    int fd;

    if (n_parts < 1 || !find(parts[n_parts - 1].iov_base, &fd, &offset))
        return syscall(SYS_writev, socket, parts, n_parts);
    for (int i = 0; i < n_parts - 1; i++)
        n_header += static_cast<ssize_t>(parts[i].iov_len);
    if (n_header > 0) {
        n = send_header(socket, parts, n_parts - 1);
        if (n < n_header)
            return n;
    }
    n = send_pages(socket, parts[n_parts - 1], fd, offset);
    if (n < 0)
        return n_header > 0 ? n_header : -1; /* the next call returns the error */
    return n_header + n;
}
