/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Weights as the caller sees them, at addresses that never change. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct zerod;

bool weights_is_stage3(const struct zerod *c);
size_t weights_param_bytes(const struct zerod *c, uint32_t param);

/* The size of all parameters' weights, as weights_offset() places them. */
uint64_t weights_bytes(const struct zerod *c);

/* The parameter's offset in the weight segment; in stage 3, in the range in host memory and in windows. */
uint64_t weights_offset(const struct zerod *c, uint32_t param);

/* The weights in host memory that the caller sees: its private copy, or the daemon's segment. */
uint8_t *weights_visible(const struct zerod *c);

/* Stage 3 on GPUs: after a change of weights, gathers all gathered parameters again. Return: 0 or fatal. */
int weights_gather_anew(struct zerod *c);

/* Stage 3: tells a daemon that does not know it how often each parameter is gathered. Return: as call_say(). */
int weights_say_held(struct zerod *c);
