/* SPDX-License-Identifier: Apache-2.0 */

/* Finds torch's rank prefix at the start of a line. */

#include "client/run/torch-rank.h"

#include <stdio.h>
#include <string.h>

size_t torch_rank_length(const char *label, const char *line, size_t n_bytes)
{
    char prefix[64];
    size_t n = (size_t)snprintf(prefix, sizeof(prefix), "[rank%s]:", label);

    if (n >= sizeof(prefix) || n_bytes <= n || memcmp(line, prefix, n) != 0)
        return 0;
    return line[n] == ' ' && n_bytes > n + 1 ? n + 1 : n;
}
