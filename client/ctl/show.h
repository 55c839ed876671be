/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Prints answers of the daemon for people. docs/schema/ describes the answers. Missing keys, as in the answer of an
 * older daemon, are shown as 0 or "-".
 */

#include <stdio.h>

struct json_object;

/* Return: 0 or -ENOMEM. */
typedef int show_fn(FILE *file, struct json_object *answer);

show_fn show_status, show_ranks, show_params, show_diagnostics, show_stacks, show_message;
