/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Write windows. */

struct zerod;

/* Shows the published weights again. Does nothing if no window is open. */
void window_close(struct zerod *c);
