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
/* What the engine begins its versions with. */
const char *machine_prefix(void);
/* Can a test order faults? */
bool machine_has_faults(void);
/* Sets the environment of the engine that is started next; fault: the fault that it is to have, or NULL. */
void machine_set(unsigned node, const char *fault);
/* The next work on the stream waits until machine_let_go(); one stream at a time. */
void machine_hold(struct CUstream_st *stream);
void machine_let_go(void);
