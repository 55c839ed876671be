/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The link between two nodes. The first byte of an input says how the rest is used:
 *
 *     0, 1    bytes from a stranger, in pieces, to the listening or the connecting end
 *     2       a conversation. Four bytes are one act. All sent frames must arrive in order, or none after a byte
 *             was changed.
 *     3       a frame that could be opened, and an introduction's text that is compared with ours
 *
 * libsodium's random bytes are the same in each run.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/link/link-frame.h"
#include "daemon/link/secure-stream.h"

enum { MAX_FRAME = 2048, MAX_SAID = 512, WIRE_BYTES = 1 << 20 };

struct act {
    uint8_t verb, fill;
    uint16_t size;
};

/* One direction: the sealed bytes, how many of them were fed, and the frames that must arrive. */
struct stream {
    struct secure_stream *from, *to;
    uint8_t *wire;
    size_t n_wire, n_fed;
    uint16_t sizes[MAX_SAID];
    uint8_t fills[MAX_SAID];
    size_t n_said, n_heard;
    bool *spoilt; /* shared by both directions, because each hello is part of both keys */
};

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t wires[2][WIRE_BYTES];
static uint32_t random_state;

static uint32_t next_random(void)
{
    random_state = random_state * 1664525 + 1013904223;
    return random_state;
}

static const char *random_name(void)
{
    return "the same each time";
}

static void fill_random(void *const bytes, const size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)(next_random() >> 24);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static randombytes_implementation implementation = {
        .implementation_name = random_name, .random = next_random, .buf = fill_random};

    (void)argc;
    (void)argv;
    return randombytes_set_implementation(&implementation);
}

static void init(struct secure_stream *stream, enum secure_stream_role role)
{
    struct secure_stream_key key;
    struct secure_stream_options options = {.role = role,
                                            .key = &key,
                                            .job = "train",
                                            .node = role == SECURE_STREAM_CONNECTS,
                                            .max_frame_bytes = MAX_FRAME};

    assert(secure_stream_key_init(&key, "fuzz", 4) == 0);
    fill_random(options.nonce, sizeof(options.nonce));
    secure_stream_init(stream, &options);
}

/* A stranger without the key gets no further than the hello. */
static void hear_stranger(enum secure_stream_role role, const uint8_t *data, size_t size)
{
    struct secure_stream_frame frame;
    struct secure_stream stream;
    int r = SECURE_STREAM_AGAIN;

    init(&stream, role);
    while (size > 1 && (r == SECURE_STREAM_AGAIN || r == SECURE_STREAM_MET)) {
        size_t n = MIN((size_t)data[0] + 1, size - 1);

        assert(secure_stream_feed(&stream, data + 1, n) == 0);
        while ((r = secure_stream_next(&stream, &frame)) == SECURE_STREAM_MET)
            ;
        assert(r != 0);
        assert(stream.input_capacity <=
               2 * (MAX_FRAME + SECURE_STREAM_OVERHEAD_BYTES + SECURE_STREAM_HEADER_BYTES + 1024));
        data += n + 1;
        size -= n + 1;
    }
    secure_stream_deinit(&stream);
}

static void say(struct stream *stream, const struct act *act)
{
    uint8_t data[MAX_FRAME];
    size_t n_bytes = act->size % (MAX_FRAME + 1), n_sealed = secure_stream_pushed_bytes(stream->from, n_bytes);

    if (!stream->from->has_keys || stream->n_said == MAX_SAID || stream->n_wire + n_sealed > WIRE_BYTES)
        return;
    memset(data, act->fill, sizeof(data));
    secure_stream_push(stream->from, data, n_bytes, stream->wire + stream->n_wire);
    stream->n_wire += n_sealed;
    stream->sizes[stream->n_said] = (uint16_t)n_bytes;
    stream->fills[stream->n_said++] = act->fill;
}

static void expect_heard(struct stream *stream, const struct secure_stream_frame *frame)
{
    assert(stream->n_heard < stream->n_said);
    assert(frame->n_bytes == stream->sizes[stream->n_heard]);
    for (size_t i = 0; i < frame->n_bytes; i++)
        assert(frame->data[i] == stream->fills[stream->n_heard]);
    stream->n_heard++;
}

/* Feeds n_bytes, and checks all frames that they complete. */
static void carry(struct stream *stream, size_t n_bytes)
{
    struct secure_stream_frame frame;
    int r;

    n_bytes = MIN(n_bytes, stream->n_wire - stream->n_fed);
    assert(secure_stream_feed(stream->to, stream->wire + stream->n_fed, n_bytes) == 0);
    stream->n_fed += n_bytes;
    while ((r = secure_stream_next(stream->to, &frame)) == 0 || r == SECURE_STREAM_MET) {
        if (r == 0)
            expect_heard(stream, &frame);
    }
    assert(r == SECURE_STREAM_AGAIN || *stream->spoilt);
}

/* Changes a byte that has not arrived. */
static void spoil(struct stream *stream, const struct act *act)
{
    size_t n_waiting = stream->n_wire - stream->n_fed;

    if (n_waiting == 0 || act->fill == 0)
        return;
    stream->wire[stream->n_fed + act->size % n_waiting] ^= act->fill;
    *stream->spoilt = true;
}

static void play(struct stream *stream, const struct act *act)
{
    switch (act->verb % 8) {
    case 0 ... 2:
        say(stream, act);
        return;
    case 3 ... 6:
        carry(stream, act->verb % 8 == 3 ? act->size % 64 : act->size);
        return;
    default:
        if (act->verb >= 128) /* rarely, because it ends the conversation */
            spoil(stream, act);
    }
}

static void converse(const uint8_t *data, size_t size)
{
    struct secure_stream ends[2];
    bool spoilt = false;
    struct stream streams[2] = {{.from = &ends[0], .to = &ends[1], .wire = wires[0], .spoilt = &spoilt},
                                {.from = &ends[1], .to = &ends[0], .wire = wires[1], .spoilt = &spoilt}};
    struct act act;

    init(&ends[0], SECURE_STREAM_CONNECTS);
    init(&ends[1], SECURE_STREAM_LISTENS);
    for (unsigned i = 0; i < 2; i++) {
        memcpy(streams[i].wire, ends[i].hello, SECURE_STREAM_HELLO_BYTES);
        streams[i].n_wire = SECURE_STREAM_HELLO_BYTES;
    }
    for (; size >= sizeof(act); data += sizeof(act), size -= sizeof(act)) {
        memcpy(&act, data, sizeof(act));
        play(&streams[act.verb / 8 % 2], &act);
    }
    for (unsigned i = 0; i < 2; i++) {
        carry(&streams[i], WIRE_BYTES);
        assert(streams[i].n_heard == streams[i].n_said || spoilt);
    }
    secure_stream_deinit(&ends[0]);
    secure_stream_deinit(&ends[1]);
}

static void read_frame(const uint8_t *data, size_t size)
{
    static const char here[] =
        "zerod version: 0\njob: \"train\"\nworld.size: 2\nworld.nodes: [{address: \"a:1\", ranks: 1}]\n";
    struct link_frame frame;
    uint8_t *again;
    char *there, sentence[480];

    if (link_frame_unpack(&frame, data, size) != 0)
        return;
    again = malloc(size);
    assert(again && link_frame_packed_bytes(&frame) == size);
    link_frame_pack(&frame, again);
    assert(memcmp(again, data, size) == 0);
    free(again);
    if (frame.kind != LINK_FRAME_INTRODUCTION)
        return;
    there = strndup((const char *)frame.data, frame.n_bytes);
    assert(there);
    assert((config_shared_difference(here, there, sentence, sizeof(sentence)) == 0) == (*sentence == '\0'));
    free(there);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    random_state = 1;
    switch (data[0] % 4) {
    case 0:
    case 1:
        hear_stranger(data[0] % 4 ? SECURE_STREAM_CONNECTS : SECURE_STREAM_LISTENS, data + 1, size - 1);
        break;
    case 2:
        converse(data + 1, size - 1);
        break;
    default:
        read_frame(data + 1, size - 1);
    }
    return 0;
}
