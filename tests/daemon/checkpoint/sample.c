/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/checkpoint/sample.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/load-check.h"
#include "core/checkpoint/folder.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/write.h"
#include "daemon/memory/snapshot.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"

const struct sample_param sample_small[3] = {
    {"w", DTYPE_BF16, false, 1, {40}}, {"b", DTYPE_F32, false, 1, {8}}, {"f", DTYPE_F16, true, 1, {5}}};

static const struct sample_param all_kinds[] = {
    {"layers.0.weight", DTYPE_BF16, false, 2, {300, 257}},
    {"layers.0.bias", DTYPE_F32, false, 1, {257}},
    {"b\xff"
     "d \"name\"",
     DTYPE_F16,
     false,
     3,
     {3, 1, 11}},
    {"scalar", DTYPE_F32, false, 0, {0}},
    {"half scalar", DTYPE_BF16, false, 0, {0}},
    {"empty", DTYPE_BF16, false, 2, {5, 0}},
    {"embedding", DTYPE_F32, true, 2, {10, 3}},
    {"frozen.half", DTYPE_BF16, true, 1, {7}},
    {"frozen.empty", DTYPE_F16, true, 1, {0}},
    {"wide", DTYPE_F32, false, 1, {70001}},
    {"", DTYPE_F16, false, 1, {1}},
    {"(buffers)", DTYPE_F32, true, 1, {6}}, /* belongs to no model */
    {"(half)", DTYPE_BF16, false, 1, {3}},
    {"(wide)", DTYPE_F32, false, 1, {2}},
};

static const struct kernels *kernels(void)
{
    static const struct kernels *chosen;
    char why[128];

    if (!chosen)
        assert_int_equal(kernels_select(&chosen, NULL, why, sizeof(why)), 0);
    return chosen;
}

struct sample *sample_new(const struct sample_options *options)
{
    struct sample *s = calloc(1, sizeof(*s));
    const struct hyper hyper = {.momentum = options->no_momentum ? 0 : 0.9, .adam_w_mode = true};
    struct layout_decl decls[16];
    struct state_options o;
    uint32_t bad;

    s->options = *options;
    if (!options->params) {
        s->options.params = all_kinds;
        s->options.n_params = ARRAY_SIZE(all_kinds);
    }
    for (size_t i = 0; i < s->options.n_params; i++) {
        const struct sample_param *p = &s->options.params[i];

        decls[i] = (struct layout_decl){.name = p->name,
                                        .name_len = strlen(p->name),
                                        .dtype = p->dtype,
                                        .grad_dtype = p->dtype,
                                        .trainable = !p->frozen,
                                        .muon = options->optimizer == OPTIMIZER_MUON && !p->frozen && p->n_dims == 2,
                                        .n_dims = p->n_dims,
                                        .shape = p->shape};
    }
    assert_int_equal(
        layout_new(&s->layout, decls, (uint32_t)s->options.n_params, options->world_size, options->bucket_elems, &bad),
        0);
    o = (struct state_options){.layout = s->layout,
                               .stage = options->stage,
                               .first_rank = options->first_rank,
                               .n_ranks = options->n_local ? options->n_local : options->world_size,
                               .moments = optimizer_moments(options->optimizer, &hyper)};
    o.moments.type.dtype = options->moments;
    o.moments.master24 = options->master24;
    assert_int_equal(state_new(&s->state, &o), 0);
    return s;
}

void sample_free(struct sample *s)
{
    state_free(s->state);
    layout_free(s->layout);
    free(s);
}

/* ---- values -------------------------------------------------------------------------------------------- */

enum { FROZEN = STATE_N_KINDS, COUNT, BLOB };

static uint64_t mix(uint64_t seed, uint64_t param, unsigned kind, uint64_t elem)
{
    uint64_t x = (seed * 0x9e3779b97f4a7c15 + param) * 0xbf58476d1ce4e5b9 + kind + elem * 0x94d049bb133111eb;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Return: a value with any bits, also NaN; or a number, if it will be rounded. */
static float value_of(uint64_t seed, uint64_t param, enum state_kind kind, uint64_t elem, bool rounded)
{
    uint64_t x = mix(seed, param, kind, elem);
    uint32_t bits = (uint32_t)x;
    float value = (float)(int32_t)bits * 1e-8f;

    if (!rounded)
        memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint64_t count_of(uint64_t seed, uint64_t param)
{
    return mix(seed, param, COUNT, 0) % (1 << 24);
}

/* Fills a range with the expected bytes, or compares it. Return: whether it is equal to them. */
static bool visit(void *at, const void *expected, size_t n_bytes, bool fill)
{
    if (fill && n_bytes > 0)
        memcpy(at, expected, n_bytes);
    return n_bytes == 0 || memcmp(at, expected, n_bytes) == 0;
}

static bool visit_frozen(const struct sample *s, uint32_t id, uint64_t seed, bool fill)
{
    const struct layout_param *p = &s->layout->params[id];
    size_t n = p->n_elems * dtype_size(p->dtype);
    _cleanup_free_ uint8_t *bytes = malloc(n + 1);

    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)mix(seed, id, FROZEN, i);
    return visit(state_frozen(s->state, id), bytes, n, fill);
}

static bool visit_master24(struct master24 masters, const float *values, size_t n, bool fill)
{
    _cleanup_free_ uint16_t *weights = calloc(n, sizeof(*weights));
    _cleanup_free_ int8_t *lower = calloc(n, sizeof(*lower));

    master24_from_f32((struct master24){.weights = weights, .lower = lower}, values, n);
    return visit(masters.weights, weights, n * sizeof(*weights), fill) & visit(masters.lower, lower, n, fill);
}

/* Fills or compares the masters or moments that this node owns. values has the whole parameter's. */
static bool visit_owned(const struct sample *s, uint32_t id, enum state_kind kind, const float *values, bool fill)
{
    const struct layout_param *p = &s->layout->params[id];
    const struct state_bucket *bucket = &s->state->buckets[p->bucket];
    uint64_t first = MAX(p->offset_elems, bucket->owned_start);
    uint64_t end = MIN(p->offset_elems + p->n_elems, bucket->owned_start + bucket->owned_elems);
    enum dtype dtype = state_dtype(s->state, kind);
    _cleanup_free_ uint8_t *expected = calloc(p->n_elems + GROUP8_ELEMS, sizeof(*values));
    void *at;

    if (first >= end || !state_has(s->state, kind, p->bucket))
        return true;
    if (kind == STATE_MASTER && state_is_master24(s->state, p->bucket))
        return visit_master24(state_master24(s->state, p->bucket, first), values + (first - p->offset_elems),
                              end - first, fill);
    at = state_values(s->state, kind, p->bucket, first);
    kernels()->convert_from_f32(expected, values + (first - p->offset_elems), dtype, end - first);
    return visit(at, expected, dtype_bytes(dtype, end - first), fill);
}

/* Rounds to numbers that 8 bits can represent, and therefore also bf16. */
static void narrow(float *values, uint64_t n, enum state_kind kind)
{
    enum dtype dtype = kind == STATE_EXP_AVG ? DTYPE_SIGNED8 : DTYPE_UNSIGNED8;
    _cleanup_free_ void *narrowed = malloc(dtype_bytes(dtype, n) + 1);

    convert_from_f32(narrowed, values, dtype, n);
    convert_to_f32(values, narrowed, dtype, n);
}

/* Rounds to numbers that 24 bits can represent. */
static void narrow_masters(float *values, uint64_t n)
{
    _cleanup_free_ uint16_t *weights = calloc(n + 1, sizeof(*weights));
    _cleanup_free_ int8_t *lower = calloc(n + 1, sizeof(*lower));
    struct master24 masters = {.weights = weights, .lower = lower};

    master24_from_f32(masters, values, n);
    master24_to_f32(values, masters, n);
}

static bool visit_trainable(const struct sample *s, uint32_t id, uint64_t seed, bool fill)
{
    const struct layout_param *p = &s->layout->params[id];
    bool is_short = p->dtype != DTYPE_F32, equal = true;
    _cleanup_free_ float *values = malloc((p->n_elems + 1) * sizeof(*values));
    _cleanup_free_ uint16_t *rounded = malloc((p->n_elems + 1) * sizeof(*rounded));

    for (unsigned kind = STATE_N_KINDS; kind-- > 0;) { /* the masters last */
        for (uint64_t i = 0; i < p->n_elems; i++)
            values[i] = value_of(seed, id, kind, i, is_short && kind == STATE_MASTER);
        if (kind != STATE_MASTER && s->options.short_moments)
            narrow(values, p->n_elems, (enum state_kind)kind);
        if (kind == STATE_MASTER && s->options.short_masters && p->dtype == DTYPE_BF16)
            narrow_masters(values, p->n_elems);
        equal &= visit_owned(s, id, kind, values, fill);
    }
    if (is_short)
        kernels()->convert_from_f32(rounded, values, p->dtype, p->n_elems);
    if (s->options.stage != 3)
        equal &= visit(state_weights(s->state, id, 0), is_short ? (const void *)rounded : (const void *)values,
                       p->n_elems * dtype_size(p->dtype), fill);
    return equal && visit(&s->state->progress.counts[id], &(uint64_t){count_of(seed, id)}, sizeof(uint64_t), fill);
}

static bool visit_all(const struct sample *s, uint64_t seed, bool fill)
{
    bool equal = true;

    for (uint32_t i = 0; i < s->layout->n_params; i++)
        equal &= s->layout->params[i].trainable ? visit_trainable(s, i, seed, fill) : visit_frozen(s, i, seed, fill);
    return equal;
}

void sample_fill(struct sample *s, uint64_t seed)
{
    visit_all(s, seed, true);
}

bool sample_is(const struct sample *s, uint64_t seed)
{
    return visit_all(s, seed, false);
}

/* ---- saving -------------------------------------------------------------------------------------------- */

/* Return: the size of the blob that a rank stores. Odd ranks store none, rank 2 an empty one. */
static size_t blob_bytes(unsigned rank)
{
    return rank == 2 ? 0 : 100 + 1000 * rank;
}

static uint8_t *blob_of(uint64_t seed, unsigned rank)
{
    uint8_t *bytes = malloc(blob_bytes(rank) + 1);

    for (size_t i = 0; i < blob_bytes(rank); i++)
        bytes[i] = (uint8_t)mix(seed, rank, BLOB, i);
    return bytes;
}

/* Return: an order without a snapshot and blobs. */
static struct checkpoint_order order_of(const struct sample *s, const struct sample_save *save)
{
    struct checkpoint_order order = {.dir = save->dir,
                                     .disk = save->disk ? save->disk : &disk_hasty,
                                     .state = s->state,
                                     .kernels = kernels(),
                                     .optimizer = s->options.optimizer,
                                     .node = save->n_nodes > 0 ? (int)save->node : -1,
                                     .token = save->token,
                                     .save_total_limit = save->save_total_limit,
                                     .cancelled = save->cancelled,
                                     .description = {.version = strdup("0"),
                                                     .job = strdup("job"),
                                                     .optimizer = strdup(optimizer_name(s->options.optimizer)),
                                                     .configuration = strdup(""),
                                                     .step = save->step,
                                                     .world_size = s->options.world_size,
                                                     .n_nodes = MAX(save->n_nodes, 1U),
                                                     .stage = s->options.stage}};

    order.counts = calloc(s->layout->n_params, sizeof(*order.counts));
    memcpy(order.counts, s->state->progress.counts, s->layout->n_params * sizeof(*order.counts));
    return order;
}

int sample_save(struct sample *s, uint64_t seed, const struct sample_save *save, char *why)
{
    struct checkpoint_order order;
    struct snapshot_pool *pool;
    int r;

    sample_fill(s, seed);
    order = order_of(s, save);
    order.blobs = calloc(s->options.world_size, sizeof(*order.blobs));
    for (unsigned rank = 0; rank < s->options.world_size; rank += 2)
        if (state_owns(s->state, rank))
            order.blobs[order.n_blobs++] = (struct checkpoint_blob){rank, blob_of(seed, rank), blob_bytes(rank)};
    assert_int_equal(snapshot_pool_new(&pool, 1 << 20), 0);
    assert_int_equal(snapshot_new(&order.snapshot, s->state, pool), 0);
    *why = '\0';
    r = checkpoint_write(&order, why, SAMPLE_WHY_BYTES);
    if (r == 0)
        assert_int_equal(order.n_bytes_done, order.n_bytes);
    snapshot_free(order.snapshot);
    snapshot_pool_free(pool);
    checkpoint_order_deinit(&order);
    return r;
}

int sample_publish(const struct sample *s, const struct sample_save *save, char *why)
{
    struct checkpoint_order order = order_of(s, save);
    int r;

    *why = '\0';
    r = checkpoint_publish(&order, why, SAMPLE_WHY_BYTES);
    checkpoint_order_deinit(&order);
    return r;
}

/* ---- loading ------------------------------------------------------------------------------------------- */

/* Compares the blobs of the ranks of this node. */
static void check_blobs(const struct sample *s, const struct loading *loading, uint64_t seed)
{
    const struct description *d = loading_description(loading);

    for (unsigned rank = 0; rank < d->world_size + 2; rank++) {
        size_t n_bytes = 12345;
        const void *blob = loading_blob(loading, rank, &n_bytes);
        uint8_t *expected;

        if (rank % 2 == 1 || rank >= d->world_size || !state_owns(s->state, rank)) {
            assert_null(blob);
            continue;
        }
        expected = blob_of(seed, rank);
        assert_non_null(blob);
        assert_int_equal(n_bytes, blob_bytes(rank));
        assert_memory_equal(blob, expected, n_bytes);
        free(expected);
    }
}

/* Asserts that a checkpoint of all state of a job passes checkpoint_check(). */
static void check_whole(const struct loading *loading)
{
    char why[SAMPLE_WHY_BYTES] = "";
    struct description d;
    int folder = folder_open(AT_FDCWD, loading_path(loading), &d, why, sizeof(why));

    if (folder < 0 || checkpoint_check(folder, &d, why, sizeof(why)) != 0)
        fail_msg("%s: %s", loading_path(loading), why);
    close(folder);
    description_deinit(&d);
}

int sample_load(struct sample *s, const struct sample_load *load, uint64_t *step, char *why)
{
    const struct loading_options options = {.dir = load->dir,
                                            .path = load->path,
                                            .before_step = load->before_step ? load->before_step : UINT64_MAX,
                                            .state = s->state,
                                            .optimizer = s->options.optimizer,
                                            .optimizer_name = optimizer_name(s->options.optimizer),
                                            .strict = load->strict};
    struct loading *loading = NULL;
    int r;

    *why = '\0';
    r = loading_open(&loading, &options, why);
    assert_true(r == 0 || r == 1 || *why);
    if (r != 0)
        return r;
    for (uint32_t i = loading_n_pieces(loading); r == 0 && i-- > 0;) /* in any order */
        r = loading_read(loading, i);
    if (r == 0) {
        if (load->strict)
            check_whole(loading);
        loading_finish(loading);
        *step = loading_description(loading)->step;
        if (load->seed)
            check_blobs(s, loading, load->seed);
    }
    snprintf(why, SAMPLE_WHY_BYTES, "%s", r == 0 ? loading_note(loading) : loading_why(loading));
    loading_free(loading);
    return r;
}

/* ---- a disk, and folders ------------------------------------------------------------------------------- */

static int hasty_make_folder(const struct disk *disk, int dir, const char *name)
{
    (void)disk;
    return disk_system.make_folder(&disk_system, dir, name);
}

static int hasty_open_folder(const struct disk *disk, int dir, const char *name)
{
    (void)disk;
    return disk_system.open_folder(&disk_system, dir, name);
}

static int hasty_create(const struct disk *disk, int dir, const char *name)
{
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);

    (void)disk;
    return fd < 0 ? -errno : fd;
}

/* hasty_write() also checks the arguments, as disk.h promises them. */
static int hasty_write(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset)
{
    (void)disk;
    if ((uintptr_t)bytes % DISK_ALIGN_BYTES || n_bytes % DISK_ALIGN_BYTES || offset % DISK_ALIGN_BYTES || n_bytes == 0)
        return -EINVAL;
    return disk_system.write(&disk_system, fd, bytes, n_bytes, offset);
}

static int hasty_truncate(const struct disk *disk, int fd, uint64_t n_bytes)
{
    (void)disk;
    return disk_system.truncate(&disk_system, fd, n_bytes);
}

static int hasty_sync(const struct disk *disk, int fd)
{
    (void)disk;
    (void)fd;
    return 0;
}

static int hasty_rename(const struct disk *disk, int dir, const char *from, const char *to)
{
    (void)disk;
    return disk_system.rename(&disk_system, dir, from, to);
}

static int hasty_exchange(const struct disk *disk, int dir, const char *one, const char *other)
{
    (void)disk;
    return disk_system.exchange(&disk_system, dir, one, other);
}

static int hasty_remove_folder(const struct disk *disk, int dir, const char *name)
{
    (void)disk;
    return disk_system.remove_folder(&disk_system, dir, name);
}

const struct disk disk_hasty = {
    .make_folder = hasty_make_folder,
    .open_folder = hasty_open_folder,
    .create = hasty_create,
    .write = hasty_write,
    .truncate = hasty_truncate,
    .sync = hasty_sync,
    .rename = hasty_rename,
    .exchange = hasty_exchange,
    .remove_folder = hasty_remove_folder,
};

void scratch_new(char *path)
{
    snprintf(path, 64, "%s/zerod-checkpoint.XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(path));
}

void scratch_remove(const char *path)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf %s", path);
    assert_int_equal(system(command), 0);
}

int scratch_count(const char *path)
{
    DIR *stream = opendir(path);
    int n = -2;

    if (!stream)
        return -1;
    while (readdir(stream))
        n++;
    closedir(stream);
    return n;
}
