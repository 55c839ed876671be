/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Writes to published weights outside of a window (E1106). */

#include <stdbool.h>

struct zerod;

/*
 * The handler of SIGSEGV calls it after a write to published weights. Return: true if the write succeeds when it is
 * repeated.
 */
bool written_begin(struct zerod *c);

/* Call it when the private copy has become equal to the published weights. */
void written_refreshed(struct zerod *c);

/* Replaces written weights with the published ones, if E1106 has reported the writes. */
void written_forget_reported(struct zerod *c);
