/* SPDX-License-Identifier: Apache-2.0 */

/* Two ends of a connection as two arrays of bytes. Tests which frames can be opened, and that no others can. */

#include <endian.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "daemon/link/link-frame.h"
#include "daemon/link/mailbox.h"
#include "daemon/link/secure-stream.h"

enum { MAX_FRAME = 4096, WIRE_BYTES = 64 * 1024 };

/* Bytes that one end has sent, and that were not fed to the other end. */
struct wire {
    uint8_t bytes[WIRE_BYTES];
    size_t n_bytes;
};

struct end {
    struct secure_stream stream;
    struct wire said;
};

struct pair {
    struct end connecting, listening;
};

static struct pair pair;

static struct secure_stream_key key_of(const char *text)
{
    struct secure_stream_key key;

    assert_int_equal(secure_stream_key_init(&key, text, strlen(text)), 0);
    return key;
}

static void end_init(struct end *end, enum secure_stream_role role, const char *key_text, const char *job,
                     uint8_t nonce)
{
    struct secure_stream_key key = key_of(key_text);
    struct secure_stream_options options = {
        .role = role, .key = &key, .job = job, .node = role == SECURE_STREAM_CONNECTS, .max_frame_bytes = MAX_FRAME};

    memset(options.nonce, nonce, sizeof(options.nonce));
    *end = (struct end){.said = {.n_bytes = 0}};
    secure_stream_init(&end->stream, &options);
    memcpy(end->said.bytes, end->stream.hello, SECURE_STREAM_HELLO_BYTES);
    end->said.n_bytes = SECURE_STREAM_HELLO_BYTES;
}

static void say(struct end *end, const void *data, size_t n_bytes)
{
    size_t n_sealed = secure_stream_pushed_bytes(&end->stream, n_bytes);

    assert_true(end->said.n_bytes + n_sealed <= WIRE_BYTES);
    secure_stream_push(&end->stream, data, n_bytes, end->said.bytes + end->said.n_bytes);
    end->said.n_bytes += n_sealed;
}

/* Feeds all bytes that one end has sent to the other end. */
static void carry(struct end *from, struct end *to)
{
    assert_int_equal(secure_stream_feed(&to->stream, from->said.bytes, from->said.n_bytes), 0);
    from->said.n_bytes = 0;
}

static void pair_init(void)
{
    end_init(&pair.connecting, SECURE_STREAM_CONNECTS, "the key of this job, 32 bytes and more", "train", 1);
    end_init(&pair.listening, SECURE_STREAM_LISTENS, "the key of this job, 32 bytes and more", "train", 2);
}

static void pair_meet(void)
{
    struct secure_stream_frame frame;

    carry(&pair.connecting, &pair.listening);
    carry(&pair.listening, &pair.connecting);
    assert_int_equal(secure_stream_next(&pair.listening.stream, &frame), SECURE_STREAM_MET);
    assert_int_equal(secure_stream_next(&pair.connecting.stream, &frame), SECURE_STREAM_MET);
    assert_int_equal(secure_stream_next(&pair.listening.stream, &frame), SECURE_STREAM_AGAIN);
    assert_int_equal(pair.listening.stream.peer_node, 1);
    assert_int_equal(pair.connecting.stream.peer_node, 0);
}

static void pair_deinit(void)
{
    secure_stream_deinit(&pair.connecting.stream);
    secure_stream_deinit(&pair.listening.stream);
}

static void expect_frame(struct end *end, const void *data, size_t n_bytes)
{
    struct secure_stream_frame frame;

    assert_int_equal(secure_stream_next(&end->stream, &frame), 0);
    assert_int_equal(frame.n_bytes, n_bytes);
    assert_memory_equal(frame.data, data, n_bytes);
}

/* Asserts that the stream fails, returns the same failure again, and accepts no more bytes. */
static void expect_failure(struct end *end, int failure)
{
    static const uint8_t more[100];
    struct secure_stream_frame frame;

    assert_int_equal(secure_stream_next(&end->stream, &frame), failure);
    assert_int_equal(secure_stream_feed(&end->stream, more, sizeof(more)), 0);
    assert_int_equal(secure_stream_next(&end->stream, &frame), failure);
}

/* ---- what opens ---------------------------------------------------------------------------------------- */

static void test_both_ways(void **userdata)
{
    static const uint8_t large[MAX_FRAME] = {[0] = 7, [MAX_FRAME - 1] = 9};
    struct secure_stream_frame frame;

    (void)userdata;
    pair_init();
    pair_meet();
    for (unsigned round = 0; round < 3; round++) {
        say(&pair.connecting, "one", 3);
        say(&pair.connecting, "", 0);
        say(&pair.connecting, large, sizeof(large));
        say(&pair.listening, "two", 3);
        carry(&pair.connecting, &pair.listening);
        carry(&pair.listening, &pair.connecting);
        expect_frame(&pair.listening, "one", 3);
        expect_frame(&pair.listening, "", 0);
        expect_frame(&pair.listening, large, sizeof(large));
        expect_frame(&pair.connecting, "two", 3);
        assert_int_equal(secure_stream_next(&pair.listening.stream, &frame), SECURE_STREAM_AGAIN);
        assert_int_equal(secure_stream_next(&pair.connecting.stream, &frame), SECURE_STREAM_AGAIN);
    }
    pair_deinit();
}

static void test_byte_by_byte(void **userdata)
{
    struct secure_stream_frame frame;
    unsigned n_frames = 0, n_met = 0;
    size_t n_said;

    (void)userdata;
    pair_init();
    assert_int_equal(secure_stream_feed(&pair.connecting.stream, pair.listening.said.bytes, SECURE_STREAM_HELLO_BYTES),
                     0);
    assert_int_equal(secure_stream_next(&pair.connecting.stream, &frame), SECURE_STREAM_MET);
    for (unsigned i = 0; i < 5; i++)
        say(&pair.connecting, "frame", 5);
    n_said = pair.connecting.said.n_bytes;
    assert_int_equal(n_said,
                     SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES + 5 * (SECURE_STREAM_OVERHEAD_BYTES + 5));
    for (size_t i = 0; i < n_said; i++) {
        int r;

        assert_int_equal(secure_stream_feed(&pair.listening.stream, pair.connecting.said.bytes + i, 1), 0);
        while ((r = secure_stream_next(&pair.listening.stream, &frame)) != SECURE_STREAM_AGAIN) {
            assert_true(r == 0 || r == SECURE_STREAM_MET);
            n_frames += r == 0;
            n_met += r == SECURE_STREAM_MET;
            assert_true(r == SECURE_STREAM_MET || (frame.n_bytes == 5 && memcmp(frame.data, "frame", 5) == 0));
            assert_int_equal(n_met, 1);
        }
        /* A frame is complete only with its last byte. */
        assert_int_equal(n_frames, i + 1 < SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES
                                       ? 0
                                       : (i + 1 - SECURE_STREAM_HELLO_BYTES - SECURE_STREAM_HEADER_BYTES) /
                                             (SECURE_STREAM_OVERHEAD_BYTES + 5));
    }
    assert_int_equal(n_frames, 5);
    pair_deinit();
}

/* The sent bytes do not contain the messages. The same message has other bytes when it is sent again. */
static void test_is_secret(void **userdata)
{
    static const char text[] = "zero_optimization.stage: 3";
    uint8_t first[sizeof(text)];

    (void)userdata;
    pair_init();
    assert_null(memmem(pair.connecting.said.bytes, pair.connecting.said.n_bytes, "train", 5));
    pair_meet();
    say(&pair.connecting, text, sizeof(text));
    assert_null(memmem(pair.connecting.said.bytes, pair.connecting.said.n_bytes, text, 8));
    memcpy(first, pair.connecting.said.bytes + pair.connecting.said.n_bytes - sizeof(text), sizeof(text));
    say(&pair.connecting, text, sizeof(text));
    assert_memory_not_equal(pair.connecting.said.bytes + pair.connecting.said.n_bytes - sizeof(text), first,
                            sizeof(text));
    pair_deinit();
}

/* ---- what does not ------------------------------------------------------------------------------------- */

static void test_other_key(void **userdata)
{
    static const char *const keys[] = {"the key of this job, 32 bytes and morf",
                                       "the key of this job, 32 bytes and mor"};

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        pair_init();
        secure_stream_deinit(&pair.connecting.stream);
        end_init(&pair.connecting, SECURE_STREAM_CONNECTS, keys[i], "train", 1);
        pair_meet();
        say(&pair.connecting, "hello", 5);
        carry(&pair.connecting, &pair.listening);
        expect_failure(&pair.listening, SECURE_STREAM_E_FORGED);
        say(&pair.listening, "hello", 5);
        carry(&pair.listening, &pair.connecting);
        expect_failure(&pair.connecting, SECURE_STREAM_E_FORGED);
        pair_deinit();
    }
}

/*
 * Another job with the same key passes the handshake. The difference is then reported by the jobs' names, in sealed
 * frames.
 */
static void test_other_job(void **userdata)
{
    (void)userdata;
    pair_init();
    secure_stream_deinit(&pair.connecting.stream);
    end_init(&pair.connecting, SECURE_STREAM_CONNECTS, "the key of this job, 32 bytes and more", "other", 1);
    assert_memory_not_equal(pair.connecting.stream.hello + SECURE_STREAM_HELLO_BYTES - SECURE_STREAM_JOB_BYTES,
                            pair.listening.stream.hello + SECURE_STREAM_HELLO_BYTES - SECURE_STREAM_JOB_BYTES,
                            SECURE_STREAM_JOB_BYTES);
    pair_meet();
    say(&pair.connecting, "job: other", 10);
    carry(&pair.connecting, &pair.listening);
    expect_frame(&pair.listening, "job: other", 10);
    pair_deinit();
}

/* Recorded bytes cannot be used in another connection, because its other end has another nonce. */
static void test_replayed(void **userdata)
{
    struct wire recorded;
    struct end victim;

    (void)userdata;
    pair_init();
    memcpy(recorded.bytes, pair.connecting.said.bytes, SECURE_STREAM_HELLO_BYTES);
    pair_meet();
    say(&pair.connecting, "decided", 7);
    memcpy(recorded.bytes + SECURE_STREAM_HELLO_BYTES, pair.connecting.said.bytes, pair.connecting.said.n_bytes);
    recorded.n_bytes = SECURE_STREAM_HELLO_BYTES + pair.connecting.said.n_bytes;

    end_init(&victim, SECURE_STREAM_LISTENS, "the key of this job, 32 bytes and more", "train", 3);
    assert_int_equal(secure_stream_feed(&victim.stream, recorded.bytes, recorded.n_bytes), 0);
    assert_int_equal(secure_stream_next(&victim.stream, &(struct secure_stream_frame){0}), SECURE_STREAM_MET);
    expect_failure(&victim, SECURE_STREAM_E_FORGED);
    secure_stream_deinit(&victim.stream);

    /* The same frame cannot be opened twice. */
    carry(&pair.connecting, &pair.listening);
    expect_frame(&pair.listening, "decided", 7);
    assert_int_equal(secure_stream_feed(&pair.listening.stream,
                                        recorded.bytes + SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES,
                                        SECURE_STREAM_OVERHEAD_BYTES + 7),
                     0);
    expect_failure(&pair.listening, SECURE_STREAM_E_FORGED);
    pair_deinit();
}

/* A daemon gets its own bytes back. */
static void test_reflected(void **userdata)
{
    struct end mirror;

    (void)userdata;
    pair_init();
    assert_int_equal(secure_stream_feed(&pair.connecting.stream, pair.connecting.said.bytes, SECURE_STREAM_HELLO_BYTES),
                     0);
    assert_int_equal(secure_stream_next(&pair.connecting.stream, &(struct secure_stream_frame){0}), SECURE_STREAM_MET);
    pair.connecting.said.n_bytes = 0;
    say(&pair.connecting, "me", 2);
    mirror.said = pair.connecting.said;
    carry(&mirror, &pair.connecting);
    expect_failure(&pair.connecting, SECURE_STREAM_E_FORGED);
    pair_deinit();
}

/* Frames that are exchanged or left out cannot be opened. */
static void test_reordered(void **userdata)
{
    size_t n_first;

    (void)userdata;
    pair_init();
    pair_meet();
    say(&pair.connecting, "a", 1);
    carry(&pair.connecting, &pair.listening);
    expect_frame(&pair.listening, "a", 1);
    say(&pair.connecting, "b", 1);
    n_first = pair.connecting.said.n_bytes;
    say(&pair.connecting, "c", 1);
    assert_int_equal(secure_stream_feed(&pair.listening.stream, pair.connecting.said.bytes + n_first, n_first), 0);
    expect_failure(&pair.listening, SECURE_STREAM_E_FORGED);
    pair_deinit();
}

/*
 * Flips every bit of a conversation, from the hello to the end of the last frame. None of these conversations is
 * accepted.
 */
static void test_flipped_bits(void **userdata)
{
    size_t n_said = SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES + SECURE_STREAM_OVERHEAD_BYTES + 3;
    struct secure_stream_frame frame;

    (void)userdata;
    for (size_t bit = 0; bit < 8 * n_said; bit++) {
        int r = 0;

        pair_init();
        assert_int_equal(
            secure_stream_feed(&pair.connecting.stream, pair.listening.said.bytes, SECURE_STREAM_HELLO_BYTES), 0);
        assert_int_equal(secure_stream_next(&pair.connecting.stream, &frame), SECURE_STREAM_MET);
        say(&pair.connecting, "abc", 3);
        assert_int_equal(pair.connecting.said.n_bytes, n_said);
        pair.connecting.said.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        carry(&pair.connecting, &pair.listening);
        do {
            r = secure_stream_next(&pair.listening.stream, &frame);
        } while (r == SECURE_STREAM_MET);
        /* With a larger length, the stream waits for more bytes. Every other change is noticed at once. */
        assert_true(r == SECURE_STREAM_E_STRANGER || r == SECURE_STREAM_E_VERSION || r == SECURE_STREAM_E_LENGTH ||
                    r == SECURE_STREAM_E_FORGED ||
                    (r == SECURE_STREAM_AGAIN && bit / 8 >= SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES &&
                     bit / 8 < SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES + SECURE_STREAM_LENGTH_BYTES));
        pair_deinit();
    }
}

static void test_strangers(void **userdata)
{
    static const struct {
        const char *bytes;
        size_t n_bytes;
        int r;
    } cases[] = {
        {"G", 1, SECURE_STREAM_E_STRANGER},
        {"GET / HTTP/1.1\r\n\r\n", 18, SECURE_STREAM_E_STRANGER},
        {"z", 1, SECURE_STREAM_AGAIN},
        {"zerodlnk", 8, SECURE_STREAM_AGAIN},
        {"zerodlnk\1\0\0", 11, SECURE_STREAM_AGAIN},
        {"zerodlnk\2\0\0\0", 12, SECURE_STREAM_E_VERSION},
        {"zerodlnX", 8, SECURE_STREAM_E_STRANGER},
        {"zerodlnk\1\0\0\0", 12, SECURE_STREAM_AGAIN},
        {"\0\0\0\0\0\0\0\0", 8, SECURE_STREAM_E_STRANGER},
    };

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        pair_init();
        assert_int_equal(secure_stream_feed(&pair.listening.stream, cases[i].bytes, cases[i].n_bytes), 0);
        assert_int_equal(secure_stream_next(&pair.listening.stream, &(struct secure_stream_frame){0}), cases[i].r);
        if (cases[i].r == SECURE_STREAM_E_VERSION)
            assert_int_equal(pair.listening.stream.peer_version, 2);
        pair_deinit();
    }
}

/* A length is checked when its four bytes are there, and no memory is allocated for a frame that is refused. */
static void test_lengths(void **userdata)
{
    static const struct {
        uint32_t length;
        int r;
    } cases[] = {
        {0, SECURE_STREAM_E_LENGTH},
        {SECURE_STREAM_OVERHEAD_BYTES - SECURE_STREAM_LENGTH_BYTES - 1, SECURE_STREAM_E_LENGTH},
        {SECURE_STREAM_OVERHEAD_BYTES - SECURE_STREAM_LENGTH_BYTES, SECURE_STREAM_AGAIN},
        {MAX_FRAME + SECURE_STREAM_OVERHEAD_BYTES - SECURE_STREAM_LENGTH_BYTES, SECURE_STREAM_AGAIN},
        {MAX_FRAME + SECURE_STREAM_OVERHEAD_BYTES - SECURE_STREAM_LENGTH_BYTES + 1, SECURE_STREAM_E_LENGTH},
        {UINT32_MAX, SECURE_STREAM_E_LENGTH},
    };
    static const uint8_t header[SECURE_STREAM_HEADER_BYTES];

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        uint32_t length = htole32(cases[i].length);

        pair_init();
        pair_meet();
        assert_int_equal(secure_stream_feed(&pair.listening.stream, header, sizeof(header)), 0);
        assert_int_equal(secure_stream_feed(&pair.listening.stream, &length, sizeof(length)), 0);
        assert_int_equal(secure_stream_next(&pair.listening.stream, &(struct secure_stream_frame){0}), cases[i].r);
        assert_true(pair.listening.stream.input_capacity <= 1024);
        pair_deinit();
    }
}

static void test_wiped(void **userdata)
{
    static const struct secure_stream empty;
    static const struct secure_stream_key no_key;

    (void)userdata;
    pair_init();
    pair_meet();
    /* The shared key is wiped after the handshake. */
    assert_memory_equal(&pair.connecting.stream.key, &no_key, sizeof(no_key));
    pair_deinit();
    assert_memory_equal(&pair.connecting.stream, &empty, sizeof(empty));
    secure_stream_deinit(&pair.connecting.stream);
}

/* ---- what the frames say ------------------------------------------------------------------------------- */

static void test_frames(void **userdata)
{
    static const struct link_frame frames[] = {
        {.kind = LINK_FRAME_INTRODUCTION,
         .introduction = {0x0102030405060708, 3, 4, 5, true},
         .data = (const uint8_t *)"job: a\n",
         .n_bytes = 7},
        {.kind = LINK_FRAME_INTRODUCTION, .introduction = {1, 0, 0, 0, false}},
        {.kind = LINK_FRAME_MESSAGE, .number = 1},
        {.kind = LINK_FRAME_MESSAGE, .number = UINT64_MAX, .data = (const uint8_t *)"\0x", .n_bytes = 2},
        {.kind = LINK_FRAME_HEARTBEAT, .n_received = 77},
        {.kind = LINK_FRAME_FAREWELL, .data = (const uint8_t *)"why", .n_bytes = 3},
    };
    uint8_t bytes[128];
    struct link_frame back;

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(frames); i++) {
        size_t n_bytes = link_frame_packed_bytes(&frames[i]), n_fixed = n_bytes - frames[i].n_bytes;

        link_frame_pack(&frames[i], bytes);
        assert_int_equal(link_frame_unpack(&back, bytes, n_bytes), 0);
        assert_int_equal(back.kind, frames[i].kind);
        assert_memory_equal(&back.introduction, &frames[i].introduction, sizeof(back.introduction));
        assert_int_equal(back.n_bytes, frames[i].n_bytes);
        if (back.n_bytes > 0)
            assert_memory_equal(back.data, frames[i].data, back.n_bytes);
        assert_int_equal(link_frame_unpack(&back, bytes, n_fixed - 1), LINK_FRAME_E_INVALID);
    }
}

static void test_frames_that_are_none(void **userdata)
{
    static const struct {
        const char *bytes;
        size_t n_bytes;
    } cases[] = {
        {"", 0},
        {"\0", 1},
        {"\5", 1},
        {"\1\0\0\0\0\0\0\0\0"
         "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
         34}, /* incarnation 0 */
        {"\1\1\0\0\0\0\0\0\0"
         "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\2",
         34}, /* has_run is neither 0 nor 1 */
        {"\1\1\0\0\0\0\0\0\0"
         "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0a\0b",
         37},                        /* a text with a zero byte */
        {"\2\0\0\0\0\0\0\0\0x", 10}, /* message 0 */
        {"\3\1\0\0\0\0\0\0\0x", 10}, /* a heartbeat with extra bytes */
        {"\4a\0b", 4},               /* a sentence with a zero byte */
    };
    static uint8_t long_farewell[LINK_FRAME_MAX_WHY + 2];
    struct link_frame frame;

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_int_equal(link_frame_unpack(&frame, (const uint8_t *)cases[i].bytes, cases[i].n_bytes),
                         LINK_FRAME_E_INVALID);
    memset(long_farewell, 'x', sizeof(long_farewell));
    long_farewell[0] = LINK_FRAME_FAREWELL;
    assert_int_equal(link_frame_unpack(&frame, long_farewell, sizeof(long_farewell)), LINK_FRAME_E_INVALID);
    assert_int_equal(link_frame_unpack(&frame, long_farewell, sizeof(long_farewell) - 1), 0);
}

/* ---- messages that outlive a connection ---------------------------------------------------------------- */

static void expect_taken(struct mailbox *mailbox, uint64_t number)
{
    const struct mailbox_message *message = mailbox_take(mailbox);
    struct link_frame frame;

    if (number == 0) {
        assert_null(message);
        return;
    }
    assert_non_null(message);
    assert_int_equal(link_frame_unpack(&frame, message->bytes, message->n_bytes), 0);
    assert_int_equal(frame.number, number);
    assert_int_equal(frame.data[0], number);
}

static void test_mailbox(void **userdata)
{
    struct mailbox mailbox;

    (void)userdata;
    mailbox_init(&mailbox, 4096);
    expect_taken(&mailbox, 0);
    for (uint8_t i = 1; i <= 4; i++)
        assert_int_equal(mailbox_put(&mailbox, &i, 1), 0);
    expect_taken(&mailbox, 1);
    expect_taken(&mailbox, 2);
    assert_int_equal(mailbox_acknowledge(&mailbox, 3), MAILBOX_E_GAP); /* not sent yet */
    assert_int_equal(mailbox_acknowledge(&mailbox, 1), 0);
    mailbox_rewind(&mailbox); /* a new connection; message 2 was lost with the old one */
    expect_taken(&mailbox, 2);
    expect_taken(&mailbox, 3);
    mailbox_rewind(&mailbox);
    assert_int_equal(mailbox_acknowledge(&mailbox, 3), 0); /* an old acknowledgement: 2 and 3 were not lost */
    expect_taken(&mailbox, 4);
    expect_taken(&mailbox, 0);
    assert_int_equal(mailbox_acknowledge(&mailbox, 2), 0); /* known already */
    assert_int_equal(mailbox.n_acknowledged, 3);
    assert_int_equal(mailbox_acknowledge(&mailbox, 4), 0);
    assert_int_equal(mailbox.n_bytes, 0);
    assert_null(mailbox.last);

    assert_int_equal(mailbox_receive(&mailbox, 2), MAILBOX_E_GAP);
    assert_int_equal(mailbox_receive(&mailbox, 1), 0);
    assert_int_equal(mailbox_receive(&mailbox, 1), MAILBOX_OLD);
    assert_int_equal(mailbox_receive(&mailbox, 2), 0);
    mailbox_reset(&mailbox);
    assert_int_equal(mailbox_receive(&mailbox, 1), 0);
    assert_int_equal(mailbox_put(&mailbox, "\1", 1), 0);
    expect_taken(&mailbox, 1);
    mailbox_reset(&mailbox);
}

static void test_mailbox_full(void **userdata)
{
    static const uint8_t data[1000];
    struct mailbox mailbox;

    (void)userdata;
    mailbox_init(&mailbox, 4096);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(mailbox_put(&mailbox, data, sizeof(data)), 0);
    assert_int_equal(mailbox_put(&mailbox, data, sizeof(data)), MAILBOX_E_FULL);
    assert_int_equal(mailbox.n_put, 3);
    (void)mailbox_take(&mailbox);
    assert_int_equal(mailbox_acknowledge(&mailbox, 1), 0);
    assert_int_equal(mailbox_put(&mailbox, data, sizeof(data)), 0);
    mailbox_reset(&mailbox);
    assert_int_equal(mailbox.n_bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways),    cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_is_secret),    cmocka_unit_test(test_other_key),
        cmocka_unit_test(test_other_job),    cmocka_unit_test(test_replayed),
        cmocka_unit_test(test_reflected),    cmocka_unit_test(test_reordered),
        cmocka_unit_test(test_flipped_bits), cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_lengths),      cmocka_unit_test(test_wiped),
        cmocka_unit_test(test_frames),       cmocka_unit_test(test_frames_that_are_none),
        cmocka_unit_test(test_mailbox),      cmocka_unit_test(test_mailbox_full),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
