/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The bytes that travel between two nodes' daemons: a plain hello each way, then sealed frames (libsodium's
 * secretstream). Pure: bytes in, bytes out; no sockets, no clock. The caller passes the nonce. The only randomness made
 * here is the public header that libsodium puts in front of a stream.
 *
 *     connecting end                          listening end
 *     hello ------------------------------->
 *            <------------------------------- hello
 *     stream header, frame, frame, ... ---->
 *            <------------------------------- stream header, frame, frame, ...
 *
 * A hello is magic, version, node, nonce and a tag of the job's name that only a holder of the key can compute. Each
 * direction has its own key: a hash, under the shared key, of its name and both hellos. So a frame that was
 * recorded, altered, reflected, made with another key, or meant for another connection cannot be opened, and the first
 * such frame is noticed. A hello by itself proves nothing. The first frame that opens proves that the peer holds the
 * key, and is the node that its hello claims.
 *
 * A frame is its length as four bytes, little-endian, then the ciphertext. The length is authenticated with the
 * ciphertext, and checked before memory is allocated for it.
 */

#include <sodium.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SECURE_STREAM_VERSION = 1, /* of all this, and of the frames in link-frame.h */
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
    SECURE_STREAM_MET,        /* the peer's hello is there; secure_stream_push() works from here on */
    SECURE_STREAM_E_STRANGER, /* the first bytes are not those of our daemon */
    SECURE_STREAM_E_VERSION,  /* another version of this protocol; stream->peer_version */
    SECURE_STREAM_E_LENGTH,   /* a frame longer than allowed, or shorter than any */
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
    uint32_t node;                            /* ours */
    uint8_t nonce[SECURE_STREAM_NONCE_BYTES]; /* random, never the same twice */
    size_t max_frame_bytes;                   /* of plain text, both ways */
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
    uint32_t peer_version, peer_node; /* what its hello says */
    size_t max_frame_bytes;
    struct secure_stream_key key;
    uint8_t hello[SECURE_STREAM_HELLO_BYTES]; /* ours */
    crypto_secretstream_xchacha20poly1305_state push, pull;
    uint8_t pull_key[crypto_secretstream_xchacha20poly1305_KEYBYTES]; /* until the header has come */
    uint8_t header[SECURE_STREAM_HEADER_BYTES];                       /* ours; goes in front of the first frame */
    bool has_keys, header_sent;
    uint8_t *input; /* received bytes that are not read yet; owned */
    size_t input_start, input_end, input_capacity;
    uint8_t *plain; /* the last frame; owned */
    size_t plain_capacity;
};

/*
 * Hashes the bytes of a key file. Also starts libsodium, so it is called before all other functions here. Return: 0, or
 * -ENOSYS if libsodium cannot start.
 */
int secure_stream_key_init(struct secure_stream_key *key, const void *data, size_t n_bytes);
void secure_stream_key_deinit(struct secure_stream_key *key);

void secure_stream_init(struct secure_stream *stream, const struct secure_stream_options *options);
/* Wipes the keys and the frame that was opened last. {0} is fine. */
void secure_stream_deinit(struct secure_stream *stream);

/*
 * Adds received bytes. Between two calls, the caller calls secure_stream_next() until it returns SECURE_STREAM_AGAIN,
 * so that at most one frame and one such piece are held. Return: 0 or -ENOMEM.
 */
int secure_stream_feed(struct secure_stream *stream, const void *data, size_t n_bytes);

/*
 * Reads the next item of the bytes fed. After a failure each call returns the same failure again.
 * Return: 0 and a frame; SECURE_STREAM_AGAIN; SECURE_STREAM_MET; SECURE_STREAM_E_*; -ENOMEM.
 */
int secure_stream_next(struct secure_stream *stream, struct secure_stream_frame *frame);

/* Return: how many bytes secure_stream_push() writes for a frame of n_bytes. */
size_t secure_stream_pushed_bytes(const struct secure_stream *stream, size_t n_bytes);

/*
 * Seals a frame of at most max_frame_bytes. Allowed from SECURE_STREAM_MET on, even after a failure of reading. out:
 * room for secure_stream_pushed_bytes().
 */
void secure_stream_push(struct secure_stream *stream, const void *data, size_t n_bytes, uint8_t *out);
