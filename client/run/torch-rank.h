/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* With a process group torch begins lines with the rank: "[rank3]: " each line of a traceback, also the indented ones,
 * and "[rank3]:" its own warnings. */

#include <stddef.h>

/* label: of the process, "3". Return: bytes of torch's prefix at the start of the line; 0: there is none, or it names
 * another rank, or nothing stands behind it. */
size_t torch_rank_length(const char *label, const char *line, size_t n_bytes);
