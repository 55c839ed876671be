/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Where the exporter listens. */

/*
 * address: "HOST:PORT", "[HOST]:PORT", or ":PORT" for all addresses. Return: a listening socket, which says on stderr
 * where it is; a negative code of sysexits.h, after a sentence.
 */
int place_listen(const char *address);
