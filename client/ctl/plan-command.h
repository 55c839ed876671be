/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* `zerodctl plan`: what a model will take, before there is a daemon. */

#include <stdbool.h>
#include <stdio.h>

/* argv[0] is "plan". Return: 0, or a code of sysexits.h, negative; then a sentence is on stderr. */
int plan_command(int argc, char **argv, bool json);
