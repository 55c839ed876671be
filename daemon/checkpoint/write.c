/* SPDX-License-Identifier: Apache-2.0 */

/* Writing a checkpoint (write.h): which tensors go where, the order of calls, and what is removed afterwards. */

#include "daemon/checkpoint/write.h"

#include <dirent.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"
#include "core/layout/layout.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/stream.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

enum { NAME_BYTES = 64 };

/* Where the bytes of a tensor come from. */
enum source {
    FROM_STATE, /* an array of the snapshot */
    FROM_ROUNDED_MASTER,
    FROM_FROZEN,
    FROM_COUNT,
    FROM_BLOB,
};

struct tensor {
    enum source source;
    uint32_t index; /* of the parameter, or blob */
    enum snapshot_array array;
    bool comes_again; /* a later tensor has the same array */
};

/* A file of tensors, before it is written: the header, and the sources in the same order. */
struct file {
    const char *name;
    struct safetensors header;
    struct tensor *tensors; /* owned */
    size_t capacity;
};

struct writing {
    struct checkpoint_order *order;
    const struct layout *layout;
    int dir, folder; /* descriptors; -1: not open */
    char name[FOLDER_NAME_BYTES], hidden[NAME_BYTES];
    bool published; /* it has its name; what has the hidden one is no longer ours */
    struct file files[3];
    const char *at; /* the file that is being written, for texts */
    float values[CHUNK_ELEMS];
    uint16_t rounded[CHUNK_ELEMS];
};

void checkpoint_order_deinit(struct checkpoint_order *order)
{
    for (size_t i = 0; i < order->n_blobs; i++)
        free(order->blobs[i].data);
    free(order->blobs);
    free(order->counts);
    description_deinit(&order->description);
}

/* ---- which tensors ------------------------------------------------------------------------------------- */

static int add(struct file *file, const char *name, int dtype, const uint64_t *shape, uint32_t n_dims,
               struct tensor tensor)
{
    int r = name ? safetensors_add(&file->header, name, dtype, shape, n_dims) : -ENOMEM;

    if (r == 0 && file->header.n > file->capacity) {
        struct tensor *tensors = reallocarray(file->tensors, file->header.capacity, sizeof(*tensors));

        if (!tensors)
            return -ENOMEM;
        file->tensors = tensors;
        file->capacity = file->header.capacity;
    }
    if (r == 0)
        file->tensors[file->header.n - 1] = tensor;
    return r;
}

static int add_weights(const struct writing *w, struct file *file, uint32_t id)
{
    const struct layout_param *p = &w->layout->params[id];
    struct tensor tensor = {.source = FROM_STATE, .index = id, .array = SNAPSHOT_MASTER};

    if (!p->trainable) {
        tensor.source = FROM_FROZEN;
    } else if (p->dtype != DTYPE_F32 && w->order->state->stage == 3) {
        tensor.source = FROM_ROUNDED_MASTER;
        tensor.comes_again = tensor_is_of_model(p->name); /* else the master came before */
    } else if (p->dtype != DTYPE_F32) {
        tensor.array = SNAPSHOT_WEIGHTS;
    }
    return add(file, p->name, p->dtype, p->shape, p->n_dims, tensor);
}

/* of_model: of the model's parameters; else of what clients have declared for their own ends. */
static int add_all_weights(const struct writing *w, struct file *file, bool of_model)
{
    int r = 0;

    for (size_t size = sizeof(float); r == 0 && size >= sizeof(uint16_t); size /= 2) /* for their alignment */
        for (uint32_t i = 0; r == 0 && i < w->layout->n_params; i++)
            if (dtype_size(w->layout->params[i].dtype) == size &&
                tensor_is_of_model(w->layout->params[i].name) == of_model)
                r = add_weights(w, file, i);
    return r;
}

static int add_state(struct file *file, const struct layout_param *p, const char *key, struct tensor tensor)
{
    _cleanup_free_ char *name = tensor_state_name(p->name, key);

    if (tensor.source == FROM_COUNT)
        return add(file, name, DTYPE_F32, NULL, 0, tensor);
    return add(file, name, DTYPE_F32, p->shape, p->n_dims, tensor);
}

static int add_optimizer(const struct writing *w, struct file *file, enum optimizer optimizer)
{
    const struct state *state = w->order->state;
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < w->layout->n_params; i++) {
        const struct layout_param *p = &w->layout->params[i];
        bool again = state->stage == 3 && !tensor_is_of_model(p->name);

        if (!p->trainable)
            continue;
        if (state->buckets[p->bucket].exp_avg)
            r = add_state(file, p, tensor_moment_key(optimizer, false),
                          (struct tensor){FROM_STATE, i, SNAPSHOT_EXP_AVG});
        if (r == 0 && state->buckets[p->bucket].exp_avg_sq)
            r = add_state(file, p, tensor_moment_key(optimizer, true),
                          (struct tensor){FROM_STATE, i, SNAPSHOT_EXP_AVG_SQ});
        if (r == 0 && p->dtype != DTYPE_F32)
            r = add_state(file, p, TENSOR_MASTER, (struct tensor){FROM_STATE, i, SNAPSHOT_MASTER, again});
        if (r == 0)
            r = add_state(file, p, TENSOR_STEP, (struct tensor){FROM_COUNT, i, 0});
    }
    return r;
}

static int add_ranks(const struct writing *w, struct file *file)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < w->order->n_blobs; i++) {
        char name[32];

        tensor_rank_name(name, sizeof(name), w->order->blobs[i].rank);
        r = add(file, name, SAFETENSORS_U8, &(uint64_t){w->order->blobs[i].n_bytes}, 1,
                (struct tensor){.source = FROM_BLOB, .index = (uint32_t)i});
    }
    return r;
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

static void put(struct writing *w, struct stream *stream, const void *bytes, size_t n_bytes)
{
    if (w->order->cancelled)
        return; /* stream_close() notices that bytes are missing */
    stream_put(stream, bytes, n_bytes);
    atomic_fetch_add_explicit(&w->order->n_bytes_done, n_bytes, memory_order_relaxed);
}

/* Values go from the state straight into the stream, unless they are rounded or the place there is in two pieces. */
static void put_chunk(struct writing *w, struct stream *stream, const struct tensor *tensor, uint32_t chunk)
{
    const struct layout_param *p = &w->layout->params[tensor->index];
    size_t n = w->layout->chunks[chunk].n_elems;
    bool rounded = tensor->source == FROM_ROUNDED_MASTER;
    size_t n_bytes = n * (rounded || tensor->array == SNAPSHOT_WEIGHTS ? 2 : sizeof(float));
    void *place = rounded ? NULL : stream_place(stream, n_bytes);

    snapshot_read(w->order->snapshot, chunk, tensor->array, place ? place : w->values, !tensor->comes_again);
    if (rounded)
        w->order->kernels->convert_from_f32(w->rounded, w->values, p->dtype, n);
    if (place)
        stream_placed(stream, n_bytes);
    else
        stream_put(stream, rounded ? (const void *)w->rounded : w->values, n_bytes);
    atomic_fetch_add_explicit(&w->order->n_bytes_done, n_bytes, memory_order_relaxed);
}

static void put_array(struct writing *w, struct stream *stream, const struct tensor *tensor)
{
    const struct layout_param *p = &w->layout->params[tensor->index];

    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks && !w->order->cancelled; c++)
        put_chunk(w, stream, tensor, c);
}

static void put_tensor(struct writing *w, struct stream *stream, const struct tensor *tensor)
{
    const struct layout_param *p = &w->layout->params[tensor->index];
    const struct checkpoint_blob *blob = &w->order->blobs[tensor->index];
    float count;

    switch (tensor->source) {
    case FROM_STATE:
    case FROM_ROUNDED_MASTER:
        put_array(w, stream, tensor);
        break;
    case FROM_FROZEN:
        put(w, stream, state_frozen(w->order->state, tensor->index), p->n_elems * dtype_size(p->dtype));
        break;
    case FROM_COUNT:
        count = (float)w->order->counts[tensor->index]; /* as torch has it */
        put(w, stream, &count, sizeof(count));
        break;
    case FROM_BLOB:
        put(w, stream, blob->data, blob->n_bytes);
        break;
    }
}

/* Takes the header. */
static int write_tensors(struct writing *w, struct file *file, uint8_t *header, size_t n_header)
{
    _cleanup_free_ uint8_t *header_bytes = header;
    struct description_file *described = description_add_file(&w->order->description);
    struct stream *stream;
    int r;

    if (!described || !(described->name = strdup(file->name)))
        return -ENOMEM;
    described->n_bytes = file->header.file_bytes;
    r = stream_open(&stream, w->order->disk, w->folder, file->name, file->header.file_bytes);
    if (r < 0)
        return r;
    put(w, stream, header_bytes, n_header);
    for (size_t i = 0; i < file->header.n; i++)
        put_tensor(w, stream, &file->tensors[i]);
    return stream_close(stream, &described->hash);
}

static int write_description(struct writing *w)
{
    _cleanup_free_ char *text = description_print(&w->order->description, w->layout);
    struct file_hash unused = {0};
    struct stream *stream;
    int r = text ? 0 : -ENOMEM;

    if (r == 0)
        r = stream_open(&stream, w->order->disk, w->folder, CHECKPOINT_DESCRIPTION, strlen(text));
    if (r == 0) {
        stream_put(stream, text, strlen(text));
        r = stream_close(stream, &unused);
    }
    file_hash_deinit(&unused);
    return r;
}

/* ---- folders ------------------------------------------------------------------------------------------- */

/*
 * Removes, under another name, which is on the disk before the first file goes: nothing that has a checkpoint's name is
 * half of one, not even after a loss of power.
 */
static int remove_checkpoint(const struct writing *w, const char *name)
{
    const struct disk *disk = w->order->disk;
    char hidden[NAME_BYTES];
    int r;

    snprintf(hidden, sizeof(hidden), ".%s.removed", name);
    r = disk->rename(disk, w->dir, name, hidden);
    if (r == 0)
        r = disk->sync(disk, w->dir);
    return r < 0 ? r : disk->remove_folder(disk, w->dir, hidden);
}

/* Return: whether an earlier writer has left it behind. */
static bool is_left_over(const char *name)
{
    char middle[FOLDER_NAME_BYTES];
    const char *end = strrchr(name, '.');
    uint64_t step;

    if (*name != '.' || end == name || (strcmp(end, ".writing") != 0 && strcmp(end, ".removed") != 0))
        return false;
    snprintf(middle, sizeof(middle), "%.*s", (int)(end - name - 1), name + 1);
    return folder_parse_name(middle, &step);
}

/*
 * Removes folders that an earlier writer has left. Failures do not matter: the next save tries again. The names are
 * synced first, because the earlier writer may have died right after it renamed a checkpoint, which still has its old
 * name on the disk.
 */
static void remove_left_over(const struct writing *w)
{
    const struct disk *disk = w->order->disk;
    int fd = openat(w->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), synced = 1;
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *entry;

    while (stream && synced >= 0 && (entry = readdir(stream))) {
        if (!is_left_over(entry->d_name))
            continue;
        synced = synced == 0 ? 0 : disk->sync(disk, w->dir);
        if (synced == 0)
            (void)disk->remove_folder(disk, w->dir, entry->d_name);
    }
    if (stream)
        closedir(stream);
    else if (fd >= 0)
        close(fd);
}

/* Only whole ones count. The one that was just written stays: a job that went back to an older checkpoint has newer
 * ones in the folder. */
static void remove_old(const struct writing *w)
{
    struct folder_list list;
    unsigned n_whole = 1;

    if (w->order->save_total_limit == 0 || folder_list(w->dir, &list) < 0)
        return;
    for (size_t i = 0; i < list.n; i++) {
        char name[FOLDER_NAME_BYTES];

        if (!list.entries[i].whole || list.entries[i].step == w->order->description.step)
            continue;
        folder_name(name, list.entries[i].step);
        if (++n_whole > w->order->save_total_limit)
            (void)remove_checkpoint(w, name);
    }
    folder_list_deinit(&list);
}

/* ---- in order ------------------------------------------------------------------------------------------ */

/* Makes the folder of the checkpoints, if need be, and syncs its name. If it was there already, its parent need not be
 * a folder that we can open. */
static int make_dir(const struct checkpoint_order *order)
{
    const struct disk *disk = order->disk;
    int made = disk->make_folder(disk, AT_FDCWD, order->dir), r;
    _cleanup_free_ char *copy = strdup(order->dir);
    _cleanup_close_ int parent = -1;

    if (made < 0 && made != -EEXIST)
        return made;
    if (!copy)
        return -ENOMEM;
    parent = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    r = parent < 0 ? -errno : disk->sync(disk, parent);
    return made == 0 ? r : 0;
}

static int begin(struct writing *w)
{
    const struct checkpoint_order *order = w->order;
    int r;

    folder_name(w->name, order->description.step);
    snprintf(w->hidden, sizeof(w->hidden), ".%s.writing", w->name);
    w->at = order->dir;
    r = make_dir(order);
    if (r < 0)
        return r;
    w->dir = open(order->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (w->dir < 0)
        return -errno;
    remove_left_over(w);
    w->at = w->hidden;
    r = order->disk->make_folder(order->disk, w->dir, w->hidden);
    if (r < 0)
        return r;
    w->folder = order->disk->open_folder(order->disk, w->dir, w->hidden);
    return MIN(w->folder, 0);
}

static int write_files(struct writing *w)
{
    uint8_t *headers[ARRAY_SIZE(w->files)] = {NULL};
    size_t n_headers[ARRAY_SIZE(w->files)];
    int r = 0;

    for (size_t i = 0; r == 0 && i < ARRAY_SIZE(w->files); i++) {
        w->at = w->files[i].name;
        if (w->files[i].header.n > 0)
            r = safetensors_header(&w->files[i].header, &headers[i], &n_headers[i]);
        w->order->n_bytes += w->files[i].header.file_bytes;
    }
    for (size_t i = 0; i < ARRAY_SIZE(w->files); i++) {
        w->at = r == 0 ? w->files[i].name : w->at;
        if (r == 0 && headers[i])
            r = write_tensors(w, &w->files[i], headers[i], n_headers[i]);
        else
            free(headers[i]);
    }
    return r;
}

/*
 * All of it is on the disk: it gets its name. One that has the name already, of an earlier run, gets the hidden name
 * instead, and is removed when that is on the disk, now or before the next save.
 */
static int publish(struct writing *w)
{
    const struct disk *disk = w->order->disk;
    bool replaces = false;
    int r;

    w->at = w->hidden;
    r = disk->sync(disk, w->folder);
    w->at = w->name;
    if (r == 0)
        r = disk->rename(disk, w->dir, w->hidden, w->name);
    if (r == -EEXIST || r == -ENOTEMPTY) {
        replaces = true;
        r = disk->exchange(disk, w->dir, w->hidden, w->name);
    }
    w->published = r == 0;
    if (r == 0)
        r = disk->sync(disk, w->dir);
    if (r == 0 && replaces)
        (void)disk->remove_folder(disk, w->dir, w->hidden);
    return r;
}

static int write_all(struct writing *w)
{
    int r;

    r = begin(w);
    if (r == 0)
        r = write_files(w);
    snapshot_give_up(w->order->snapshot); /* it has been read; or nobody will */
    if (r == 0) {
        w->at = CHECKPOINT_DESCRIPTION;
        r = write_description(w);
    }
    return r == 0 ? publish(w) : r;
}

static void explain(const struct writing *w, int r, char *why, size_t why_size)
{
    if (r == SAFETENSORS_E_DUPLICATE)
        snprintf(why, why_size, "%s: two parameters have names that are one in UTF-8, or one has the name __metadata__",
                 w->at);
    else if (r == SAFETENSORS_E_TOO_LARGE)
        snprintf(why, why_size, "%s: it has more tensors than a safetensors file can have", w->at);
    else
        snprintf(why, why_size, "%s: %s", w->at, strerror(-r));
}

/* Return: 0, or as safetensors_add(). */
static int plan(struct writing *w, enum optimizer optimizer)
{
    int r = add_all_weights(w, &w->files[0], true);

    if (r == 0)
        r = add_optimizer(w, &w->files[1], optimizer);
    if (r == 0)
        r = add_all_weights(w, &w->files[1], false);
    return r == 0 ? add_ranks(w, &w->files[2]) : r;
}

static void writing_free(struct writing *w)
{
    for (size_t i = 0; i < ARRAY_SIZE(w->files); i++) {
        safetensors_deinit(&w->files[i].header);
        free(w->files[i].tensors);
    }
    closep(&w->folder);
    closep(&w->dir);
    free(w);
}

int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size)
{
    struct writing *w = calloc(1, sizeof(*w));
    int r;

    if (!w) {
        snapshot_give_up(order->snapshot);
        snprintf(why, why_size, "no memory");
        return -ENOMEM;
    }
    w->order = order;
    w->layout = order->state->layout;
    w->dir = w->folder = -1;
    w->files[0].name = w->at = CHECKPOINT_MODEL;
    w->files[1].name = CHECKPOINT_OPTIMIZER;
    w->files[2].name = CHECKPOINT_RANKS;
    r = plan(w, order->optimizer);
    if (r == 0)
        r = write_all(w);
    snapshot_give_up(order->snapshot);
    if (r != 0 && order->cancelled)
        r = -ECANCELED;
    if (r == 0) {
        remove_old(w);
    } else {
        if (r != -ECANCELED)
            explain(w, r, why, why_size);
        if (w->folder >= 0 && !w->published)
            (void)order->disk->remove_folder(order->disk, w->dir, w->hidden);
    }
    writing_free(w);
    return r > 0 ? -EINVAL : r;
}
