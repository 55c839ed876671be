/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The handler of SIGSEGV, and the weights of all handles that it watches. */

#include <stddef.h>
#include <stdint.h>

struct zerod;

void fault_register(struct zerod *c, const uint8_t *base, size_t n_bytes);
void fault_unregister(const struct zerod *c); /* also for a handle that is not registered */
