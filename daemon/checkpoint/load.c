/* SPDX-License-Identifier: Apache-2.0 */

/* Loading a checkpoint (load.h). */

#include "daemon/checkpoint/load.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"

enum {
    PIECE_BLOCKS = 8, /* of a MiB; picked: enough pieces for all workers, and few openings */
};

/* Where a tensor goes. */
struct place {
    bool known;  /* the job has such a tensor */
    uint8_t *at; /* NULL: nowhere, nevertheless */
};

/* Moments that the checkpoint lacks. One that was loaded before may have had them. */
struct hole {
    void *at;
    size_t n_bytes;
};

/* A file of tensors. */
struct source {
    const struct description_file *file;
    int fd;
    struct safetensors header;
    struct place *places; /* per tensor */
    uint32_t first_piece, n_pieces;
};

enum { MODEL, OPTIMIZER, RANKS, N_SOURCES };

static const char *const source_names[N_SOURCES] = {CHECKPOINT_MODEL, CHECKPOINT_OPTIMIZER, CHECKPOINT_RANKS};

struct loading {
    struct loading_options options;
    const struct layout *layout;
    char path[4096 + FOLDER_NAME_BYTES];
    struct description description;
    struct source sources[N_SOURCES];
    uint32_t n_pieces;
    struct hole *holes; /* n_holes; become 0 with the first piece */
    size_t n_holes;
    float *counts;   /* per parameter */
    uint8_t **blobs; /* per tensor of RANKS */
    char note[LOADING_WHY_BYTES];
    unsigned n_ignored, n_lacking;
    char first_lacking[LOADING_WHY_BYTES / 4];
    int failed; /* a header cannot be read; loading_read() says so */
    pthread_mutex_t lock;
    char why[LOADING_WHY_BYTES];
};

static int fail(char *why, int r, const char *format, ...) __attribute__((format(printf, 3, 4)));

static int fail(char *why, int r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, LOADING_WHY_BYTES, format, args);
    va_end(args);
    return r;
}

/* ---- places -------------------------------------------------------------------------------------------- */

static bool same_shape(const struct safetensors_tensor *tensor, const struct layout_param *p, int dtype)
{
    return tensor->dtype == dtype && tensor->n_dims == p->n_dims &&
           memcmp(tensor->shape, p->shape, p->n_dims * sizeof(*p->shape)) == 0;
}

/* Gives the tensor its place. Return: 0; 1: there is no such tensor; or -EINVAL. */
static int place(struct source *source, const char *name, const struct layout_param *p, int dtype, void *at, char *why)
{
    const struct safetensors_tensor *tensor = name ? safetensors_find(&source->header, name) : NULL;

    if (!tensor)
        return 1;
    if (p && !same_shape(tensor, p, dtype))
        return fail(why, -EINVAL, "%s has another shape or type there than in this job", name);
    if (!p && (tensor->n_dims > 0 || tensor->dtype != dtype))
        return fail(why, -EINVAL, "%s is no single number", name);
    source->places[tensor - source->header.tensors] = (struct place){.known = true, .at = at};
    return 0;
}

static void *master_of(const struct loading *l, const struct layout_param *p)
{
    return state_master(l->options.state, p->bucket, p->offset_elems);
}

/* NULL: in stage 3 nobody keeps weights of 16 bits. */
static void *weights_of(const struct loading *l, uint32_t id)
{
    const struct layout_param *p = &l->layout->params[id];

    if (!p->trainable)
        return state_frozen(l->options.state, id);
    if (p->dtype == DTYPE_F32)
        return master_of(l, p);
    return l->options.state->stage == 3 ? NULL : state_weights(l->options.state, id, 0);
}

static int lacks(struct loading *l, const char *name, bool may, char *why)
{
    if (!may)
        return fail(why, -EINVAL, "it lacks %s, which this job has", name);
    if (l->n_lacking++ == 0)
        snprintf(l->first_lacking, sizeof(l->first_lacking), "%s", name);
    return 0;
}

static int place_state(struct loading *l, const struct layout_param *p, const char *key, void *at, bool may, char *why)
{
    _cleanup_free_ char *name = tensor_state_name(p->name, key);
    bool is_count = strcmp(key, TENSOR_STEP) == 0;
    int r = place(&l->sources[OPTIMIZER], name, is_count ? NULL : p, DTYPE_F32, at, why);

    if (r != 1)
        return r;
    if (may && !is_count)
        l->holes[l->n_holes++] = (struct hole){.at = at, .n_bytes = p->n_elems * sizeof(float)};
    return lacks(l, name, may, why);
}

static int place_param(struct loading *l, uint32_t id, char *why)
{
    const struct layout_param *p = &l->layout->params[id];
    const struct state *state = l->options.state;
    bool may = !l->options.strict;
    struct source *source = &l->sources[tensor_is_of_model(p->name) ? MODEL : OPTIMIZER];
    int r = place(source, p->name, p, p->dtype, weights_of(l, id), why);

    if (r == 1)
        return lacks(l, p->name, false, why);
    if (r == 0 && p->trainable && state->buckets[p->bucket].exp_avg)
        r = place_state(l, p, tensor_moment_key(l->options.optimizer, false),
                        state_exp_avg(state, p->bucket, p->offset_elems), may, why);
    if (r == 0 && p->trainable && state->buckets[p->bucket].exp_avg_sq)
        r = place_state(l, p, tensor_moment_key(l->options.optimizer, true),
                        state_exp_avg_sq(state, p->bucket, p->offset_elems), may, why);
    if (r == 0 && p->trainable && p->dtype != DTYPE_F32)
        r = place_state(l, p, TENSOR_MASTER, master_of(l, p), false, why);
    if (r == 0 && p->trainable)
        r = place_state(l, p, TENSOR_STEP, &l->counts[id], may, why);
    return r;
}

/* Return: the first tensor that the job lacks, and counts them. NULL: there is none. */
static const char *find_unknown(struct loading *l)
{
    const char *first = NULL;

    for (unsigned s = MODEL; s <= OPTIMIZER; s++)
        for (size_t i = 0; i < l->sources[s].header.n; i++)
            if (!l->sources[s].places[i].known) {
                first = first ? first : l->sources[s].header.tensors[i].name;
                l->n_ignored++;
            }
    return first;
}

static void note(struct loading *l, const char *first_ignored)
{
    char ignored[LOADING_WHY_BYTES / 2] = "", lacking[LOADING_WHY_BYTES / 2] = "";

    if (l->n_ignored > 0)
        snprintf(ignored, sizeof(ignored), "of its tensors %u are ignored because this job lacks them: %.120s",
                 l->n_ignored, first_ignored);
    if (l->n_lacking > 0)
        snprintf(lacking, sizeof(lacking), "of this job's tensors %u begin with zero because it lacks them: %.120s",
                 l->n_lacking, l->first_lacking);
    snprintf(l->note, sizeof(l->note), "%s%s%s", ignored, *ignored && *lacking ? "; " : "", lacking);
}

static int place_all(struct loading *l, char *why)
{
    const char *unknown;
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < l->layout->n_params; i++)
        r = place_param(l, i, why);
    if (r < 0)
        return r;
    unknown = find_unknown(l);
    if (unknown && l->options.strict)
        return fail(why, -EINVAL, "it has %s, which this job lacks", unknown);
    note(l, unknown);
    return 0;
}

/* The bytes that ranks have stored are no part of the state, so they get memory of their own. */
static int place_blobs(struct loading *l)
{
    struct source *source = &l->sources[RANKS];

    l->blobs = calloc(source->header.n + 1, sizeof(*l->blobs));
    for (size_t i = 0; l->blobs && i < source->header.n; i++) {
        l->blobs[i] = malloc(source->header.tensors[i].n_bytes + 1);
        if (!l->blobs[i])
            return -ENOMEM;
        source->places[i] = (struct place){.known = true, .at = l->blobs[i]};
    }
    return l->blobs ? 0 : -ENOMEM;
}

/* ---- opening ------------------------------------------------------------------------------------------- */

static size_t block_bytes(const struct source *source, uint64_t block)
{
    return MIN(source->file->n_bytes - block * HASH_BLOCK_BYTES, (uint64_t)HASH_BLOCK_BYTES);
}

/* Reads a MiB, or the rest, and compares its hash. Return: 0; or -errno and a sentence. */
static int read_block(const struct source *source, uint64_t block, uint8_t *dst, char *why)
{
    uint64_t at = block * HASH_BLOCK_BYTES;
    size_t n = block_bytes(source, block);
    int r = folder_read(source->fd, dst, n, at);

    if (r < 0)
        return fail(why, r, "%s: %s", source->file->name, strerror(-r));
    if (hash_block(dst, n) != source->file->hash.blocks[block])
        return fail(why, -EBADMSG, "%s: the MiB from byte %" PRIu64 " is not as it was written", source->file->name,
                    at);
    return 0;
}

/* Reads the blocks in which the header lies. *n: how long it is. Return: its bytes, to be freed; or NULL, and *r is
 * set. */
static uint8_t *read_header_bytes(const struct source *source, uint64_t *n, int *r, char *why)
{
    uint8_t *bytes = calloc(1, MAX(block_bytes(source, 0), (size_t)SAFETENSORS_LENGTH_BYTES)), *more;

    *n = 0;
    *r = !bytes ? fail(why, -ENOMEM, "no memory") : source->file->n_bytes > 0 ? read_block(source, 0, bytes, why) : 0;
    if (*r == 0) {
        *n = safetensors_header_bytes(bytes, source->file->n_bytes);
        if (*n == 0)
            *r = fail(why, -EINVAL, "%s is no safetensors file", source->file->name);
    }
    if (*r == 0 && *n > HASH_BLOCK_BYTES) {
        more = realloc(bytes, round_up(*n, HASH_BLOCK_BYTES));
        if (!more)
            *r = fail(why, -ENOMEM, "no memory");
        bytes = more ? more : bytes;
    }
    for (uint64_t block = 1; *r == 0 && block * HASH_BLOCK_BYTES < *n; block++)
        *r = read_block(source, block, bytes + block * HASH_BLOCK_BYTES, why);
    if (*r == 0)
        return bytes;
    free(bytes);
    return NULL;
}

static int read_header(struct source *source, char *why)
{
    char what[LOADING_WHY_BYTES / 2];
    uint64_t n;
    int r;
    _cleanup_free_ uint8_t *bytes = read_header_bytes(source, &n, &r, why);

    if (!bytes)
        return r;
    r = safetensors_parse(&source->header, bytes, n, source->file->n_bytes, what, sizeof(what));
    if (r == SAFETENSORS_E_INVALID)
        return fail(why, -EINVAL, "%s: %s", source->file->name, what);
    source->places = r == 0 ? calloc(source->header.n + 1, sizeof(*source->places)) : NULL;
    return source->places ? 0 : fail(why, -ENOMEM, "no memory");
}

static int open_source(struct loading *l, int folder, unsigned which, char *why)
{
    struct source *source = &l->sources[which];

    source->file = description_find(&l->description, source_names[which]);
    if (!source->file)
        return which != MODEL ? 0 : fail(why, -EINVAL, "it has no %s", source_names[which]);
    source->fd = folder_open_file(folder, source->file, why, LOADING_WHY_BYTES);
    if (source->fd < 0)
        return source->fd;
    source->first_piece = l->n_pieces;
    source->n_pieces = (uint32_t)div_round_up(source->file->hash.n_blocks, PIECE_BLOCKS);
    l->n_pieces += source->n_pieces;
    return read_header(source, why);
}

/* A checkpoint of another optimizer has other moments, so that fails with the name of one; this says it better. */
static int check_optimizer(const struct loading *l, const char *name, char *why)
{
    if (!l->options.strict || strcmp(l->description.optimizer, name) == 0)
        return 0;
    return fail(why, -EINVAL, "it is of a run with %s, and this job has %s", l->description.optimizer, name);
}

static int open_checkpoint(struct loading *l, int dir, const char *name, char *why)
{
    _cleanup_close_ int folder = folder_open(dir, name, &l->description, why, LOADING_WHY_BYTES);
    int r = MIN(folder, 0);

    for (unsigned i = 0; r == 0 && i < N_SOURCES; i++)
        r = open_source(l, folder, i, why);
    if (r == -EBADMSG || r == -EIO) { /* bytes that are wrong are as bad in a header as behind it */
        snprintf(l->why, sizeof(l->why), "%s", why);
        l->failed = r;
        l->n_pieces = 1;
        return 0;
    }
    if (r == 0)
        r = check_optimizer(l, l->options.optimizer_name, why);
    if (r == 0)
        r = place_all(l, why);
    if (r == 0 && place_blobs(l) < 0)
        r = fail(why, -ENOMEM, "no memory");
    return r;
}

/* Return: as loading_open(). */
static int open_newest(struct loading *l, char *why)
{
    _cleanup_close_ int dir = open(l->options.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct folder_list list = {0};
    char name[FOLDER_NAME_BYTES];
    int r = dir < 0 ? -errno : folder_list(dir, &list);
    size_t i = 0;

    if (r == -ENOENT)
        return 1;
    if (r < 0)
        return fail(why, r, "%s: %s", l->options.dir, strerror(-r));
    while (i < list.n && (!list.entries[i].whole || list.entries[i].step >= l->options.before_step))
        i++;
    if (i < list.n) {
        folder_name(name, list.entries[i].step);
        snprintf(l->path, sizeof(l->path), "%s/%s", l->options.dir, name);
        r = open_checkpoint(l, dir, name, why);
    } else if (list.n == 0) {
        r = 1;
    } else {
        folder_name(name, list.entries[0].step);
        r = fail(why, -EIO, "none of the %zu checkpoints in %s is whole; of %s: %s", list.n, l->options.dir, name,
                 *list.entries[0].why ? list.entries[0].why : "its bytes are not those that were written");
    }
    folder_list_deinit(&list);
    return r;
}

int loading_open(struct loading **out, const struct loading_options *options, char *why)
{
    struct loading *l = calloc(1, sizeof(*l));
    int r;

    if (!l)
        return fail(why, -ENOMEM, "no memory");
    l->options = *options;
    l->layout = options->state->layout;
    pthread_mutex_init(&l->lock, NULL);
    for (unsigned i = 0; i < N_SOURCES; i++)
        l->sources[i].fd = -1;
    l->counts = calloc(l->layout->n_params, sizeof(*l->counts));
    l->holes = calloc(2 * (size_t)l->layout->n_params + 1, sizeof(*l->holes)); /* two moments of each */
    snprintf(l->path, sizeof(l->path), "%s", options->path ? options->path : options->dir);
    if (!l->counts || !l->holes)
        r = fail(why, -ENOMEM, "no memory");
    else
        r = options->dir ? open_newest(l, why) : open_checkpoint(l, AT_FDCWD, options->path, why);
    if (r != 0) {
        loading_free(l);
        return r;
    }
    *out = l;
    return 0;
}

void loading_free(struct loading *l)
{
    if (!l)
        return;
    for (size_t i = 0; l->blobs && i < l->sources[RANKS].header.n; i++)
        free(l->blobs[i]);
    for (unsigned i = 0; i < N_SOURCES; i++) {
        safetensors_deinit(&l->sources[i].header);
        free(l->sources[i].places);
        closep(&l->sources[i].fd);
    }
    free(l->blobs);
    free(l->counts);
    free(l->holes);
    description_deinit(&l->description);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

/* ---- reading ------------------------------------------------------------------------------------------- */

/* Bytes [at, at + n) of the file, which are right: each goes to the place of its tensor. */
static void spread(const struct source *source, const uint8_t *bytes, uint64_t at, size_t n)
{
    size_t first = safetensors_at(&source->header, at);
    uint64_t end = at + n;

    for (size_t i = first < source->header.n ? first : 0; i < source->header.n; i++) {
        const struct safetensors_tensor *tensor = &source->header.tensors[i];
        uint64_t from = MAX(at, tensor->offset_bytes), to = MIN(end, tensor->offset_bytes + tensor->n_bytes);

        if (tensor->offset_bytes >= end)
            break;
        if (from < to && source->places[i].at)
            memcpy(source->places[i].at + (from - tensor->offset_bytes), bytes + (from - at), to - from);
    }
}

static int load_block(struct loading *l, const struct source *source, uint64_t block, uint8_t *buffer)
{
    char why[LOADING_WHY_BYTES];
    int r = read_block(source, block, buffer, why);

    if (r == 0) {
        spread(source, buffer, block * HASH_BLOCK_BYTES, block_bytes(source, block));
        return 0;
    }
    pthread_mutex_lock(&l->lock);
    if (!*l->why)
        snprintf(l->why, sizeof(l->why), "%s", why);
    pthread_mutex_unlock(&l->lock);
    return r;
}

uint32_t loading_n_pieces(const struct loading *l)
{
    return l->n_pieces;
}

int loading_read(struct loading *l, uint32_t piece)
{
    const struct source *source = &l->sources[N_SOURCES - 1];
    _cleanup_free_ uint8_t *buffer = NULL;
    uint64_t first, end;
    int r = l->failed;

    if (r < 0)
        return r;
    for (size_t i = 0; piece == 0 && i < l->n_holes; i++)
        memset(l->holes[i].at, 0, l->holes[i].n_bytes);
    while (source->n_pieces == 0 || piece < source->first_piece)
        source--;
    first = (uint64_t)(piece - source->first_piece) * PIECE_BLOCKS;
    end = MIN(first + PIECE_BLOCKS, (uint64_t)source->file->hash.n_blocks);
    buffer = malloc(block_bytes(source, first));
    if (!buffer)
        return -ENOMEM;
    for (uint64_t block = first; r == 0 && block < end; block++)
        r = load_block(l, source, block, buffer);
    return r;
}

/* ---- the end ------------------------------------------------------------------------------------------- */

void loading_finish(struct loading *l)
{
    for (uint32_t i = 0; i < l->layout->n_params; i++) {
        float count = l->counts[i];

        l->options.state->progress.counts[i] = count > 0 && count < 0x1p63f ? (uint64_t)count : 0; /* others are none */
    }
}

const void *loading_blob(const struct loading *l, unsigned rank, size_t *n_bytes)
{
    const struct safetensors *header = &l->sources[RANKS].header;
    const struct safetensors_tensor *tensor;
    char name[32];

    tensor_rank_name(name, sizeof(name), rank);
    tensor = l->sources[RANKS].file ? safetensors_find(header, name) : NULL;
    if (!tensor)
        return NULL;
    *n_bytes = tensor->n_bytes;
    return l->blobs[tensor - header->tensors];
}

const struct description *loading_description(const struct loading *l)
{
    return &l->description;
}

const char *loading_path(const struct loading *l)
{
    return l->path;
}

const char *loading_note(const struct loading *l)
{
    return l->note;
}

const char *loading_why(struct loading *l)
{
    return l->why;
}
