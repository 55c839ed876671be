/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Places limit the number of control connections: limits.clients for all users, and PLACES_KEPT more for
 * administrators. When no place is free, a newcomer gets the place of a connection of lower standing. root is above the
 * other administrators, and these are above all other users. If there is none lower, the newcomer gets the place of the
 * connection of its own standing that has been silent for longest, if that is at least PLACES_SILENT_NS.
 *
 * Trainers have places of their own, one for each rank, and are never closed here.
 */

#include <stdbool.h>
#include <stdint.h>

struct service;
struct session;

enum { PLACES_KEPT = 8 };                           /* picked: more than administrators ask at one time */
#define PLACES_SILENT_NS (UINT64_C(1) * 1000000000) /* picked, because zerodctl asks at once */

/* Gets a place for a control connection, and closes another connection if necessary. Return: false if there is no
 * place. */
bool places_take(struct service *service, struct session *session);

/*
 * Closes a connection for the newest one, which has not sent Hello, when descriptors or places before Hello are short.
 * equals: closes a connection before Hello, also of the same standing, the lowest and then the oldest first; otherwise
 * only of a lower standing. Return: true if it closed one.
 */
bool places_make_room(struct service *service, struct session *session, bool equals);

/* Closes connections that have sent no Hello, asked nothing, or read no answer, for limits.handshake_timeout. */
void places_close_silent(struct service *service, uint64_t now_ns);
/* Return: the time until places_close_silent() may close a connection, or UINT64_MAX if it closes none. */
uint64_t places_rest_ns(const struct service *service, uint64_t now_ns);
