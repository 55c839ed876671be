/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Removes control characters, terminal commands, bytes that are not UTF-8, and blanks at the end from a program's
 * output, so that another line can quote it. */

#include <stdbool.h>
#include <stddef.h>

/*
 * size: the size of `to`, NUL included. A longer text is cut between two characters. Return: true if the text was cut.
 */
bool plain_text(char *to, size_t size, const char *text, size_t n_bytes);
