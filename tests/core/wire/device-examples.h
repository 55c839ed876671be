/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One message of each type between zerod and the engine on GPUs, with every field set. Tests compare with them, and the
 * fuzzer starts from them.
 */

#include "core/wire/device-wire.h"

extern const struct device_command device_example_commands[N_DEVICE_COMMAND_TYPES]; /* by type; [0] is unused */
extern const struct device_report device_example_reports[N_DEVICE_REPORT_TYPES];
