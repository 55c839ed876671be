/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* `zerodctl top`: the job on a full-screen terminal, redrawn twice a second, until the user presses q. */

#include <stdbool.h>

/* argv[0] is "top". Return: 0, or a code of sysexits.h after an error message. It does not return after a signal that
 * ends top. */
int top_command(int argc, char **argv, const char *socket, bool json);
