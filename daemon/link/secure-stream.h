/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What travels between two nodes' daemons, as bytes: a plain hello each way, then sealed frames (libsodium's
 * secretstream). Pure: it takes bytes and gives bytes, knows no sockets and no clock. The nonce is passed in; the only
 * randomness taken here is the public header that libsodium puts in front of a stream.
 *
 *     connecting end                          listening end
 *     hello ------------------------------->
 *            <------------------------------- hello
 *     stream header, frame, frame, ... ---->
 *            <------------------------------- stream header, frame, frame, ...
 *
 * A hello is magic, version, node, nonce and a tag of the job's name that only a holder of the key can compute. Each
 * direction has its own key: a hash, under the shared key, of its name and both hellos. So whatever was recorded,
 * altered, reflected, made with another key, or meant for another connection, cannot be opened, and that is noticed at
 * the first frame. A hello by itself proves nothing; the first frame that opens proves that the peer holds the key, and
 * that it is who the hello said.
 *
 * A frame is its length as four bytes, little-endian, then the ciphertext. The length is authenticated with it, and
 * bounded before anything is kept.
 */

#include <sodium.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SEAL_VERSION = 1, /* of all this, and of the frames in link-frame.h */
    SEAL_KEY_BYTES = 32,
    SEAL_NONCE_BYTES = 32,
    SEAL_JOB_BYTES = 32,
    SEAL_HELLO_BYTES = 8 + 4 + 4 + SEAL_NONCE_BYTES + SEAL_JOB_BYTES,
    SEAL_HEADER_BYTES = crypto_secretstream_xchacha20poly1305_HEADERBYTES,
    SEAL_LENGTH_BYTES = 4,
    SEAL_OVERHEAD_BYTES = SEAL_LENGTH_BYTES + crypto_secretstream_xchacha20poly1305_ABYTES, /* per frame */
};

enum {
    SEAL_AGAIN = 1,  /* more bytes are needed */
    SEAL_MET,        /* the peer's hello is there; seal_push() works from here on */
    SEAL_E_STRANGER, /* does not begin as a daemon of ours does */
    SEAL_E_VERSION,  /* another version of this protocol; seal->peer_version */
    SEAL_E_LENGTH,   /* a frame longer than allowed, or shorter than any */
    SEAL_E_FORGED,   /* a frame that cannot be opened: another key, a recording, an altered byte */
};

enum seal_role { SEAL_CONNECTS, SEAL_LISTENS };

enum seal_state { SEAL_AWAITS_HELLO, SEAL_AWAITS_HEADER, SEAL_OPEN, SEAL_BROKEN };

/* What a key file's bytes are made into. */
struct seal_key {
    uint8_t bytes[SEAL_KEY_BYTES];
};

struct seal_options {
    enum seal_role role;
    const struct seal_key *key; /* copied */
    const char *job;
    uint32_t node;                   /* ours */
    uint8_t nonce[SEAL_NONCE_BYTES]; /* random, never the same twice */
    size_t max_frame_bytes;          /* of plain text, both ways */
};

/* What a frame holds; valid until the next call. */
struct seal_frame {
    const uint8_t *data;
    size_t n_bytes;
};

/* One end of one connection. */
struct seal {
    enum seal_role role;
    enum seal_state state;
    int failure;                      /* SEAL_E_*, once broken */
    uint32_t peer_version, peer_node; /* what its hello says */
    size_t max_frame_bytes;
    struct seal_key key;
    uint8_t hello[SEAL_HELLO_BYTES]; /* ours */
    crypto_secretstream_xchacha20poly1305_state push, pull;
    uint8_t pull_key[crypto_secretstream_xchacha20poly1305_KEYBYTES]; /* until the header has come */
    uint8_t header[SEAL_HEADER_BYTES];                                /* ours; goes in front of the first frame */
    bool has_keys, header_sent;
    uint8_t *input; /* what has come and was not taken; owned */
    size_t input_start, input_end, input_capacity;
    uint8_t *plain; /* the last frame; owned */
    size_t plain_capacity;
};

/*
 * Hashes the bytes of a key file. Also makes libsodium ready, so it comes before everything else here.
 * Return: 0, or -ENOSYS when libsodium cannot start.
 */
int seal_key_init(struct seal_key *key, const void *data, size_t n_bytes);
void seal_key_deinit(struct seal_key *key);

void seal_init(struct seal *seal, const struct seal_options *options);
/* Wipes keys and what was last opened. {0} is fine. */
void seal_deinit(struct seal *seal);

/*
 * Adds bytes as they came. Between two calls seal_next() is to be called until it says SEAL_AGAIN, so that no more
 * than one frame and one such piece are ever held. Return: 0 or -ENOMEM.
 */
int seal_feed(struct seal *seal, const void *data, size_t n_bytes);

/*
 * What comes next in the bytes fed. After a failure nothing more is looked at: the same failure comes again.
 * Return: 0 and a frame; SEAL_AGAIN; SEAL_MET; SEAL_E_*; -ENOMEM.
 */
int seal_next(struct seal *seal, struct seal_frame *frame);

/* How many bytes seal_push() will write for a frame of n_bytes. */
size_t seal_pushed_bytes(const struct seal *seal, size_t n_bytes);

/* Seals a frame of at most max_frame_bytes, after SEAL_MET, and whatever else came. out: room for seal_pushed_bytes().
 */
void seal_push(struct seal *seal, const void *data, size_t n_bytes, uint8_t *out);
