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
    LINK_FRAME_INTRODUCTION = 1, /* the first frame of each direction, and no other */
    LINK_FRAME_MESSAGE,
    LINK_FRAME_HEARTBEAT, /* every CLUSTER_HEARTBEAT_MS, and after received messages */
    LINK_FRAME_FAREWELL,  /* the sender closes the connection; data: why */
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
            uint64_t peer_incarnation; /* the receiver's, as far as the sender knows; 0: unknown */
            uint64_t n_received;       /* messages that the sender has received of that incarnation */
            uint64_t n_acknowledged;   /* messages to that incarnation that the sender knows to have arrived */
            bool has_run;              /* the sender holds the state of a run; one byte, 0 or 1 */
        } introduction;
        uint64_t number;     /* message: its number, counted from 1 between two incarnations */
        uint64_t n_received; /* heartbeat: all messages up to this number have come */
    };
    /* Introduction: the settings that must be equal, as text. Message: its bytes. Farewell: a sentence. Borrowed. */
    const uint8_t *data;
    size_t n_bytes;
};

/* Return: 0 or LINK_FRAME_E_INVALID. data of the frame points into bytes. */
int link_frame_unpack(struct link_frame *frame, const uint8_t *bytes, size_t n_bytes);

size_t link_frame_packed_bytes(const struct link_frame *frame);

/* out: room for link_frame_packed_bytes(). */
void link_frame_pack(const struct link_frame *frame, uint8_t *out);
