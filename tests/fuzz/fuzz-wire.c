/* SPDX-License-Identifier: Apache-2.0 */

/* Requests of clients, and replies of the daemon. */

#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "round-trip.h"

DEFINE_ROUND_TRIP(wire, request, struct request, "")
DEFINE_ROUND_TRIP(wire, reply, struct reply, "")
DEFINE_FUZZER(request, reply)
