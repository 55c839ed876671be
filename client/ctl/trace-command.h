/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

struct json_object;

/*
 * The command "trace": a timeline of the last steps. argv[0] is the command. print: the daemon's answer is printed
 * unchanged. Return: an exit status.
 */
int trace_command(int argc, char **argv, const char *socket, _Bool print);

/*
 * Adds the events of another file in the Trace Event Format to the trace. A trace of another node is aligned by the
 * steps that both traces have committed; any other trace by its baseTimeNanoseconds, as torch.profiler writes it. Pure:
 * no I/O. Return: NULL, or a static sentence that says why nothing was added.
 */
const char *trace_merge(struct json_object *trace, struct json_object *other);
