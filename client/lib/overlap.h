/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A step that is decided, and whose answer the daemon still owes: zerod_step() has returned under ZEROD_OVERLAP_UPDATE,
 * and weights are being written. call.owes says so.
 */

#include <stddef.h>

struct zerod;

/* Waits for the answer, and does what zerod_step() does last. Nothing is sent before that. Return: 0; ZEROD_REFUSED; or
 * fatal. */
int overlap_settle(struct zerod *c);

/* Waits until the published page has these parameters, or the answer is there, or why there will be none. Return: as
 * overlap_settle(). */
int overlap_await(struct zerod *c, const unsigned *params, size_t n_params);
