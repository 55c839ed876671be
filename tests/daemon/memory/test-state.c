/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The state. In each stage, and for each range of owned ranks, every array of the owned partitions has its place in the
 * segment that the header names, on cache lines, and apart from other arrays. The journal has room for every count.
 * Each page is reserved once.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "tests/group.h"
#include "tests/programs/held.h"

enum { WORLD = 4, N_PARAMS = 6, BUCKET_ELEMS = 1200 };

static unsigned fail_fallocate; /* which call fails, from 1; 0: none */

/* The linker takes this one instead of libc's. A real shortage would kill a process instead of returning an error. */
int fallocate(int fd, int mode, off_t offset, off_t n_bytes)
{
    if (fail_fallocate > 0 && --fail_fallocate == 0) {
        errno = ENOSPC;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, offset, n_bytes);
}

static size_t n_open;

static int setup(void **state)
{
    (void)state;
    fail_fallocate = 0;
    n_open = count_fds();
    return 0;
}

/* Each test must close its descriptors. */
static int teardown(void **state)
{
    (void)state;
    return count_fds() == n_open ? 0 : -1;
}

/* Trainable and frozen parameters of each dtype; the fourth has no elements. muon: Muon updates the 16-bit ones. */
static struct layout *make_layout(bool muon)
{
    static const uint64_t shapes[N_PARAMS][2] = {{1000, 1}, {300, 1}, {777, 1}, {0, 1}, {100, 1}, {33, 1}};
    static const enum dtype dtypes[N_PARAMS] = {DTYPE_BF16, DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_F16, DTYPE_F32};
    struct layout_decl decls[N_PARAMS];
    struct layout *layout = NULL;
    char names[N_PARAMS][4];
    uint32_t bad;

    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .dtype = dtypes[p],
                                        .trainable = p < 4,
                                        .muon = muon && p < 4 && dtypes[p] != DTYPE_F32,
                                        .n_dims = 2,
                                        .shape = shapes[p]};
    }
    assert_int_equal(layout_new(&layout, decls, N_PARAMS, WORLD, BUCKET_ELEMS, &bad), 0);
    assert_true(layout->n_buckets >= 3);
    return layout;
}

static struct layout *make_one(uint64_t n_elems, enum dtype dtype, bool trainable)
{
    struct layout_decl decl = {
        .name = "w", .name_len = 1, .dtype = dtype, .trainable = trainable, .n_dims = 1, .shape = &n_elems};
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, &decl, 1, 1, n_elems, &bad), 0);
    return layout;
}

static struct state *make(const struct state_options *options)
{
    struct state *s = NULL;

    assert_int_equal(state_new(&s, options), 0);
    assert_non_null(s);
    return s;
}

/* ---- places -------------------------------------------------------------------------------------------- */

/* Memory that an array has in a segment. */
struct extent {
    const struct segment *segment;
    const uint8_t *start;
    uint64_t n_bytes;
};

struct extents {
    struct extent all[64];
    size_t n;
};

static void add(struct extents *e, const struct segment *segment, const void *start, uint64_t n_bytes)
{
    assert_true(e->n < ARRAY_SIZE(e->all));
    e->all[e->n++] = (struct extent){segment, start, n_bytes};
}

static void check_extents(const struct extents *e)
{
    for (size_t i = 0; i < e->n; i++) {
        const struct extent *a = &e->all[i];
        const uint8_t *map = a->segment->map;

        assert_int_equal((uintptr_t)a->start % 64, 0);
        assert_true(a->n_bytes == 0 || a->start >= map);
        assert_true(a->n_bytes == 0 || (uint64_t)(a->start - map) + a->n_bytes <= a->segment->n_bytes);
        for (size_t k = 0; k < i; k++) {
            const struct extent *b = &e->all[k];

            assert_true(a->n_bytes == 0 || b->n_bytes == 0 || a->start + a->n_bytes <= b->start ||
                        b->start + b->n_bytes <= a->start);
        }
    }
}

/* Checks masters of 24 bits. In stages 1 and 2 their weights are the published ones. */
static void check_master24(const struct state *s, const struct state_options *o, struct extents *e, uint32_t bucket,
                           uint64_t room_elems)
{
    uint64_t start = s->buckets[bucket].owned_start;
    struct master24 masters = state_master24(s, bucket, start), later = state_master24(s, bucket, start + 5);

    assert_true(state_is_master24(s, bucket));
    assert_null(s->buckets[bucket].master);
    add(e, &s->state, masters.lower, room_elems);
    if (o->stage == 3)
        add(e, &s->state, masters.weights, room_elems * sizeof(uint16_t));
    else
        assert_ptr_equal(masters.weights,
                         s->weights.map + s->layout->buckets[bucket].weight_offset_bytes + start * sizeof(uint16_t));
    assert_ptr_equal(later.weights, masters.weights + 5);
    assert_ptr_equal(later.lower, masters.lower + 5);
}

/* Asserts that each array is where the table of state.h says. Collects the arrays' extents, which must not overlap. */
static void check_buckets(const struct state *s, const struct state_options *o, struct extents *e)
{
    const struct layout *layout = o->layout;

    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        const struct state_bucket *bucket = &s->buckets[b];
        uint64_t start, n_elems = layout_owned_elems(layout, b, o->first_rank, o->n_ranks, &start);
        uint64_t room_elems = layout_room_elems(layout, b, o->first_rank, o->n_ranks);
        uint64_t owned_bytes = room_elems * sizeof(float);
        uint64_t moment_bytes = dtype_bytes(o->moments.type.dtype, room_elems);

        assert_int_equal(bucket->owned_start, start);
        assert_int_equal(bucket->owned_elems, n_elems);
        if (o->moments.master24 && layout->buckets[b].dtype == DTYPE_BF16)
            check_master24(s, o, e, b, room_elems);
        else if (o->stage != 3 && layout->buckets[b].dtype == DTYPE_F32)
            assert_ptr_equal(state_master(s, b, start), /* fp32 weights are their own masters */
                             s->weights.map + layout->buckets[b].weight_offset_bytes + start * sizeof(float));
        else
            add(e, &s->state, state_master(s, b, start), owned_bytes);
        if (o->moments.m)
            add(e, &s->state, state_exp_avg(s, b, start), moment_bytes);
        else
            assert_null(state_exp_avg(s, b, start));
        if (o->moments.v && !layout_is_muon(layout, b))
            add(e, &s->state, state_exp_avg_sq(s, b, start), moment_bytes);
        else
            assert_null(state_exp_avg_sq(s, b, start));
        add(e, &s->gradient, state_acc(s, b, start), owned_bytes);
        assert_ptr_equal(state_acc(s, b, start + 5), state_acc(s, b, start) + 5);
        if (!state_is_master24(s, b))
            assert_ptr_equal(state_master(s, b, start + 5), state_master(s, b, start) + 5);
    }
}

static void check_places(const struct state_options *o)
{
    const struct layout *layout = o->layout;
    struct state *s = make(o);
    struct extents e = {.n = 0};
    uint64_t n_bytes = 0;

    check_buckets(s, o, &e);
    for (uint32_t p = 0; p < layout->n_params; p++) {
        const struct layout_param *param = &layout->params[p];
        uint64_t param_bytes = param->n_elems * dtype_size(param->dtype);

        if (!param->trainable)
            add(&e, o->stage == 3 ? &s->state : &s->weights, state_frozen(s, p), param_bytes);
        else if (o->stage != 3)
            add(&e, &s->weights, state_weights(s, p, 0), param_bytes);
        if (o->stage != 3 && param->n_elems > 3)
            assert_ptr_equal(state_weights(s, p, 3), state_weights(s, p, 0) + 3 * dtype_size(param->dtype));
    }
    check_extents(&e);

    /* The segment has no other bytes, except up to the end of the last page. */
    for (size_t i = 0; i < e.n; i++)
        if (e.all[i].segment == &s->state)
            n_bytes += round_up(e.all[i].n_bytes, 64);
    if (o->moments.master24) /* an empty segment has no addresses */
        n_bytes = MAX(n_bytes, UINT64_C(64));
    assert_int_equal(s->state.n_bytes, round_up(n_bytes, page_size()));
    assert_int_equal(s->weights.n_bytes, o->stage == 3 ? 0 : round_up(layout->weight_bytes, page_size()));
    for (unsigned rank = 0; rank < WORLD; rank++)
        assert_int_equal(state_owns(s, rank), rank >= o->first_rank && rank < o->first_rank + o->n_ranks);
    state_free(s);
}

static void test_places(void **state)
{
    static const unsigned owned[][2] = {{0, WORLD}, {0, 1}, {1, 2}, {3, 1}};
    static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_SIGNED8};
    struct layout *const layouts[] = {make_layout(false), make_layout(true)};

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (size_t i = 0; i < 2 * ARRAY_SIZE(owned); i++)
            for (unsigned moments = 0; moments < 8 * ARRAY_SIZE(types); moments++)
                check_places(&(struct state_options){
                    .layout = layouts[i / ARRAY_SIZE(owned)],
                    .stage = stage,
                    .first_rank = owned[i % ARRAY_SIZE(owned)][0],
                    .n_ranks = owned[i % ARRAY_SIZE(owned)][1],
                    .moments = {
                        .m = moments & 1, .v = moments & 2, .master24 = moments & 4, .type = {types[moments / 8]}}});
    layout_free(layouts[0]);
    layout_free(layouts[1]);
}

/* With another number of ranks, the same elements are in the same places. */
static void test_repartition(void **state)
{
    struct layout *layout = make_layout(true);

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (unsigned n_ranks = 1; n_ranks <= LAYOUT_ROOM_RANKS; n_ranks++) {
            struct state_options options = {
                .layout = layout, .stage = stage, .n_ranks = WORLD, .moments = {true, true}, .alone = true};
            struct state *s = make(&options), before = *s;
            struct layout *other = NULL;
            struct extents e = {.n = 0};

            before.buckets = calloc(layout->n_buckets, sizeof(*before.buckets));
            memcpy(before.buckets, s->buckets, layout->n_buckets * sizeof(*before.buckets));
            assert_int_equal(layout_for_ranks(&other, layout, n_ranks), 0);
            state_repartition(s, other);
            options.layout = other;
            options.n_ranks = n_ranks;
            check_buckets(s, &options, &e);
            check_extents(&e);
            for (uint32_t p = 0; p < layout->n_params; p++) {
                const struct layout_param *param = &layout->params[p];

                for (enum state_kind kind = 0; param->trainable && kind < STATE_N_KINDS; kind++)
                    assert_ptr_equal(state_values(s, kind, param->bucket, param->offset_elems),
                                     state_values(&before, kind, param->bucket, param->offset_elems));
                if (!param->trainable)
                    assert_ptr_equal(state_frozen(s, p), state_frozen(&before, p));
                else if (stage != 3)
                    assert_ptr_equal(state_weights(s, p, 0), state_weights(&before, p, 0));
            }
            free(before.buckets);
            state_free(s);
            layout_free(other);
        }
    layout_free(layout);
}

static void test_names(void **state)
{
    static const char *const names[] = {"state", "gradient", "weights", "counts"};
    struct layout *layout = make_layout(false);
    struct state *s = make(&(struct state_options){.layout = layout, .stage = 2, .n_ranks = WORLD});
    const struct segment *segments[] = {&s->state, &s->gradient, &s->weights, &s->counts};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char path[64], target[128] = "", expected[64];

        snprintf(path, sizeof(path), "/proc/self/fd/%d", segments[i]->fd);
        snprintf(expected, sizeof(expected), "/memfd:zerod.%s (deleted)", names[i]);
        assert_true(readlink(path, target, sizeof(target) - 1) > 0);
        assert_string_equal(target, expected);
    }
    state_free(s);
    layout_free(layout);
}

/* With only frozen parameters, there is nothing to reduce or update. */
static void test_all_frozen(void **state)
{
    struct layout *layout = make_one(1000, DTYPE_BF16, false);

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++) {
        struct state *s =
            make(&(struct state_options){.layout = layout, .stage = stage, .n_ranks = 1, .moments = {true, true}});
        const struct segment *with = stage == 3 ? &s->state : &s->weights;

        assert_int_equal(s->gradient.n_bytes, 0);
        assert_true(with->n_bytes >= 2000);
        assert_int_equal((stage == 3 ? &s->weights : &s->state)->n_bytes, 0);
        assert_true(state_frozen(s, 0) >= with->map && state_frozen(s, 0) + 2000 <= with->map + with->n_bytes);
        for (uint32_t piece = 0; piece < state_n_reserve_pieces(s); piece++)
            assert_int_equal(state_reserve(s, piece), 0);
        state_free(s);
    }
    layout_free(layout);
}

/*
 * Large arrays must not be a multiple of 2^27 bytes apart (see segment.c), because an update reads all of them at once.
 */
static void test_large_arrays_are_skewed(void **state)
{
    const uint64_t stride = UINT64_C(1) << 27;
    struct layout *layout = make_one(stride / sizeof(float), DTYPE_BF16, true);
    struct state *s =
        make(&(struct state_options){.layout = layout, .stage = 2, .n_ranks = 1, .moments = {true, true}});
    const float *arrays[] = {state_master(s, 0, 0), state_exp_avg(s, 0, 0), state_exp_avg_sq(s, 0, 0),
                             state_acc(s, 0, 0)};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(arrays); i++)
        for (size_t k = 0; k < i; k++)
            assert_true(((uintptr_t)arrays[i] - (uintptr_t)arrays[k]) % stride >= page_size());
    state_free(s);
    layout_free(layout);
}

static void test_new_fails(void **state)
{
    struct layout *layout = make_layout(false);
    struct state *s = NULL;
    struct rlimit before, few;
    int first = dup(0), r;

    (void)state;
    close(first); /* the lowest free descriptor */
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    for (unsigned i = 0; i < 4; i++) {
        few.rlim_cur = (rlim_t)first + i; /* room for i of its four segments */
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        r = state_new(&s, &(struct state_options){.layout = layout, .stage = 1, .n_ranks = WORLD});
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        assert_int_equal(r, -EMFILE);
        assert_null(s);
        assert_int_equal(count_fds(), n_open);
    }
    state_free(NULL);
    layout_free(layout);
}

/* ---- counts -------------------------------------------------------------------------------------------- */

/* The counts have two copies in one segment. A process with the descriptor can read both. */
static void test_counts(void **state)
{
    struct layout *layout = make_layout(false);
    struct state *s = make(&(struct state_options){.layout = layout, .stage = 1, .n_ranks = WORLD});
    const uint64_t *seen;
    uint64_t *other;
    int fd = segment_open_ro(&s->counts);

    (void)state;
    seen = mmap(NULL, s->counts.n_bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(seen, MAP_FAILED);
    for (unsigned p = 0; p < N_PARAMS; p++)
        s->progress.counts[p] = 100 + p;
    other = state_begin_counts(s);
    assert_memory_equal(other, s->progress.counts, N_PARAMS * sizeof(*other));
    other[1] = 7;
    assert_int_equal(s->progress.counts[1], 101); /* until the other copy is used */
    state_use_counts(s, state_other_copy(s));
    assert_int_equal(s->progress.counts[1], 7);
    assert_int_equal(seen[1], 101);
    assert_int_equal(seen[N_PARAMS + 1], 7);
    munmap((void *)seen, s->counts.n_bytes);
    close(fd);
    state_free(s);
    layout_free(layout);
}

/* Counts of more than one page. */
static void test_counts_of_many(void **state)
{
    enum { N = 3000 };
    static struct layout_decl decls[N];
    static char names[N][8];
    const uint64_t shape = 1;
    struct layout *layout = NULL;
    struct state *s;
    uint32_t bad;

    (void)state;
    for (unsigned p = 0; p < N; p++) {
        snprintf(names[p], sizeof(names[p]), "%u", p);
        decls[p] = (struct layout_decl){
            .name = names[p], .name_len = strlen(names[p]), .trainable = p % 2, .n_dims = 1, .shape = &shape};
    }
    assert_int_equal(layout_new(&layout, decls, N, 1, 100000, &bad), 0);
    s = make(&(struct state_options){.layout = layout, .stage = 3, .n_ranks = 1});
    assert_true(s->counts.n_bytes >= 2 * N * sizeof(uint64_t));
    s->progress.counts[N - 1] = 7; /* a frozen parameter has a count, too */
    state_free(s);
    layout_free(layout);
}

/* Written bytes remain after the process has ended, even if it was killed. */
static void test_outlives_a_process(void **state)
{
    struct layout *layout = make_layout(false);
    struct state *s =
        make(&(struct state_options){.layout = layout, .stage = 2, .n_ranks = WORLD, .moments = {true, true}});
    int status;
    pid_t pid = fork();

    (void)state;
    if (pid == 0) {
        s->progress.counts[0] = 41;
        for (uint32_t b = 0; b < layout->n_buckets; b++) {
            *state_master(s, b, 9) = 1.5f;
            *(float *)state_exp_avg(s, b, 9) = 2.5f;
            *(float *)state_exp_avg_sq(s, b, 9) = 3.5f;
            *state_acc(s, b, 9) = 4.5f;
        }
        *state_weights(s, 0, 9) = 42;
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(s->progress.counts[0], 41);
    for (uint32_t b = 0; b < layout->n_buckets; b++) {
        assert_true(*state_master(s, b, 9) == 1.5f);
        assert_true(*(float *)state_exp_avg(s, b, 9) == 2.5f);
        assert_true(*(float *)state_exp_avg_sq(s, b, 9) == 3.5f);
        assert_true(*state_acc(s, b, 9) == 4.5f);
    }
    assert_int_equal(*state_weights(s, 0, 9), 42);
    state_free(s);
    layout_free(layout);
}

/* ---- reserving ----------------------------------------------------------------------------------------- */

static uint64_t held_bytes(const struct state *s)
{
    const struct segment *segments[] = {&s->state, &s->gradient, &s->weights, &s->counts};
    uint64_t sum = 0;
    struct stat st;

    for (size_t i = 0; i < ARRAY_SIZE(segments); i++) {
        if (segments[i]->n_bytes == 0)
            continue;
        assert_int_equal(fstat(segments[i]->fd, &st), 0);
        sum += (uint64_t)st.st_blocks * 512;
    }
    return sum;
}

static uint64_t size_bytes(const struct state *s)
{
    return s->state.n_bytes + s->gradient.n_bytes + s->weights.n_bytes + s->counts.n_bytes;
}

static void test_reserve(void **state)
{
    struct layout *layout = make_layout(false);

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++) {
        struct state *s =
            make(&(struct state_options){.layout = layout, .stage = stage, .n_ranks = WORLD, .moments = {true, true}});

        assert_int_equal(held_bytes(s), 0); /* sparse */
        for (uint32_t piece = state_n_reserve_pieces(s); piece-- > 0;)
            assert_int_equal(state_reserve(s, piece), 0);
        assert_int_equal(held_bytes(s), size_bytes(s));
        state_free(s);
    }
    layout_free(layout);
}

/* Segments of several pieces, the last of which is short. Each piece adds pages, so no page is reserved twice. */
static void test_reserve_pieces(void **state)
{
    struct layout *layout = make_one(UINT64_C(17) << 20, DTYPE_F32, true); /* 68 MiB */
    struct state *s = make(&(struct state_options){.layout = layout, .stage = 2, .n_ranks = 1});
    uint32_t n_pieces = state_n_reserve_pieces(s);
    uint64_t before = 0;

    (void)state;
    assert_true(n_pieces > 3); /* more pieces than segments */
    for (uint32_t piece = 0; piece < n_pieces; piece++) {
        assert_int_equal(state_reserve(s, piece), 0);
        assert_true(held_bytes(s) > before);
        before = held_bytes(s);
    }
    assert_int_equal(before, size_bytes(s));
    state_free(s);
    layout_free(layout);
}

static void test_reserve_fails(void **state)
{
    struct layout *layout = make_layout(false);
    struct state *s = make(&(struct state_options){.layout = layout, .stage = 2, .n_ranks = WORLD});

    (void)state;
    for (uint32_t piece = 0; piece < state_n_reserve_pieces(s); piece++) {
        uint64_t before = held_bytes(s);

        fail_fallocate = 1;
        assert_int_equal(state_reserve(s, piece), -ENOMEM);
        assert_int_equal(held_bytes(s), before);
        assert_int_equal(state_reserve(s, piece), 0); /* works when there is memory again */
    }
    assert_int_equal(held_bytes(s), size_bytes(s));
    state_free(s);
    layout_free(layout);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

TEST_GROUP(state)
{
    const struct CMUnitTest tests[] = {
        TEST(test_places),
        TEST(test_repartition),
        TEST(test_names),
        TEST(test_all_frozen),
        TEST(test_large_arrays_are_skewed),
        TEST(test_new_fails),
        TEST(test_counts),
        TEST(test_counts_of_many),
        TEST(test_outlives_a_process),
        TEST(test_reserve),
        TEST(test_reserve_pieces),
        TEST(test_reserve_fails),
    };

    return cmocka_run_group_tests_name("state", tests, NULL, NULL);
}
