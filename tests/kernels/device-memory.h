/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The device of test-device-kernels.c: the CPU, with the kernels of kernels/cuda/host.h (device-memory-host.c), or a
 * GPU (device-memory-cuda.c).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Return: whether there is a device. If not, prints a sentence on stderr. */
bool device_open(void);

/* Return: memory for CPU and device, at a multiple of 256 bytes. If there is none, the process ends. */
void *device_memory_new(size_t n_bytes);
void device_memory_free(void *memory);

/* Waits until all launches on stream NULL have ended. Return: 0, or the error of one of them. */
int device_finish(void);

/*
 * Ends the next launch after its threads have had n turns, as if its process was killed. 0: ends no launch. Return:
 * false if launches cannot be ended on this device.
 */
bool device_stop_after(uint64_t n_turns);
/* Return: whether the last launch was ended early. */
bool device_was_stopped(void);

/* Sets whether blocks and threads run from the last to the first, on a device whose order can be set. */
void device_order(bool backwards);
