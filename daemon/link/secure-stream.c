/* SPDX-License-Identifier: Apache-2.0 */

/* Opens and seals frames with libsodium's secretstream. secure-stream.h describes the protocol. */

#include "daemon/link/secure-stream.h"

#include <assert.h>
#include <endian.h>
#include <string.h>

#include "core/base/base.h"

/* The offsets of the parts of a hello. */
enum {
    AT_MAGIC = 0,
    MAGIC_BYTES = 8,
    AT_VERSION = 8,
    AT_NODE = 12,
    AT_NONCE = 16,
    AT_JOB = AT_NONCE + SECURE_STREAM_NONCE_BYTES,
};

_Static_assert(AT_JOB + SECURE_STREAM_JOB_BYTES == SECURE_STREAM_HELLO_BYTES, "the tag of the job ends the hello");
_Static_assert((int)SECURE_STREAM_JOB_BYTES == (int)SECURE_STREAM_KEY_BYTES, "hash_finish() writes the tag, too");

static const uint8_t magic[MAGIC_BYTES] = {'z', 'e', 'r', 'o', 'd', 'l', 'n', 'k'};

static void put_u32(uint8_t *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof(value));
}

static uint32_t get_u32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

/* ---- keys ---------------------------------------------------------------------------------------------- */

int secure_stream_key_init(struct secure_stream_key *key, const void *data, size_t n_bytes)
{
    if (sodium_init() < 0)
        return -ENOSYS;
    crypto_generichash(key->bytes, sizeof(key->bytes), data, n_bytes, NULL, 0);
    return 0;
}

void secure_stream_key_deinit(struct secure_stream_key *key)
{
    sodium_memzero(key, sizeof(*key));
}

static void hash_add(crypto_generichash_state *hash, const void *data, size_t n_bytes)
{
    int r = crypto_generichash_update(hash, data, n_bytes);

    assert(r == 0);
    (void)r;
}

static void hash_init(crypto_generichash_state *hash, const struct secure_stream_key *key, const char *purpose)
{
    int r = crypto_generichash_init(hash, key->bytes, sizeof(key->bytes), SECURE_STREAM_KEY_BYTES);

    assert(r == 0);
    (void)r;
    hash_add(hash, purpose, strlen(purpose) + 1);
}

static void hash_finish(crypto_generichash_state *hash, uint8_t *out)
{
    int r = crypto_generichash_final(hash, out, SECURE_STREAM_KEY_BYTES);

    assert(r == 0);
    (void)r;
    sodium_memzero(hash, sizeof(*hash));
}

/* Computes the tag of the job's name. Only a holder of the key can compute this tag. */
static void tag_job(uint8_t *tag, const struct secure_stream_key *key, const char *job)
{
    crypto_generichash_state hash;

    hash_init(&hash, key, "zerod link 1: job");
    hash_add(&hash, job, strlen(job));
    hash_finish(&hash, tag);
}

/* Derives the key of one direction. On both ends, the hello of the connecting end is hashed first. */
static void derive(uint8_t *out, const struct secure_stream *stream, const uint8_t *peer_hello, const char *direction)
{
    bool connects = stream->role == SECURE_STREAM_CONNECTS;
    crypto_generichash_state hash;

    hash_init(&hash, &stream->key, direction);
    hash_add(&hash, connects ? stream->hello : peer_hello, SECURE_STREAM_HELLO_BYTES);
    hash_add(&hash, connects ? peer_hello : stream->hello, SECURE_STREAM_HELLO_BYTES);
    hash_finish(&hash, out);
}

static void derive_both(struct secure_stream *stream, const uint8_t *peer_hello)
{
    static const char from_connecting[] = "zerod link 1: from the connecting end";
    static const char from_listening[] = "zerod link 1: from the listening end";
    bool connects = stream->role == SECURE_STREAM_CONNECTS;
    uint8_t push_key[crypto_secretstream_xchacha20poly1305_KEYBYTES];

    assert(!stream->has_keys); /* the shared key is wiped below */
    derive(push_key, stream, peer_hello, connects ? from_connecting : from_listening);
    derive(stream->pull_key, stream, peer_hello, connects ? from_listening : from_connecting);
    crypto_secretstream_xchacha20poly1305_init_push(&stream->push, stream->header, push_key);
    sodium_memzero(push_key, sizeof(push_key));
    secure_stream_key_deinit(&stream->key); /* no longer needed */
    stream->has_keys = true;
}

_Static_assert(SECURE_STREAM_KEY_BYTES == crypto_secretstream_xchacha20poly1305_KEYBYTES, "one hash is one key");

/* ---- life ---------------------------------------------------------------------------------------------- */

void secure_stream_init(struct secure_stream *stream, const struct secure_stream_options *options)
{
    *stream = (struct secure_stream){
        .role = options->role,
        .state = SECURE_STREAM_AWAITS_HELLO,
        .max_frame_bytes = options->max_frame_bytes,
        .key = *options->key,
    };
    memcpy(stream->hello + AT_MAGIC, magic, sizeof(magic));
    put_u32(stream->hello + AT_VERSION, SECURE_STREAM_VERSION);
    put_u32(stream->hello + AT_NODE, options->node);
    memcpy(stream->hello + AT_NONCE, options->nonce, SECURE_STREAM_NONCE_BYTES);
    tag_job(stream->hello + AT_JOB, &stream->key, options->job);
}

void secure_stream_deinit(struct secure_stream *stream)
{
    if (stream->plain)
        sodium_memzero(stream->plain, stream->plain_capacity);
    free(stream->plain);
    free(stream->input);
    sodium_memzero(stream, sizeof(*stream));
}

/* ---- in ------------------------------------------------------------------------------------------------ */

static size_t n_waiting(const struct secure_stream *stream)
{
    assert(stream->input_start <= stream->input_end);
    return stream->input_end - stream->input_start;
}

static const uint8_t *waiting(const struct secure_stream *stream)
{
    return stream->input + stream->input_start;
}

int secure_stream_feed(struct secure_stream *stream, const void *data, size_t n_bytes)
{
    size_t n_kept = n_waiting(stream), capacity = MAX(stream->input_capacity, (size_t)1024);
    uint8_t *input;

    if (stream->state == SECURE_STREAM_BROKEN || n_bytes == 0)
        return 0;
    if (stream->input_start > 0) {
        memmove(stream->input, waiting(stream), n_kept);
        stream->input_start = 0;
        stream->input_end = n_kept;
    }
    while (capacity < n_kept + n_bytes)
        capacity *= 2;
    if (capacity > stream->input_capacity) {
        input = realloc(stream->input, capacity);
        if (!input)
            return -ENOMEM;
        stream->input = input;
        stream->input_capacity = capacity;
    }
    assert(n_kept + n_bytes <= stream->input_capacity);
    memcpy(stream->input + n_kept, data, n_bytes);
    stream->input_end += n_bytes;
    return 0;
}

static int broken(struct secure_stream *stream, int failure)
{
    stream->state = SECURE_STREAM_BROKEN;
    stream->failure = failure;
    return failure;
}

/* Reads the peer's hello. Recognises a stranger at the first byte that differs, without waiting for more bytes. */
static int take_hello(struct secure_stream *stream)
{
    const uint8_t *hello = waiting(stream);

    if (n_waiting(stream) == 0)
        return SECURE_STREAM_AGAIN;
    if (memcmp(hello + AT_MAGIC, magic, MIN(n_waiting(stream), sizeof(magic))) != 0)
        return broken(stream, SECURE_STREAM_E_STRANGER);
    if (n_waiting(stream) < AT_NODE)
        return SECURE_STREAM_AGAIN;
    stream->peer_version = get_u32(hello + AT_VERSION);
    if (stream->peer_version != SECURE_STREAM_VERSION)
        return broken(stream, SECURE_STREAM_E_VERSION);
    if (n_waiting(stream) < SECURE_STREAM_HELLO_BYTES)
        return SECURE_STREAM_AGAIN;
    stream->peer_node = get_u32(hello + AT_NODE);
    derive_both(stream, hello);
    stream->input_start += SECURE_STREAM_HELLO_BYTES;
    stream->state = SECURE_STREAM_AWAITS_HEADER;
    return SECURE_STREAM_MET;
}

static int take_header(struct secure_stream *stream)
{
    int r;

    if (n_waiting(stream) < SECURE_STREAM_HEADER_BYTES)
        return SECURE_STREAM_AGAIN;
    r = crypto_secretstream_xchacha20poly1305_init_pull(&stream->pull, waiting(stream), stream->pull_key);
    sodium_memzero(stream->pull_key, sizeof(stream->pull_key));
    if (r != 0)
        return broken(stream, SECURE_STREAM_E_FORGED);
    stream->input_start += SECURE_STREAM_HEADER_BYTES;
    stream->state = SECURE_STREAM_OPEN;
    return 0;
}

static int reserve_plain(struct secure_stream *stream, size_t n_bytes)
{
    uint8_t *plain;

    n_bytes = MAX(n_bytes, (size_t)1); /* a frame may be empty */
    if (n_bytes <= stream->plain_capacity)
        return 0;
    plain = malloc(n_bytes);
    if (!plain)
        return -ENOMEM;
    if (stream->plain)
        sodium_memzero(stream->plain, stream->plain_capacity);
    free(stream->plain);
    stream->plain = plain;
    stream->plain_capacity = n_bytes;
    return 0;
}

static int take_frame(struct secure_stream *stream, struct secure_stream_frame *frame)
{
    const uint8_t *at = waiting(stream);
    size_t n_sealed, n_plain;
    uint8_t tag;

    if (n_waiting(stream) < SECURE_STREAM_LENGTH_BYTES)
        return SECURE_STREAM_AGAIN;
    n_sealed = get_u32(at);
    if (n_sealed < crypto_secretstream_xchacha20poly1305_ABYTES ||
        n_sealed - crypto_secretstream_xchacha20poly1305_ABYTES > stream->max_frame_bytes)
        return broken(stream, SECURE_STREAM_E_LENGTH);
    if (n_waiting(stream) < SECURE_STREAM_LENGTH_BYTES + n_sealed)
        return SECURE_STREAM_AGAIN;
    n_plain = n_sealed - crypto_secretstream_xchacha20poly1305_ABYTES;
    if (reserve_plain(stream, n_plain) < 0)
        return -ENOMEM;
    assert(n_plain <= stream->plain_capacity);
    if (crypto_secretstream_xchacha20poly1305_pull(&stream->pull, stream->plain, NULL, &tag,
                                                   at + SECURE_STREAM_LENGTH_BYTES, n_sealed, at,
                                                   SECURE_STREAM_LENGTH_BYTES) != 0)
        return broken(stream, SECURE_STREAM_E_FORGED);
    stream->input_start += SECURE_STREAM_LENGTH_BYTES + n_sealed;
    *frame = (struct secure_stream_frame){.data = stream->plain, .n_bytes = n_plain};
    return 0;
}

int secure_stream_next(struct secure_stream *stream, struct secure_stream_frame *frame)
{
    int r;

    switch (stream->state) {
    case SECURE_STREAM_AWAITS_HELLO:
        return take_hello(stream);
    case SECURE_STREAM_AWAITS_HEADER:
        r = take_header(stream);
        return r ? r : take_frame(stream, frame);
    case SECURE_STREAM_OPEN:
        return take_frame(stream, frame);
    case SECURE_STREAM_BROKEN:
        break;
    }
    return stream->failure;
}

/* ---- out ----------------------------------------------------------------------------------------------- */

size_t secure_stream_pushed_bytes(const struct secure_stream *stream, size_t n_bytes)
{
    return (stream->header_sent ? 0 : SECURE_STREAM_HEADER_BYTES) + SECURE_STREAM_OVERHEAD_BYTES + n_bytes;
}

void secure_stream_push(struct secure_stream *stream, const void *data, size_t n_bytes, uint8_t *out)
{
    assert(stream->has_keys);
    assert(n_bytes <= stream->max_frame_bytes);
    if (!stream->header_sent) {
        memcpy(out, stream->header, SECURE_STREAM_HEADER_BYTES);
        out += SECURE_STREAM_HEADER_BYTES;
        stream->header_sent = true;
    }
    put_u32(out, (uint32_t)(n_bytes + crypto_secretstream_xchacha20poly1305_ABYTES));
    crypto_secretstream_xchacha20poly1305_push(&stream->push, out + SECURE_STREAM_LENGTH_BYTES, NULL, data, n_bytes,
                                               out, SECURE_STREAM_LENGTH_BYTES, 0);
}
