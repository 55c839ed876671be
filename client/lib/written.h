/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Writes to published weights outside of a window (E1106). */

#include <stdbool.h>

struct zerod;

/* In the handler of SIGSEGV: a write to published weights. Return: it may be done again, and succeeds. */
bool written_begin(struct zerod *c);

/* The private copy has just been made from the published weights: nothing is written in it. */
void written_refreshed(struct zerod *c);

/* If E1106 has reported what was written, the weights become the published ones again. */
void written_forget_reported(struct zerod *c);
