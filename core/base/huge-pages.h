/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Whether this system gives shared memory huge pages, of 2 MiB. Memory that is mapped at multiples of HUGE_PAGE_BYTES
 * can have them.
 */

#include <stdbool.h>
#include <stddef.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* Does it give them to memory that asks for them, with madvise()? */
bool huge_pages_on_advice(void);

/* The kernel's word for what is in force, such as never or advise; "unknown": it says nothing. */
void huge_pages_mode(char *mode, size_t size);

/* A sentence about what is in force. mode_file: NULL, the system's; else one like it, for tests. */
void huge_pages_describe(const char *mode_file, char *text, size_t size);
