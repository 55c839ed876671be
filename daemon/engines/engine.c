/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's side of an engine between nodes: orders to the child process, and its reports. */

#include "daemon/engines/engine.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "daemon/engines/child.h"

_Static_assert((int)ENGINE_GRACE_MS == (int)CHILD_GRACE_MS && (int)ENGINE_MAX_WHAT_BYTES == (int)CHILD_MAX_WHAT_BYTES,
               "what engine.h says of a child");

_Static_assert((int)ENGINE_SETUP_SEGMENTS <= (int)FRAME_MAX_FDS, "the setup is one packet");

enum { SENT, RECEIVED }; /* indices of child_order.expected, which has numbers of bytes */

struct engine {
    struct engine_ops ops;
    struct child *child;
    struct wire_arena arena;
    uint8_t *packet;
    bool started; /* the process was started, so on_freed() calls ended() */
};

/* ---- reports -------------------------------------------------------------------------------------------- */

static void serve_done(struct engine *engine, const struct engine_done *done)
{
    struct child_order *order = child_find(engine->child, done->tag);

    if (!order || !child_is_ready(engine->child)) {
        child_fail(engine->child, NULL, "has reported the end of order %" PRIu64 ", which is not under way", done->tag);
        return;
    }
    if (done->n_bytes_sent != order->expected[SENT] || done->n_bytes_received != order->expected[RECEIVED]) {
        child_fail(engine->child, &done->tag,
                   "has reported %" PRIu64 " bytes sent and %" PRIu64 " received, expected %" PRIu64 " and %" PRIu64,
                   done->n_bytes_sent, done->n_bytes_received, order->expected[SENT], order->expected[RECEIVED]);
        return;
    }
    child_settle(engine->child, order, done->n_bytes_sent, done->n_bytes_received);
    engine->ops.done(engine->ops.userdata, done);
}

static void serve_failed(struct engine *engine, const struct engine_failed *failed)
{
    bool has_tag = failed->has_tag && child_find(engine->child, failed->tag);

    child_say(engine->child, has_tag ? &failed->tag : NULL, failed->what);
}

static void serve_report(struct engine *engine, const struct engine_report *report)
{
    switch (report->type) {
    case ENGINE_REPORT_VALUE:
        engine->ops.put(engine->ops.userdata, report->value.key, report->value.value, report->value.n_value_bytes);
        return;
    case ENGINE_REPORT_READY:
        if (child_note_ready(engine->child))
            engine->ops.ready(engine->ops.userdata);
        return;
    case ENGINE_REPORT_DONE:
        serve_done(engine, &report->done);
        return;
    case ENGINE_REPORT_FAILED:
        serve_failed(engine, &report->failed);
        return;
    case N_ENGINE_REPORT_TYPES:
        break;
    }
    abort(); /* unpacking yields no other type */
}

static void on_packet(void *userdata, const uint8_t *data, size_t n_bytes, int *fds, size_t n_fds)
{
    struct engine *engine = userdata;
    struct engine_report report;
    char why[WIRE_WHY_BYTES];
    int r;

    r = engine_unpack_report(&engine->arena, data, n_bytes, &report, why, sizeof(why));
    if (r == 0)
        serve_report(engine, &report);
    else
        child_fail(engine->child, NULL, "has sent an invalid report: %s", r == WIRE_E_INVALID ? why : strerror(-r));
}

static void on_child_failed(void *userdata, const struct child_failure *failure)
{
    struct engine *engine = userdata;

    engine->ops.failed(engine->ops.userdata, &(struct engine_failure){
                                                 .kind = failure->said ? ENGINE_SAID : ENGINE_BEHAVED,
                                                 .what = failure->what,
                                                 .has_tag = failure->has_tag,
                                                 .tag = failure->tag,
                                             });
}

static void on_freed(void *userdata)
{
    struct engine *engine = userdata;

    if (engine->started && engine->ops.ended)
        engine->ops.ended(engine->ops.userdata);
    wire_arena_deinit(&engine->arena);
    free(engine->packet);
    free(engine);
}

/* ---- commands ------------------------------------------------------------------------------------------- */

/* Takes ownership of the descriptors. */
static int submit(struct engine *engine, const struct engine_command *command, int *fds, size_t n_fds)
{
    int n = engine_pack_command(&engine->arena, command, engine->packet, FRAME_MAX_BYTES);

    return child_send(engine->child, engine->packet, n, fds, n_fds);
}

static int share_fd(const struct segment *segment)
{
    int fd = fcntl(segment->fd, F_DUPFD_CLOEXEC, 0);

    return fd < 0 ? -errno : fd;
}

static int submit_setup(struct engine *engine, const struct engine_options *options)
{
    struct engine_segment segments[ENGINE_SETUP_SEGMENTS];
    int fds[ENGINE_SETUP_SEGMENTS], r = 0;
    size_t n = 0;

    for (size_t i = 0; i < options->n_segments && r >= 0; i++) {
        if (!options->segments[i])
            continue;
        r = share_fd(options->segments[i]);
        if (r >= 0) {
            segments[n] = (struct engine_segment){.number = i, .n_bytes = options->segments[i]->n_bytes};
            fds[n++] = r;
        }
    }
    for (size_t i = 0; i < n && r < 0; i++)
        close(fds[i]);
    if (r < 0)
        return r;
    return submit(engine,
                  &(struct engine_command){.type = ENGINE_COMMAND_SETUP,
                                           .setup = {.version = ENGINE_WIRE_VERSION,
                                                     .generation = options->generation,
                                                     .node = options->node,
                                                     .n_nodes = options->n_nodes,
                                                     .address = options->address,
                                                     .connect_timeout_ms = options->connect_timeout_ms,
                                                     .segments = segments,
                                                     .n_segments = n}},
                  fds, n);
}

static int expect(struct engine *engine, const struct engine_order *order)
{
    struct child_order expected = {.tag = order->tag, .kind = order->kind};

    for (size_t i = 0; i < order->n_moves; i++)
        expected.expected[order->moves[i].send ? SENT : RECEIVED] += order->moves[i].n_bytes;
    return child_expect(engine->child, &expected, order->timeout_ms);
}

int engine_order(struct engine *engine, const struct engine_order *order)
{
    int r;

    if (child_is_over(engine->child))
        return -EPIPE;
    if (order->n_moves == 0 || order->n_moves > ENGINE_MAX_MOVES || order->tag > ENGINE_MAX_TAG) {
        child_fail(engine->child, &order->tag, "was given order %" PRIu64 " of %zu moves, expected 1 to %d", order->tag,
                   order->n_moves, ENGINE_MAX_MOVES);
        return -EINVAL;
    }
    r = expect(engine, order);
    if (r < 0)
        return r;
    return submit(engine, &(struct engine_command){.type = ENGINE_COMMAND_ORDER, .order = *order}, NULL, 0);
}

int engine_value(struct engine *engine, const char *key, const uint8_t *value, size_t n_bytes)
{
    return submit(engine,
                  &(struct engine_command){.type = ENGINE_COMMAND_VALUE,
                                           .value = {.key = key, .value = value, .n_value_bytes = n_bytes}},
                  NULL, 0);
}

int engine_share(struct engine *engine, uint32_t number, const struct segment *segment)
{
    int fd;

    assert(number < ENGINE_MAX_SEGMENTS);

    fd = share_fd(segment);
    if (fd < 0) {
        child_fail(engine->child, NULL, "cannot be given a segment: %s", strerror(-fd));
        return fd;
    }
    return submit(engine,
                  &(struct engine_command){.type = ENGINE_COMMAND_SHARE,
                                           .share = {.segment = {.number = number, .n_bytes = segment->n_bytes}}},
                  &fd, 1);
}

/* ---- life ----------------------------------------------------------------------------------------------- */

static int start_process(struct engine *engine, const struct engine_options *options, char *why, size_t why_size)
{
    int r = submit_setup(engine, options);

    if (r < 0) {
        snprintf(why, why_size, "the engine cannot be set up: %s", strerror(-r));
        return r;
    }
    r = child_start(engine->child, why, why_size);
    engine->started = r == 0;
    return r;
}

static int make_child(struct engine *engine, const struct engine_options *options, char *why, size_t why_size)
{
    struct child_options child = {
        .loop = options->loop,
        .program = options->program,
        .variable = "ZEROD_ENGINE",
        .name = "zerod-engine-gloo",
        .ready_timeout_ms = options->connect_timeout_ms,
        .traffic = options->traffic,
        .ops = {.packet = on_packet, .failed = on_child_failed, .freed = on_freed, .userdata = engine},
    };

    return child_new(&engine->child, &child, why, why_size);
}

int engine_new(struct engine **out, const struct engine_options *options, char *why, size_t why_size)
{
    struct engine *engine = calloc(1, sizeof(*engine));
    int r = -ENOMEM;

    assert(options->n_segments <= ENGINE_SETUP_SEGMENTS && options->node < options->n_nodes);
    assert(options->kind == ENGINE_GLOO);

    if (engine)
        engine->packet = malloc(FRAME_MAX_BYTES);
    if (!engine || !engine->packet || wire_arena_init(&engine->arena) < 0) {
        snprintf(why, why_size, "no memory for the engine");
    } else {
        engine->ops = options->ops;
        r = make_child(engine, options, why, why_size);
        if (!r)
            r = start_process(engine, options, why, why_size);
    }
    if (r < 0) {
        engine_close(engine);
        return r;
    }
    *out = engine;
    return 0;
}

void engine_close(struct engine *engine)
{
    if (!engine)
        return;
    if (engine->child)
        child_close(engine->child);
    else
        on_freed(engine);
}

int64_t engine_pid(const struct engine *engine)
{
    return child_pid(engine->child);
}
