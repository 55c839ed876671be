/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Steps, and their abort. */

struct wire_position;
struct zerod;

/* The step was aborted: forgets what was pushed and written in it. position: where the next one begins. */
void step_forget(struct zerod *c, const struct wire_position *position);
