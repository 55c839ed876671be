/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* `zerodctl plan`: computes, without a daemon, the memory that a model will need. */

#include <stdbool.h>
#include <stdio.h>

/* argv[0] is "plan". Return: 0; or -sysexits.h after an error message on stderr. */
int plan_command(int argc, char **argv, bool json);
