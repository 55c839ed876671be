/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One message of each type between zerod and its engine, with every field set. Tests compare with them, and the fuzzer
 * starts from them.
 */

#include "core/wire/engine-wire.h"

extern const struct engine_command engine_example_commands[N_ENGINE_COMMAND_TYPES]; /* by type; [0] is unused */
extern const struct engine_report engine_example_reports[N_ENGINE_REPORT_TYPES];
