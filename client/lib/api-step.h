/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Steps and aborts. */

struct wire_position;
struct zerod;

/* Drops the pushes and writes of an aborted step. position: where the next attempt begins. */
void step_forget(struct zerod *c, const struct wire_position *position);
