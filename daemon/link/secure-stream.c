/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/link/secure-stream.h"

#include <assert.h>
#include <endian.h>
#include <string.h>

#include "core/base/base.h"

/* Where the parts of a hello are. */
enum {
    AT_MAGIC = 0,
    MAGIC_BYTES = 8,
    AT_VERSION = 8,
    AT_NODE = 12,
    AT_NONCE = 16,
    AT_JOB = AT_NONCE + SEAL_NONCE_BYTES,
};

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

int seal_key_init(struct seal_key *key, const void *data, size_t n_bytes)
{
    if (sodium_init() < 0)
        return -ENOSYS;
    crypto_generichash(key->bytes, sizeof(key->bytes), data, n_bytes, NULL, 0);
    return 0;
}

void seal_key_deinit(struct seal_key *key)
{
    sodium_memzero(key, sizeof(*key));
}

static void hash_add(crypto_generichash_state *hash, const void *data, size_t n_bytes)
{
    int r = crypto_generichash_update(hash, data, n_bytes);

    assert(r == 0);
    (void)r;
}

static void hash_init(crypto_generichash_state *hash, const struct seal_key *key, const char *purpose)
{
    int r = crypto_generichash_init(hash, key->bytes, sizeof(key->bytes), SEAL_KEY_BYTES);

    assert(r == 0);
    (void)r;
    hash_add(hash, purpose, strlen(purpose) + 1);
}

static void hash_finish(crypto_generichash_state *hash, uint8_t *out)
{
    int r = crypto_generichash_final(hash, out, SEAL_KEY_BYTES);

    assert(r == 0);
    (void)r;
    sodium_memzero(hash, sizeof(*hash));
}

/* Which job a daemon serves, for those who hold the key; nothing for others. */
static void tag_job(uint8_t *tag, const struct seal_key *key, const char *job)
{
    crypto_generichash_state hash;

    hash_init(&hash, key, "zerod link 1: job");
    hash_add(&hash, job, strlen(job));
    hash_finish(&hash, tag);
}

/* One direction's key; the connecting end's hello comes first. */
static void derive(uint8_t *out, const struct seal *seal, const uint8_t *peer_hello, const char *direction)
{
    bool connects = seal->role == SEAL_CONNECTS;
    crypto_generichash_state hash;

    hash_init(&hash, &seal->key, direction);
    hash_add(&hash, connects ? seal->hello : peer_hello, SEAL_HELLO_BYTES);
    hash_add(&hash, connects ? peer_hello : seal->hello, SEAL_HELLO_BYTES);
    hash_finish(&hash, out);
}

static void derive_both(struct seal *seal, const uint8_t *peer_hello)
{
    static const char from_connecting[] = "zerod link 1: from the connecting end";
    static const char from_listening[] = "zerod link 1: from the listening end";
    bool connects = seal->role == SEAL_CONNECTS;
    uint8_t push_key[crypto_secretstream_xchacha20poly1305_KEYBYTES];

    derive(push_key, seal, peer_hello, connects ? from_connecting : from_listening);
    derive(seal->pull_key, seal, peer_hello, connects ? from_listening : from_connecting);
    crypto_secretstream_xchacha20poly1305_init_push(&seal->push, seal->header, push_key);
    sodium_memzero(push_key, sizeof(push_key));
    seal_key_deinit(&seal->key); /* it has done its part */
    seal->has_keys = true;
}

_Static_assert(SEAL_KEY_BYTES == crypto_secretstream_xchacha20poly1305_KEYBYTES, "one hash is one key");

/* ---- life ---------------------------------------------------------------------------------------------- */

void seal_init(struct seal *seal, const struct seal_options *options)
{
    *seal = (struct seal){
        .role = options->role,
        .state = SEAL_AWAITS_HELLO,
        .max_frame_bytes = options->max_frame_bytes,
        .key = *options->key,
    };
    memcpy(seal->hello + AT_MAGIC, magic, sizeof(magic));
    put_u32(seal->hello + AT_VERSION, SEAL_VERSION);
    put_u32(seal->hello + AT_NODE, options->node);
    memcpy(seal->hello + AT_NONCE, options->nonce, SEAL_NONCE_BYTES);
    tag_job(seal->hello + AT_JOB, &seal->key, options->job);
}

void seal_deinit(struct seal *seal)
{
    if (seal->plain)
        sodium_memzero(seal->plain, seal->plain_capacity);
    free(seal->plain);
    free(seal->input);
    sodium_memzero(seal, sizeof(*seal));
}

/* ---- in ------------------------------------------------------------------------------------------------ */

static size_t n_waiting(const struct seal *seal)
{
    return seal->input_end - seal->input_start;
}

static const uint8_t *waiting(const struct seal *seal)
{
    return seal->input + seal->input_start;
}

int seal_feed(struct seal *seal, const void *data, size_t n_bytes)
{
    size_t n_kept = n_waiting(seal), capacity = MAX(seal->input_capacity, (size_t)1024);
    uint8_t *input;

    if (seal->state == SEAL_BROKEN || n_bytes == 0)
        return 0;
    if (seal->input_start > 0) {
        memmove(seal->input, waiting(seal), n_kept);
        seal->input_start = 0;
        seal->input_end = n_kept;
    }
    while (capacity < n_kept + n_bytes)
        capacity *= 2;
    if (capacity > seal->input_capacity) {
        input = realloc(seal->input, capacity);
        if (!input)
            return -ENOMEM;
        seal->input = input;
        seal->input_capacity = capacity;
    }
    memcpy(seal->input + n_kept, data, n_bytes);
    seal->input_end += n_bytes;
    return 0;
}

static int broken(struct seal *seal, int failure)
{
    seal->state = SEAL_BROKEN;
    seal->failure = failure;
    return failure;
}

/* A stranger is told from the first bytes that differ, without waiting for more. */
static int take_hello(struct seal *seal)
{
    const uint8_t *hello = waiting(seal);

    if (n_waiting(seal) == 0)
        return SEAL_AGAIN;
    if (memcmp(hello + AT_MAGIC, magic, MIN(n_waiting(seal), sizeof(magic))) != 0)
        return broken(seal, SEAL_E_STRANGER);
    if (n_waiting(seal) < AT_NODE)
        return SEAL_AGAIN;
    seal->peer_version = get_u32(hello + AT_VERSION);
    if (seal->peer_version != SEAL_VERSION)
        return broken(seal, SEAL_E_VERSION);
    if (n_waiting(seal) < SEAL_HELLO_BYTES)
        return SEAL_AGAIN;
    seal->peer_node = get_u32(hello + AT_NODE);
    derive_both(seal, hello);
    seal->input_start += SEAL_HELLO_BYTES;
    seal->state = SEAL_AWAITS_HEADER;
    return SEAL_MET;
}

static int take_header(struct seal *seal)
{
    int r;

    if (n_waiting(seal) < SEAL_HEADER_BYTES)
        return SEAL_AGAIN;
    r = crypto_secretstream_xchacha20poly1305_init_pull(&seal->pull, waiting(seal), seal->pull_key);
    sodium_memzero(seal->pull_key, sizeof(seal->pull_key));
    if (r != 0)
        return broken(seal, SEAL_E_FORGED);
    seal->input_start += SEAL_HEADER_BYTES;
    seal->state = SEAL_OPEN;
    return 0;
}

static int reserve_plain(struct seal *seal, size_t n_bytes)
{
    uint8_t *plain;

    n_bytes = MAX(n_bytes, (size_t)1); /* a frame may be empty */
    if (n_bytes <= seal->plain_capacity)
        return 0;
    plain = malloc(n_bytes);
    if (!plain)
        return -ENOMEM;
    if (seal->plain)
        sodium_memzero(seal->plain, seal->plain_capacity);
    free(seal->plain);
    seal->plain = plain;
    seal->plain_capacity = n_bytes;
    return 0;
}

static int take_frame(struct seal *seal, struct seal_frame *frame)
{
    const uint8_t *at = waiting(seal);
    size_t n_sealed, n_plain;
    uint8_t tag;

    if (n_waiting(seal) < SEAL_LENGTH_BYTES)
        return SEAL_AGAIN;
    n_sealed = get_u32(at);
    if (n_sealed < crypto_secretstream_xchacha20poly1305_ABYTES ||
        n_sealed - crypto_secretstream_xchacha20poly1305_ABYTES > seal->max_frame_bytes)
        return broken(seal, SEAL_E_LENGTH);
    if (n_waiting(seal) < SEAL_LENGTH_BYTES + n_sealed)
        return SEAL_AGAIN;
    n_plain = n_sealed - crypto_secretstream_xchacha20poly1305_ABYTES;
    if (reserve_plain(seal, n_plain) < 0)
        return -ENOMEM;
    if (crypto_secretstream_xchacha20poly1305_pull(&seal->pull, seal->plain, NULL, &tag, at + SEAL_LENGTH_BYTES,
                                                   n_sealed, at, SEAL_LENGTH_BYTES) != 0)
        return broken(seal, SEAL_E_FORGED);
    seal->input_start += SEAL_LENGTH_BYTES + n_sealed;
    *frame = (struct seal_frame){.data = seal->plain, .n_bytes = n_plain};
    return 0;
}

int seal_next(struct seal *seal, struct seal_frame *frame)
{
    int r;

    switch (seal->state) {
    case SEAL_AWAITS_HELLO:
        return take_hello(seal);
    case SEAL_AWAITS_HEADER:
        r = take_header(seal);
        return r ? r : take_frame(seal, frame);
    case SEAL_OPEN:
        return take_frame(seal, frame);
    case SEAL_BROKEN:
        break;
    }
    return seal->failure;
}

/* ---- out ----------------------------------------------------------------------------------------------- */

size_t seal_pushed_bytes(const struct seal *seal, size_t n_bytes)
{
    return (seal->header_sent ? 0 : SEAL_HEADER_BYTES) + SEAL_OVERHEAD_BYTES + n_bytes;
}

void seal_push(struct seal *seal, const void *data, size_t n_bytes, uint8_t *out)
{
    assert(seal->has_keys);
    assert(n_bytes <= seal->max_frame_bytes);
    if (!seal->header_sent) {
        memcpy(out, seal->header, SEAL_HEADER_BYTES);
        out += SEAL_HEADER_BYTES;
        seal->header_sent = true;
    }
    put_u32(out, (uint32_t)(n_bytes + crypto_secretstream_xchacha20poly1305_ABYTES));
    crypto_secretstream_xchacha20poly1305_push(&seal->push, out + SEAL_LENGTH_BYTES, NULL, data, n_bytes, out,
                                               SEAL_LENGTH_BYTES, 0);
}
