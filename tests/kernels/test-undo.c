/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A kernel with an undo slot is killed after each of its instructions: ptrace runs them one by one. After each, a copy
 * of the kernel's memory is put back, and the update is finished. The bits must be those of an undisturbed kernel
 * without a slot. So must those of an update to another place, which has no slot.
 */

#include "core/base/base.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/master24.h"
#include "kernels/undo.h"

#include "tests/group.h"
#include "tests/kernels/kernels-reference.h"

#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    N_ELEMS = UNDO_GROUP_ELEMS + 22, /* a group, and part of one */
    N_LONG = 3 * 1024 + 22,          /* blocks of update_kernel.c, and part of one */
    MAX_LEAVES = 4,
    FIRST = 1000, /* the first element's number in the slot */
};

/* Memory that remains when the process is killed. */
struct memory {
    struct undo_slot slot;
    float p[N_ELEMS], m[N_ELEMS], v[N_ELEMS], acc[N_ELEMS]; /* narrow moments: the first part of m and v */
    uint16_t w16[N_ELEMS];
    int8_t lower[N_ELEMS];
};

/* A kernel and its arguments. */
struct job {
    const struct kernels *kernels;
    enum optimizer optimizer;
    struct update_scalars scalars;
    struct optimizer_moments moments;
    enum dtype dtype;  /* dtype of the weights, or of the leaves */
    unsigned n_leaves; /* 0: an update */
    bool first_pass;   /* the first pass of Muon's two */
    const void *leaves[MAX_LEAVES];
    struct reduce_join joins[MAX_LEAVES];
    uint64_t n_steps; /* how many instructions were tried in all jobs */
};

static struct memory *shared;
static float pushed[MAX_LEAVES][N_ELEMS];

/* Runs the kernel. If is_found, first puts back the group of a killed run, and runs only what is not done. from: for an
 * update that is not in place, or NULL. */
static void run_job(const struct job *job, struct memory *on, const struct memory *from, bool with_slot, bool is_found)
{
    if (job->n_leaves == 0) {
        struct update_values old = {0};
        struct update_args args = {.p = on->p,
                                   .m = job->moments.m ? on->m : NULL,
                                   .v = job->moments.v ? on->v : NULL,
                                   .acc = on->acc,
                                   .w16 = job->dtype == DTYPE_F32 ? NULL : on->w16,
                                   .w16_dtype = job->dtype,
                                   .n_elems = N_ELEMS,
                                   .moments = job->moments.type,
                                   .start_elem = 5,
                                   .k = &job->scalars,
                                   .undo = with_slot ? &on->slot : NULL,
                                   .undo_elem = FIRST};

        if (job->moments.master24) {
            args.p = NULL;
            args.lower = on->lower;
            args.start_elem = MASTER24_GROUP_ELEMS;
        }
        if (from) {
            old = (struct update_values){
                .p = from->p, .lower = from->lower, .m = from->m, .v = from->v, .w16 = from->w16};
            args.old = &old;
        }
        if (job->first_pass)
            args.acc = args.p;
        if (is_found)
            update_put_back(&args);
        if (job->first_pass)
            job->kernels->muon_momentum(&args);
        else
            job->kernels->update[job->optimizer](&args);
    } else {
        const void *leaves[MAX_LEAVES];
        struct reduce_args args = {.dtype = job->dtype,
                                   .n_leaves = job->n_leaves,
                                   .leaves = job->leaves,
                                   .joins = job->joins,
                                   .acc = on->acc,
                                   .n_elems = N_ELEMS,
                                   .undo = with_slot ? &on->slot : NULL,
                                   .undo_elem = FIRST};
        struct reduce_result result = {0};

        if (is_found)
            reduce_put_back(&args, leaves);
        if (args.n_elems > 0)
            job->kernels->reduce(&args, &result);
    }
}

static void assert_equal(const struct memory *a, const struct memory *b, uint64_t step)
{
    const size_t begin = offsetof(struct memory, p);

    if (memcmp((const char *)a + begin, (const char *)b + begin, sizeof(*a) - begin) != 0)
        fail_msg("killed after %" PRIu64 " instructions: other bits", step);
}

/* Starts a process that runs the job. Return: its pid; the process is stopped before the kernel. */
static pid_t start(const struct job *job)
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(1);
        raise(SIGSTOP);
        run_job(job, shared, NULL, true, false);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFSTOPPED(status)) {
        print_message("ptrace is not allowed here\n");
        skip();
    }
    return pid;
}

/* The values there are only written: each of them is another one before. p begins at a line of the caches, m does not. */
static void update_to_another_place(const struct job *job, const struct memory *before, const struct memory *expected)
{
    const uint8_t *from = (const uint8_t *)before, *to = (const uint8_t *)expected;
    const struct memory old = *before;
    struct memory on = old;

    for (size_t i = offsetof(struct memory, p); i < sizeof(on); i++)
        if (from[i] != to[i])
            ((uint8_t *)&on)[i] = (uint8_t)~to[i];
    run_job(job, &on, &old, false, false);
    assert_equal(&on, expected, 0);
    assert_equal(&old, before, 0);
}

static void kill_after_each_instruction(struct job *job)
{
    struct memory before = *shared, expected = *shared, found;
    uint64_t step = 0;
    int status;
    pid_t pid;

    run_job(job, &expected, NULL, false, false);
    assert_memory_not_equal(&before.p, &expected.p, sizeof(before) - offsetof(struct memory, p));
    if (job->n_leaves == 0 && !job->first_pass)
        update_to_another_place(job, &before, &expected);
    pid = start(job);
    for (;; step++) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status))
            break;
        assert_true(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
        found = *shared;
        run_job(job, &found, NULL, true, true);
        assert_equal(&found, &expected, step);
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_equal(shared, &expected, step);
    assert_int_equal(undo_next_elem(&shared->slot), FIRST + N_ELEMS);
    assert_true(step > N_ELEMS);
    job->n_steps += step;
    *shared = before;
}

static float small(uint64_t *seed)
{
    return (float)((int64_t)next(seed) >> 40) * 0x1p-24f;
}

static int setup(void **state)
{
    uint64_t seed = 1;

    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return -1;
    for (unsigned i = 0; i < N_ELEMS; i++) {
        shared->p[i] = small(&seed);
        shared->m[i] = small(&seed);
        shared->v[i] = fabsf(small(&seed));
        shared->acc[i] = small(&seed);
        for (unsigned leaf = 0; leaf < MAX_LEAVES; leaf++)
            pushed[leaf][i] = small(&seed);
    }
    atomic_store(&shared->slot.mark, 2 * FIRST);
    return 0;
}

static int teardown(void **state)
{
    return munmap(shared, sizeof(*shared));
}

static const struct hyper plain = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .adam_w_mode = true};
static const struct hyper momentum = {.lr = 1e-3, .momentum = 0.9, .weight_decay = 0.01};
static const struct hyper nesterov = {.lr = 1e-3, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true};
static const struct hyper l2 = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};

static void test_update(void **state)
{
    static const struct {
        enum optimizer optimizer;
        const struct hyper *hyper;
        uint64_t t;
    } rows[] = {
        {OPTIMIZER_ADAMW, &plain, 3}, {OPTIMIZER_ADAM, &l2, 3},      {OPTIMIZER_SGD, &plain, 3},
        {OPTIMIZER_SGD, &momentum, 1}, {OPTIMIZER_SGD, &momentum, 3}, {OPTIMIZER_SGD, &nesterov, 1},
        {OPTIMIZER_SGD, &nesterov, 3}, {OPTIMIZER_LION, &plain, 3},   {OPTIMIZER_ADAGRAD, &plain, 3},
    };
    struct job job = {0};

    for (unsigned isa = 0; (job.kernels = kernels_nth(isa)); isa++) {
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
            job.optimizer = rows[i].optimizer;
            job.moments = optimizer_moments(rows[i].optimizer, rows[i].hyper);
            update_scalars_compute(rows[i].optimizer, rows[i].hyper, 0.5, rows[i].t, &job.scalars);
            for (job.dtype = 0; job.dtype < N_DTYPES; job.dtype++)
                kill_after_each_instruction(&job);
        }
    }
    print_message("%" PRIu64 " kills\n", job.n_steps);
}

/* Makes moments that are valid groups. Other tests use random bits, but a group's exponent must be valid. */
static void make_groups(const struct memory *from)
{
    convert_from_f32(shared->m, from->m, DTYPE_SIGNED8, N_ELEMS);
    convert_from_f32(shared->v, from->v, DTYPE_UNSIGNED8, N_ELEMS);
}

static void test_update_of_narrow_moments(void **state)
{
    static const enum optimizer optimizers[] = {OPTIMIZER_ADAMW, OPTIMIZER_LION, OPTIMIZER_ADAGRAD};
    static const struct moments_type types[] = {{DTYPE_BF16}, {DTYPE_BF16, true}, {DTYPE_SIGNED8, true}};
    const struct memory numbers = *shared;
    struct job job = {.dtype = DTYPE_BF16};

    for (unsigned isa = 0; (job.kernels = kernels_nth(isa)); isa++) {
        for (size_t i = 0; i < ARRAY_SIZE(types) * ARRAY_SIZE(optimizers); i++) {
            job.optimizer = optimizers[i / ARRAY_SIZE(types)];
            job.moments = optimizer_moments(job.optimizer, &plain);
            job.moments.type = types[i % ARRAY_SIZE(types)];
            update_scalars_compute(job.optimizer, &plain, 0.5, 3, &job.scalars);
            job.scalars.rounding_key = update_rounding_key(1, 3);
            if (job.moments.type.dtype == DTYPE_SIGNED8)
                make_groups(&numbers);
            kill_after_each_instruction(&job);
            *shared = numbers;
        }
    }
    print_message("%" PRIu64 " kills\n", job.n_steps);
}

/* 24-bit masters, with moments of all types and without moments. */
static void test_update_of_master24(void **state)
{
    static const enum optimizer optimizers[] = {OPTIMIZER_ADAMW, OPTIMIZER_SGD, OPTIMIZER_MUON};
    static const struct moments_type types[] = {{DTYPE_F32}, {DTYPE_BF16}, {DTYPE_BF16, true}, {DTYPE_SIGNED8, true}};
    const struct memory numbers = *shared;
    struct job job = {.dtype = DTYPE_BF16};

    for (unsigned isa = 0; (job.kernels = kernels_nth(isa)); isa++) {
        for (size_t i = 0; i < ARRAY_SIZE(types) * ARRAY_SIZE(optimizers); i++) {
            job.optimizer = optimizers[i / ARRAY_SIZE(types)];
            job.moments = job.optimizer == OPTIMIZER_ADAMW ? optimizer_moments(job.optimizer, &plain)
                                                           : (struct optimizer_moments){0};
            job.moments.type = types[i % ARRAY_SIZE(types)];
            job.moments.master24 = true;
            update_scalars_compute(job.optimizer, &plain, 0.5, 3, &job.scalars);
            job.scalars.rounding_key = update_rounding_key(1, 3);
            job.scalars.a = job.optimizer == OPTIMIZER_MUON ? 0.02f : job.scalars.a;
            master24_from_f32((struct master24){.weights = shared->w16, .lower = shared->lower}, numbers.p, N_ELEMS);
            if (job.moments.type.dtype == DTYPE_SIGNED8)
                make_groups(&numbers);
            kill_after_each_instruction(&job);
            *shared = numbers;
        }
    }
    print_message("%" PRIu64 " kills\n", job.n_steps);
}

static void test_reduce(void **state)
{
    static uint16_t narrow[N_DTYPES][MAX_LEAVES][N_ELEMS];
    struct job job = {0};

    for (unsigned isa = 0; (job.kernels = kernels_nth(isa)); isa++) {
        for (job.dtype = 0; job.dtype < N_DTYPES; job.dtype++) {
            for (unsigned leaf = 0; leaf < MAX_LEAVES; leaf++) {
                job.leaves[leaf] = pushed[leaf];
                if (job.dtype == DTYPE_F32)
                    continue;
                job.kernels->convert_from_f32(narrow[job.dtype][leaf], pushed[leaf], job.dtype, N_ELEMS);
                job.leaves[leaf] = narrow[job.dtype][leaf];
            }
            for (job.n_leaves = 1; job.n_leaves <= MAX_LEAVES; job.n_leaves++) {
                if (job.dtype != DTYPE_F32 && job.n_leaves != 3)
                    continue;
                reduce_joins(NULL, job.n_leaves, job.joins);
                kill_after_each_instruction(&job);
            }
        }
    }
    print_message("%" PRIu64 " kills\n", job.n_steps);
}

/* ---- 16-bit weights, which are written by blocks of many groups --------------------------------------------- */

struct long_memory {
    float p[N_LONG], m[N_LONG];
    uint16_t w16[N_LONG];
};

/*
 * Continues from a kill in the middle of the group at `done`. before and after are the state of an undisturbed update.
 */
static void kill_in_group(const struct kernels *kernels, struct update_args args, size_t done,
                          const struct long_memory *before, const struct long_memory *after)
{
    static struct long_memory torn;
    const size_t n = MIN((size_t)UNDO_GROUP_ELEMS, N_LONG - done);
    struct undo_slot slot;

    torn = *before;
    memcpy(torn.p, after->p, done * sizeof(float));
    memcpy(torn.m, after->m, done * sizeof(float));
    undo_save(&slot, 0, torn.p + done, n);
    undo_save(&slot, 1, torn.m + done, n);
    undo_mark(&slot, FIRST + done, true);
    memset(torn.p + done, 0x55, n * sizeof(float));
    memset(torn.m + done, 0x55, n * sizeof(float));
    args.p = torn.p;
    args.m = torn.m;
    args.w16 = torn.w16;
    args.undo = &slot;
    args.undo_elem = FIRST;
    update_put_back(&args);
    assert_int_equal(args.n_elems, N_LONG - done);
    kernels->update[OPTIMIZER_LION](&args);
    assert_memory_equal(&torn, after, sizeof(torn));
    assert_int_equal(undo_next_elem(&slot), FIRST + N_LONG);
}

static void test_blocks(void **state)
{
    static struct long_memory before, after;
    static float acc[N_LONG];
    struct update_scalars scalars;
    struct update_args args = {
        .p = after.p, .m = after.m, .acc = acc, .w16 = after.w16, .n_elems = N_LONG, .k = &scalars};
    const struct kernels *kernels;
    uint64_t seed = 1;

    update_scalars_compute(OPTIMIZER_LION, &plain, 0.5, 3, &scalars);
    for (unsigned i = 0; i < N_LONG; i++) {
        before.p[i] = small(&seed);
        before.m[i] = small(&seed);
        acc[i] = small(&seed);
    }
    for (unsigned isa = 0; (kernels = kernels_nth(isa)); isa++) {
        for (args.w16_dtype = DTYPE_BF16; args.w16_dtype <= DTYPE_F16; args.w16_dtype++) {
            after = before;
            kernels->update[OPTIMIZER_LION](&args);
            for (size_t done = 0; done < N_LONG; done += UNDO_GROUP_ELEMS)
                kill_in_group(kernels, args, done, &before, &after);
        }
    }
}

/* Both passes of Muon. The first pass overwrites the gradients that it reads. */
static void test_muon(void **state)
{
    static const struct moments_type types[] = {{DTYPE_F32}, {DTYPE_BF16}, {DTYPE_BF16, true}, {DTYPE_SIGNED8, true}};
    const struct memory numbers = *shared;
    struct job job = {.optimizer = OPTIMIZER_MUON};

    for (unsigned isa = 0; (job.kernels = kernels_nth(isa)); isa++) {
        for (size_t i = 0; i < 2 * ARRAY_SIZE(types); i++) {
            const struct hyper *hyper = i % 2 ? &nesterov : &momentum;

            job.first_pass = true;
            job.dtype = DTYPE_F32;
            job.moments = (struct optimizer_moments){.m = true, .type = types[i / 2]};
            update_scalars_compute(OPTIMIZER_MUON, hyper, 0.5, 3, &job.scalars);
            job.scalars.rounding_key = update_rounding_key(1, 3);
            if (job.moments.type.dtype == DTYPE_SIGNED8)
                make_groups(&numbers);
            kill_after_each_instruction(&job);
            *shared = numbers;
        }
        job.first_pass = false;
        job.moments = (struct optimizer_moments){0};
        job.scalars.a = 0.02f;
        for (job.dtype = 0; job.dtype < N_DTYPES; job.dtype++)
            kill_after_each_instruction(&job);
    }
    print_message("%" PRIu64 " kills\n", job.n_steps);
}

TEST_GROUP(undo)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_update), cmocka_unit_test(test_update_of_narrow_moments),
        cmocka_unit_test(test_muon),   cmocka_unit_test(test_update_of_master24),
        cmocka_unit_test(test_reduce), cmocka_unit_test(test_blocks),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
