/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Sends bytes of segments without copying them into the kernel: the kernel sends the segment's pages.
 *
 * gloo sends with writev(), which copies. A program's symbols precede those of its libraries, so gloo calls the
 * writev() of gloo-pages.cc. Bytes that begin in an added range are sent with sendfile(); all other bytes are written
 * as before. TCP reads the pages again for each retransmission, so the bytes must not change until the other end has
 * received them.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the address range where the file is mapped from its start. The caller owns the descriptor. Any thread may call
 * it. */
void pages_add(const char *map, uint64_t n_bytes, int fd);
/* Removes the range. Call it only when nothing is sent from the range any more. */
void pages_remove(const char *map);

#ifdef __cplusplus
}
#endif
