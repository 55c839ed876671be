/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The bytes between two nodes' daemons: a plain hello each way, then sealed frames (libsodium's secretstream). This
 * module does no I/O and reads no clock. The caller passes the nonce. The only randomness made in this module is the
 * public header that libsodium puts in front of a stream.
 *
 *     connecting end                          listening end
 *     hello ------------------------------->
 *            <------------------------------- hello
 *     stream header, frame, frame, ... ---->
 *            <------------------------------- stream header, frame, frame, ...
 *
 * A hello is magic, version, node, nonce and a tag of the job's name that only a holder of the key can compute. Each
 * direction has its own key, which is a hash of the direction's name and both hellos under the shared key. So a frame
 * that was recorded, altered, reflected, made with another key, or meant for another connection cannot be opened. A
 * hello by itself proves nothing. The first frame that can be opened proves that the peer holds the key, and is the
 * node that its hello claims.
 *
 * A frame is the length of its ciphertext as four bytes, little-endian, and then the ciphertext. The length is checked
 * before memory is allocated, and is authenticated with the ciphertext.
 */

#include <sodium.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SECURE_STREAM_VERSION = 1, /* of this protocol and of the frames in link-frame.h */
    SECURE_STREAM_KEY_BYTES = 32,
    SECURE_STREAM_NONCE_BYTES = 32,
    SECURE_STREAM_JOB_BYTES = 32,
    SECURE_STREAM_HELLO_BYTES = 8 + 4 + 4 + SECURE_STREAM_NONCE_BYTES + SECURE_STREAM_JOB_BYTES,
    SECURE_STREAM_HEADER_BYTES = crypto_secretstream_xchacha20poly1305_HEADERBYTES,
    SECURE_STREAM_LENGTH_BYTES = 4,
    SECURE_STREAM_OVERHEAD_BYTES =
        SECURE_STREAM_LENGTH_BYTES + crypto_secretstream_xchacha20poly1305_ABYTES, /* per frame */
};

enum {
    SECURE_STREAM_AGAIN = 1,  /* more bytes are needed */
    SECURE_STREAM_MET,        /* the peer's hello was read; from now on secure_stream_push() is allowed */
    SECURE_STREAM_E_STRANGER, /* the first bytes are not those of our daemon */
    SECURE_STREAM_E_VERSION,  /* another version of this protocol; stream->peer_version */
    SECURE_STREAM_E_LENGTH,   /* a frame is longer or shorter than allowed */
    SECURE_STREAM_E_FORGED,   /* a frame that cannot be opened: another key, a recording, an altered byte */
};

enum secure_stream_role { SECURE_STREAM_CONNECTS, SECURE_STREAM_LISTENS };

enum secure_stream_state {
    SECURE_STREAM_AWAITS_HELLO,
    SECURE_STREAM_AWAITS_HEADER,
    SECURE_STREAM_OPEN,
    SECURE_STREAM_BROKEN
};

/* The hash of a key file's bytes. */
struct secure_stream_key {
    uint8_t bytes[SECURE_STREAM_KEY_BYTES];
};

struct secure_stream_options {
    enum secure_stream_role role;
    const struct secure_stream_key *key; /* copied */
    const char *job;
    uint32_t node;                            /* number of this node */
    uint8_t nonce[SECURE_STREAM_NONCE_BYTES]; /* random, never the same twice */
    size_t max_frame_bytes;                   /* of plain text, in both directions */
};

/* The plain text of a frame; valid until the next call. */
struct secure_stream_frame {
    const uint8_t *data;
    size_t n_bytes;
};

/* One end of one connection. */
struct secure_stream {
    enum secure_stream_role role;
    enum secure_stream_state state;
    int failure;                      /* SECURE_STREAM_E_*, when broken */
    uint32_t peer_version, peer_node; /* from the peer's hello */
    size_t max_frame_bytes;
    struct secure_stream_key key;
    uint8_t hello[SECURE_STREAM_HELLO_BYTES]; /* our own hello */
    crypto_secretstream_xchacha20poly1305_state push, pull;
    uint8_t pull_key[crypto_secretstream_xchacha20poly1305_KEYBYTES]; /* used until the peer's header is read */
    uint8_t header[SECURE_STREAM_HEADER_BYTES];                       /* our header, sent before our first frame */
    bool has_keys, header_sent;
    uint8_t *input; /* received bytes that are not read yet; owned */
    size_t input_start, input_end, input_capacity;
    uint8_t *plain; /* the last frame; owned */
    size_t plain_capacity;
};

/*
 * Hashes the bytes of a key file. Call it before all other functions of this header, because it initialises libsodium.
 * Return: 0, or -ENOSYS if libsodium cannot be initialised.
 */
int secure_stream_key_init(struct secure_stream_key *key, const void *data, size_t n_bytes);
void secure_stream_key_deinit(struct secure_stream_key *key);

void secure_stream_init(struct secure_stream *stream, const struct secure_stream_options *options);
/* Wipes the keys and the last opened frame. A zeroed stream is fine. */
void secure_stream_deinit(struct secure_stream *stream);

/*
 * Adds received bytes. After each call, call secure_stream_next() until it returns SECURE_STREAM_AGAIN, so that the
 * stream buffers at most one frame and the bytes of one call. Return: 0 or -ENOMEM.
 */
int secure_stream_feed(struct secure_stream *stream, const void *data, size_t n_bytes);

/*
 * Reads the next hello or frame of the fed bytes. Return: 0 with a frame, SECURE_STREAM_AGAIN, SECURE_STREAM_MET,
 * SECURE_STREAM_E_* (then again at each later call), or -ENOMEM.
 */
int secure_stream_next(struct secure_stream *stream, struct secure_stream_frame *frame);

/* Return: the number of bytes that secure_stream_push() writes for a frame of n_bytes. */
size_t secure_stream_pushed_bytes(const struct secure_stream *stream, size_t n_bytes);

/*
 * Seals a frame of at most max_frame_bytes. Allowed after SECURE_STREAM_MET, even after a failure of
 * secure_stream_next(). out has room for secure_stream_pushed_bytes().
 */
void secure_stream_push(struct secure_stream *stream, const void *data, size_t n_bytes, uint8_t *out);
