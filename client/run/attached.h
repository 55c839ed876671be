/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/* Has no rank ever attached to this daemon? Return: false also if the daemon does not answer within half a second. */
bool attached_nobody(const char *socket);
