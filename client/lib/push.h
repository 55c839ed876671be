/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Gradients of a micro-batch. */

#include <stdint.h>

struct zerod;

/* Needs the layout and the memory. Return: 0 or fatal. */
int push_init(struct zerod *c, uint32_t n_tickets);
void push_deinit(struct zerod *c);

/* Forgets the open micro-batch, because it has ended or the step was aborted. */
void push_close(struct zerod *c);
