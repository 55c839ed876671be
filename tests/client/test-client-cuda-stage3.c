/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests libzerod in a job on GPUs in stage 3, with the stand-ins. tests/client/test-client-cuda.c is for stages 1 and
 * 2. The driver tells how much of the GPU's memory a process has. The stand-ins check that none of it is freed while a
 * stream uses it.
 */

#include <dlfcn.h>
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

#include "tests/client/cuda-trainer.h"
#include "tests/sim/sim-child.h"
#include "tests/tiers.h"

/* ONE, TWO and THREE each need one granule of GPU memory, LARGE needs two. */
enum { SMALL, ONE, EMPTY, TWO, THREE, LARGE, LAST, N_PARAMS };
static const uint64_t sizes[N_PARAMS] = {100, 200000, 0, 200000, 200000, 600000, 3000};

enum {
    GRANULE = 2 << 20,
    MIB = 1 << 20,
    TWO_GRANULES_ELEMS = 2 * GRANULE / sizeof(float), /* max_live_elems that allows two granules */
};

/*
 * Values that a test compares, in addition to the trainer's. They are static because each test's body has its own
 * process.
 */
static struct {
    float *copied;      /* on the GPU: where read_slowly() copies to */
    size_t n_own_bytes; /* GPU memory in use before anything was gathered */
    const void *places[N_PARAMS];
    void *event; /* recorded after the last read_slowly() */
} observed;

/* The pool has room for all weights in two requests, and max_live_elems is never reached. */
static const struct cuda_daemon_options usual = {
    .bucket_elems = 70000, .ring_bytes = GRANULE, .pool_bytes = 2 * GRANULE, .max_live_elems = 1 << 30};

/* ---- the GPU -------------------------------------------------------------------------------------------- */

typedef unsigned long long address;

static void *driver(const char *name)
{
    void *library = dlopen(getenv("ZEROD_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
    void *call = library ? dlsym(library, name) : NULL;

    CHECK(call);
    return call;
}

#define DRIVER(type, name) ((type)(uintptr_t)driver(name))

static size_t used_bytes(void)
{
    size_t n_free, total;

    CHECK(DRIVER(int (*)(size_t *, size_t *), "cuMemGetInfo_v2")(&n_free, &total) == 0);
    return total - n_free;
}

/* Return: the MiB of GPU memory that the client has for gathered weights. */
static unsigned held_mib(void)
{
    return (unsigned)((used_bytes() - observed.n_own_bytes) / MIB);
}

/* Return: whether the work before observed.event has not ended. */
static bool is_running(void)
{
    enum { NOT_READY = 600 };
    int r = DRIVER(int (*)(void *), "cuEventQuery")(observed.event);

    CHECK(r == 0 || r == NOT_READY);
    return r == NOT_READY;
}

/* Starts work on a stream that reads a weight, as a kernel of the program would. Does not wait for the work. */
static void read_on(struct trainer *t, unsigned param, void *stream)
{
    CHECK(DRIVER(int (*)(address, address, size_t, void *), "cuMemcpyDtoDAsync_v2")(
              (uintptr_t)(observed.copied + trainer_offset(t, param)), (uintptr_t)zerod_weight(t->c, param),
              sizes[param] * sizeof(float), stream) == 0);
    CHECK(DRIVER(int (*)(void *, void *), "cuEventRecord")(observed.event, stream) == 0);
}

static void read_slowly(struct trainer *t, unsigned param)
{
    read_on(t, param, gpu_stream(t->gpu));
}

/* ---- the job -------------------------------------------------------------------------------------------- */

static struct trainer begin(const struct cuda_daemon_options *options, int rank)
{
    struct trainer t = trainer_begin(options, sizes, N_PARAMS, options->device, rank);

    CHECK(DRIVER(int (*)(void **, unsigned), "cuEventCreate")(&observed.event, 0) == 0);
    CHECK(zerod_set_stream(t.c, gpu_stream(t.gpu)) == 0);
    trainer_declare(&t);
    observed.copied = gpu_alloc(t.gpu, trainer_offset(&t, N_PARAMS) * sizeof(float));
    CHECK(observed.copied);
    return t;
}

static struct trainer begin_as(const struct cuda_daemon_options *options, int rank)
{
    struct trainer t = begin(options, rank);

    CHECK(zerod_form(t.c) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        CHECK((observed.places[p] = zerod_weight(t.c, p)));
    observed.n_own_bytes = used_bytes();
    return t;
}

static struct trainer begin_formed(const struct cuda_daemon_options *options)
{
    return begin_as(options, 0);
}

#define LIST(...) ((const unsigned[]){__VA_ARGS__}), sizeof((unsigned[]){__VA_ARGS__}) / sizeof(unsigned)

/* Asserts that the weight has its first address and the right values. */
static void check_weight(struct trainer *t, unsigned p)
{
    CHECK(zerod_weight(t->c, p) == observed.places[p]);
    trainer_check_weight(t, p);
}

/* Asserts that read_slowly() read the expected weights. */
static void check_copied(struct trainer *t, unsigned p, const float *expected)
{
    float *seen = malloc(sizes[p] * sizeof(float));

    CHECK(seen && gpu_get(t->gpu, seen, observed.copied + trainer_offset(t, p), sizes[p] * sizeof(float)) == 0);
    CHECK(memcmp(seen, expected + trainer_offset(t, p), sizes[p] * sizeof(float)) == 0);
    free(seen);
}

static void gather_one(struct trainer *t, unsigned p)
{
    CHECK(zerod_gather(t->c, &p, 1) == 0);
    check_weight(t, p);
}

static void release_one(struct trainer *t, unsigned p)
{
    CHECK(zerod_release(t->c, &p, 1) == 0);
}

/*
 * Gathers, starts work on the stream, and releases while that work runs. The delays of the caller's process make it
 * slow.
 */
static void use_slowly(struct trainer *t, unsigned p)
{
    CHECK(zerod_gather(t->c, &p, 1) == 0);
    read_slowly(t, p);
    release_one(t, p);
}

static void drain(struct trainer *t)
{
    float there;

    CHECK(gpu_get(t->gpu, &there, observed.copied, sizeof(there)) == 0);
}

/* Does a step, which adds 1 to every weight. */
static int take_step(struct trainer *t)
{
    size_t n = trainer_offset(t, N_PARAMS);
    float *ones = malloc(n * sizeof(float));

    CHECK(ones);
    for (size_t i = 0; i < n; i++) {
        ones[i] = 1;
        t->host[i] += 1;
    }
    CHECK(gpu_put(t->gpu, t->grads, ones, n * sizeof(float)) == 0);
    free(ones);
    CHECK(zerod_begin_backward(t->c, NULL) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        CHECK(zerod_push(t->c, &(struct zerod_push){.param = p, .data = t->grads + trainer_offset(t, p)}) == 0);
    CHECK(zerod_end_backward(t->c, NULL, 0) == 0);
    return zerod_step(t->c, NULL, NULL);
}

static bool says(const struct trainer *t, const char *text)
{
    if (strcmp(zerod_error(t->c)->text, text) == 0)
        return true;
    fprintf(stderr, "says: %s\n", zerod_error(t->c)->text);
    return false;
}

/*
 * Delays the first read. 12 copies happen until the job is formed, the 13th gathers the first parameter, the 14th reads
 * it.
 */
#define WHEN_FIRST_READ "cudaMemcpyAsync:delay=2000@14"

/* Delays the first read of a test that gathers once more and drains the stream before it. */
#define WHEN_READ_LATER "cudaMemcpyAsync:delay=2000@16"

/* Runs a test's body with the delays of most tests. */
static void passes(void (*body)(void *arg))
{
    child_passes("delay-us=3000", body, NULL);
    if (tests_full())
        child_passes("delay-us=0", body, NULL);
}

/* ---- what is shown -------------------------------------------------------------------------------------- */

static void one_by_one(void *arg)
{
    struct trainer t = begin_formed(&usual);
    void *base;
    size_t n_bytes;

    (void)arg;
    CHECK(zerod_memory(t.c, ZEROD_MEMORY_WEIGHTS, &base, &n_bytes) == 0 && !base && n_bytes == 0);
    for (unsigned round = 0; round < 2; round++)
        for (unsigned p = 0; p < N_PARAMS; p++) {
            gather_one(&t, p);
            release_one(&t, p);
        }
    CHECK(held_mib() == 6); /* one piece of memory of each size */
    CHECK(take_step(&t) == 0);
    CHECK(t.seen->n_held == 0);
    CHECK(t.seen->n_gathers == 2 * N_PARAMS); /* the step gathers nothing again */
    for (unsigned p = 0; p < N_PARAMS; p++)
        gather_one(&t, p);
    CHECK(zerod_prefetch(t.c, LIST(ONE, TWO)) == 0);
    trainer_end(&t);
}

/* Gathers more than the pool can contain. */
static void all_at_once(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(SMALL, ONE, EMPTY, TWO, THREE, LARGE, LAST)) == 0);
    CHECK(t.seen->n_gathers == 2);
    for (unsigned p = 0; p < N_PARAMS; p++)
        check_weight(&t, p);
    CHECK(held_mib() == 14);
    CHECK(zerod_release(t.c, LIST(LAST, LARGE, THREE, TWO, EMPTY, ONE, SMALL)) == 0);
    CHECK(zerod_gather(t.c, LIST(LARGE, LARGE, LARGE)) == 0);
    CHECK(t.seen->n_gathers == 5);
    CHECK(zerod_release(t.c, LIST(LARGE, LARGE, LARGE)) == 0);
    CHECK(zerod_gather(t.c, NULL, 0) == 0 && t.seen->n_gathers == 5);
    gather_one(&t, SMALL);
    CHECK(t.seen->n_held == 1);
    trainer_end(&t);
}

static void as_often_as_gathered(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE, TWO, ONE)) == 0);
    release_one(&t, ONE);
    gather_one(&t, TWO);
    release_one(&t, TWO);
    drain(&t);
    gather_one(&t, LARGE); /* may reuse only memory that is no longer needed: neither ONE's nor TWO's */
    CHECK(held_mib() == 8);
    check_weight(&t, ONE);
    check_weight(&t, TWO);
    CHECK(zerod_release(t.c, LIST(ONE, TWO, LARGE)) == 0);
    CHECK(zerod_release(t.c, LIST(ONE)) == -EINVAL);
    CHECK(says(&t, "zerod_release: parameter 1 is not gathered, or not as often"));
    gather_one(&t, ONE);
    CHECK(t.seen->n_held == 1);
    trainer_end(&t);
}

static void *use_here(void *arg)
{
    struct trainer *t = arg;
    unsigned p = TWO;

    CHECK(zerod_gather(t->c, &p, 1) == 0 && zerod_release(t->c, &p, 1) == 0);
    CHECK(zerod_gather(t->c, &p, 1) == 0);
    return NULL;
}

static void other_thread(void *arg)
{
    struct trainer t = begin_formed(&usual);
    pthread_t thread;

    (void)arg;
    CHECK(pthread_create(&thread, NULL, use_here, &t) == 0 && pthread_join(thread, NULL) == 0);
    check_weight(&t, TWO);
    trainer_end(&t);
}

static void test_shown(void **state)
{
    (void)state;
    passes(one_by_one);
    passes(all_at_once);
    passes(as_often_as_gathered);
    passes(other_thread);
}

static void another_device(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.device = options.gpu = 2;
    t = begin_formed(&options);
    gather_one(&t, ONE);
    trainer_end(&t);
}

static void test_another_device(void **state)
{
    (void)state;
    child_passes("peers=0", another_device, NULL);
}

/* ---- what is hidden ------------------------------------------------------------------------------------- */

static void read_after_release(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    gather_one(&t, ONE);
    release_one(&t, ONE);
    drain(&t);
    gather_one(&t, TWO);
    read_slowly(&t, ONE);
}

static void test_released(void **state)
{
    (void)state;
    child_dies("", read_after_release, NULL,
               "cudaMemcpyAsync: the source (800000 bytes) is neither device memory nor registered host memory");
}

/* All three use the same memory, because a second cuMemCreate() would fail. */
static void one_after_the_other(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    for (unsigned round = 0; round < 4; round++)
        for (unsigned p = ONE; p <= THREE; p++) {
            gather_one(&t, p);
            release_one(&t, p);
            drain(&t);
        }
    CHECK(held_mib() == 2);
    trainer_end(&t);
}

/* A stream still reads a released parameter when the next one is gathered. */
static void while_it_is_read(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    use_slowly(&t, ONE);
    CHECK(zerod_gather(t.c, LIST(TWO)) == 0);
    CHECK(is_running() && held_mib() == 4); /* the gather did not wait, and left the memory that is still read */
    drain(&t);
    gather_one(&t, THREE);
    CHECK(held_mib() == 4);
    check_copied(&t, ONE, t.host);
    check_weight(&t, TWO);
    trainer_end(&t);
}

/* ONE is gathered and released twice. The event of the first release has passed, that of the second has not. */
static void hidden_once_more(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE)) == 0 && zerod_release(t.c, LIST(ONE)) == 0);
    drain(&t);
    use_slowly(&t, ONE);
    CHECK(zerod_gather(t.c, LIST(TWO)) == 0);
    CHECK(is_running() && held_mib() == 4);
    check_copied(&t, ONE, t.host);
    trainer_end(&t);
}

static void again_while_it_is_read(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    use_slowly(&t, ONE);
    CHECK(is_running());
    CHECK(zerod_gather(t.c, LIST(ONE)) == 0);
    CHECK(!is_running() && held_mib() == 2);
    check_weight(&t, ONE);
    check_copied(&t, ONE, t.host);
    /* ONE is gathered again, so TWO does not get its memory. */
    drain(&t);
    CHECK(zerod_gather(t.c, LIST(TWO)) == 0);
    CHECK(held_mib() == 4);
    check_weight(&t, ONE);
    trainer_end(&t);
}

/* A parameter is released, still read, and gathered again with the weights of the next step. */
static void again_after_a_step(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    for (unsigned round = 0; round < 3; round++) {
        use_slowly(&t, ONE);
        CHECK(take_step(&t) == 0);
        gather_one(&t, ONE);
        release_one(&t, ONE);
    }
    trainer_end(&t);
}

static void test_hidden(void **state)
{
    (void)state;
    child_passes("cuMemCreate:error=CUDA_ERROR_NOT_PERMITTED@2", one_after_the_other, NULL);
    child_passes(WHEN_FIRST_READ, while_it_is_read, NULL);
    child_passes(WHEN_READ_LATER, hidden_once_more, NULL);
    if (tests_full())
        child_passes(WHEN_FIRST_READ, again_while_it_is_read, NULL);
    passes(again_after_a_step);
}

/* ---- the bound ------------------------------------------------------------------------------------------ */

static struct cuda_daemon_options bounded(void)
{
    struct cuda_daemon_options options = usual;

    options.max_live_elems = TWO_GRANULES_ELEMS;
    return options;
}

/* The third gather waits for the stream's work that reads the first weights. */
static void waits_for_the_first(void *arg)
{
    struct cuda_daemon_options options = bounded();
    struct trainer t = begin_formed(&options);

    (void)arg;
    use_slowly(&t, ONE);
    use_slowly(&t, TWO);
    CHECK(is_running() && held_mib() == 4);
    CHECK(zerod_gather(t.c, LIST(THREE)) == 0);
    CHECK(held_mib() == 4);
    check_weight(&t, THREE);
    check_copied(&t, ONE, t.host);
    check_copied(&t, TWO, t.host);
    trainer_end(&t);
}

/* Memory of one size is freed when another size is needed; the gathered weights never exceed the bound. */
static void sizes_change(void *arg)
{
    struct cuda_daemon_options options = bounded();
    struct trainer t = begin_formed(&options);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE, TWO)) == 0 && zerod_release(t.c, LIST(ONE, TWO)) == 0);
    gather_one(&t, LARGE);
    CHECK(held_mib() == 4);
    gather_one(&t, THREE);
    CHECK(held_mib() == 6);
    CHECK(zerod_release(t.c, LIST(LARGE, THREE)) == 0);
    drain(&t);
    CHECK(zerod_gather(t.c, LIST(ONE, TWO)) == 0);
    CHECK(held_mib() == 4);
    check_weight(&t, ONE);
    check_weight(&t, TWO);
    trainer_end(&t);
}

/* Weights that are released, and no longer read, do not count against the bound. */
static void given_back(void *arg)
{
    struct cuda_daemon_options options = bounded();
    struct trainer t = begin_formed(&options);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(LARGE)) == 0 && zerod_release(t.c, LIST(LARGE)) == 0);
    drain(&t);
    use_slowly(&t, ONE);
    CHECK(is_running() && held_mib() == 2);
    CHECK(zerod_gather(t.c, LIST(TWO)) == 0);
    CHECK(is_running() && held_mib() == 4);
    trainer_end(&t);
}

static void test_bound(void **state)
{
    (void)state;
    child_passes(WHEN_FIRST_READ, waits_for_the_first, NULL);
    passes(sizes_change);
    child_passes(WHEN_READ_LATER, given_back, NULL);
}

/* ---- weights that change -------------------------------------------------------------------------------- */

static void steps(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(SMALL, ONE, TWO, THREE, LARGE)) == 0);
    CHECK(zerod_gather(t.c, LIST(ONE)) == 0);
    for (unsigned round = 0; round < 3; round++) {
        uint32_t n_gathers = t.seen->n_gathers;

        read_slowly(&t, ONE); /* sees the weights before the step */
        CHECK(take_step(&t) == 0);
        CHECK(t.seen->n_gathers == n_gathers + 2); /* gathered again, in two requests */
        for (unsigned p = SMALL; p <= LARGE; p++)
            check_weight(&t, p);
    }
    release_one(&t, ONE);
    CHECK(zerod_release(t.c, LIST(SMALL, ONE, TWO, THREE, LARGE)) == 0);
    gather_one(&t, EMPTY); /* gets an answer, so earlier requests are counted */
    CHECK(t.seen->n_held == 1);
    trainer_end(&t);
}

static void windows(void *arg)
{
    int rank = *(const int *)arg;
    struct trainer t = begin_as(&usual, rank);
    float *window, kept;

    gather_one(&t, TWO);
    CHECK(!zerod_window(t.c, TWO));
    CHECK(zerod_write_begin(t.c) == 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        CHECK(memcmp(zerod_window(t.c, p), t.host + trainer_offset(&t, p), sizes[p] * sizeof(float)) == 0);
    gather_one(&t, LARGE); /* gathers the committed weights, not the window's */
    window = zerod_window(t.c, TWO);
    kept = t.host[trainer_offset(&t, TWO) + 5];
    window[5] = 77;
    check_weight(&t, TWO);
    t.host[trainer_offset(&t, TWO) + 5] = rank == 0 ? 77 : kept; /* other ranks' writes are dropped */
    CHECK(zerod_write_end(t.c) == 0);
    check_weight(&t, TWO);
    check_weight(&t, LARGE);
    CHECK(zerod_write_begin(t.c) == 0);
    *(float *)zerod_window(t.c, SMALL) = 1e9f;
    CHECK(zerod_write_forget(t.c) == 0);
    gather_one(&t, SMALL);
    check_weight(&t, TWO);
    trainer_end(&t);
}

/* Another rank aborts the next step before this rank has gathered the weights of the last step. */
static void aborted_meanwhile(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.fault = GATHERS_ABORTED;
    options.fault_at = 2;
    t = begin_formed(&options);
    gather_one(&t, ONE);
    CHECK(take_step(&t) == 0);
    CHECK(t.seen->n_gathers == 3);
    CHECK(zerod_epoch(t.c).step == 1 && zerod_epoch(t.c).attempt == 1);
    check_weight(&t, ONE);
    CHECK(take_step(&t) == 0);
    check_weight(&t, ONE);
    trainer_end(&t);
}

static void refused_meanwhile(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.fault = GATHERS_REFUSED;
    options.fault_at = 2;
    t = begin_formed(&options);
    gather_one(&t, ONE);
    CHECK(take_step(&t) == -EPROTO);
    CHECK(says(&t, "zerod refused to show the new weights of parameters that are gathered"));
    CHECK(zerod_gather(t.c, LIST(ONE)) == -EPROTO);
    trainer_end(&t);
}

static void test_changes(void **state)
{
    (void)state;
    passes(steps);
    if (tests_full())
        child_passes("", windows, &(int){0});
    child_passes("", windows, &(int){1});
    child_passes("", aborted_meanwhile, NULL);
    child_passes("", refused_meanwhile, NULL);
}

/* ---- what cannot be ------------------------------------------------------------------------------------- */

static struct trainer begin_wrong(enum cuda_daemon_fault fault, uint32_t at)
{
    struct cuda_daemon_options options = usual;

    options.fault = fault;
    options.fault_at = at;
    return begin_formed(&options);
}

static void offsets(void *arg)
{
    struct trainer t = begin_wrong(*(const enum cuda_daemon_fault *)arg, 2);

    gather_one(&t, SMALL);
    CHECK(zerod_gather(t.c, LIST(SMALL, ONE)) == -EPROTO);
    CHECK(says(&t, *(const enum cuda_daemon_fault *)arg == GATHERS_OUTSIDE
                       ? "zerod gathered parameter 1, of 800000 bytes, to byte 4194300 of a pool of 4194304 bytes"
                       : "zerod gathered 2 parameters, and said of 1 where they are"));
    CHECK(zerod_step(t.c, NULL, NULL) == -EPROTO);
    trainer_end(&t);
}

/* The second of two requests is refused. Nothing of the first request stays gathered. */
static void refused(void *arg)
{
    struct trainer t = begin_wrong(GATHERS_REFUSED, 2);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE, TWO, THREE, LARGE)) == ZEROD_REFUSED);
    CHECK(zerod_error(t.c)->code == 1401);
    CHECK(zerod_clear_fault(t.c) == 0);
    CHECK(t.seen->n_held == 0);
    CHECK(zerod_release(t.c, LIST(ONE)) == -EINVAL);
    drain(&t);
    CHECK(zerod_gather(t.c, LIST(THREE, LARGE)) == 0);
    CHECK(held_mib() == 10); /* the refused gather left 4 MiB of it free */
    check_weight(&t, THREE);
    check_weight(&t, LARGE);
    trainer_end(&t);
}

static void no_pool(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.hides_pool = true;
    t = begin(&options, 0);
    CHECK(zerod_form(t.c) == -EPROTO);
    CHECK(says(&t, "zerod sent no pool for gathered weights"));
    trainer_end(&t);
}

static void small_pool(void *arg)
{
    struct cuda_daemon_options options = usual;
    struct trainer t;

    (void)arg;
    options.pool_bytes = GRANULE;
    t = begin(&options, 0);
    CHECK(zerod_form(t.c) == -EPROTO);
    CHECK(says(&t, "zerod's pool of 2097152 bytes has no room for parameter 5, of 2400000 bytes"));
    trainer_end(&t);
}

/* The GPU has 16 MiB. The program itself uses 9.2 MiB. */
static void no_memory(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE, TWO)) == 0);
    CHECK(zerod_gather(t.c, LIST(THREE, LARGE)) == -ENOMEM);
    CHECK(says(&t, "zerod_gather: the GPU has no 2400000 bytes left for parameter 5, beside 6291456 bytes of other "
                   "gathered weights: release some of them, or lower stage3_max_live_parameters, which bounds what is "
                   "held"));
    CHECK(zerod_release(t.c, LIST(THREE)) == -EINVAL);
    check_weight(&t, ONE);
    CHECK(take_step(&t) == 0);
    check_weight(&t, TWO);
    gather_one(&t, EMPTY);
    CHECK(t.seen->n_held == 3);
    /* A release frees memory for the next gather. */
    release_one(&t, ONE);
    gather_one(&t, LARGE);
    CHECK(held_mib() == 6);
    check_weight(&t, TWO);
    trainer_end(&t);
}

/* A gather waits for memory that the stream still reads. */
static void no_memory_for_long(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE)) == 0);
    use_slowly(&t, TWO);
    use_slowly(&t, THREE);
    CHECK(is_running());
    CHECK(zerod_gather(t.c, LIST(LARGE)) == 0);
    check_weight(&t, ONE);
    check_weight(&t, LARGE);
    check_copied(&t, THREE, t.host);
    trainer_end(&t);
}

static void makes_room(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    gather_one(&t, ONE);
    CHECK(held_mib() == 2);
    trainer_end(&t);
}

static void driver_fails(void *arg)
{
    struct trainer t = begin_formed(&usual);

    CHECK(zerod_gather(t.c, LIST(ONE)) == -EIO);
    CHECK(says(&t, arg));
    CHECK(zerod_gather(t.c, LIST(ONE)) == -EIO);
    trainer_end(&t);
}

static void event_fails(void *arg)
{
    struct trainer t = begin_formed(&usual);

    (void)arg;
    gather_one(&t, ONE);
    CHECK(zerod_release(t.c, LIST(ONE)) == -EIO);
    CHECK(says(&t, "the GPU: cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY"));
    trainer_end(&t);
}

static void test_refusals(void **state)
{
    (void)state;
    child_passes("", offsets, &(enum cuda_daemon_fault){GATHERS_OUTSIDE});
    child_passes("", offsets, &(enum cuda_daemon_fault){GATHERS_ONE_OFFSET_LESS});
    passes(refused);
    child_passes("", no_pool, NULL);
    child_passes("", small_pool, NULL);
}

static void test_memory(void **state)
{
    (void)state;
    child_passes("memory=16", no_memory, NULL);
    if (tests_full())
        child_passes("memory=16,delay-us=5000", no_memory, NULL);
    child_passes("memory=16,cudaMemcpyAsync:delay=2000@15", no_memory_for_long, NULL);
    child_passes("cuMemCreate:error=CUDA_ERROR_OUT_OF_MEMORY", makes_room, NULL);
    /* The first two calls are for the ring and the pool. */
    child_passes("cuMemSetAccess:error=CUDA_ERROR_OUT_OF_MEMORY@3", makes_room, NULL);
    if (tests_full())
        child_passes("cuMemMap:error=CUDA_ERROR_OUT_OF_MEMORY@3", makes_room, NULL);
    child_passes("cuMemCreate:error=CUDA_ERROR_NOT_PERMITTED", driver_fails,
                 (void *)"the GPU: cuMemCreate: CUDA_ERROR_NOT_PERMITTED");
    child_passes("cuMemMap:error=CUDA_ERROR_INVALID_VALUE@3", driver_fails,
                 (void *)"the GPU: cuMemMap: CUDA_ERROR_INVALID_VALUE");
    child_passes("cudaEventCreateWithFlags:error=cudaErrorMemoryAllocation@2", event_fails, NULL);
}

/* ---- the end -------------------------------------------------------------------------------------------- */

/*
 * A handle is closed, which frees its memory while streams still read it. The caller's stream reads gathered weights.
 * Another stream, the handle's at a release, reads released weights.
 */
static void closed_early(void *arg)
{
    struct trainer t = begin_formed(&usual);
    struct gpu *other;

    (void)arg;
    CHECK(gpu_open(&other, 0) == 0);
    CHECK(zerod_gather(t.c, LIST(ONE, TWO, THREE, SMALL)) == 0);
    CHECK(zerod_release(t.c, LIST(SMALL)) == 0);
    drain(&t);
    CHECK(zerod_gather(t.c, LIST(LARGE)) == 0); /* in other memory than SMALL's, which stays free */
    for (unsigned i = 0; i < 4; i++)
        read_on(&t, ONE, gpu_stream(other));
    CHECK(zerod_set_stream(t.c, gpu_stream(other)) == 0 && zerod_release(t.c, LIST(ONE)) == 0);
    CHECK(zerod_set_stream(t.c, gpu_stream(t.gpu)) == 0);
    read_slowly(&t, TWO);
    CHECK(is_running());
    zerod_close(t.c);
    t.c = NULL;
    check_copied(&t, ONE, t.host);
    check_copied(&t, TWO, t.host);
    CHECK(held_mib() == 0);
    gpu_close(other);
    trainer_end(&t);
}

static void forked(void *arg)
{
    struct trainer t = begin_formed(&usual);
    int status;
    pid_t pid;

    (void)arg;
    CHECK(zerod_gather(t.c, LIST(ONE, TWO)) == 0 && zerod_release(t.c, LIST(ONE)) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(zerod_gather(t.c, LIST(THREE)) == -ECHILD);
        CHECK(zerod_release(t.c, LIST(TWO)) == -ECHILD);
        zerod_close(t.c);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    check_weight(&t, TWO);
    gather_one(&t, ONE);
    trainer_end(&t);
}

static void test_ends(void **state)
{
    (void)state;
    /* Copy 19 is the first one on the other stream, copy 23 the one on the caller's stream. */
    child_passes("cudaMemcpyAsync:delay=2000@19,cudaMemcpyAsync:delay=1000@23", closed_early, NULL);
    if (tests_full())
        child_passes("cudaMemcpyAsync:delay=1000@19,cudaMemcpyAsync:delay=2000@23", closed_early, NULL);
    child_passes("", forked, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shown),    cmocka_unit_test(test_another_device), cmocka_unit_test(test_released),
        cmocka_unit_test(test_hidden),   cmocka_unit_test(test_bound),          cmocka_unit_test(test_changes),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_memory),         cmocka_unit_test(test_ends),
    };

    trainer_find_driver();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
