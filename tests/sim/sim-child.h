/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Tests of the stand-ins, each in its own process, because the environment is read once and a wrong use ends the
 * process. A test's body runs in a child with CHECK() instead of cmocka's asserts, which would continue in the child as
 * if it were the parent.
 */

#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "cuda.h"
#include "cuda_runtime_api.h"
#include "nccl.h"
#include "sim.h"

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                 \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Runs body(arg) in a child with ZEROD_SIM=env. The child must exit with 0 and print nothing. */
void child_passes(const char *env, void (*body)(void *arg), void *arg);

/* child_passes(), but the stand-ins must end the child, with exactly this sentence after "sim: ". */
void child_dies(const char *env, void (*body)(void *arg), void *arg, const char *sentence);

/* child_passes(), but the child must die by this signal and print nothing. */
void child_is_killed(const char *env, void (*body)(void *arg), void *arg, int signal);

void sleep_ms(unsigned ms);

/* ---- for bodies ----------------------------------------------------------------------------------------- */

struct CUstream_st *new_stream(int device);
struct CUevent_st *new_event(int device, unsigned flags);
void *new_memory(int device, size_t n_bytes);
void *new_host(size_t n_bytes);                                                              /* registered */
void put(void *device_memory, const void *from, size_t n_bytes, struct CUstream_st *stream); /* waits for the copy */
void get(void *to, const void *device_memory, size_t n_bytes, struct CUstream_st *stream);
uint32_t poison_at(const void *at); /* Return: the four poison bytes of that address, read as a number */
