/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/client/cuda-trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/sim/sim-child.h"

size_t trainer_offset(const struct trainer *trainer, unsigned param)
{
    size_t n = 0;

    for (unsigned p = 0; p < param; p++)
        n += trainer->sizes[p];
    return n;
}

float trainer_value(unsigned param, uint64_t elem, unsigned round)
{
    return (float)((param * 31 + elem * 7 + round * 13) % 1021) * 0.25f;
}

struct trainer trainer_begin(const struct cuda_daemon_options *options, const uint64_t *sizes, unsigned n_params,
                             int own, int rank)
{
    struct trainer trainer = {.sizes = sizes, .n_params = n_params};
    char path[64];

    snprintf(path, sizeof(path), "/tmp/zerod-cuda-trainer-%d", getpid());
    trainer.seen = mmap(NULL, sizeof(*trainer.seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(trainer.seen != MAP_FAILED);
    trainer.daemon = cuda_daemon_start(path, options, trainer.seen);
    if (own >= 0)
        CHECK(gpu_open(&trainer.gpu, own) == 0);
    CHECK(zerod_connect(&trainer.c, &(struct zerod_options){.socket = path, .rank = rank, .client = "test"}) == 0);
    unlink(path);
    return trainer;
}

void trainer_declare(struct trainer *trainer)
{
    size_t n_bytes = trainer_offset(trainer, trainer->n_params) * sizeof(float);
    char name[16];

    trainer->host = malloc(n_bytes);
    trainer->grads = gpu_alloc(trainer->gpu, n_bytes);
    CHECK(trainer->host && trainer->grads);
    for (unsigned p = 0; p < trainer->n_params; p++)
        for (uint64_t i = 0; i < trainer->sizes[p]; i++)
            trainer->host[trainer_offset(trainer, p) + i] = trainer_value(p, i, 0);
    CHECK(gpu_put(trainer->gpu, trainer->grads, trainer->host, n_bytes) == 0);
    for (unsigned p = 0; p < trainer->n_params; p++) {
        snprintf(name, sizeof(name), "p%u", p);
        CHECK(zerod_declare(trainer->c,
                            &(struct zerod_param){.name = name,
                                                  .ndim = 1,
                                                  .shape = &trainer->sizes[p],
                                                  .trainable = true,
                                                  .init = trainer->grads + trainer_offset(trainer, p)},
                            1) == 0);
    }
}

void trainer_check_weight(struct trainer *trainer, unsigned param)
{
    size_t n_bytes = trainer->sizes[param] * sizeof(float);
    float *seen = malloc(n_bytes + 1);

    CHECK(seen && gpu_get(trainer->gpu, seen, zerod_weight(trainer->c, param), n_bytes) == 0);
    CHECK(memcmp(seen, trainer->host + trainer_offset(trainer, param), n_bytes) == 0);
    free(seen);
}

void trainer_end(struct trainer *trainer)
{
    zerod_close(trainer->c);
    gpu_close(trainer->gpu);
    cuda_daemon_wait(trainer->daemon);
    munmap(trainer->seen, sizeof(*trainer->seen));
    free(trainer->host);
}

void trainer_find_driver(void)
{
    const char *sim = getenv("ZEROD_LIBCUDA_SIM");

    if (!sim) {
        fprintf(stderr, "ZEROD_LIBCUDA_SIM has to name libcuda-sim.so\n");
        exit(1);
    }
    setenv("ZEROD_LIBCUDA", sim, 1);
}
