/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pushes the gradients of a micro-batch. */

#include <stdint.h>

struct zerod;

/* Call it when the layout and the memory exist. Return: 0 or fatal. */
int push_init(struct zerod *c, uint32_t n_tickets);
void push_deinit(struct zerod *c);

/* Drops the client's state of the open micro-batch. Call it when the micro-batch ends, or the step is aborted. */
void push_close(struct zerod *c);
