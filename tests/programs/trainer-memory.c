/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/programs/trainer-memory.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/example/gpu.h"

enum { MAX_PARAMS = 256, ALIGN_BYTES = 256 };

#define ARENA_BYTES ((size_t)64 << 20)

static struct gpu *gpu; /* NULL: host memory. Never closed, because a later handle uses it again. */
static uint8_t *arena;  /* initial weights; not freed */
static size_t n_used;
static void *scratch; /* on the GPU, the gradient to push */
static struct {
    void *device; /* as of zerod_slot() */
    void *host;
} slots[MAX_PARAMS];
static void *weights;

static void fail(const char *what)
{
    fprintf(stderr, "trainer-memory: %s\n", what);
    exit(1);
}

static void *host_memory(void *old, size_t n_bytes)
{
    void *memory = realloc(old, n_bytes + 1);

    if (!memory)
        fail("out of memory");
    return memory;
}

static void put(void *to, const void *from, size_t n_bytes)
{
    if (n_bytes > 0 && gpu_put(gpu, to, from, n_bytes) != 0)
        fail("cannot write to the GPU");
}

/* The GPU's number on its node: LOCAL_RANK, or the rank if there is only one node. */
static int gpu_of(int rank)
{
    const char *local = getenv("LOCAL_RANK");

    return local ? atoi(local) : rank;
}

/* Return: whether the job is on GPUs. Opens the rank's GPU at the first call. */
static bool is_on_gpu(struct zerod *c, int rank)
{
    struct zerod_job job;

    if (zerod_job(c, &job) != 0 || !job.cuda)
        return false;
    if (!gpu && (gpu_open(&gpu, gpu_of(rank)) != 0 || !(arena = gpu_alloc(gpu, ARENA_BYTES)) ||
                 !(scratch = gpu_alloc(gpu, ARENA_BYTES))))
        fail("no GPU");
    return true;
}

int memory_declare(struct zerod *c, int rank, const struct zerod_param *param, size_t n_bytes)
{
    struct zerod_param moved = *param;

    if (!is_on_gpu(c, rank))
        return zerod_declare(c, param, 1);
    if (zerod_set_stream(c, gpu_stream(gpu)) != 0)
        return zerod_error(c)->status;
    if (param->init) {
        if (n_bytes + ALIGN_BYTES > ARENA_BYTES - n_used)
            n_used = 0; /* reuses the memory of an earlier handle */
        moved.init = arena + n_used;
        put(arena + n_used, param->init, n_bytes);
        n_used += (n_bytes / ALIGN_BYTES + 1) * ALIGN_BYTES;
    }
    return zerod_declare(c, &moved, 1);
}

void *memory_slot(struct zerod *c, unsigned param, size_t n_bytes)
{
    void *slot = zerod_slot(c, param);

    if (!gpu || !slot)
        return slot;
    if (param >= MAX_PARAMS)
        fail("more parameters than expected");
    slots[param].device = slot;
    return slots[param].host = host_memory(slots[param].host, n_bytes);
}

int memory_push(struct zerod *c, const struct zerod_push *push, size_t n_bytes)
{
    struct zerod_push moved = *push;

    if (!gpu)
        return zerod_push(c, push);
    if (push->data) {
        put(scratch, push->data, n_bytes); /* waits for the stream, and so for the copy of the last push */
        moved.data = scratch;
    } else if (push->param < MAX_PARAMS && slots[push->param].device) {
        put(slots[push->param].device, slots[push->param].host, n_bytes);
        slots[push->param].device = NULL;
    }
    return zerod_push(c, &moved);
}

const void *memory_weight(struct zerod *c, unsigned param, size_t n_bytes)
{
    const void *weight = zerod_weight(c, param);

    if (!gpu || !weight)
        return weight;
    weights = host_memory(weights, n_bytes);
    if (n_bytes > 0 && gpu_get(gpu, weights, weight, n_bytes) != 0)
        fail("cannot read from the GPU");
    return weights;
}
