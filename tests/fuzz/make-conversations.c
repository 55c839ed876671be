/* SPDX-License-Identifier: Apache-2.0 */

/* Writes the seeds of fuzz-dispatch to a folder (the argument): conversations of a trainer and of zerodctl. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/wire/frame.h"
#include "core/wire/wire.h"
#include "core/wire/wire-request.h"

struct conversation {
    FILE *file;
    struct wire_arena arena;
    uint64_t sequence;
};

static uint8_t packet[FRAME_MAX_BYTES];

static void say(struct conversation *c, unsigned connection, const struct request *request)
{
    int n = wire_pack_request(&c->arena, request, packet, sizeof(packet));
    unsigned head = (unsigned)n | connection << 15;

    if (n <= 0 || n > 0x7fff)
        exit(1);
    fputc((int)(head & 0xff), c->file);
    fputc((int)(head >> 8), c->file);
    fwrite(packet, 1, (size_t)n, c->file);
}

static void begin(struct conversation *c, const char *folder, const char *name)
{
    char path[4096];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    *c = (struct conversation){.file = fopen(path, "w")};
    if (!c->file || wire_arena_init(&c->arena) < 0)
        exit(1);
}

static void end(struct conversation *c)
{
    fclose(c->file);
    wire_arena_deinit(&c->arena);
}

enum { SMALL_ROWS = 8, LARGE_ROWS = 8200 /* two chunks, so two parts */ };

/* Declares three parameters. With few rows two share a bucket, else the first has its own. One is frozen. */
static void attach(struct conversation *c, uint64_t rows)
{
    static const uint64_t shape[] = {8};
    const uint64_t matrix[] = {rows, 8};
    const struct layout_decl decls[] = {
        {.name = "a.weight", .name_len = 8, .trainable = true, .n_dims = 2, .shape = matrix},
        {.name = "b.bias", .name_len = 6, .trainable = true, .n_dims = 1, .shape = shape},
        {.name = "c", .name_len = 1, .dtype = DTYPE_BF16, .grad_dtype = DTYPE_BF16, .n_dims = 1, .shape = shape},
    };

    say(c, 0,
        &(struct request){.type = REQUEST_HELLO,
                          .hello = {.version_min = WIRE_VERSION,
                                    .version_max = WIRE_VERSION,
                                    .incarnation = 7,
                                    .run_id = "r",
                                    .client = "seed"}});
    say(c, 0, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = decls, .n_params = 3}});
    say(c, 0, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 3}});
    say(c, 0, &(struct request){.type = REQUEST_INIT, .init = {.param = 0, .n_elems = (uint32_t)rows * 8}});
    say(c, 0, &(struct request){.type = REQUEST_READY});
}

static void push(struct conversation *c, uint64_t step, uint32_t micro_batch, uint32_t param, uint32_t ticket,
                 uint32_t use)
{
    say(c, 0,
        &(struct request){.type = REQUEST_PUSH,
                          .push = {.sequence = ++c->sequence,
                                   .step = step,
                                   .micro_batch = micro_batch,
                                   .param = param,
                                   .ticket = ticket,
                                   .use = use,
                                   .ordinal = 1,
                                   .site = 1}});
}

static void step(struct conversation *c, uint64_t number, uint32_t use)
{
    say(c, 0, &(struct request){.type = REQUEST_BEGIN_BACKWARD, .begin_backward = {.step = number}});
    push(c, number, 0, 1, 0, use);
    push(c, number, 0, 0, 0, use);
    say(c, 0,
        &(struct request){
            .type = REQUEST_END_BACKWARD,
            .end_backward = {.step = number, .has_blob = true, .blob = (const uint8_t *)"x", .n_blob_bytes = 1}});
    say(c, 0, &(struct request){.type = REQUEST_GRAD_NORM});
    say(c, 0, &(struct request){.type = REQUEST_STEP, .step = {.step = number}});
}

/* Writes state in a window. The last two writes are refused, and all requests before ClearFault. */
static void write_state(struct conversation *c)
{
    static const struct request_write_state writes[] = {
        {.param = 0, .kind = WIRE_STATE_MASTER},  {.param = 1, .kind = WIRE_STATE_EXP_AVG},
        {.param = 1, .kind = WIRE_STATE_EXP_AVG}, {.param = 0, .kind = WIRE_STATE_STEP_COUNT, .count = 5},
        {.param = 2, .kind = WIRE_STATE_MASTER},  {.param = 3, .kind = WIRE_STATE_MASTER},
    };

    for (size_t i = 0; i < sizeof(writes) / sizeof(writes[0]); i++)
        say(c, 0, &(struct request){.type = REQUEST_WRITE_STATE, .write_state = writes[i]});
    say(c, 0, &(struct request){.type = REQUEST_CLEAR_FAULT});
}

static void training(const char *folder)
{
    static const uint32_t ids[] = {0, 1};
    struct conversation c;

    begin(&c, folder, "training");
    attach(&c, SMALL_ROWS);
    say(&c, 0, &(struct request){.type = REQUEST_INTERN, .intern = {.id = 1, .text = "train.py:3"}});
    step(&c, 0, 0);
    say(&c, 0, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = 2}});
    say(&c, 0, &(struct request){.type = REQUEST_PREFETCH, .prefetch = {.params = ids, .n_params = 2}});
    say(&c, 0, &(struct request){.type = REQUEST_RELEASE, .release = {.params = ids, .n_params = 2}});
    say(&c, 0, &(struct request){.type = REQUEST_WRITE_BEGIN});
    write_state(&c);
    say(&c, 0, &(struct request){.type = REQUEST_WRITE_END});
    for (enum wire_state_kind kind = WIRE_STATE_MASTER; kind <= WIRE_STATE_STEP_COUNT; kind++)
        say(&c, 0, &(struct request){.type = REQUEST_READ_STATE, .read_state = {.param = 0, .kind = kind}});
    step(&c, 1, 1);
    say(&c, 0, &(struct request){.type = REQUEST_LEAVE});
    end(&c);
}

static void faults(const char *folder)
{
    static const uint32_t ids[] = {0, 1};
    struct conversation c;

    begin(&c, folder, "faults");
    attach(&c, SMALL_ROWS);
    say(&c, 0, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 0}});
    say(&c, 0, &(struct request){.type = REQUEST_BEGIN_BACKWARD});
    push(&c, 0, 0, 0, 0, 0);
    push(&c, 0, 0, 0, 0, 0);
    say(&c, 0, &(struct request){.type = REQUEST_END_BACKWARD});
    say(&c, 0, &(struct request){.type = REQUEST_CLEAR_FAULT});
    say(&c, 0, &(struct request){.type = REQUEST_ABANDON_BACKWARD, .abandon_backward = {.why = "oom"}});
    say(&c, 0, &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "test"}});
    say(&c, 0, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = 1}});
    say(&c, 0,
        &(struct request){.type = REQUEST_EVIDENCE,
                          .evidence = {.attempt = 1,
                                       .exception = "RuntimeError: out of memory",
                                       .swallowed_by = "train.py:9 main",
                                       .dead_segment = "a",
                                       .n_dead_segments = 1,
                                       .site = "model.py:3",
                                       .n_forwards = 1,
                                       .not_called = ids,
                                       .n_not_called = 1,
                                       .called = ids + 1,
                                       .n_called = 1}});
    say(&c, 0, &(struct request){.type = REQUEST_STEP, .step = {.attempt = 1}});
    say(&c, 0, &(struct request){.type = REQUEST_REPORT, .report = {.code = 1104, .detail = "moved"}});
    end(&c);
}

static void push_part(struct conversation *c, uint32_t micro_batch, uint32_t part, uint32_t ticket)
{
    say(c, 0,
        &(struct request){
            .type = REQUEST_PUSH,
            .push = {
                .sequence = ++c->sequence, .micro_batch = micro_batch, .part = part, .ticket = ticket, .ordinal = 1}});
}

/* A gradient in two parts. Then only one of the parts, and the end of the micro-batch. */
static void parts(const char *folder)
{
    struct conversation c;

    begin(&c, folder, "parts");
    attach(&c, LARGE_ROWS);
    say(&c, 0, &(struct request){.type = REQUEST_BEGIN_BACKWARD});
    say(&c, 0, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 1, .parcel = 1}});
    push_part(&c, 0, 0, 0);
    push_part(&c, 0, 1, 1);
    say(&c, 0, &(struct request){.type = REQUEST_END_BACKWARD});
    say(&c, 0, &(struct request){.type = REQUEST_BEGIN_BACKWARD, .begin_backward = {.micro_batch = 1}});
    push_part(&c, 1, 0, 2);
    say(&c, 0, &(struct request){.type = REQUEST_END_BACKWARD, .end_backward = {.micro_batch = 1}});
    say(&c, 0, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = 1}});
    end(&c);
}

static void control(const char *folder)
{
    static const char *const commands[] = {"status",     "ranks", "params", "diagnostics", "report",
                                           "abort-step", "drop",  "drain",  "nothing"};
    struct conversation c;

    begin(&c, folder, "control");
    attach(&c, SMALL_ROWS);
    say(&c, 1,
        &(struct request){.type = REQUEST_HELLO,
                          .hello = {.version_min = WIRE_VERSION,
                                    .version_max = WIRE_VERSION,
                                    .incarnation = 9,
                                    .role = WIRE_ROLE_CONTROL,
                                    .client = "zerodctl"}});
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        say(&c, 1, &(struct request){.type = REQUEST_ADMIN, .admin = {.command = commands[i]}});
    end(&c);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make-conversations FOLDER\n");
        return 64;
    }
    training(argv[1]);
    faults(argv[1]);
    parts(argv[1]);
    control(argv[1]);
    return 0;
}
