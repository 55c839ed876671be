/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* For a user who may not open a socket: finds the group that he needs. */

#include <stddef.h>

enum { WHO_MAY_BYTES = 512 };

/* Writes a clause that says who may open the socket at this path, such as "; members of lab may (...)". Any thread. */
void who_may_open(const char *path, char text[WHO_MAY_BYTES]);
