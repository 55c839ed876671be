/* SPDX-License-Identifier: Apache-2.0 */

/* For LD_PRELOAD: shutdown() always fails, as if the peer had closed the connection before. */

#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) int shutdown(int fd, int how)
{
    (void)syscall(SYS_shutdown, fd, how);
    errno = ENOTCONN;
    return -1;
}
