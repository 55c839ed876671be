/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One message of each type with every field set, each to another value. Tests compare with them, and fuzzers start from
 * them.
 */

#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

extern const struct request example_requests[N_REQUEST_TYPES]; /* by type; [0] is unused */
extern const struct reply example_replies[N_REPLY_TYPES];
