/* SPDX-License-Identifier: Apache-2.0 */

/* Writing a file. The caller fills buffers in turn, and a thread writes the filled buffers. */

#include "daemon/checkpoint/stream.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include "core/base/base.h"
#include "daemon/checkpoint/disk.h"

/* Picked. With two buffers the caller waited for the disk, because some writes take twice as long as others. */
enum { N_BUFFERS = 4, BUFFER_BYTES = 4 << 20 };

_Static_assert((int)BUFFER_BYTES % (int)DISK_ALIGN_BYTES == 0, "each buffer is written at an aligned offset");

struct stream_buffers {
    uint8_t bytes[N_BUFFERS][BUFFER_BYTES]; /* aligned to pages, and so for the disk */
};

struct stream {
    const struct disk *disk;
    int fd;
    uint64_t n_bytes, n_put;
    struct hash_state *hash;
    struct stream_buffers *buffers; /* borrowed */
    unsigned filling;               /* the buffer that the caller fills */
    size_t n_filled;                /* bytes in that buffer */

    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned n_pending;   /* filled buffers that the thread still has to write: those before `filling` */
    size_t pending_bytes; /* bytes of the last pending buffer; earlier ones are full */
    uint64_t offset;      /* place in the file for the first pending buffer */
    bool over;
    int result; /* the first failure */
};

/* ---- the thread ---------------------------------------------------------------------------------------- */

/* Writes the first pending buffer. The caller holds the lock. */
static void write_first(struct stream *s)
{
    const uint8_t *buffer = s->buffers->bytes[(s->filling + N_BUFFERS - s->n_pending) % N_BUFFERS];
    size_t n_bytes = s->n_pending == 1 ? s->pending_bytes : BUFFER_BYTES;
    int r = s->result;

    assert(s->n_pending > 0);
    assert(s->offset % DISK_ALIGN_BYTES == 0);
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        r = s->disk->write(s->disk, s->fd, buffer, n_bytes, s->offset);
    pthread_mutex_lock(&s->lock);
    s->result = r;
    s->offset += n_bytes;
    s->n_pending--;
    pthread_cond_broadcast(&s->changed);
}

static void *write_until_over(void *userdata)
{
    struct stream *s = userdata;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->n_pending == 0 && !s->over)
            pthread_cond_wait(&s->changed, &s->lock);
        if (s->n_pending == 0)
            break;
        write_first(s);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Waits until at most n buffers are pending. Return: 0, or the first failure. */
static int wait_until_pending(struct stream *s, unsigned n)
{
    int r;

    pthread_mutex_lock(&s->lock);
    while (s->n_pending > n)
        pthread_cond_wait(&s->changed, &s->lock);
    r = s->result;
    pthread_mutex_unlock(&s->lock);
    return r;
}

/* Hands the filled buffer to the thread, and waits until the next buffer is free. */
static void hand_over(struct stream *s, size_t n_bytes)
{
    assert(n_bytes > 0 && n_bytes <= BUFFER_BYTES);
    pthread_mutex_lock(&s->lock);
    assert(s->n_pending < N_BUFFERS);                              /* the filled buffer is not pending yet */
    assert(s->n_pending == 0 || s->pending_bytes == BUFFER_BYTES); /* only the last one is shorter */
    s->n_pending++;
    s->pending_bytes = n_bytes;
    s->filling = (s->filling + 1) % N_BUFFERS;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    s->n_filled = 0;
    wait_until_pending(s, N_BUFFERS - 1);
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
        assert(s->n_pending == 0);
    }
    closep(&s->fd);
    hash_free(s->hash);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int start_writer(struct stream *s)
{
    int r;

    s->hash = hash_new(s->n_bytes);
    if (!s->hash)
        return -ENOMEM;
    r = -pthread_create(&s->thread, NULL, write_until_over, s);
    s->has_thread = r == 0;
    return r;
}

struct stream_buffers *stream_buffers_new(void)
{
    struct stream_buffers *buffers =
        mmap(NULL, sizeof(*buffers), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (buffers == MAP_FAILED)
        return NULL;
    (void)madvise(buffers, sizeof(*buffers), MADV_HUGEPAGE);
    return buffers;
}

void stream_buffers_free(struct stream_buffers *buffers)
{
    if (buffers)
        munmap(buffers, sizeof(*buffers));
}

int stream_open(struct stream **out, struct stream_buffers *buffers, const struct disk *disk, int dir, const char *name,
                uint64_t n_bytes)
{
    struct stream *s = calloc(1, sizeof(*s));
    int r;

    if (!s)
        return -ENOMEM;
    s->buffers = buffers;
    s->disk = disk;
    s->n_bytes = n_bytes;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->fd = disk->create(disk, dir, name);
    r = s->fd < 0 ? s->fd : start_writer(s);
    if (r < 0) {
        stream_free(s);
        return r;
    }
    *out = s;
    return 0;
}

static uint8_t *next_byte(const struct stream *s)
{
    return s->buffers->bytes[s->filling] + s->n_filled;
}

void *stream_place(struct stream *s, size_t n_bytes)
{
    return n_bytes <= BUFFER_BYTES - s->n_filled ? next_byte(s) : NULL;
}

void stream_placed(struct stream *s, size_t n_bytes)
{
    assert(n_bytes <= BUFFER_BYTES - s->n_filled);
    assert(n_bytes <= s->n_bytes - s->n_put); /* hash_new() got this size */
    hash_add(s->hash, next_byte(s), n_bytes);
    s->n_put += n_bytes;
    s->n_filled += n_bytes;
    if (s->n_filled == BUFFER_BYTES)
        hand_over(s, BUFFER_BYTES);
}

void stream_put(struct stream *s, const void *bytes, size_t n_bytes)
{
    const uint8_t *at = bytes;

    assert(n_bytes <= s->n_bytes - s->n_put); /* hash_new() got this size */
    hash_add(s->hash, bytes, n_bytes);
    s->n_put += n_bytes;
    while (n_bytes > 0) {
        size_t n = MIN(n_bytes, BUFFER_BYTES - s->n_filled);

        memcpy(next_byte(s), at, n);
        s->n_filled += n;
        if (s->n_filled == BUFFER_BYTES)
            hand_over(s, BUFFER_BYTES);
        at += n;
        n_bytes -= n;
    }
}

/* Writes the last bytes, padded to whole blocks. stream_close() truncates the file to its size. */
static void put_rest(struct stream *s)
{
    size_t n = round_up(s->n_filled, DISK_ALIGN_BYTES);

    memset(next_byte(s), 0, n - s->n_filled);
    if (n > 0)
        hand_over(s, n);
}

int stream_close(struct stream *s, struct file_hash *hash)
{
    int r;

    put_rest(s);
    r = wait_until_pending(s, 0);
    if (r == 0 && s->n_put != s->n_bytes)
        r = -EPIPE; /* the caller has put fewer bytes */
    if (r == 0)
        r = s->disk->truncate(s->disk, s->fd, s->n_bytes);
    if (r == 0)
        r = s->disk->sync(s->disk, s->fd);
    if (r == 0)
        hash_end(steal_ptr(s->hash), hash);
    stream_free(s);
    return r;
}
