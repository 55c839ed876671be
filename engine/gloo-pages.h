/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Sends bytes of segments without copying them into the kernel: the pages of the segment travel instead.
 *
 * gloo sends with writev(), which copies. A program's symbols come before those of its libraries, so gloo calls the
 * writev() of gloo-pages.cc. What begins in an added range goes out with sendfile(); everything else is written as
 * before. The pages are read again whenever TCP sends again, so the bytes must stay as they are until the other end has
 * received them.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The range of addresses is where the file is mapped, from its start. The descriptor stays the caller's. Any thread. */
void pages_add(const char *map, uint64_t n_bytes, int fd);
/* Nothing of the range is being sent any more. */
void pages_remove(const char *map);

#ifdef __cplusplus
}
#endif
