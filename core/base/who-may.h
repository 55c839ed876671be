/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A user whom a socket refuses learns which group he needs. */

#include <stddef.h>

enum { WHO_MAY_BYTES = 512 };

/* Writes a clause behind a semicolon, such as "; members of lab may (...)": who may open the socket at this path. Any
 * thread may call it. */
void who_may_open(const char *path, char text[WHO_MAY_BYTES]);
