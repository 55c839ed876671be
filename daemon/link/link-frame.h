/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The contents of the sealed frames between two nodes' daemons. Pure: bytes to a plain struct and back. Numbers are
 * little-endian; a frame is its kind as one byte and then the fields in the order of the struct.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LINK_FRAME_E_INVALID = 1, /* not a frame of ours */
};

enum link_frame_kind {
    LINK_FRAME_INTRODUCTION = 1, /* the first frame each way, and only that */
    LINK_FRAME_MESSAGE,
    LINK_FRAME_HEARTBEAT, /* every CLUSTER_HEARTBEAT_MS, and after messages that came */
    LINK_FRAME_FAREWELL,  /* the sender closes the connection, and why */
};

enum {
    LINK_FRAME_MESSAGE_BYTES = 1 + 8, /* of a message without its data */
    LINK_FRAME_INTRODUCTION_BYTES = 1 + 4 * 8 + 1,
    LINK_FRAME_HEARTBEAT_BYTES = 1 + 8,
    LINK_FRAME_MAX_WHY = 400,
};

struct link_frame {
    enum link_frame_kind kind;
    union {
        struct {
            uint64_t incarnation;      /* the sender's; not 0 */
            uint64_t peer_incarnation; /* the receiver's that the sender knows; 0: none */
            uint64_t n_received;       /* how many messages of that one have come */
            uint64_t n_acknowledged;   /* how many messages to that one have come, as far as the sender knows */
            bool has_run;              /* the sender holds the state of a run; one byte, 0 or 1 */
        } introduction;
        uint64_t number;     /* message: its own, counted from 1 between two incarnations */
        uint64_t n_received; /* heartbeat: all messages up to this number have come */
    };
    /* Introduction: what must be alike, as text. Message: its bytes. Farewell: a sentence. Borrowed. */
    const uint8_t *data;
    size_t n_bytes;
};

/* Return: 0 or LINK_FRAME_E_INVALID. data of the frame points into bytes. */
int link_frame_unpack(struct link_frame *frame, const uint8_t *bytes, size_t n_bytes);

size_t link_frame_packed_bytes(const struct link_frame *frame);

/* out: room for link_frame_packed_bytes(). */
void link_frame_pack(const struct link_frame *frame, uint8_t *out);
