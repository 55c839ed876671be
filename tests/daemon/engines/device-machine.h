/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The machine for tests of the engine on GPUs: simulated GPUs (device-machine-sim.c), which can have faults, or real
 * GPUs (device-machine-cuda.c), which cannot.
 */

#include <stdbool.h>

struct CUstream_st;

/* Call it first. Return: whether there is a GPU. If not, prints a sentence on stderr. */
bool machine_open(void);
/* Return: how many GPUs an engine can have. */
unsigned machine_n_gpus(void);
/* Return: the text with which the engine's versions begin. */
const char *machine_prefix(void);
/* Return: whether tests can inject faults. */
bool machine_has_faults(void);
/* Sets the environment of the next engine. fault is what it must fail with, or NULL. */
void machine_set(unsigned node, const char *fault);
/* Makes later work on the stream wait until machine_let_go(). One stream at a time. */
void machine_hold(struct CUstream_st *stream);
void machine_let_go(void);
