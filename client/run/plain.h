/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Cleans a program's output, so that another line can quote it: removes control characters, terminal commands, bytes
 * that are not UTF-8, and blanks at the end. */

#include <stdbool.h>
#include <stddef.h>

/* size: of `to`, with its NUL. A longer text is cut between two characters. Return: true if the text was cut. */
bool plain_text(char *to, size_t size, const char *text, size_t n_bytes);
