/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Writes to published weights outside of a window (E1106). */

#include <stdbool.h>

struct zerod;

/* Called in the handler of SIGSEGV after a write to published weights. Return: true if a repeated write succeeds. */
bool written_begin(struct zerod *c);

/* Notes that the private copy is equal to the published weights. */
void written_refreshed(struct zerod *c);

/* If E1106 has reported writes, makes the weights the published ones again. */
void written_forget_reported(struct zerod *c);
