/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl checkpoint`: asks the daemon for a checkpoint, and reads existing checkpoints. With a path, only `save`
 * needs a daemon.
 *
 *   checkpoint.c          the command, `list` and `show`
 *   checkpoint-save.c     `save`
 *   checkpoint-verify.c   `verify`
 */

#include <stdbool.h>

/* argv[0] is "checkpoint". Return: 0, or a code of sysexits.h after an error message on stderr. */
int checkpoint_command(int argc, char **argv, const char *socket, bool json);
