/* SPDX-License-Identifier: Apache-2.0 */

/* Writing a checkpoint (write.h): bytes, the order of calls, and what is removed afterwards. */

#include "daemon/checkpoint/write.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/checkpoint/folder.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"
#include "core/layout/layout.h"
#include "daemon/checkpoint/contents.h"
#include "daemon/checkpoint/disk.h"
#include "daemon/checkpoint/stream.h"
#include "daemon/memory/snapshot.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"

enum { NAME_BYTES = 64 };

_Static_assert((int)NAME_BYTES >= (int)FOLDER_NAME_BYTES + (int)sizeof("..0123456789abcdef.writing"),
               "a hidden name has room for a checkpoint's name and the token");

struct writing {
    struct checkpoint_order *order;
    const struct layout *layout;
    int dir, folder; /* descriptors; -1: not open */
    char name[FOLDER_NAME_BYTES], hidden[NAME_BYTES];
    bool published; /* the folder has its final name; the hidden name no longer belongs to this save */
    struct contents contents;
    struct stream_buffers *buffers;
    const char *at;                /* the file that is being written, for messages */
    float values[CHUNK_ELEMS];     /* a chunk in the state's type */
    float widened[CHUNK_ELEMS];    /* a chunk of 8-bit moments or 24-bit masters, in fp32 */
    uint16_t rounded[CHUNK_ELEMS]; /* a chunk in 16 bits */
    int8_t lower[CHUNK_ELEMS];
};

void checkpoint_order_deinit(struct checkpoint_order *order)
{
    for (size_t i = 0; i < order->n_blobs; i++)
        free(order->blobs[i].data);
    free(order->blobs);
    free(order->counts);
    free(order->replaced_run);
    description_deinit(&order->description);
}

static bool is_sharded(const struct writing *w)
{
    return w->order->node >= 0;
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

static void put_bytes(struct writing *w, struct stream *stream, const void *bytes, size_t n_bytes)
{
    if (w->order->cancelled)
        return; /* stream_close() notices that bytes are missing */
    stream_put(stream, bytes, n_bytes);
    atomic_fetch_add_explicit(&w->order->n_bytes_done, n_bytes, memory_order_relaxed);
}

/* Return: true if the file's type differs from the state's. */
static bool is_converted(const struct writing *w, const struct contents_tensor *tensor)
{
    return tensor->source != FROM_STATE ||
           (tensor->array < SNAPSHOT_WEIGHTS &&
            dtype_is_grouped(state_dtype(w->order->state, (enum state_kind)tensor->array)));
}

/*
 * Reads a chunk. Return: its elements in the file's type. 24-bit masters become fp32, and 8-bit moments bf16. In stage
 * 3 masters are rounded to 16-bit weights. last: this is the tensor's last read of this chunk.
 */
static const void *read_converted(struct writing *w, const struct contents_tensor *tensor, uint32_t chunk, bool last)
{
    const struct kernels *kernels = w->order->kernels;
    struct snapshot *snapshot = w->order->snapshot;
    size_t n = w->layout->chunks[chunk].n_elems;
    bool not_again = last && !tensor->comes_again;

    if (tensor->source == FROM_MASTER24) {
        snapshot_read(snapshot, chunk, SNAPSHOT_WEIGHTS, w->rounded, not_again);
        snapshot_read(snapshot, chunk, SNAPSHOT_LOWER, w->lower, last);
        master24_to_f32(w->widened, (struct master24){.weights = w->rounded, .lower = w->lower}, n);
        return w->widened;
    }
    snapshot_read(snapshot, chunk, tensor->array, w->values, not_again);
    if (tensor->source == FROM_ROUNDED_MASTER) {
        kernels->convert_from_f32(w->rounded, w->values, w->layout->params[tensor->index].dtype, n);
        return w->rounded;
    }
    kernels->convert_to_f32(w->widened, w->values, state_dtype(w->order->state, (enum state_kind)tensor->array), n);
    kernels->convert_from_f32(w->rounded, w->widened, DTYPE_BF16, n); /* exact; see moment_dtype() in contents.c */
    return w->rounded;
}

static size_t file_elem_bytes(const struct writing *w, const struct contents_tensor *tensor)
{
    if (tensor->source == FROM_MASTER24)
        return sizeof(float);
    return is_converted(w, tensor) ? sizeof(uint16_t) : snapshot_bytes(w->order->state, tensor->array, 1);
}

/*
 * Writes elements [first, end) of a chunk. If they are the whole chunk, are not converted, and fit into the stream's
 * buffer in one piece, they are read straight into that buffer.
 */
static void put_chunk(struct writing *w, struct stream *stream, const struct contents_tensor *tensor, uint32_t chunk,
                      size_t first, size_t end)
{
    size_t n = w->layout->chunks[chunk].n_elems;
    bool converted = is_converted(w, tensor), whole = end - first == n, last = end == n;
    size_t elem_bytes = file_elem_bytes(w, tensor), n_bytes = (end - first) * elem_bytes;
    void *place = converted || !whole ? NULL : stream_place(stream, n_bytes);
    const uint8_t *values = (const void *)w->values;

    assert(n <= CHUNK_ELEMS);
    assert(first < end);
    assert(end <= n);
    if (converted)
        values = read_converted(w, tensor, chunk, last);
    else
        snapshot_read(w->order->snapshot, chunk, tensor->array, place ? place : w->values,
                      last && !tensor->comes_again);
    if (place)
        stream_placed(stream, n_bytes);
    else
        stream_put(stream, values + first * elem_bytes, n_bytes);
    atomic_fetch_add_explicit(&w->order->n_bytes_done, n_bytes, memory_order_relaxed);
}

static void put_array(struct writing *w, struct stream *stream, const struct contents_tensor *tensor)
{
    const struct layout_param *p = &w->layout->params[tensor->index];

    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks && !w->order->cancelled; c++) {
        const struct layout_chunk *chunk = &w->layout->chunks[c];
        uint64_t first = MAX(tensor->first_elem, chunk->start_elem);
        uint64_t end = MIN(tensor->end_elem, chunk->start_elem + chunk->n_elems);

        if (first < end)
            put_chunk(w, stream, tensor, c, first - chunk->start_elem, end - chunk->start_elem);
    }
}

static void put_tensor(struct writing *w, struct stream *stream, const struct contents_tensor *tensor)
{
    const struct layout_param *p = &w->layout->params[tensor->index];
    const struct checkpoint_blob *blob = &w->order->blobs[tensor->index];
    float count;

    assert(tensor->index < (tensor->source == FROM_BLOB ? w->order->n_blobs : w->layout->n_params));
    switch (tensor->source) {
    case FROM_STATE:
    case FROM_ROUNDED_MASTER:
    case FROM_MASTER24:
        put_array(w, stream, tensor);
        break;
    case FROM_FROZEN:
        put_bytes(w, stream, state_frozen(w->order->state, tensor->index) + tensor->first_elem * dtype_size(p->dtype),
                  (tensor->end_elem - tensor->first_elem) * dtype_size(p->dtype));
        break;
    case FROM_COUNT:
        count = (float)w->order->counts[tensor->index]; /* fp32, as in torch */
        put_bytes(w, stream, &count, sizeof(count));
        break;
    case FROM_BLOB:
        put_bytes(w, stream, blob->data, blob->n_bytes);
        break;
    }
}

/* Writes a file of tensors. Frees the header. Return: 0 or -errno. */
static int write_tensors(struct writing *w, struct contents_file *file, uint8_t *header, size_t n_header)
{
    _cleanup_free_ uint8_t *header_bytes = header;
    struct description_file *described = description_add_file(&w->order->description);
    struct stream *stream;
    int r;

    if (!described || !(described->name = strdup(file->name)))
        return -ENOMEM;
    described->n_bytes = file->header.file_bytes;
    r = stream_open(&stream, w->buffers, w->order->disk, w->folder, file->name, file->header.file_bytes);
    if (r < 0)
        return r;
    put_bytes(w, stream, header_bytes, n_header);
    for (size_t i = 0; i < file->header.n; i++)
        put_tensor(w, stream, &file->tensors[i]);
    return stream_close(stream, &described->hash);
}

/* Writes the description. name: the name of its file, which differs between the whole and a node's part. */
static int write_description(struct writing *w, const char *name)
{
    _cleanup_free_ char *text = description_print(&w->order->description, w->layout);
    struct file_hash unused = {0};
    struct stream *stream;
    int r = text ? 0 : -ENOMEM;

    w->at = name;
    if (r == 0)
        r = stream_open(&stream, w->buffers, w->order->disk, w->folder, name, strlen(text));
    if (r == 0) {
        stream_put(stream, text, strlen(text));
        r = stream_close(stream, &unused);
    }
    file_hash_deinit(&unused);
    return r;
}

/* ---- folders ------------------------------------------------------------------------------------------- */

/*
 * Removes a checkpoint. First renames it and syncs the new name, so that a folder with a checkpoint's name is never
 * incomplete, not even after a power loss.
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

/* Return: true if an earlier writer has left the folder behind. */
static bool is_left_over(const struct writing *w, const char *name)
{
    char step_name[FOLDER_NAME_BYTES];
    const char *end = strrchr(name, '.');
    uint64_t step;

    if (*name != '.' || end == name || (strcmp(end, ".writing") != 0 && strcmp(end, ".removed") != 0) ||
        (is_sharded(w) && strcmp(name, w->hidden) == 0)) /* another node may already write into this folder */
        return false;
    snprintf(step_name, sizeof(step_name), "%.*s", (int)strcspn(name + 1, "."), name + 1);
    return folder_parse_name(step_name, &step);
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
        if (!is_left_over(w, entry->d_name))
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

/*
 * Removes the oldest checkpoints beyond the limit. Incomplete checkpoints do not count, and stay. The checkpoint
 * that was just written stays, even if the folder has newer ones, because the job may have resumed from an older
 * checkpoint.
 */
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

int checkpoint_make_dir(const struct disk *disk, const char *dir)
{
    int made = disk->make_folder(disk, AT_FDCWD, dir), r;
    _cleanup_free_ char *copy = strdup(dir);
    _cleanup_close_ int parent = -1;

    if (made < 0 && made != -EEXIST)
        return made;
    if (!copy)
        return -ENOMEM;
    parent = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    r = parent < 0 ? -errno : disk->sync(disk, parent);
    return made == 0 ? r : 0;
}

/* Opens the folder of the checkpoints. */
static int open_dir(struct writing *w)
{
    const struct checkpoint_order *order = w->order;

    assert(w->dir < 0);
    folder_name(w->name, order->description.step);
    if (is_sharded(w))
        snprintf(w->hidden, sizeof(w->hidden), ".%s.%016" PRIx64 ".writing", w->name, order->token);
    else
        snprintf(w->hidden, sizeof(w->hidden), ".%s.writing", w->name);
    w->at = order->dir;
    w->dir = open(order->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return w->dir < 0 ? -errno : 0;
}

/* Makes the folder with the hidden name, and opens it. With several nodes, another node may already have made it. */
static int make_hidden(struct writing *w)
{
    const struct disk *disk = w->order->disk;
    int r = disk->make_folder(disk, w->dir, w->hidden);

    assert(w->folder < 0);
    w->at = w->hidden;
    if (r < 0 && (r != -EEXIST || !is_sharded(w)))
        return r;
    w->folder = disk->open_folder(disk, w->dir, w->hidden);
    return MIN(w->folder, 0);
}

static int begin_checkpoint(struct writing *w)
{
    int r;

    w->at = w->order->dir;
    r = checkpoint_make_dir(w->order->disk, w->order->dir);
    if (r == 0)
        r = open_dir(w);
    if (r < 0)
        return r;
    if (w->order->node <= 0)
        remove_left_over(w);
    return make_hidden(w);
}

static int write_file(struct writing *w, struct contents_file *file)
{
    uint8_t *header;
    size_t n_header;
    int r;

    w->at = file->name;
    r = safetensors_header(&file->header, &header, &n_header);
    if (r != 0)
        return r;
    w->order->n_bytes += n_header;
    return write_tensors(w, file, header, n_header);
}

static int write_files(struct writing *w)
{
    int r = 0;

    for (size_t i = 0; i < CONTENTS_FILES; i++)
        for (size_t t = 0; t < w->contents.files[i].header.n; t++)
            w->order->n_bytes += w->contents.files[i].header.tensors[t].n_bytes;
    for (size_t i = 0; r == 0 && i < CONTENTS_FILES; i++)
        if (w->contents.files[i].header.n > 0)
            r = write_file(w, &w->contents.files[i]);
    return r;
}

/* Notes the run of the replaced checkpoint, which has the hidden name now. */
static void note_replaced(struct writing *w)
{
    const char *run = w->order->description.run;
    char why[FOLDER_WHY_BYTES];
    struct description d;
    _cleanup_close_ int folder = folder_open(w->dir, w->hidden, &d, why, sizeof(why));

    if (folder < 0)
        return;
    if (w->order->follows_another || strcmp(d.run ? d.run : "", run ? run : "") != 0) {
        struct strbuf printable = {0};

        strbuf_add_foreign(&printable, d.run ? d.run : "");
        w->order->replaced_run = strdup(strbuf_text(&printable));
        strbuf_deinit(&printable);
    }
    description_deinit(&d);
}

/*
 * Gives the checkpoint its name, after all of it is on the disk. An existing checkpoint of that name gets the hidden
 * name. It is removed after the names are synced; if that fails, the next save removes it.
 */
static int publish_folder(struct writing *w)
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
    if (r == 0 && replaces) {
        note_replaced(w);
        (void)disk->remove_folder(disk, w->dir, w->hidden);
    }
    return r;
}

static void say_on_disk(const struct writing *w)
{
    if (w->order->on_disk)
        w->order->on_disk(w->order->userdata);
}

static int finish_checkpoint(struct writing *w)
{
    int r = write_description(w, CHECKPOINT_DESCRIPTION);

    if (r == 0)
        r = publish_folder(w);
    if (r < 0)
        return r;
    say_on_disk(w);
    remove_old(w);
    return 0;
}

/* Writes this node's part of the description, from which node 0 learns this node's files. */
static int finish_part(struct writing *w)
{
    char name[NAME_BYTES];
    int r;

    folder_part_name(name, (unsigned)w->order->node);
    r = write_description(w, name);
    w->at = w->hidden;
    if (r == 0)
        r = w->order->disk->sync(w->order->disk, w->folder);
    if (r == 0)
        say_on_disk(w);
    return r;
}

static void explain_failure(const struct writing *w, int r, char *why, size_t why_size)
{
    if (r == SAFETENSORS_E_DUPLICATE)
        snprintf(why, why_size, "%s: two parameters have the same name in UTF-8, or one has the name __metadata__",
                 w->at);
    else if (r == SAFETENSORS_E_TOO_LARGE)
        snprintf(why, why_size, "%s: it has more tensors than a safetensors file can have", w->at);
    else
        snprintf(why, why_size, "%s: %s", w->at, strerror(-r));
}

static struct writing *writing_new(struct checkpoint_order *order)
{
    struct writing *w = calloc(1, sizeof(*w));

    if (!w)
        return NULL;
    w->buffers = stream_buffers_new();
    if (!w->buffers) {
        free(w);
        return NULL;
    }
    w->order = order;
    w->layout = order->state->layout;
    w->dir = w->folder = -1;
    return w;
}

static void writing_free(struct writing *w)
{
    contents_deinit(&w->contents);
    stream_buffers_free(w->buffers);
    closep(&w->folder);
    closep(&w->dir);
    free(w);
}

int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size)
{
    struct writing *w = writing_new(order);
    int r;

    assert(order->description.n_files == 0); /* write_tensors() adds the files */
    if (!w) {
        snapshot_give_up(order->snapshot);
        snprintf(why, why_size, "no memory");
        return -ENOMEM;
    }
    w->at = w->contents.files[0].name;
    r = contents_plan(&w->contents, order);
    if (r == 0)
        r = begin_checkpoint(w);
    if (r == 0)
        r = write_files(w);
    snapshot_give_up(order->snapshot); /* no more reads follow */
    if (r == 0)
        r = is_sharded(w) ? finish_part(w) : finish_checkpoint(w);
    if (r != 0 && order->cancelled)
        r = -ECANCELED;
    if (r != 0 && r != -ECANCELED)
        explain_failure(w, r, why, why_size);
    if (r != 0 && w->folder >= 0 && !w->published && !is_sharded(w)) /* several nodes: node 0's next save */
        (void)order->disk->remove_folder(order->disk, w->dir, w->hidden);
    writing_free(w);
    return r > 0 ? -EINVAL : r;
}

/* ---- several nodes: node 0 puts the parts together ------------------------------------------------------------ */

/* Moves the files of a node's part into the whole description. Return: 0, or -errno with a message in why. */
static int merge_part(struct writing *w, unsigned node, char *why, size_t why_size)
{
    struct description *whole = &w->order->description, part;
    char name[NAME_BYTES], what[FOLDER_WHY_BYTES];
    int r;

    folder_part_name(name, node);
    r = folder_open_part(w->folder, name, &part, what, sizeof(what));
    if (r < 0) {
        snprintf(why, why_size,
                 "node %u has written its part, but not where this node looks: all nodes must see one folder there "
                 "(%s/%s)",
                 node, w->hidden, what);
        return r;
    }
    for (size_t i = 0; r == 0 && i < part.n_files; i++) {
        struct description_file *file = description_add_file(whole);

        if (file)
            *file = part.files[i];
        else
            r = -ENOMEM;
        part.files[i] = file ? (struct description_file){0} : part.files[i];
    }
    description_deinit(&part);
    if (r < 0)
        snprintf(why, why_size, "no memory");
    return r;
}

int checkpoint_publish(struct checkpoint_order *order, char *why, size_t why_size)
{
    struct writing *w = writing_new(order);
    int r = w ? open_dir(w) : -ENOMEM;

    assert(order->node == 0);
    *why = '\0';
    if (r == 0) {
        w->at = w->hidden;
        w->folder = order->disk->open_folder(order->disk, w->dir, w->hidden);
        r = MIN(w->folder, 0);
    }
    description_drop_files(&order->description); /* this node's files, which are also in its part */
    for (unsigned node = 0; r == 0 && node < order->description.n_nodes; node++)
        r = merge_part(w, node, why, why_size);
    if (r == 0)
        r = finish_checkpoint(w);
    if (r < 0 && !w)
        snprintf(why, why_size, "no memory");
    else if (r < 0 && !*why)
        explain_failure(w, r, why, why_size);
    if (w)
        writing_free(w);
    return r;
}
