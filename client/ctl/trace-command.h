/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

struct json_object;

/*
 * The command `zerodctl trace`: prints or writes a timeline of the last steps. argv[0] is "trace". If print is set, it
 * only prints the daemon's answer unchanged. Return: an exit status.
 */
int trace_command(int argc, char **argv, const char *socket, _Bool print);

/*
 * Adds the events of another trace, in the Trace Event Format, without I/O. The trace of another node is aligned by the
 * steps that both traces have committed. Any other trace is aligned by its baseTimeNanoseconds, which torch.profiler
 * writes. Return: NULL, or a static sentence that says why nothing was added.
 */
const char *trace_merge(struct json_object *trace, struct json_object *other);
