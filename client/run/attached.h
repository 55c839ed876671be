/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/* Return: true if the daemon's job was never formed; false also if the daemon does not answer within half a second. */
bool attached_nobody(const char *socket);
