/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The weights that the caller sees, at addresses that never change. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct zerod;

bool weights_is_stage3(const struct zerod *c);
size_t weights_param_bytes(const struct zerod *c, uint32_t param);

/* Return: the size of all parameters' weights, in the layout of weights_offset(). */
uint64_t weights_bytes(const struct zerod *c);

/*
 * Return: the parameter's offset in the weight segment. In stage 3: in host memory's range of weights, and in windows.
 */
uint64_t weights_offset(const struct zerod *c, uint32_t param);

/* Return: the weights in host memory that the caller sees: a private copy, or the daemon's segment. */
uint8_t *weights_visible(const struct zerod *c);

/* Stage 3 on GPUs: copies the new weights of all gathered parameters, after a change of weights. Return: 0 or fatal. */
int weights_gather_anew(struct zerod *c);

/* Stage 3: sends a new daemon how often each parameter is gathered. Return: as call_say(). */
int weights_say_held(struct zerod *c);
