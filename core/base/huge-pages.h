/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Finds whether this system gives shared memory huge pages, of 2 MiB. Memory that is mapped at multiples of
 * HUGE_PAGE_BYTES can have them.
 */

#include <stdbool.h>
#include <stddef.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* Return: true if the system gives huge pages to memory that asks for them by madvise(). */
bool huge_pages_on_advice(void);

/* Writes the kernel's word for its setting, such as never or advise, or "unknown" if the setting cannot be read. */
void huge_pages_mode(char *mode, size_t size);

/* Writes a sentence about the setting. mode_file: NULL for the kernel's file; tests pass a file of the same format. */
void huge_pages_describe(const char *mode_file, char *text, size_t size);
