/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Finds torch's prefix. In a process group, torch begins each line of a traceback, also indented ones, with "[rank3]:
 * ", and its own warnings with "[rank3]:". */

#include <stddef.h>

/* label: the process's label, like "3". Return: the size of torch's prefix at the start of the line; 0 if there is no
 * prefix, if it names another rank, or if the line ends after it. */
size_t torch_rank_length(const char *label, const char *line, size_t n_bytes);
