/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests libzerod in a job on GPUs, with the stand-ins. The client opens libcuda-sim.so instead of the driver, and its
 * daemon is tests/client/cuda-daemon.c. Each test's body runs in a process of its own, because the stand-ins read their
 * environment once.
 */

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/lib/memory/cuda.h"
#include "kernels/position_sum.h"
#include "tests/client/cuda-trainer.h"
#include "tests/sim/sim-child.h"

/* The last parameter is larger than a bucket and travels in parts. */
static const uint64_t sizes[] = {100, 7, 1, 3000, 0, 70000 * 3};
enum {
    N_PARAMS = sizeof(sizes) / sizeof(sizes[0]),
    SLOT_PARAMS = N_PARAMS - 1,
    BUCKET_ELEMS = 70000,
    RING_BYTES = 2 << 20
};

static struct trainer begin(const struct cuda_daemon_options *options, int own)
{
    return trainer_begin(options, sizes, N_PARAMS, own, 0);
}

static struct trainer begin_formed(const struct cuda_daemon_options *options)
{
    struct trainer t = begin(options, options->device);

    CHECK(zerod_set_stream(t.c, gpu_stream(t.gpu)) == 0);
    trainer_declare(&t);
    CHECK(zerod_form(t.c) == 0);
    return t;
}

/* Writes p's gradient to its place on the GPU, and adds it to the expected weights. Return: its address on the GPU. */
static float *make_gradient(struct trainer *t, unsigned p, unsigned round)
{
    float *at = t->grads + trainer_offset(t, p), *host = malloc(sizes[p] * sizeof(float) + 1);

    CHECK(host);
    for (uint64_t i = 0; i < sizes[p]; i++) {
        host[i] = trainer_value(p, i, round);
        t->host[trainer_offset(t, p) + i] += host[i];
    }
    CHECK(gpu_put(t->gpu, at, host, sizes[p] * sizeof(float)) == 0);
    free(host);
    return at;
}

static void check_weights(struct trainer *t)
{
    for (unsigned p = 0; p < N_PARAMS; p++)
        trainer_check_weight(t, p);
}

static void push_all(struct trainer *t, unsigned round)
{
    CHECK(zerod_begin_backward(t->c, NULL) == 0);
    for (unsigned p = N_PARAMS; p-- > 0;)
        CHECK(zerod_push(t->c, &(struct zerod_push){
                                   .param = p, .data = make_gradient(t, p, round), .flags = ZEROD_PUSH_MORE}) == 0);
}

/* ---- training ------------------------------------------------------------------------------------------ */

static void train(void *arg)
{
    struct trainer t = begin_formed(arg);
    struct zerod_job job;

    CHECK(zerod_job(t.c, &job) == 0 && job.cuda);
    check_weights(&t);
    for (unsigned round = 0; round < 8; round++) {
        push_all(&t, round);
        CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
        push_all(&t, round + 100);
        CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
        CHECK(zerod_step(t.c, NULL, NULL) == 0);
        check_weights(&t);
    }
    CHECK(t.seen->n_pushes == 8 * 2 * (N_PARAMS - 1 + 4)); /* the large one has four parts: chunks are 65,536 */
    trainer_end(&t);
}

static const struct cuda_daemon_options usual = {.bucket_elems = BUCKET_ELEMS, .ring_bytes = RING_BYTES};

static void test_train(void **state)
{
    /* The daemon is faster than the trainer's stream, as fast, or slower. */
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

/* A driver that cannot make memory read-only. The client maps it writable. */
static void test_no_read_only(void **state)
{
    (void)state;
    child_passes("cuMemSetAccess:error=CUDA_ERROR_NOT_SUPPORTED@2", train, (void *)&usual);
}

static void into_slots(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    for (unsigned round = 0; round < 3; round++) {
        CHECK(zerod_begin_backward(t.c, NULL) == 0);
        for (unsigned p = 0; p < N_PARAMS; p++) {
            float *from = malloc(sizes[p] * sizeof(float) + 1), *slot = zerod_slot(t.c, p);

            CHECK(from && slot);
            (void)make_gradient(&t, p, round);
            CHECK(gpu_get(t.gpu, from, t.grads + trainer_offset(&t, p), sizes[p] * sizeof(float)) == 0);
            CHECK(gpu_put(t.gpu, slot, from, sizes[p] * sizeof(float)) == 0);
            CHECK(zerod_push(t.c, &(struct zerod_push){.param = p}) == 0);
            free(from);
        }
        CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
        CHECK(zerod_step(t.c, NULL, NULL) == 0);
        check_weights(&t);
    }
    trainer_end(&t);
}

static void test_slots(void **state)
{
    (void)state;
    child_passes("delay-us=1000", into_slots, NULL);
}

/* ---- streams and threads -------------------------------------------------------------------------------- */

/* Parameters of one slot are copied on three streams. The daemon waits only for the last point. */
static void three_streams(void *arg)
{
    struct trainer t = begin_formed(&usual);
    struct gpu *other;

    (void)arg;
    CHECK(gpu_open(&other, 0) == 0);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned p = 0; p < SLOT_PARAMS; p++)
            (void)make_gradient(&t, p, round); /* waits for the stream */
        CHECK(zerod_begin_backward(t.c, NULL) == 0);
        for (unsigned p = SLOT_PARAMS; p-- > 0;) {
            CHECK(zerod_set_stream(t.c, p == 2 ? NULL : gpu_stream(p % 2 == 0 ? t.gpu : other)) == 0);
            CHECK(zerod_push(t.c, &(struct zerod_push){.param = p, .data = t.grads + trainer_offset(&t, p)}) == 0);
        }
        CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
        CHECK(zerod_step(t.c, NULL, NULL) == 0);
        check_weights(&t);
    }
    CHECK(zerod_set_stream(t.c, gpu_stream(t.gpu)) == 0);
    gpu_close(other);
    trainer_end(&t);
}

static void test_streams(void **state)
{
    (void)state;
    /* All copies take equally long, so the second copy on one stream ends later than the last copy on another. */
    child_passes("delay-us=0,cudaMemcpyAsync:delay=30@*", three_streams, NULL);
}

static void *push_from_here(void *arg)
{
    struct trainer *t = arg;

    CHECK(zerod_begin_backward(t->c, NULL) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        CHECK(zerod_push(t->c, &(struct zerod_push){.param = p, .data = t->grads + trainer_offset(t, p)}) == 0);
    return NULL;
}

static void push_one(struct trainer *t, unsigned p)
{
    CHECK(zerod_push(t->c, &(struct zerod_push){.param = p, .data = t->grads + trainer_offset(t, p)}) == 0);
}

static void *push_the_last(void *arg)
{
    push_one(arg, 0);
    return NULL;
}

/* The same handle means another default stream on each thread. A framework's backward runs on another thread. */
static void streams_of_threads(void *arg)
{
    struct trainer t = begin_formed(&usual);
    void *per_thread = (void *)2; /* CU_STREAM_PER_THREAD */
    pthread_t thread;

    (void)arg;
    CHECK(zerod_set_stream(t.c, per_thread) == 0);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned p = 0; p < SLOT_PARAMS; p++)
            (void)make_gradient(&t, p, round);
        CHECK(zerod_begin_backward(t.c, NULL) == 0);
        for (unsigned p = SLOT_PARAMS; --p > 0;)
            push_one(&t, p);
        CHECK(pthread_create(&thread, NULL, push_the_last, &t) == 0 && pthread_join(thread, NULL) == 0);
        CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
        CHECK(zerod_step(t.c, NULL, NULL) == 0);
        check_weights(&t);
    }
    CHECK(zerod_set_stream(t.c, gpu_stream(t.gpu)) == 0);
    trainer_end(&t);
}

/* Pushes from a thread without a context, like a thread of the framework. */
static void other_thread(void *arg)
{
    struct trainer t = begin_formed(&usual);
    pthread_t thread;

    (void)arg;
    for (unsigned p = 0; p < N_PARAMS; p++)
        (void)make_gradient(&t, p, 9);
    CHECK(pthread_create(&thread, NULL, push_from_here, &t) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
    CHECK(zerod_step(t.c, NULL, NULL) == 0);
    check_weights(&t);
    trainer_end(&t);
}

static void test_threads(void **state)
{
    (void)state;
    child_passes("delay-us=0,cudaMemcpyAsync:delay=30@*", streams_of_threads, NULL);
    child_passes("", other_thread, NULL);
}

/* ---- duplicates, windows -------------------------------------------------------------------------------- */

static void duplicates(void *arg)
{
    struct trainer t = begin_formed(&usual);
    float *kept = malloc(sizes[3] * sizeof(float)), *slot;
    struct position_sum sum = {0};

    (void)arg;
    push_all(&t, 4);
    CHECK(kept && gpu_get(t.gpu, kept, t.grads + trainer_offset(&t, 3), sizes[3] * sizeof(float)) == 0);
    position_sum_update(&sum, DTYPE_F32, kept, sizes[3], 0);
    CHECK(zerod_push(t.c, &(struct zerod_push){.param = 3, .data = t.grads + trainer_offset(&t, 3)}) == 0);
    CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
    CHECK(t.seen->n_duplicates == 1);
    CHECK(t.seen->duplicate_sum == position_sum_finish(&sum, sizes[3] * sizeof(float)));
    /* The second gradient is computed in another slot than the first. */
    push_all(&t, 5);
    slot = zerod_slot(t.c, 3);
    CHECK(slot && gpu_put(t.gpu, slot, kept, sizes[3] * sizeof(float)) == 0);
    CHECK(zerod_push(t.c, &(struct zerod_push){.param = 3}) == 0);
    CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
    CHECK(t.seen->n_duplicates == 2);
    CHECK(t.seen->duplicate_sum == position_sum_finish(&sum, sizes[3] * sizeof(float)));
    CHECK(zerod_step(t.c, NULL, NULL) == 0);
    check_weights(&t);
    free(kept);
    trainer_end(&t);
}

static void test_duplicates(void **state)
{
    (void)state;
    child_passes("delay-us=2000", duplicates, NULL);
}

static void windows(void *arg)
{
    struct trainer t = begin_formed(&usual);
    float *window;

    (void)arg;
    CHECK(!zerod_window(t.c, 3));
    CHECK(zerod_write_begin(t.c) == 0);
    window = zerod_window(t.c, 3);
    CHECK(window && memcmp(window, t.host + trainer_offset(&t, 3), sizes[3] * sizeof(float)) == 0);
    window[5] = t.host[trainer_offset(&t, 3) + 5] = 77;
    CHECK(zerod_write_end(t.c) == 0);
    check_weights(&t);
    CHECK(zerod_write_begin(t.c) == 0);
    *(float *)zerod_window(t.c, 0) = 1e9f;
    CHECK(zerod_write_forget(t.c) == 0);
    check_weights(&t);
    trainer_end(&t);
}

static void test_rest(void **state)
{
    (void)state;
    child_passes("", windows, NULL);
}

/* ---- what cannot be ------------------------------------------------------------------------------------- */

static void no_context(void *arg)
{
    struct trainer t = begin(&usual, -1);
    uint64_t shape = 4;

    (void)arg;
    CHECK(zerod_declare(t.c, &(struct zerod_param){.name = "p", .ndim = 1, .shape = &shape, .trainable = true}, 1) ==
          0);
    CHECK(zerod_form(t.c) == -ENODEV);
    CHECK(strcmp(zerod_error(t.c)->text, "this thread uses no GPU yet, and the job's gradients lie on GPUs: "
                                         "cudaSetDevice(local rank) first") == 0);
    /* The connection is still usable. */
    CHECK(gpu_open(&t.gpu, 0) == 0);
    CHECK(zerod_form(t.c) == 0);
    trainer_end(&t);
}

static void no_driver(void *arg)
{
    struct trainer t = begin(&usual, -1);

    (void)arg;
    setenv("ZEROD_LIBCUDA", "/nowhere/libcuda.so.1", 1);
    CHECK(zerod_form(t.c) == -ENODEV);
    CHECK(strcmp(zerod_error(t.c)->text,
                 "the job's gradients lie on GPUs, and there is no driver for them here: /nowhere/libcuda.so.1: cannot "
                 "open shared object file: No such file or directory") == 0);
    setenv("ZEROD_LIBCUDA", "libm.so.6", 1);
    CHECK(zerod_form(t.c) == -ENODEV);
    CHECK(strcmp(zerod_error(t.c)->text, "the NVIDIA driver has no cuGetErrorName: it has to be one for CUDA 11.7 or "
                                         "newer") == 0);
    trainer_end(&t);
}

static void wrong_gpu(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.device = options.gpu = 1;
    t = begin(&options, 3);
    trainer_declare(&t);
    CHECK(zerod_form(t.c) == -ENODEV);
    CHECK(strcmp(zerod_error(t.c)->text,
                 "this rank's memory lies on GPU-73696d2d-6465-7669-6365-2d4200000000, and this process uses "
                 "GPU-73696d2d-6465-7669-6365-2d4400000000: cudaSetDevice(1) first, or let CUDA_VISIBLE_DEVICES name "
                 "the GPUs in the order of the ranks") == 0);
    CHECK(zerod_step(t.c, NULL, NULL) == -ENODEV); /* final, because the daemon counts on this rank */
    trainer_end(&t);
}

static void unseen_gpu(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.gpu = 7;
    options.sim = "devices=8";
    t = begin(&options, 0);
    trainer_declare(&t);
    CHECK(zerod_form(t.c) == -ENODEV);
    CHECK(strcmp(zerod_error(t.c)->text,
                 "this rank's memory lies on GPU-73696d2d-6465-7669-6365-2d4800000000, and this process uses "
                 "GPU-73696d2d-6465-7669-6365-2d4100000000 and does not see the other one: CUDA_VISIBLE_DEVICES has to "
                 "name it") == 0);
    trainer_end(&t);
}

static void copy_fails(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_begin_backward(t.c, NULL) == 0);
    CHECK(zerod_push(t.c, &(struct zerod_push){.param = 0, .data = make_gradient(&t, 0, 1)}) == -EIO);
    CHECK(strcmp(zerod_error(t.c)->text, "the GPU: cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE") == 0);
    CHECK(zerod_step(t.c, NULL, NULL) == -EIO);
    trainer_end(&t);
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
    struct trainer t = begin_formed(&usual);
    int status;
    pid_t pid;

    (void)arg;
    push_all(&t, 2);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(zerod_push(t.c, &(struct zerod_push){.param = 1, .data = t.grads}) == -ECHILD);
        zerod_close(t.c);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(zerod_end_backward(t.c, NULL, 0) == 0);
    CHECK(zerod_step(t.c, NULL, NULL) == 0);
    check_weights(&t);
    trainer_end(&t);
}

/* A handle is closed, which frees its memory while work on the stream still uses it. */
static void closed_early(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    push_all(&t, 2);
    trainer_end(&t);
}

/* The close unmaps a page while the GPU still has to write to it, on a stream that is no longer the handle's. */
static void closed_before_points(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    push_all(&t, 2);
    CHECK(zerod_set_stream(t.c, NULL) == 0);
    trainer_end(&t);
}

static void no_page(void *arg)
{
    struct trainer t = begin(&usual, usual.device);

    trainer_declare(&t);
    CHECK(zerod_form(t.c) < 0);
    CHECK(strstr(zerod_error(t.c)->text, arg));
    trainer_end(&t);
}

static void test_page_refused(void **state)
{
    (void)state;
    child_passes("values=0", no_page, (void *)"cannot write 64-bit values from a stream (cuStreamWriteValue64)");
    child_passes("cuMemHostRegister:error=CUDA_ERROR_NOT_PERMITTED", no_page,
                 (void *)"cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED");
    child_passes("cuMemHostGetDevicePointer:error=CUDA_ERROR_INVALID_VALUE", no_page,
                 (void *)"cuMemHostGetDevicePointer: CUDA_ERROR_INVALID_VALUE");
}

static void test_ends(void **state)
{
    (void)state;
    child_passes("cuStreamWriteValue64:delay=100@*", closed_before_points, NULL);
    child_passes("", forked, NULL);
    child_passes("delay-us=5000", closed_early, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train),      cmocka_unit_test(test_another_device), cmocka_unit_test(test_no_read_only),
        cmocka_unit_test(test_slots),      cmocka_unit_test(test_streams),        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_duplicates), cmocka_unit_test(test_rest),           cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_ends),       cmocka_unit_test(test_page_refused),
    };

    trainer_find_driver();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
