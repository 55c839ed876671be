/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/* Has no rank ever attached to this daemon? False as well if it does not say so within half a second. */
bool attached_nobody(const char *socket);
