/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Finds the reason why CUDA does not share a trainer's events with the engine. CUDA shares them through /dev/shm, and
 * only between processes that may reach each other. Any thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/diagnosis/cause.h"

/* pid: the trainer, in the PID namespace of zerod; 0 or less: it is in one that zerod cannot see. */
enum evidence_reach device_reach(int64_t pid, uint32_t uid);
