/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* With a process group, torch begins lines with the rank: "[rank3]: " on each line of a traceback, also on indented
 * lines, and "[rank3]:" on its own warnings. */

#include <stddef.h>

/* label: of the process, like "3". Return: the number of bytes of torch's prefix at the start of the line; or 0 if
 * there is no prefix, if it names another rank, or if nothing follows it. */
size_t torch_rank_length(const char *label, const char *line, size_t n_bytes);
