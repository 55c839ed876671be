/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CPU's caches, to decide whether data is written through them or past them. */

#include <stddef.h>

/*
 * Bytes of the largest cache that one CPU of this machine reads through. If the system does not say, 16 MiB. Reads
 * files: not for each step.
 */
size_t caches_last_level_bytes(void);

/* The largest cache of data that a folder like /sys/devices/system/cpu/cpu0/cache describes, in bytes; 0: none. */
size_t caches_bytes_in(const char *folder);
