/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* `zerodctl top`: the job in a terminal, full screen, twice a second, until somebody presses q. */

#include <stdbool.h>

/* argv[0] is "top". Return: 0, or a code of sysexits.h after a sentence; a signal that ends it ends the process. */
int top_command(int argc, char **argv, const char *socket, bool json);
