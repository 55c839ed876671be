/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/device-memory.h"

#include "core/base/base.h"

#include <setjmp.h>
#include <stdlib.h>

struct CUstream_st;

extern bool emulated_backwards;
extern __thread uint64_t sim_turns;
void sim_stop(void);
int sim_launch(struct CUstream_st *stream, void (*run)(void *), void (*free_args)(void *), void *args);

int sim_load(const void *kernel);
void sim_check_loaded(const void *kernel);

bool device_open(void)
{
    return true;
}

void *device_memory_new(size_t n_bytes)
{
    void *memory = NULL;

    if (posix_memalign(&memory, 256, MAX(n_bytes, (size_t)1)) != 0)
        abort();
    return memory;
}

void device_memory_free(void *memory)
{
    free(memory);
}

int device_finish(void)
{
    return 0;
}

void device_order(bool backwards)
{
    emulated_backwards = backwards;
}

static jmp_buf before_launch;
static bool stopped;

__thread uint64_t sim_turns;

void sim_stop(void)
{
    longjmp(before_launch, 1);
}

bool device_stop_after(uint64_t n_turns)
{
    sim_turns = n_turns;
    stopped = false;
    return true;
}

bool device_was_stopped(void)
{
    return stopped;
}

/* Launches a kernel on a stream that has no delay: runs it at once. */
int sim_launch(struct CUstream_st *stream, void (*run)(void *), void (*free_args)(void *), void *args)
{
    if (setjmp(before_launch) == 0)
        run(args);
    else
        stopped = true;
    sim_turns = 0;
    free_args(args);
    return 0;
}

/* Code for the CPU is always loaded. test-device-launches.c tests what a device refuses. */
int sim_load(const void *kernel)
{
    return 0;
}

void sim_check_loaded(const void *kernel)
{
}
