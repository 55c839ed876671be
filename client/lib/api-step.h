/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Steps, and their abort. */

struct wire_position;
struct zerod;

/* The step was aborted: forgets its pushes and writes. position: where the next attempt begins. */
void step_forget(struct zerod *c, const struct wire_position *position);
