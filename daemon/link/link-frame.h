/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The contents of the sealed frames between two nodes' daemons. Converts between bytes and a plain struct, without I/O.
 * A frame is its kind as one byte, and then the fields in the order of the struct. Numbers are little-endian.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LINK_FRAME_E_INVALID = 1, /* not a frame of ours */
};

enum link_frame_kind {
    LINK_FRAME_INTRODUCTION = 1, /* only the first frame of each direction */
    LINK_FRAME_MESSAGE,
    LINK_FRAME_HEARTBEAT, /* every CLUSTER_HEARTBEAT_MS, and after received messages */
    LINK_FRAME_FAREWELL,  /* the sender closes the connection; data: the reason */
};

enum {
    LINK_FRAME_MESSAGE_BYTES = 1 + 8, /* size of a message frame without its data */
    LINK_FRAME_INTRODUCTION_BYTES = 1 + 4 * 8 + 1,
    LINK_FRAME_HEARTBEAT_BYTES = 1 + 8,
    LINK_FRAME_MAX_WHY = 400,
};

struct link_frame {
    enum link_frame_kind kind;
    union {
        struct {
            uint64_t incarnation;      /* the sender's incarnation; not 0 */
            uint64_t peer_incarnation; /* the receiver's, as the sender knows it; 0: unknown */
            uint64_t n_received;       /* messages that the sender has received from peer_incarnation */
            uint64_t n_acknowledged;   /* messages that peer_incarnation has acknowledged */
            bool has_run;              /* whether the sender holds the state of a run; one byte, 0 or 1 */
        } introduction;
        uint64_t number;     /* of a message, from 1 for each pair of incarnations */
        uint64_t n_received; /* in a heartbeat: the last message that was received */
    };
    /* Borrowed. Introduction: the settings that must be equal. Message: the message's bytes. Farewell: a sentence. */
    const uint8_t *data;
    size_t n_bytes;
};

/* Return: 0 or LINK_FRAME_E_INVALID. frame->data points into bytes. */
int link_frame_unpack(struct link_frame *frame, const uint8_t *bytes, size_t n_bytes);

size_t link_frame_packed_bytes(const struct link_frame *frame);

/* Writes the frame to out, which has room for link_frame_packed_bytes(). */
void link_frame_pack(const struct link_frame *frame, uint8_t *out);
