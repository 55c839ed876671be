/* SPDX-License-Identifier: Apache-2.0 */

/* Reports of the engine between hosts, and commands to it. */

#include "core/wire/engine-wire.h"
#include "round-trip.h"

DEFINE_ROUND_TRIP(engine, report, struct engine_report, "Engine")
DEFINE_ROUND_TRIP(engine, command, struct engine_command, "Engine")
DEFINE_FUZZER(report, command)
