/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Answers of the daemon as people read them. The input is what docs/schema/ describes; keys that are missing,
 * as from an older daemon, are shown as 0 or "-".
 */

#include <stdio.h>

struct json_object;

/* Return: 0 or -ENOMEM. */
typedef int show_fn(FILE *file, struct json_object *answer);

show_fn show_status, show_ranks, show_params, show_diagnostics, show_stacks, show_message;
