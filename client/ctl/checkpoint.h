/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl checkpoint`: asks the daemon for a checkpoint, and reads those that are there. All but `save` need no
 * daemon if a path is given.
 *
 *   checkpoint.c          the command, `list` and `show`
 *   checkpoint-save.c     `save`
 *   checkpoint-verify.c   `verify`
 */

#include <stdbool.h>

/* argv[0] is "checkpoint". Return: 0, or a code of sysexits.h; then a sentence is on stderr. */
int checkpoint_command(int argc, char **argv, const char *socket, bool json);
