/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What lies where in a rank's pool on its GPU: the parameters that it gathered last, and those that it was said to
 * gather next. Pure. They are placed one behind the other, and at the end from the start again, over those that were
 * placed first. Offsets and sizes are bytes; offsets are multiples of DEVICE_POOL_ALIGN.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

struct device_pool;

#define DEVICE_POOL_NOWHERE UINT64_MAX

/* layout: not consumed, must outlive the pool. Return: 0 or -ENOMEM. */
int device_pool_new(struct device_pool **out, const struct layout *layout, uint64_t n_bytes);
void device_pool_free(struct device_pool *pool); /* NULL is fine */

/* Can they all lie there at the same time? A parameter that is named twice counts twice. */
bool device_pool_fits(const struct device_pool *pool, const uint32_t *params, size_t n_params);

/*
 * Has a place for each of them, which must fit; those that are there stay where they are, if there is room for the
 * others beside them. absent: room for n_params; what has to be put into its place, each once. Parameters without
 * elements need none. Return: how many are absent.
 */
size_t device_pool_place(struct device_pool *pool, const uint32_t *params, size_t n_params, uint32_t *absent);

/* Where a parameter lies; 0 when it has no elements, DEVICE_POOL_NOWHERE when it has no place. */
uint64_t device_pool_offset(const struct device_pool *pool, uint32_t param);

/* Nothing has a place: what lies there is not what it was, or was never put there. */
void device_pool_forget(struct device_pool *pool);
