/* SPDX-License-Identifier: Apache-2.0 */

/* Reports of the engine on GPUs, and commands to it. */

#include "core/wire/device-wire.h"
#include "round-trip.h"

DEFINE_ROUND_TRIP(device, report, struct device_report, "Device")
DEFINE_ROUND_TRIP(device, command, struct device_command, "Device")
DEFINE_FUZZER(report, command)
