/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Where the tests of the engine on GPUs run: over the stand-ins (device-machine-sim.c), where things can be made to go
 * wrong, or on GPUs (device-machine-cuda.c), where they are what they are.
 */

#include <stdbool.h>

struct CUstream_st;

/* Before anything else. Return: whether there is a GPU; else a sentence on stderr. */
bool machine_open(void);
/* GPUs that an engine can have. */
unsigned machine_n_gpus(void);
/* What goes wrong can be ordered. */
bool machine_is_sim(void);
/* The environment of the engine that is started next; fault: what is to go wrong with it, or NULL. */
void machine_set(unsigned node, const char *fault);
/* What the stream is given next waits until it is let go; of one stream at a time. */
void machine_hold(struct CUstream_st *stream);
void machine_let_go(void);
