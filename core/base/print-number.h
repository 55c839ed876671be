/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Numbers as people read them. Each function writes to PRINT_SIZE bytes at dst, and returns dst. */

#include <stdint.h>

enum { PRINT_SIZE = 32 };

/* Prints a duration, such as "853 ns", "12.3 ms", "4.56 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". */
char *print_duration(char *dst, uint64_t ns);
/* Prints a size, such as "512 B", "1.50 KiB", "23.4 GiB". */
char *print_bytes(char *dst, uint64_t n_bytes);
/* Prints a count, such as "950", "12.3 k", "1.20 M", "7.50 G". */
char *print_count(char *dst, uint64_t n);
