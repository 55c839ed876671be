/* SPDX-License-Identifier: Apache-2.0 */

/* Packs and unpacks link frames field by field, in little-endian order. */

#include "daemon/link/link-frame.h"

#include <assert.h>
#include <endian.h>
#include <string.h>

#include "core/base/base.h"

static uint8_t *put_u64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof(value));
    return at + sizeof(value);
}

static uint64_t load_le64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

/* Return: the size of a frame of this kind without its data, or 0 if there is no such kind. */
static size_t fixed_bytes(unsigned kind)
{
    switch (kind) {
    case LINK_FRAME_INTRODUCTION:
        return LINK_FRAME_INTRODUCTION_BYTES;
    case LINK_FRAME_MESSAGE:
        return LINK_FRAME_MESSAGE_BYTES;
    case LINK_FRAME_HEARTBEAT:
        return LINK_FRAME_HEARTBEAT_BYTES;
    case LINK_FRAME_FAREWELL:
        return 1;
    default:
        return 0;
    }
}

_Static_assert(LINK_FRAME_INTRODUCTION_BYTES == 33 + 1, "has_run is the byte behind four numbers");

static bool is_sound(const struct link_frame *frame)
{
    switch (frame->kind) {
    case LINK_FRAME_INTRODUCTION:
        return frame->introduction.incarnation != 0 && !memchr(frame->data, '\0', frame->n_bytes);
    case LINK_FRAME_MESSAGE:
        return frame->number != 0;
    case LINK_FRAME_HEARTBEAT:
        return frame->n_bytes == 0;
    case LINK_FRAME_FAREWELL:
        return frame->n_bytes <= LINK_FRAME_MAX_WHY && !memchr(frame->data, '\0', frame->n_bytes);
    }
    return false;
}

int link_frame_unpack(struct link_frame *frame, const uint8_t *bytes, size_t n_bytes)
{
    size_t n_fixed = n_bytes > 0 ? fixed_bytes(bytes[0]) : 0;

    if (n_fixed == 0 || n_bytes < n_fixed)
        return LINK_FRAME_E_INVALID;
    *frame = (struct link_frame){.kind = bytes[0], .data = bytes + n_fixed, .n_bytes = n_bytes - n_fixed};
    if (frame->kind == LINK_FRAME_INTRODUCTION) {
        frame->introduction.incarnation = load_le64(bytes + 1);
        frame->introduction.peer_incarnation = load_le64(bytes + 9);
        frame->introduction.n_received = load_le64(bytes + 17);
        frame->introduction.n_acknowledged = load_le64(bytes + 25);
        frame->introduction.has_run = bytes[33];
        if (bytes[33] > 1)
            return LINK_FRAME_E_INVALID;
    } else if (frame->kind == LINK_FRAME_MESSAGE) {
        frame->number = load_le64(bytes + 1);
    } else if (frame->kind == LINK_FRAME_HEARTBEAT) {
        frame->n_received = load_le64(bytes + 1);
    }
    return is_sound(frame) ? 0 : LINK_FRAME_E_INVALID;
}

size_t link_frame_packed_bytes(const struct link_frame *frame)
{
    assert(fixed_bytes(frame->kind) > 0); /* an unknown kind has no size */
    return fixed_bytes(frame->kind) + frame->n_bytes;
}

void link_frame_pack(const struct link_frame *frame, uint8_t *out)
{
    assert(frame->kind != LINK_FRAME_MESSAGE || frame->number != 0); /* the receiver would end the link */
    *out++ = (uint8_t)frame->kind;
    if (frame->kind == LINK_FRAME_INTRODUCTION) {
        out = put_u64(out, frame->introduction.incarnation);
        out = put_u64(out, frame->introduction.peer_incarnation);
        out = put_u64(out, frame->introduction.n_received);
        out = put_u64(out, frame->introduction.n_acknowledged);
        *out++ = frame->introduction.has_run;
    } else if (frame->kind == LINK_FRAME_MESSAGE) {
        out = put_u64(out, frame->number);
    } else if (frame->kind == LINK_FRAME_HEARTBEAT) {
        out = put_u64(out, frame->n_received);
    }
    if (frame->n_bytes > 0)
        memcpy(out, frame->data, frame->n_bytes);
}
