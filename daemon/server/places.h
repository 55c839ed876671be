/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Places decide which connections may stay when there are too many. limits.clients counts control connections;
 * PLACES_KEPT more are for administrators. When no place is free, a newcomer gets that of a connection of lower rank:
 * root is above the other administrators, and these are above the rest. Among equals it gets the place of the
 * connection that has been silent for longest, if that is PLACES_SILENT_NS at least.
 *
 * Trainers have places of their own, one for each rank, and are never closed here.
 */

#include <stdbool.h>
#include <stdint.h>

struct service;
struct session;

enum { PLACES_KEPT = 8 };                           /* picked: more than administrators look at one time */
#define PLACES_SILENT_NS (UINT64_C(1) * 1000000000) /* picked: zerodctl asks at once; nobody else has to */

/* Closes the connection that has the place, if need be. Return: false, no place for this control connection. */
bool places_take(struct service *service, struct session *session);

/*
 * Closes a connection for the newest one, which has not said Hello, when descriptors or places before Hello are short.
 * equals: connections of its own standing may go, too, the oldest that has not said Hello first. Return: whether one
 * was closed.
 */
bool places_make_room(struct service *service, struct session *session, bool equals);

/* Closes connections that have not said Hello, have not asked, or do not read, for limits.handshake_timeout. */
void places_close_silent(struct service *service, uint64_t now_ns);
/* How long places_close_silent() closes none, unless one acts; UINT64_MAX: for ever. */
uint64_t places_rest_ns(const struct service *service, uint64_t now_ns);
