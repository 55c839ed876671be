/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The places of parameters in a rank's pool on its GPU: the parameters that the rank gathered last, and those that it
 * gathers next, according to hints. Pure. Parameters are placed one after the other. At the pool's end placing
 * continues from its start, over the parameters that were placed first. Offsets and sizes are bytes; offsets are
 * multiples of DEVICE_POOL_ALIGN.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

struct device_pool;

#define DEVICE_POOL_NOWHERE UINT64_MAX

/* layout: borrowed; it must outlive the pool. Return: 0 or -ENOMEM. */
int device_pool_new(struct device_pool **out, const struct layout *layout, uint64_t n_bytes);
void device_pool_free(struct device_pool *pool); /* may be NULL */

/* Does the pool have room for all these parameters at the same time? A parameter that is named twice counts twice. */
bool device_pool_fits(const struct device_pool *pool, const uint32_t *params, size_t n_params);

/*
 * Finds a place for each parameter; all of them must fit. A parameter that has a place keeps it, if the other
 * parameters find room. absent: an array for n_params numbers; it gets each parameter once that must be loaded into its
 * place. Parameters without elements need no place. Return: the number of absent parameters.
 */
size_t device_pool_place(struct device_pool *pool, const uint32_t *params, size_t n_params, uint32_t *absent);

/* Return: the offset of a parameter; 0 if it has no elements; DEVICE_POOL_NOWHERE if it has no place. */
uint64_t device_pool_offset(const struct device_pool *pool, uint32_t param);

/* Removes all places, because the pool's contents are stale or were never loaded. */
void device_pool_forget(struct device_pool *pool);
