/* SPDX-License-Identifier: Apache-2.0 */

/* Loading a checkpoint (load.h). */

#include "daemon/checkpoint/load.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/blob.h"
#include "core/base/failpoint.h"
#include "core/checkpoint/box.h"
#include "core/checkpoint/folder.h"
#include "core/checkpoint/sources.h"
#include "core/checkpoint/tensors.h"
#include "core/layout/layout.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/groups.h"
#include "daemon/checkpoint/state-targets.h"
#include "daemon/memory/state.h"
#include "kernels/convert.h"

enum {
    PIECE_BLOCKS = 8, /* blocks of a MiB in a piece; picked so that all workers have pieces */
};

/* The destination of a tensor. This node keeps bytes [from, to) of the tensor's file; from == to if it keeps none. */
struct place {
    bool known; /* the job has such a tensor */
    uint8_t *at;                  /* the array */
    uint64_t n_elems, first_elem; /* size of the array; the place in it for byte `from` */
    uint64_t from, to;
    enum dtype file_dtype, dtype; /* types of the file and of the array */
    bool is_lower;                /* the array has the lower bytes of masters (struct target) */
};

/* How a file of tensors is read. */
struct reading {
    const struct source *source;
    struct place *places; /* per tensor */
    uint32_t first_piece;
};

struct loading {
    struct loading_options options;
    char path[4096 + FOLDER_NAME_BYTES];
    struct description description;
    struct sources sources;
    struct reading *readings; /* per source */
    uint32_t n_pieces;
    struct state_targets targets;
    struct groups groups;
    struct blob *blobs; /* per rank of this node */
    char note[LOADING_WHY_BYTES];
    unsigned n_ignored, n_lacking;
    char first_lacking[LOADING_WHY_BYTES / 4];
    int failed; /* if a header cannot be read: -errno, which loading_read() returns */
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

/* Return: the bytes of the box that this node keeps, and their place. */
static struct place find_place(const struct safetensors_tensor *tensor, const struct target *target,
                               const struct box *box)
{
    uint64_t first = MAX(box->first_elem, target->first_elem);
    uint64_t end = MIN(box->first_elem + box->n_elems, target->end_elem);
    enum dtype file_dtype = (enum dtype)tensor->dtype, dtype = (enum dtype)target->dtype;
    size_t file_elem_bytes = dtype_size(file_dtype);

    if (first >= end)
        return (struct place){.known = true};
    assert(target->at); /* this node keeps elements, so it has a place for them */
    assert((end - box->first_elem) * file_elem_bytes <= tensor->n_bytes);
    return (struct place){.known = true,
                          .at = target->at,
                          .n_elems = target->end_elem - target->first_elem,
                          .first_elem = first - target->first_elem,
                          .from = tensor->offset_bytes + (first - box->first_elem) * file_elem_bytes,
                          .to = tensor->offset_bytes + (end - box->first_elem) * file_elem_bytes,
                          .file_dtype = file_dtype,
                          .dtype = dtype,
                          .is_lower = target->is_lower};
}

/* Finds the place of a tensor. A tensor that the job lacks gets no place. */
static int place_tensor(struct loading *l, struct reading *reading, size_t index, char *why)
{
    const struct safetensors_tensor *tensor = &reading->source->header.tensors[index];
    struct target *target;
    struct box box;
    int r = targets_place(&l->targets.all, reading->source, tensor, &target, &box, why, LOADING_WHY_BYTES);

    if (r == 0 && target)
        reading->places[index] = find_place(tensor, target, &box);
    return r;
}

static int check_found(struct loading *l, const struct target *target, char *why)
{
    bool may_lack = target->may_lack && !l->options.strict;

    if (target->n_found == 0 && may_lack && l->n_lacking++ == 0)
        snprintf(l->first_lacking, sizeof(l->first_lacking), "%s", target->name);
    return targets_check(&l->targets.all, target, may_lack, why, LOADING_WHY_BYTES);
}

/* Return: true if the box has the first element of the whole tensor. One box of each tensor has it. */
static bool is_first_box(const struct safetensors_tensor *tensor)
{
    static const uint64_t origin[LAYOUT_MAX_DIMS];

    return memcmp(tensor->starts, origin, sizeof(origin)) == 0;
}

/* Counts the tensors that the job lacks. Return: the first of them, or NULL. */
static const char *find_unknown(struct loading *l)
{
    const char *first = NULL;

    for (size_t s = 0; s < l->sources.n; s++) {
        const struct source *source = &l->sources.list[s];

        for (size_t i = 0; source->kind != TENSOR_RANKS && i < source->header.n; i++) {
            if (l->readings[s].places[i].known)
                continue;
            first = first ? first : source->header.tensors[i].name;
            l->n_ignored += is_first_box(&source->header.tensors[i]);
        }
    }
    return first;
}

static void note_ignored(struct loading *l, const char *first_ignored)
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

static int place_tensors(struct loading *l, char *why)
{
    const char *unknown;
    int r = 0;

    if (state_targets_init(&l->targets, l->options.state, l->options.optimizer) < 0)
        return fail(why, -ENOMEM, "no memory");
    for (size_t s = 0; s < l->sources.n; s++)
        for (size_t i = 0; r == 0 && i < l->sources.list[s].header.n; i++)
            r = place_tensor(l, &l->readings[s], i, why);
    for (size_t i = 0; r == 0 && i < l->targets.all.n; i++)
        r = check_found(l, &l->targets.all.list[i], why);
    if (r < 0)
        return r;
    unknown = find_unknown(l);
    if (unknown && l->options.strict)
        return targets_unknown(&l->targets.all, unknown, why, LOADING_WHY_BYTES);
    note_ignored(l, unknown);
    return 0;
}

/* Finds the bytes that a rank has stored, and allocates memory for them. Return: 0 or -ENOMEM. */
static int place_blob(struct loading *l, unsigned rank, struct blob *blob)
{
    char name[32];

    tensor_rank_name(name, sizeof(name), rank);
    for (size_t s = 0; s < l->sources.n; s++) {
        const struct source *source = &l->sources.list[s];
        const struct safetensors_tensor *tensor =
            source->kind == TENSOR_RANKS ? safetensors_find(&source->header, name) : NULL;

        if (!tensor)
            continue;
        *blob = (struct blob){.data = malloc(tensor->n_bytes + 1), .n_bytes = tensor->n_bytes};
        l->readings[s].places[tensor - source->header.tensors] =
            (struct place){.known = true,
                           .at = blob->data,
                           .from = tensor->offset_bytes,
                           .to = tensor->offset_bytes + tensor->n_bytes};
        return blob->data ? 0 : -ENOMEM;
    }
    return 0;
}

/* Allocates memory for the bytes that ranks have stored, because they are no part of the state. */
static int place_blobs(struct loading *l)
{
    const struct state *state = l->options.state;
    int r;

    l->blobs = calloc(state->n_ranks + 1, sizeof(*l->blobs));
    r = l->blobs ? 0 : -ENOMEM;
    for (unsigned i = 0; r == 0 && i < state->n_ranks; i++)
        r = place_blob(l, state->first_rank + i, &l->blobs[i]);
    return r;
}

/* ---- opening ------------------------------------------------------------------------------------------- */

/* Divides the files into pieces. Return: 0 or -ENOMEM. */
static int plan_reading(struct loading *l)
{
    l->readings = calloc(l->sources.n, sizeof(*l->readings));
    for (size_t s = 0; l->readings && s < l->sources.n; s++) {
        const struct source *source = &l->sources.list[s];
        struct place *places = calloc(source->header.n + 1, sizeof(*places));

        l->readings[s] = (struct reading){.source = source, .places = places, .first_piece = l->n_pieces};
        if (!places)
            return -ENOMEM;
        l->n_pieces += (uint32_t)div_round_up(source->file->hash.n_blocks, PIECE_BLOCKS);
        (void)fcntl(source->fd, F_SETFL, O_DIRECT); /* for read_past_cache(); not every file system can */
    }
    return l->readings ? 0 : -ENOMEM;
}

/* Checks the optimizer. Otherwise the message about a checkpoint of another optimizer would only name a moment. */
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

    if (r == 0)
        r = sources_open(&l->sources, folder, &l->description, why, LOADING_WHY_BYTES);
    if (r == -EBADMSG || r == -EIO) { /* loading_read() reports wrong bytes, even those of a header */
        snprintf(l->why, sizeof(l->why), "%s", why);
        l->failed = r;
        l->n_pieces = 1;
        return 0;
    }
    if (r == 0 && plan_reading(l) < 0)
        r = fail(why, -ENOMEM, "no memory");
    if (r == 0)
        r = check_optimizer(l, l->options.optimizer_name, why);
    if (r == 0)
        r = place_tensors(l, why);
    if (r == 0 && place_blobs(l) < 0)
        r = fail(why, -ENOMEM, "no memory");
    return r;
}

/* Opens the newest complete checkpoint before options.before_step. Return: as loading_open(). */
static int open_newest(struct loading *l, char *why)
{
    _cleanup_close_ int dir = open(l->options.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct folder_list list = {0};
    char name[FOLDER_NAME_BYTES];
    int r = dir < 0 ? -errno : folder_list(dir, &list);
    size_t i = 0;

    if (r == -ENOENT)
        return LOADING_NONE;
    if (r < 0)
        return fail(why, LOADING_NO_FOLDER, "%s: %s", l->options.dir, strerror(-r));
    while (i < list.n && (!list.entries[i].whole || list.entries[i].step >= l->options.before_step))
        i++;
    if (i < list.n) {
        folder_name(name, list.entries[i].step);
        snprintf(l->path, sizeof(l->path), "%s/%s", l->options.dir, name);
        r = open_checkpoint(l, dir, name, why);
    } else if (list.n == 0) {
        r = LOADING_NONE;
    } else {
        folder_name(name, list.entries[0].step);
        r = fail(why, -EIO, "no checkpoint of the %zu in %s is complete; %s: %s", list.n, l->options.dir, name,
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
    pthread_mutex_init(&l->lock, NULL);
    groups_init(&l->groups);
    snprintf(l->path, sizeof(l->path), "%s", options->path ? options->path : options->dir);
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
    for (unsigned i = 0; l->blobs && i < l->options.state->n_ranks; i++)
        blob_reset(&l->blobs[i]);
    for (size_t s = 0; l->readings && s < l->sources.n; s++)
        free(l->readings[s].places);
    free(l->readings);
    sources_deinit(&l->sources);
    free(l->blobs);
    groups_deinit(&l->groups);
    state_targets_deinit(&l->targets);
    description_deinit(&l->description);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

/* ---- reading ------------------------------------------------------------------------------------------- */

/*
 * Reads a block, which is a MiB or the rest of the file. Bypasses the page cache, because a checkpoint is read once,
 * and new pages cost more than a copy. buffer: a MiB, aligned to DISK_ALIGN_BYTES. Return: 0 or -errno.
 */
static int read_past_cache(const struct source *source, uint64_t block, uint8_t *buffer)
{
    size_t n = source_block_bytes(source, block);
    uint64_t at = block * HASH_BLOCK_BYTES;

    if (pread(source->fd, buffer, round_up(n, DISK_ALIGN_BYTES), (off_t)at) >= (ssize_t)n)
        return 0;
    (void)fcntl(source->fd, F_SETFL, 0); /* the file system needs another alignment, or the read failed */
    return folder_read(source->fd, buffer, n, at);
}

/* Converts bytes [from, to) of the file into their place. bytes: points to byte `from`. Return: 0 or -ENOMEM. */
static int convert_elems(struct loading *l, const struct place *place, uint64_t from, uint64_t to, const uint8_t *bytes)
{
    size_t file_elem_bytes = dtype_size(place->file_dtype), n = (to - from) / file_elem_bytes;
    uint64_t elem = place->first_elem + (from - place->from) / file_elem_bytes;

    assert(from >= place->from);
    assert(to <= place->to);
    assert(place->n_elems == 0 || elem + n <= place->n_elems); /* 0: bytes that a rank has stored */
    assert(place->file_dtype == place->dtype || (from - place->from) % file_elem_bytes == 0);
    if (place->is_lower) {
        master24_lower_from_f32((int8_t *)place->at + elem, (const float *)(const void *)bytes, n);
        return 0;
    }
    if (dtype_is_grouped(place->dtype))
        return groups_put(&l->groups,
                          &(struct groups_array){.at = place->at, .dtype = place->dtype, .n_elems = place->n_elems},
                          elem, n, bytes, place->file_dtype);
    if (place->file_dtype == place->dtype)
        memcpy(place->at + place->first_elem * file_elem_bytes + (from - place->from), bytes, to - from);
    else if (place->dtype == DTYPE_F32)
        convert_to_f32((float *)(void *)place->at + elem, bytes, place->file_dtype, n);
    else
        convert_from_f32((uint16_t *)(void *)place->at + elem, (const float *)(const void *)bytes, place->dtype, n);
    return 0;
}

/*
 * Copies bytes [at, at + n) of the file to the places of their tensors. bytes: these bytes, already verified, or NULL
 * to copy nothing. Return: 1 if some bytes have a place on this node; 0 if none has; or -ENOMEM.
 */
static int spread(struct loading *l, const struct reading *reading, const uint8_t *bytes, uint64_t at, size_t n)
{
    const struct safetensors *header = &reading->source->header;
    size_t first = safetensors_at(header, at);
    uint64_t end = at + n;
    int r = 0;

    for (size_t i = first < header->n ? first : 0; i < header->n; i++) {
        const struct place *place = &reading->places[i];
        uint64_t from = MAX(at, place->from), to = MIN(end, place->to);

        if (header->tensors[i].offset_bytes >= end)
            break;
        if (from >= to)
            continue;
        r = bytes ? convert_elems(l, place, from, to, bytes + (from - at)) : 0;
        if (r < 0)
            return r;
        r = 1;
    }
    return r;
}

/* Return: true if this node reads the block. A node that has all ranks reads every block, to find every wrong byte. If
 * there are several nodes, each reads only blocks with bytes that it keeps. */
static bool is_read_here(struct loading *l, const struct reading *reading, uint64_t block)
{
    const struct state *state = l->options.state;

    return state->n_ranks == state->layout->world_size ||
           spread(l, reading, NULL, block * HASH_BLOCK_BYTES, source_block_bytes(reading->source, block)) > 0;
}

static int load_block(struct loading *l, const struct reading *reading, uint64_t block, uint8_t *buffer)
{
    const struct source *source = reading->source;
    char why[LOADING_WHY_BYTES];
    int r = read_past_cache(source, block, buffer);

    r = source_check_block(source, block, buffer, r, why, sizeof(why));
    if (r == 0)
        r = spread(l, reading, buffer, block * HASH_BLOCK_BYTES, source_block_bytes(source, block));
    if (r >= 0)
        return 0;
    if (r == -ENOMEM)
        snprintf(why, sizeof(why), "no memory");
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

/*
 * Sets the elements that the checkpoint lacks to zero. They may have other values, if an earlier call read a part of a
 * newer checkpoint and then found a wrong byte.
 */
static void clear_lacking(const struct loading *l)
{
    for (size_t i = 0; i < l->targets.all.n; i++) {
        const struct target *target = &l->targets.all.list[i];

        assert(target->n_found > 0 || !target->is_lower); /* masters are never missing */
        if (target->n_found == 0 && target->first_elem < target->end_elem)
            memset(target->at, 0, dtype_bytes((enum dtype)target->dtype, target->end_elem - target->first_elem));
    }
}

int loading_read(struct loading *l, uint32_t piece)
{
    const struct reading *reading;
    _cleanup_free_ uint8_t *buffer = NULL;
    uint64_t first, end;
    int r = l->failed;

    if (r < 0)
        return r;
    assert(piece < l->n_pieces);
    (void)failpoint("load");
    if (piece == 0)
        clear_lacking(l);
    reading = &l->readings[l->sources.n - 1];
    while (piece < reading->first_piece)
        reading--;
    first = (uint64_t)(piece - reading->first_piece) * PIECE_BLOCKS;
    end = MIN(first + PIECE_BLOCKS, (uint64_t)reading->source->file->hash.n_blocks);
    if (posix_memalign((void **)&buffer, DISK_ALIGN_BYTES, HASH_BLOCK_BYTES) != 0)
        return -ENOMEM;
    for (uint64_t block = first; r == 0 && block < end; block++)
        if (is_read_here(l, reading, block))
            r = load_block(l, reading, block, buffer);
    return r;
}

/* ---- the end ------------------------------------------------------------------------------------------- */

void loading_finish(struct loading *l)
{
    struct state *state = l->options.state;

    for (uint32_t i = 0; i < state->layout->n_params; i++) {
        float count = l->targets.counts[i];

        state->progress.counts[i] = count > 0 && count < 0x1p63f ? (uint64_t)count : 0; /* else the count is invalid */
    }
}

const void *loading_blob(const struct loading *l, unsigned rank, size_t *n_bytes)
{
    const struct state *state = l->options.state;
    struct blob blob = {0};

    if (state_owns(state, rank))
        blob = l->blobs[rank - state->first_rank];
    if (blob.data)
        *n_bytes = blob.n_bytes;
    return blob.data;
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
