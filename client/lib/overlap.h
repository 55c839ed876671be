/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Waits for a decided step's answer that the daemon still owes (call.owes). With ZEROD_OVERLAP_UPDATE zerod_step()
 * returns before this answer, while the daemon still writes weights.
 */

#include <stddef.h>

struct zerod;

/*
 * Receives the owed answer and completes the step. Call it before any other request is sent. Return: 0; ZEROD_REFUSED;
 * or fatal.
 */
int overlap_settle(struct zerod *c);

/*
 * Waits until the published page shows these parameters as written, or the daemon has sent the answer or a refusal.
 * Return: as overlap_settle().
 */
int overlap_await(struct zerod *c, const unsigned *params, size_t n_params);
