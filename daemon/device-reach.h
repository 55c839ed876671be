/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What zerod can see of why CUDA does not share a trainer's events with the engine: they travel through /dev/shm, and
 * between processes that may reach each other. Any thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cause.h"

/* Of a process, as zerod sees it; pid: 0 or less, it is in a PID namespace that zerod cannot see. */
enum evidence_reach device_reach(int64_t pid, uint32_t uid);
