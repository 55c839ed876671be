/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CPU's caches, to decide whether data is written through them or past them. */

#include <stddef.h>

/*
 * Return: the size in bytes of the largest cache that one CPU of this machine reads through, or 16 MiB if the system
 * does not say. Reads files, so do not call it in each step.
 */
size_t caches_last_level_bytes(void);

/* Return: the size in bytes of the largest data cache that a folder like /sys/devices/system/cpu/cpu0/cache describes;
 * 0 if it describes none. */
size_t caches_bytes_in(const char *folder);
