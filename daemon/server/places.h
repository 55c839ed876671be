/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Places limit the number of control connections. All users share limits.clients places, and administrators have
 * PLACES_KEPT more. When no place is free, a connection of lower standing is closed for the newcomer. root has the
 * highest standing, then the other administrators, then all other users. If no connection has lower standing, the
 * connection of the newcomer's standing with the longest silence is closed, if the silence is at least
 * PLACES_SILENT_NS.
 *
 * Each rank has its own place for its trainer. A trainer's connection is never closed for a newcomer.
 */

#include <stdbool.h>
#include <stdint.h>

struct service;
struct session;

enum { PLACES_KEPT = 8 };                           /* picked: more than the administrators who ask at one time */
#define PLACES_SILENT_NS (UINT64_C(1) * 1000000000) /* picked: zerodctl asks at once */

/*
 * Reserves a place for a control connection, and closes another connection if necessary. Return: false if no place is
 * free and none can be freed.
 */
bool places_take(struct service *service, struct session *session);

/*
 * Closes one connection for the new session, because descriptors are short or too many connections have not sent Hello.
 * equals: true closes only a connection before Hello, of the same or lower standing; false closes a connection of lower
 * standing, before Hello or a control connection. Return: whether a connection was closed.
 */
bool places_make_room(struct service *service, struct session *session, bool equals);

/*
 * Closes connections that for limits.handshake_timeout have not sent Hello, have not asked anything, or have not read
 * their answer.
 */
void places_close_silent(struct service *service, uint64_t now_ns);
/*
 * Return: the time until places_close_silent() may close a connection, or UINT64_MAX if no connection can become
 * silent.
 */
uint64_t places_rest_ns(const struct service *service, uint64_t now_ns);
