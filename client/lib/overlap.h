/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A decided step whose answer the daemon still owes (call.owes): zerod_step() has returned under ZEROD_OVERLAP_UPDATE,
 * and the daemon writes weights.
 */

#include <stddef.h>

struct zerod;

/* Receives the owed answer and completes zerod_step(). Nothing is sent before. Return: 0; ZEROD_REFUSED; or fatal. */
int overlap_settle(struct zerod *c);

/*
 * Waits until the published page has these parameters, or the daemon has sent the answer or a refusal. Return: as
 * overlap_settle().
 */
int overlap_await(struct zerod *c, const unsigned *params, size_t n_params);
