/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The exporter's listening socket. */

/*
 * Opens a listening socket, and prints its address on stderr. address: "HOST:PORT", "[HOST]:PORT", or ":PORT" for all
 * addresses. Return: a socket; or, after an error message, a negative code of sysexits.h.
 */
int place_listen(const char *address);
