/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Registers the weights of handles that the handler of SIGSEGV watches. */

#include <stddef.h>
#include <stdint.h>

struct zerod;

void fault_register(struct zerod *c, const uint8_t *base, size_t n_bytes);
void fault_unregister(const struct zerod *c); /* also if c is not registered */
