/* SPDX-License-Identifier: Apache-2.0 */

/* A file that is being written: two buffers, and the thread that writes one while the other fills. */

#include "daemon/checkpoint/stream.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "core/base/base.h"
#include "daemon/checkpoint/disk.h"

enum { BUFFER_BYTES = 8 << 20 }; /* measured: docs/benchmarks.md */

struct stream {
    const struct disk *disk;
    int fd;
    uint64_t n_bytes, n_put;
    struct hash_state *hash;
    uint8_t *buffers[2];
    size_t buffer_bytes; /* of each */
    unsigned filling;    /* which of them */
    size_t n_filled;

    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const uint8_t *pending; /* the thread is to write this; NULL: nothing */
    size_t n_pending;
    uint64_t offset; /* where */
    bool over;
    int result; /* the first failure */
};

/* ---- the thread ---------------------------------------------------------------------------------------- */

static void *run(void *userdata)
{
    struct stream *s = userdata;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        int r;

        while (!s->pending && !s->over)
            pthread_cond_wait(&s->changed, &s->lock);
        if (!s->pending)
            break;
        r = s->result;
        pthread_mutex_unlock(&s->lock);
        if (r == 0)
            r = s->disk->write(s->disk, s->fd, s->pending, s->n_pending, s->offset);
        pthread_mutex_lock(&s->lock);
        s->result = r;
        s->offset += s->n_pending;
        s->pending = NULL;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Return: 0, or the first failure. */
static int wait_until_written(struct stream *s)
{
    int r;

    pthread_mutex_lock(&s->lock);
    while (s->pending)
        pthread_cond_wait(&s->changed, &s->lock);
    r = s->result;
    pthread_mutex_unlock(&s->lock);
    return r;
}

/* The buffer that was filled is written; the other one is filled next. */
static void hand_over(struct stream *s, size_t n_bytes)
{
    wait_until_written(s);
    pthread_mutex_lock(&s->lock);
    s->pending = s->buffers[s->filling];
    s->n_pending = n_bytes;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    s->filling = 1 - s->filling;
    s->n_filled = 0;
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static void stream_free(struct stream *s)
{
    if (s->has_thread) {
        pthread_mutex_lock(&s->lock);
        s->over = true;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    closep(&s->fd);
    hash_free(s->hash);
    free(s->buffers[0]);
    free(s->buffers[1]);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int start(struct stream *s)
{
    int r;

    s->hash = hash_new(s->n_bytes);
    s->buffer_bytes = round_up(MAX(MIN(s->n_bytes, (uint64_t)BUFFER_BYTES), (uint64_t)1), DISK_ALIGN_BYTES);
    if (!s->hash || posix_memalign((void **)&s->buffers[0], DISK_ALIGN_BYTES, s->buffer_bytes) != 0 ||
        posix_memalign((void **)&s->buffers[1], DISK_ALIGN_BYTES, s->buffer_bytes) != 0)
        return -ENOMEM;
    r = -pthread_create(&s->thread, NULL, run, s);
    s->has_thread = r == 0;
    return r;
}

int stream_open(struct stream **out, const struct disk *disk, int dir, const char *name, uint64_t n_bytes)
{
    struct stream *s = calloc(1, sizeof(*s));
    int r;

    if (!s)
        return -ENOMEM;
    s->disk = disk;
    s->n_bytes = n_bytes;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->fd = disk->create(disk, dir, name);
    r = s->fd < 0 ? s->fd : start(s);
    if (r < 0) {
        stream_free(s);
        return r;
    }
    *out = s;
    return 0;
}

void *stream_place(struct stream *s, size_t n_bytes)
{
    return n_bytes <= BUFFER_BYTES - s->n_filled ? s->buffers[s->filling] + s->n_filled : NULL;
}

void stream_placed(struct stream *s, size_t n_bytes)
{
    hash_add(s->hash, s->buffers[s->filling] + s->n_filled, n_bytes);
    s->n_put += n_bytes;
    s->n_filled += n_bytes;
    if (s->n_filled == BUFFER_BYTES)
        hand_over(s, BUFFER_BYTES);
}

void stream_put(struct stream *s, const void *bytes, size_t n_bytes)
{
    const uint8_t *at = bytes;

    hash_add(s->hash, bytes, n_bytes);
    s->n_put += n_bytes;
    while (n_bytes > 0) {
        size_t n = MIN(n_bytes, s->buffer_bytes - s->n_filled);

        memcpy(s->buffers[s->filling] + s->n_filled, at, n);
        s->n_filled += n;
        if (s->n_filled == s->buffer_bytes)
            hand_over(s, s->buffer_bytes);
        at += n;
        n_bytes -= n;
    }
}

/* The last piece is written as whole blocks, and cut. */
static void put_rest(struct stream *s)
{
    size_t n = round_up(s->n_filled, DISK_ALIGN_BYTES);

    memset(s->buffers[s->filling] + s->n_filled, 0, n - s->n_filled);
    if (n > 0)
        hand_over(s, n);
}

int stream_close(struct stream *s, struct file_hash *hash)
{
    int r;

    put_rest(s);
    r = wait_until_written(s);
    if (r == 0 && s->n_put != s->n_bytes)
        r = -EPIPE; /* a caller that gave up */
    if (r == 0)
        r = s->disk->truncate(s->disk, s->fd, s->n_bytes);
    if (r == 0)
        r = s->disk->sync(s->disk, s->fd);
    if (r == 0)
        hash_end(steal_ptr(s->hash), hash);
    stream_free(s);
    return r;
}
