/* SPDX-License-Identifier: Apache-2.0 */

/*
 * libzerod in a job on GPUs, over the stand-ins: the client opens libcuda-sim.so as it would the driver, and the other
 * end is tests/cuda-daemon.c. Each test's body runs in a process of its own, for the stand-ins read their environment
 * once.
 */

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/example/gpu.h"
#include "client/lib/cuda.h"
#include "kernels/position_sum.h"
#include "tests/cuda-daemon.h"
#include "tests/sim/sim-child.h"
#include "zerod/client.h"

/* The last one is larger than a bucket and travels in parts. */
static const uint64_t sizes[] = {100, 7, 1, 3000, 0, 70000 * 3};
enum {
    N_PARAMS = sizeof(sizes) / sizeof(sizes[0]),
    SLOT_PARAMS = N_PARAMS - 1,
    BUCKET_ELEMS = 70000,
    RING_BYTES = 2 << 20
};

struct world {
    char path[64];
    pid_t daemon;
    struct cuda_daemon_seen *seen;
    struct gpu *gpu;
    struct zerod *c;
    float *inits, *grads; /* on the GPU, all parameters one behind the other */
    float *host;          /* what they should be: the weights */
};

static size_t offset_of(unsigned param)
{
    size_t n = 0;

    for (unsigned p = 0; p < param; p++)
        n += sizes[p];
    return n;
}

static float value(unsigned param, uint64_t elem, unsigned round)
{
    return (float)((param * 31 + elem * 7 + round * 13) % 1021) * 0.25f;
}

/* Starts the other end, and attaches. own: the GPU that this process takes. */
static struct world begin(const struct cuda_daemon_options *options, int own)
{
    struct world w = {0};

    snprintf(w.path, sizeof(w.path), "/tmp/zerod-client-cuda-%d", getpid());
    w.seen = mmap(NULL, sizeof(*w.seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(w.seen != MAP_FAILED);
    w.daemon = cuda_daemon_start(w.path, options, w.seen);
    if (own >= 0)
        CHECK(gpu_open(&w.gpu, own) == 0);
    CHECK(zerod_connect(&w.c, &(struct zerod_options){.socket = w.path, .client = "test"}) == 0);
    unlink(w.path);
    return w;
}

static void end(struct world *w)
{
    zerod_close(w->c);
    gpu_close(w->gpu);
    cuda_daemon_wait(w->daemon);
    munmap(w->seen, sizeof(*w->seen));
    free(w->host);
}

static void declare(struct world *w)
{
    size_t n = offset_of(N_PARAMS);
    char name[16];

    w->host = calloc(n, sizeof(float));
    w->inits = gpu_alloc(w->gpu, n * sizeof(float));
    w->grads = gpu_alloc(w->gpu, n * sizeof(float));
    CHECK(w->host && w->inits && w->grads);
    for (unsigned p = 0; p < N_PARAMS; p++)
        for (uint64_t i = 0; i < sizes[p]; i++)
            w->host[offset_of(p) + i] = value(p, i, 0);
    CHECK(gpu_put(w->gpu, w->inits, w->host, n * sizeof(float)) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(name, sizeof(name), "p%u", p);
        CHECK(zerod_declare(
                  w->c,
                  &(struct zerod_param){
                      .name = name, .ndim = 1, .shape = &sizes[p], .trainable = true, .init = w->inits + offset_of(p)},
                  1) == 0);
    }
}

static struct world begin_formed(const struct cuda_daemon_options *options)
{
    struct world w = begin(options, options->device);

    CHECK(zerod_set_stream(w.c, gpu_stream(w.gpu)) == 0);
    declare(&w);
    CHECK(zerod_form(w.c) == 0);
    return w;
}

/* On the GPU, where p's gradient lies from now on; it is counted among what the weights should be. */
static float *make_gradient(struct world *w, unsigned p, unsigned round)
{
    float *at = w->grads + offset_of(p), *host = malloc(sizes[p] * sizeof(float) + 1);

    CHECK(host);
    for (uint64_t i = 0; i < sizes[p]; i++) {
        host[i] = value(p, i, round);
        w->host[offset_of(p) + i] += host[i];
    }
    CHECK(gpu_put(w->gpu, at, host, sizes[p] * sizeof(float)) == 0);
    free(host);
    return at;
}

/* Is what the daemon shows on the GPU what it should be? */
static void check_weights(struct world *w)
{
    for (unsigned p = 0; p < N_PARAMS; p++) {
        float *seen = malloc(sizes[p] * sizeof(float) + 1);

        CHECK(seen && gpu_get(w->gpu, seen, zerod_weight(w->c, p), sizes[p] * sizeof(float)) == 0);
        CHECK(memcmp(seen, w->host + offset_of(p), sizes[p] * sizeof(float)) == 0);
        free(seen);
    }
}

static void push_all(struct world *w, unsigned round)
{
    CHECK(zerod_begin_backward(w->c, NULL) == 0);
    for (unsigned p = N_PARAMS; p-- > 0;)
        CHECK(zerod_push(w->c, &(struct zerod_push){
                                   .param = p, .data = make_gradient(w, p, round), .flags = ZEROD_PUSH_MORE}) == 0);
}

/* ---- training ------------------------------------------------------------------------------------------ */

static void train(void *arg)
{
    struct world w = begin_formed(arg);
    struct zerod_job job;

    CHECK(zerod_job(w.c, &job) == 0 && job.cuda);
    check_weights(&w);
    for (unsigned round = 0; round < 8; round++) {
        push_all(&w, round);
        CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
        push_all(&w, round + 100);
        CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
        CHECK(zerod_step(w.c, NULL, NULL) == 0);
        check_weights(&w);
    }
    CHECK(w.seen->n_pushes == 8 * 2 * (N_PARAMS - 1 + 4)); /* the large one has four parts: chunks are 65,536 */
    CHECK(w.seen->n_events == CUDA_N_EVENTS && w.seen->max_event == CUDA_N_EVENTS - 1);
    end(&w);
}

static const struct cuda_daemon_options usual = {.bucket_elems = BUCKET_ELEMS, .ring_bytes = RING_BYTES};

static void test_train(void **state)
{
    /* The daemon is faster, as fast and slower than the trainer's stream. */
    static const char *const delays[][2] = {{"delay-us=3000", ""}, {"", ""}, {"delay-us=0", "delay-us=3000"}};

    (void)state;
    for (unsigned i = 0; i < sizeof(delays) / sizeof(delays[0]); i++) {
        struct cuda_daemon_options options = usual;

        options.sim = delays[i][1];
        child_passes(delays[i][0], train, &options);
    }
}

static void train_on_another(void *arg)
{
    struct cuda_daemon_options options = usual;

    (void)arg;
    options.device = options.gpu = 2;
    train(&options);
}

static void test_another_device(void **state)
{
    (void)state;
    child_passes("seed=5", train_on_another, NULL);
}

/* Memory that devices may not only read: what a driver that knows no such thing leaves. */
static void test_no_read_only(void **state)
{
    (void)state;
    child_passes("cuMemSetAccess:error=CUDA_ERROR_NOT_SUPPORTED@2", train, (void *)&usual);
}

static void into_slots(void *arg)
{
    struct world w = begin_formed(&usual);

    (void)arg;
    for (unsigned round = 0; round < 3; round++) {
        CHECK(zerod_begin_backward(w.c, NULL) == 0);
        for (unsigned p = 0; p < N_PARAMS; p++) {
            float *from = malloc(sizes[p] * sizeof(float) + 1), *slot = zerod_slot(w.c, p);

            CHECK(from && slot);
            (void)make_gradient(&w, p, round);
            CHECK(gpu_get(w.gpu, from, w.grads + offset_of(p), sizes[p] * sizeof(float)) == 0);
            CHECK(gpu_put(w.gpu, slot, from, sizes[p] * sizeof(float)) == 0);
            CHECK(zerod_push(w.c, &(struct zerod_push){.param = p}) == 0);
            free(from);
        }
        CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
        CHECK(zerod_step(w.c, NULL, NULL) == 0);
        check_weights(&w);
    }
    end(&w);
}

static void test_slots(void **state)
{
    (void)state;
    child_passes("delay-us=1000", into_slots, NULL);
}

/* ---- streams and threads -------------------------------------------------------------------------------- */

/* Parameters of one slot come from three streams, and the daemon looks at the last event alone. */
static void three_streams(void *arg)
{
    struct world w = begin_formed(&usual);
    struct gpu *other;

    (void)arg;
    CHECK(gpu_open(&other, 0) == 0);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned p = 0; p < SLOT_PARAMS; p++)
            (void)make_gradient(&w, p, round); /* it waits for the stream */
        CHECK(zerod_begin_backward(w.c, NULL) == 0);
        for (unsigned p = SLOT_PARAMS; p-- > 0;) {
            CHECK(zerod_set_stream(w.c, p == 2 ? NULL : gpu_stream(p % 2 == 0 ? w.gpu : other)) == 0);
            CHECK(zerod_push(w.c, &(struct zerod_push){.param = p, .data = w.grads + offset_of(p)}) == 0);
        }
        CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
        CHECK(zerod_step(w.c, NULL, NULL) == 0);
        check_weights(&w);
    }
    CHECK(zerod_set_stream(w.c, gpu_stream(w.gpu)) == 0);
    gpu_close(other);
    end(&w);
}

static void test_streams(void **state)
{
    (void)state;
    /* Of two copies that take as long on one stream the second ends later than the last one on another. */
    child_passes("delay-us=0,cudaMemcpyAsync:delay=30@*", three_streams, NULL);
}

static void *push_from_here(void *arg)
{
    struct world *w = arg;

    CHECK(zerod_begin_backward(w->c, NULL) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        CHECK(zerod_push(w->c, &(struct zerod_push){.param = p, .data = w->grads + offset_of(p)}) == 0);
    return NULL;
}

/* A thread that has no context, as one of a framework's may be. */
static void other_thread(void *arg)
{
    struct world w = begin_formed(&usual);
    pthread_t thread;

    (void)arg;
    for (unsigned p = 0; p < N_PARAMS; p++)
        (void)make_gradient(&w, p, 9);
    CHECK(pthread_create(&thread, NULL, push_from_here, &w) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
    CHECK(zerod_step(w.c, NULL, NULL) == 0);
    check_weights(&w);
    end(&w);
}

/* ---- duplicates, windows -------------------------------------------------------------------------------- */

static void duplicates(void *arg)
{
    struct world w = begin_formed(&usual);
    float *kept = malloc(sizes[3] * sizeof(float)), *slot;
    struct position_sum sum = {0};

    (void)arg;
    push_all(&w, 4);
    CHECK(kept && gpu_get(w.gpu, kept, w.grads + offset_of(3), sizes[3] * sizeof(float)) == 0);
    position_sum_update(&sum, DTYPE_F32, kept, sizes[3], 0);
    CHECK(zerod_push(w.c, &(struct zerod_push){.param = 3, .data = w.grads + offset_of(3)}) == 0);
    CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
    CHECK(w.seen->n_duplicates == 1);
    CHECK(w.seen->duplicate_sum == position_sum_finish(&sum, sizes[3] * sizeof(float)));
    /* Where a second one is computed is not where the first one lies. */
    push_all(&w, 5);
    slot = zerod_slot(w.c, 3);
    CHECK(slot && gpu_put(w.gpu, slot, kept, sizes[3] * sizeof(float)) == 0);
    CHECK(zerod_push(w.c, &(struct zerod_push){.param = 3}) == 0);
    CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
    CHECK(w.seen->n_duplicates == 2);
    CHECK(w.seen->duplicate_sum == position_sum_finish(&sum, sizes[3] * sizeof(float)));
    CHECK(zerod_step(w.c, NULL, NULL) == 0);
    check_weights(&w);
    free(kept);
    end(&w);
}

static void test_duplicates(void **state)
{
    (void)state;
    child_passes("delay-us=2000", duplicates, NULL);
}

static void windows(void *arg)
{
    struct world w = begin_formed(&usual);
    float *window;

    (void)arg;
    CHECK(!zerod_window(w.c, 3));
    CHECK(zerod_write_begin(w.c) == 0);
    window = zerod_window(w.c, 3);
    CHECK(window && memcmp(window, w.host + offset_of(3), sizes[3] * sizeof(float)) == 0);
    window[5] = w.host[offset_of(3) + 5] = 77;
    CHECK(zerod_write_end(w.c) == 0);
    check_weights(&w);
    CHECK(zerod_write_begin(w.c) == 0);
    *(float *)zerod_window(w.c, 0) = 1e9f;
    CHECK(zerod_write_forget(w.c) == 0);
    check_weights(&w);
    end(&w);
}

static void test_rest(void **state)
{
    (void)state;
    child_passes("", other_thread, NULL);
    child_passes("", windows, NULL);
}

/* ---- what cannot be ------------------------------------------------------------------------------------- */

static void no_context(void *arg)
{
    struct world w = begin(&usual, -1);
    uint64_t shape = 4;

    (void)arg;
    CHECK(zerod_declare(w.c, &(struct zerod_param){.name = "p", .ndim = 1, .shape = &shape, .trainable = true}, 1) ==
          0);
    CHECK(zerod_form(w.c) == -ENODEV);
    CHECK(strcmp(zerod_error(w.c)->text, "this thread uses no GPU yet, and the job's gradients lie on GPUs: "
                                         "cudaSetDevice(local rank) first") == 0);
    /* Not the end of the connection. */
    CHECK(gpu_open(&w.gpu, 0) == 0);
    CHECK(zerod_form(w.c) == 0);
    end(&w);
}

static void no_driver(void *arg)
{
    struct world w = begin(&usual, -1);

    (void)arg;
    setenv("ZEROD_LIBCUDA", "/nowhere/libcuda.so.1", 1);
    CHECK(zerod_form(w.c) == -ENODEV);
    CHECK(strcmp(zerod_error(w.c)->text,
                 "the job's gradients lie on GPUs, and there is no driver for them here: /nowhere/libcuda.so.1: cannot "
                 "open shared object file: No such file or directory") == 0);
    setenv("ZEROD_LIBCUDA", "libm.so.6", 1);
    CHECK(zerod_form(w.c) == -ENODEV);
    CHECK(strcmp(zerod_error(w.c)->text, "the NVIDIA driver has no cuGetErrorName: it has to be one for CUDA 11.4 or "
                                         "newer") == 0);
    end(&w);
}

static void wrong_gpu(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct world w;

    (void)arg;
    options.device = options.gpu = 1;
    w = begin(&options, 3);
    declare(&w);
    CHECK(zerod_form(w.c) == -ENODEV);
    CHECK(strcmp(zerod_error(w.c)->text,
                 "this rank's memory lies on GPU-73696d2d-6465-7669-6365-2d4200000000, and this process uses "
                 "GPU-73696d2d-6465-7669-6365-2d4400000000: cudaSetDevice(1) first, or let CUDA_VISIBLE_DEVICES name "
                 "the GPUs in the order of the ranks") == 0);
    CHECK(zerod_step(w.c, NULL, NULL) == -ENODEV); /* it is: the daemon counts on this rank */
    end(&w);
}

static void unseen_gpu(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct world w;

    (void)arg;
    options.gpu = 7;
    options.sim = "devices=8";
    w = begin(&options, 0);
    declare(&w);
    CHECK(zerod_form(w.c) == -ENODEV);
    CHECK(strcmp(zerod_error(w.c)->text,
                 "this rank's memory lies on GPU-73696d2d-6465-7669-6365-2d4800000000, and this process uses "
                 "GPU-73696d2d-6465-7669-6365-2d4100000000 and does not see the other one: CUDA_VISIBLE_DEVICES has to "
                 "name it") == 0);
    end(&w);
}

static void copy_fails(void *arg)
{
    struct world w = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_begin_backward(w.c, NULL) == 0);
    CHECK(zerod_push(w.c, &(struct zerod_push){.param = 0, .data = make_gradient(&w, 0, 1)}) == -EIO);
    CHECK(strcmp(zerod_error(w.c)->text, "the GPU: cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE") == 0);
    CHECK(zerod_step(w.c, NULL, NULL) == -EIO);
    end(&w);
}

static void test_refusals(void **state)
{
    (void)state;
    child_passes("cudaMemcpyAsync:error=cudaErrorInvalidValue@8", copy_fails, NULL);
    child_passes("", no_context, NULL);
    child_passes("", no_driver, NULL);
    child_passes("", wrong_gpu, NULL);
    child_passes("", unseen_gpu, NULL);
}

static void forked(void *arg)
{
    struct world w = begin_formed(&usual);
    int status;
    pid_t pid;

    (void)arg;
    push_all(&w, 2);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(zerod_push(w.c, &(struct zerod_push){.param = 1, .data = w.grads}) == -ECHILD);
        zerod_close(w.c);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(zerod_end_backward(w.c, NULL, 0) == 0);
    CHECK(zerod_step(w.c, NULL, NULL) == 0);
    check_weights(&w);
    end(&w);
}

/* What is on the stream when a handle is closed uses memory that goes with it. */
static void closed_early(void *arg)
{
    struct world w = begin_formed(&usual);

    (void)arg;
    push_all(&w, 2);
    end(&w);
}

static void test_ends(void **state)
{
    (void)state;
    child_passes("", forked, NULL);
    child_passes("delay-us=5000", closed_early, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train), cmocka_unit_test(test_another_device), cmocka_unit_test(test_no_read_only),
        cmocka_unit_test(test_slots), cmocka_unit_test(test_streams),        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_rest),  cmocka_unit_test(test_refusals),       cmocka_unit_test(test_ends),
    };

    if (!getenv("ZEROD_LIBCUDA_SIM")) {
        fprintf(stderr, "ZEROD_LIBCUDA_SIM has to name libcuda-sim.so\n");
        return 1;
    }
    setenv("ZEROD_LIBCUDA", getenv("ZEROD_LIBCUDA_SIM"), 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
