/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where test-device-kernels.c runs: on the CPU, with the kernels of kernels/cuda/host.h (device-memory-host.c), or on a
 * GPU (device-memory-cuda.c).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Return: whether there is a device; else a sentence on stderr. */
bool device_open(void);

/* Memory that both sides read and write, at a multiple of 256 bytes. The process ends when there is none. */
void *device_memory_new(size_t n_bytes);
void device_memory_free(void *memory);

/* Until all that was launched on stream NULL has run. Return: 0, or the error of one of them. */
int device_finish(void);

/*
 * The next launch ends, as if its process had been killed, when its threads have been given n turns; 0: none does.
 * Return: false, where a launch cannot be ended.
 */
bool device_stop_after(uint64_t n_turns);
/* Has it ended so? */
bool device_was_stopped(void);

/* Blocks and threads run from the last to the first; only where the order can be set. */
void device_order(bool backwards);
