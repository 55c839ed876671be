/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes seeds for these fuzzers. For wire, engine, device, nodes, frame and secure-stream: one packed example of every
 * message, and a few conversations. For safetensors and description: the files of a checkpoint. For client: a daemon's
 * answers to a rank. Usage: make-corpus DIRECTORY, which has a folder for each of them.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/description.h"
#include "core/checkpoint/safetensors.h"
#include "core/layout/layout.h"
#include "core/wire/frame.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "daemon/link/link-frame.h"
#include "daemon/link/secure-stream.h"
#include "tests/core/wire/device-examples.h"
#include "tests/core/wire/engine-examples.h"
#include "tests/core/wire/node-examples.h"
#include "tests/core/wire/wire-examples.h"

static uint8_t packet[FRAME_MAX_BYTES];

static int write_seed(const char *directory, const char *folder, const char *name, const void *data, int n)
{
    char path[4096];
    FILE *file;
    int r;

    if (n < 0)
        return n;
    snprintf(path, sizeof(path), "%s/%s/%s", directory, folder, name);
    file = fopen(path, "wb");
    if (!file)
        return -errno;
    r = fwrite(data, 1, n, file) == (size_t)n ? 0 : -EIO;
    if (fclose(file) != 0)
        r = -EIO;
    return r;
}

static int write_messages(const char *directory)
{
    struct wire_arena arena;
    char name[64];
    int r;

    r = wire_arena_init(&arena);
    for (unsigned type = 1; type < N_REQUEST_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "request-%s", request_type_name(type));
        r = write_seed(directory, "wire", name, packet,
                       wire_pack_request(&arena, &example_requests[type], packet, sizeof(packet)));
    }
    for (unsigned type = 1; type < N_REPLY_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "reply-%s", reply_type_name(type));
        r = write_seed(directory, "wire", name, packet,
                       wire_pack_reply(&arena, &example_replies[type], packet, sizeof(packet)));
    }
    wire_arena_deinit(&arena);
    return r;
}

static int write_engine_messages(const char *directory)
{
    struct wire_arena arena;
    char name[64];
    int r;

    r = wire_arena_init(&arena);
    for (unsigned type = 1; type < N_ENGINE_COMMAND_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "command-%u", type);
        r = write_seed(directory, "engine", name, packet,
                       engine_pack_command(&arena, &engine_example_commands[type], packet, sizeof(packet)));
    }
    for (unsigned type = 1; type < N_ENGINE_REPORT_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "report-%u", type);
        r = write_seed(directory, "engine", name, packet,
                       engine_pack_report(&arena, &engine_example_reports[type], packet, sizeof(packet)));
    }
    wire_arena_deinit(&arena);
    return r;
}

static int write_device_messages(const char *directory)
{
    struct wire_arena arena;
    char name[64];
    int r;

    r = wire_arena_init(&arena);
    for (unsigned type = 1; type < N_DEVICE_COMMAND_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "command-%u", type);
        r = write_seed(directory, "device", name, packet,
                       device_pack_command(&arena, &device_example_commands[type], packet, sizeof(packet)));
    }
    for (unsigned type = 1; type < N_DEVICE_REPORT_TYPES && !r; type++) {
        snprintf(name, sizeof(name), "report-%u", type);
        r = write_seed(directory, "device", name, packet,
                       device_pack_report(&arena, &device_example_reports[type], packet, sizeof(packet)));
    }
    wire_arena_deinit(&arena);
    return r;
}

/* Adds a message in the format of fuzz-nodes at offset `at`. Return: the end of the message, or -errno. */
static int add_node_message(struct wire_arena *arena, size_t at, unsigned node, const struct node_message *message)
{
    int n = node_pack(arena, message, packet + at + 3, sizeof(packet) - at - 3);

    if (n < 0)
        return n;
    packet[at] = (uint8_t)n;
    packet[at + 1] = (uint8_t)(n >> 8);
    packet[at + 2] = (uint8_t)node;
    return (int)at + 3 + n;
}

/* Writes a step: three nodes ask, measure and update. */
static int write_node_step(const char *directory, struct wire_arena *arena)
{
    static const enum node_kind kinds[] = {NODE_READY, NODE_MOVED, NODE_ASKED, NODE_SUM, NODE_UPDATED, NODE_MOVED};
    static const uint8_t none[192]; /* the exact sum of nothing */
    int n = 1;

    packet[0] = 1;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        for (unsigned node = 0; node < 3 && n > 0; node++)
            n = add_node_message(arena, (size_t)n, node,
                                 &(struct node_message){.kind = kinds[i],
                                                        .tag = i < 3 ? 5 : 6,
                                                        .has_rank = kinds[i] == NODE_ASKED,
                                                        .bytes = none,
                                                        .n_bytes = kinds[i] == NODE_SUM ? sizeof(none) : 0});
    return n < 0 ? n : write_seed(directory, "nodes", "step", packet, n);
}

static int write_node_messages(const char *directory)
{
    struct wire_arena arena;
    char name[64];
    int r = wire_arena_init(&arena);

    packet[0] = 1;
    for (size_t i = 0; i < N_NODE_EXAMPLES && !r; i++) {
        int n = add_node_message(&arena, 1, (unsigned)i % 3, &node_examples[i]);

        snprintf(name, sizeof(name), "message-%s", node_kind_name(node_examples[i].kind));
        r = n < 0 ? n : write_seed(directory, "nodes", name, packet, n);
    }
    if (!r)
        r = write_node_step(directory, &arena);
    wire_arena_deinit(&arena);
    return r;
}

/* Writes acts of fuzz-frame. An act is four bytes: verb, descriptors, size. */
static int write_talks(const char *directory)
{
    static const struct {
        const char *name;
        uint8_t verbs[8];
        uint8_t n_fds;
        uint16_t size;
        unsigned n_rounds;
    } talks[] = {
        {"pushes", {1, 1, 1, 1, 11}, 0, 40, 20},
        {"questions", {1, 11, 9, 5}, 0, 100, 20},
        {"segments", {9, 5}, 5, 60, 12},
        {"unread", {9, 12, 9, 12, 10}, 2, 20000, 12},
        {"bursts", {9, 9, 9, 9, 5, 10, 5}, 1, 9000, 20},
        {"bad-client", {1, 4, 11, 2}, 3, 65535, 8},
        {"death", {1, 9, 8, 11, 10}, 1, 60001, 4},
    };
    uint8_t *p;
    int r = 0;

    for (size_t i = 0; i < ARRAY_SIZE(talks) && !r; i++) {
        p = packet;
        for (unsigned round = 0; round < talks[i].n_rounds; round++) {
            for (unsigned k = 0; k < 8 && talks[i].verbs[k]; k++, p += 4) {
                p[0] = talks[i].verbs[k];
                p[1] = talks[i].n_fds;
                memcpy(p + 2, &talks[i].size, 2);
            }
        }
        r = write_seed(directory, "frame", talks[i].name, packet, p - packet);
    }
    return r;
}

/* The first byte of an input of fuzz-secure-stream.c, which says how the rest is used. */
enum { FROM_STRANGER, TO_CONNECTING, CONVERSATION, OPENED_FRAME };

/* Writes a hello in pieces of up to 64 bytes, each behind its length minus one, and bytes that are not a frame. */
static int write_strangers(const char *directory)
{
    struct secure_stream_key key;
    struct secure_stream_options options = {.key = &key, .job = "train", .max_frame_bytes = 2048};
    uint8_t said[SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES + 100] = {0};
    struct secure_stream stream;
    uint8_t *p = packet;
    int r = secure_stream_key_init(&key, "fuzz", 4);

    if (r)
        return r;
    secure_stream_init(&stream, &options);
    memcpy(said, stream.hello, SECURE_STREAM_HELLO_BYTES);
    said[SECURE_STREAM_HELLO_BYTES + SECURE_STREAM_HEADER_BYTES] = 50; /* a frame's length */
    secure_stream_deinit(&stream);
    *p++ = FROM_STRANGER;
    for (size_t at = 0; at < sizeof(said); at += 64) {
        size_t n = MIN(sizeof(said) - at, (size_t)64);

        *p++ = (uint8_t)(n - 1);
        memcpy(p, said + at, n);
        p += n;
    }
    r = write_seed(directory, "secure-stream", "hello", packet, p - packet);
    packet[0] = TO_CONNECTING;
    return r ? r : write_seed(directory, "secure-stream", "answer", packet, p - packet);
}

/* Writes acts as write_talks() does. 8 more in the verb means the other direction. */
static int write_sealed_talk(const char *directory)
{
    static const uint8_t verbs[] = {6, 14, 0, 8, 3, 11, 1, 6, 14, 6};
    static const uint16_t sizes[] = {80, 80, 0, 2048, 20, 63, 300, 5000, 5000, 5000};
    uint8_t *p = packet;

    *p++ = CONVERSATION;
    for (unsigned round = 0; round < 6; round++) {
        for (size_t i = 0; i < ARRAY_SIZE(verbs); i++, p += 4) {
            p[0] = round == 5 && i == 7 ? 135 : verbs[i]; /* the last act changes a byte */
            p[1] = (uint8_t)(round + 1);
            memcpy(p + 2, &sizes[i], 2);
        }
    }
    return write_seed(directory, "secure-stream", "talk", packet, p - packet);
}

static int write_opened_frames(const char *directory)
{
    static const char text[] = "zerod version: 1\njob: \"other\"\nworld.nodes: [{address: \"b:1\", ranks: 1}]\n";
    static const struct {
        const char *name;
        struct link_frame frame;
    } frames[] = {
        {"introduction", {LINK_FRAME_INTRODUCTION, {{1, 2, 3, 4}}, (const uint8_t *)text, sizeof(text) - 1}},
        {"message", {.kind = LINK_FRAME_MESSAGE, .number = 1, .data = (const uint8_t *)"x", .n_bytes = 1}},
        {"heartbeat", {.kind = LINK_FRAME_HEARTBEAT, .n_received = 1}},
        {"farewell", {.kind = LINK_FRAME_FAREWELL, .data = (const uint8_t *)"why", .n_bytes = 3}},
    };
    int r = 0;

    packet[0] = OPENED_FRAME;
    for (size_t i = 0; i < ARRAY_SIZE(frames) && !r; i++) {
        link_frame_pack(&frames[i].frame, packet + 1);
        r = write_seed(directory, "secure-stream", frames[i].name, packet,
                       1 + (int)link_frame_packed_bytes(&frames[i].frame));
    }
    return r;
}

/* Writes a header in the format of fuzz-safetensors: the size of the data behind the header, then the header's JSON. */
static int write_header(const char *directory, const char *name, struct safetensors *file)
{
    _cleanup_free_ uint8_t *header = NULL;
    size_t n_header = 0, n_json;
    int r = safetensors_header(file, &header, &n_header);
    uint32_t n_data = r == 0 ? (uint32_t)(file->file_bytes - n_header) : 0;

    safetensors_deinit(file);
    if (r)
        return -ENOMEM;
    n_json = n_header - SAFETENSORS_LENGTH_BYTES;
    memcpy(packet, &n_data, sizeof(n_data));
    memcpy(packet + sizeof(n_data), header + SAFETENSORS_LENGTH_BYTES, n_json);
    return write_seed(directory, "safetensors", name, packet, (int)(sizeof(n_data) + n_json));
}

static int write_headers(const char *directory)
{
    static const uint64_t shape[] = {3, 5, 2}, none[] = {2, 0}, starts[] = {12, 0, 7};
    static const struct {
        const char *name;
        int dtype;
        uint32_t n_dims;
        const uint64_t *shape;
    } tensors[] = {{"a.weight", DTYPE_F32, 2, shape}, {"state.a.weight.step", DTYPE_F32, 0, NULL},
                   {"\"\\:\n", DTYPE_F32, 2, none},   {"b", DTYPE_BF16, 3, shape},
                   {"c", DTYPE_F16, 1, shape},        {"rank.0", SAFETENSORS_U8, 1, shape + 1}};
    struct safetensors file = {0};
    int r = write_header(directory, "empty", &file);

    for (size_t k = 0; k < 2 * ARRAY_SIZE(tensors) && !r; k++) {
        bool sharded = k >= ARRAY_SIZE(tensors);
        size_t n = k % ARRAY_SIZE(tensors) + 1;
        char name[16];

        file.sharded = sharded;
        for (size_t i = 0; i < n && !r; i++)
            r = safetensors_add(&file, tensors[i].name, tensors[i].dtype, tensors[i].shape, sharded ? starts : NULL,
                                tensors[i].n_dims);
        snprintf(name, sizeof(name), "%s-%zu", sharded ? "boxes" : "tensors", n);
        r = r ? -ENOMEM : write_header(directory, name, &file);
    }
    return r;
}

/* Writes a description as it is, and one without its seal, which fuzz-description adds. */
static int write_descriptions(const char *directory)
{
    static const struct layout no_params;
    struct file_hash hash = {.whole = "0123456789abcdef0123456789abcdef", .blocks = (uint64_t[]){1, 2}, .n_blocks = 2};
    struct description_file files[] = {
        {.name = (char *)"model.safetensors", .n_bytes = HASH_BLOCK_BYTES + 1, .hash = hash},
        {.name = (char *)"optimizer.safetensors", .n_bytes = 2 * HASH_BLOCK_BYTES, .hash = hash},
    };
    const struct description d = {.version = (char *)"1",
                                  .job = (char *)"job",
                                  .run = (char *)"run",
                                  .optimizer = (char *)"AdamW",
                                  .configuration = (char *)"zero_optimization.stage: 2\n",
                                  .step = 1000,
                                  .n_applied = 999,
                                  .world_size = 4,
                                  .n_nodes = 1,
                                  .stage = 2,
                                  .loss_scale = {true, 65536, 2, 1000, 7},
                                  .files = files,
                                  .n_files = ARRAY_SIZE(files)};
    _cleanup_free_ char *text = description_print(&d, &no_params);
    int r;

    if (!text)
        return -ENOMEM;
    r = write_seed(directory, "description", "sealed", text, (int)strlen(text));
    return r ? r : write_seed(directory, "description", "unsealed", text, (int)(strstr(text, ",\"xxh128_of") - text));
}

/* ---- answers of a daemon to a rank ---------------------------------------------------------------------- */

enum { ANSWER_PAGE = 4096, ANSWER_RING_BYTES = 24576, ANSWER_OVERFLOW_BYTES = 65536 };

struct answers {
    struct wire_arena arena;
    struct layout *layout;
    uint8_t bytes[1 << 16];
    size_t n;
};

/* Adds an answer in the format of fuzz-client.c. pages has the sizes of n_fds descriptors. */
static void add_answer(struct answers *answers, const struct reply *reply, const uint16_t *pages, size_t n_fds)
{
    uint8_t *at = answers->bytes + answers->n;
    int n = wire_pack_reply(&answers->arena, reply, packet, sizeof(packet));

    *at++ = (uint8_t)n_fds;
    for (size_t i = 0; i < n_fds; i++) {
        *at++ = (uint8_t)pages[i];
        *at++ = (uint8_t)(pages[i] >> 8);
    }
    *at++ = (uint8_t)n;
    *at++ = (uint8_t)(n >> 8);
    memcpy(at, packet, (size_t)n);
    answers->n = (size_t)(at - answers->bytes) + (size_t)n;
}

static uint64_t weight_bytes(const struct answers *answers, unsigned stage)
{
    return round_up(stage == 3 ? answers->layout->range_bytes : answers->layout->weight_bytes, ANSWER_PAGE);
}

static void add_formed(struct answers *answers, unsigned stage)
{
    const struct wire_segment segments[] = {
        {WIRE_SEGMENT_RING, ANSWER_RING_BYTES + ANSWER_PAGE, false},
        {WIRE_SEGMENT_OVERFLOW, ANSWER_OVERFLOW_BYTES, false},
        {WIRE_SEGMENT_CREDIT, ANSWER_PAGE, false},
        {stage == 3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS, weight_bytes(answers, stage), false},
        {WIRE_SEGMENT_PUBLISHED, ANSWER_PAGE, false},
    };
    uint16_t pages[ARRAY_SIZE(segments)];

    for (size_t i = 0; i < ARRAY_SIZE(segments); i++)
        pages[i] = (uint16_t)(segments[i].n_bytes / ANSWER_PAGE);
    add_answer(answers,
               &(struct reply){.type = REPLY_FORMED,
                               .formed = {.segments = segments,
                                          .n_segments = ARRAY_SIZE(segments),
                                          .init_wanted = stage != 3,
                                          .n_tickets = 8,
                                          .ring_bytes = ANSWER_RING_BYTES,
                                          .loss_scale = 1}},
               pages, ARRAY_SIZE(segments));
}

static void add_welcome(struct answers *answers, unsigned stage)
{
    add_answer(answers,
               &(struct reply){.type = REPLY_WELCOME,
                               .welcome = {.version = WIRE_VERSION,
                                           .world_size = 1,
                                           .stage = stage,
                                           .bucket_elems = 1024,
                                           .server = "test",
                                           .run_id = "run",
                                           .optimizer = "AdamW",
                                           .private_weights = stage == 1,
                                           .stage3_max_live_elems = 1 << 20}},
               NULL, 0);
}

static void add_dones(struct answers *answers, size_t n)
{
    for (size_t i = 0; i < n; i++)
        add_answer(answers, &(struct reply){.type = REPLY_DONE, .done = {.loss_scale = 1}}, NULL, 0);
}

/* Adds the answers to the calls of a rank in fuzz-client.c, for one step and the calls after it. */
static void add_training(struct answers *answers, unsigned stage, bool is_first)
{
    const struct wire_segment state = {WIRE_SEGMENT_STATE, 5 * ANSWER_PAGE, false};
    const struct reply grant = {.type = REPLY_SLOT_GRANT, .slot_grant = {.offset_bytes = 4096}};
    const struct reply is = {.type = REPLY_STATE_IS,
                             .state_is = {.segments = &state, .n_segments = 1, .n_elems = 5000}};

    for (unsigned i = 0; i < 3; i++) {
        if (!is_first || i > 0)
            add_answer(answers, &grant, NULL, 0);
        add_dones(answers, 1);
    }
    add_answer(answers, &(struct reply){.type = REPLY_STEP_DONE, .step_done = {.position = {.step = 1}}}, NULL, 0);
    add_dones(answers, stage == 3);
    add_answer(answers, &is, (uint16_t[]){5}, 1);
    add_answer(answers, &(struct reply){.type = REPLY_STATE_IS, .state_is = {.norm = 2}}, NULL, 0);
    add_dones(answers, 1);
    add_welcome(answers, stage); /* for the connection that asks for the status */
    add_answer(answers,
               &(struct reply){.type = REPLY_ADMIN_PART,
                               .admin_part = {.json = (const uint8_t *)"{}", .n_json_bytes = 2, .last = true}},
               NULL, 0);
}

static void add_window(struct answers *answers, unsigned stage)
{
    const struct wire_segment state = {WIRE_SEGMENT_WINDOW_STATE, 5 * ANSWER_PAGE, false};
    const struct wire_segment window = {WIRE_SEGMENT_WINDOW, weight_bytes(answers, stage), false};

    add_answer(answers,
               &(struct reply){.type = REPLY_DONE, .done = {.segments = &window, .n_segments = 1, .loss_scale = 1}},
               (uint16_t[]){(uint16_t)(window.n_bytes / ANSWER_PAGE)}, 1);
    add_answer(
        answers,
        &(struct reply){.type = REPLY_STATE_IS, .state_is = {.segments = &state, .n_segments = 1, .n_elems = 5000}},
        (uint16_t[]){5}, 1);
    add_answer(answers, &(struct reply){.type = REPLY_STATE_IS}, NULL, 0);
    add_dones(answers, 3);
}

static int write_answers(const char *directory)
{
    const struct layout_decl decls[] = {
        {.name = "a", .name_len = 1, .trainable = true, .n_dims = 1, .shape = (uint64_t[]){300}},
        {.name = "b", .name_len = 1, .trainable = true, .n_dims = 1, .shape = (uint64_t[]){5000}},
        {.name = "c", .name_len = 1, .n_dims = 1, .shape = (uint64_t[]){7}}};
    static struct answers answers;
    uint32_t bad;
    char name[16];
    int r = wire_arena_init(&answers.arena);

    if (r == 0)
        r = layout_new(&answers.layout, decls, ARRAY_SIZE(decls), 1, 1024, &bad);
    for (unsigned stage = 1; stage <= 3 && r == 0; stage++) {
        answers.n = 0;
        add_welcome(&answers, stage);
        add_formed(&answers, stage);
        add_dones(&answers, stage == 3 ? 1 : 4); /* also for the initial weights */
        add_training(&answers, stage, true);
        add_window(&answers, stage);
        add_dones(&answers, 2); /* for an abort, and for a cleared fault */
        add_training(&answers, stage, false);
        snprintf(name, sizeof(name), "stage%u", stage);
        r = write_seed(directory, "client", name, answers.bytes, (int)answers.n);
    }
    layout_free(answers.layout);
    wire_arena_deinit(&answers.arena);
    return r;
}

int main(int argc, char **argv)
{
    int r;

    if (argc != 2) {
        fprintf(stderr, "usage: make-corpus DIRECTORY\n");
        return 64;
    }
    r = write_messages(argv[1]);
    if (!r)
        r = write_engine_messages(argv[1]);
    if (!r)
        r = write_device_messages(argv[1]);
    if (!r)
        r = write_node_messages(argv[1]);
    if (!r)
        r = write_talks(argv[1]);
    if (!r)
        r = write_strangers(argv[1]);
    if (!r)
        r = write_sealed_talk(argv[1]);
    if (!r)
        r = write_opened_frames(argv[1]);
    if (!r)
        r = write_headers(argv[1]);
    if (!r)
        r = write_descriptions(argv[1]);
    if (!r)
        r = write_answers(argv[1]);
    if (r)
        fprintf(stderr, "make-corpus: %s\n", strerror(-r));
    return r ? 1 : 0;
}
