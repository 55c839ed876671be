/* SPDX-License-Identifier: Apache-2.0 */

/* The daemon's side of an engine of GPUs: commands to the child process, and its reports. */

#include "daemon/engines/gpu-engine.h"

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
#include "daemon/engines/device-keep.h"

struct device {
    struct device_ops ops;
    struct device_keep *keep;
    struct child *child;
    struct wire_arena arena;
    uint8_t *packet;
    unsigned n_memories; /* local ranks whose memory the engine has reported */
    bool started;        /* the process was started, so on_freed() calls ended() */
    /* Tags of the orders that were submitted and not reported. The child's own list is lost when the child fails. */
    uint64_t *tags;
    size_t n_tags, n_tags_allocated;
    uint64_t trainers_tag; /* of the last order that waits for trainers; 0: none did */
};

/* ---- orders that are not reported ------------------------------------------------------------------------ */

static int tags_add(struct device *device, uint64_t tag)
{
    size_t n = MAX(2 * device->n_tags_allocated, (size_t)16);
    uint64_t *grown;

    if (device->n_tags == device->n_tags_allocated) {
        grown = reallocarray(device->tags, n, sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        device->tags = grown;
        device->n_tags_allocated = n;
    }
    device->tags[device->n_tags++] = tag;
    return 0;
}

static bool tags_have(const struct device *device, uint64_t tag)
{
    for (size_t i = 0; i < device->n_tags; i++)
        if (device->tags[i] == tag)
            return true;
    return false;
}

static void tags_remove(struct device *device, uint64_t tag)
{
    for (size_t i = 0; i < device->n_tags; i++)
        if (device->tags[i] == tag) {
            device->tags[i] = device->tags[--device->n_tags];
            return;
        }
    assert(!"the tag of an order that was submitted");
}

/* ---- reports --------------------------------------------------------------------------------------------- */

static void serve_memory(struct device *device, const struct device_memory *memory, int *fds, size_t n_fds)
{
    struct device_keep *keep = device->keep;
    size_t n = 0;

    if (memory->local_rank >= keep->plan.head->n_local || device_memory_n_fds(memory) != n_fds ||
        memory->n_gpu_bytes != DEVICE_GPU_BYTES || child_is_ready(device->child)) {
        child_fail(device->child, NULL, "has reported memory of local rank %" PRIu32 " with %zu descriptors",
                   memory->local_rank, n_fds);
        return;
    }
    for (size_t i = 0; i < memory->n_pieces; i++) {
        const struct device_piece *piece = &memory->pieces[i];
        int r;

        if (!piece->has_fd || keep->fds[memory->local_rank][piece->kind] >= 0 ||
            piece->n_bytes < keep->places[memory->local_rank].piece_bytes[piece->kind]) {
            child_fail(device->child, NULL, "has reported a piece of memory that it was not asked for");
            return;
        }
        assert(n < n_fds);
        r = device_keep_add(keep, memory->local_rank, piece->kind, steal_fd(&fds[n++]), piece->n_bytes);
        if (r < 0) {
            child_fail(device->child, NULL, "has allocated memory that cannot be kept: %s", strerror(-r));
            return;
        }
    }
    memcpy(keep->facts->gpus[memory->local_rank], memory->gpu, DEVICE_GPU_BYTES);
    device->n_memories++;
}

static void serve_ready(struct device *device, const struct device_ready *ready)
{
    if (device->n_memories != device->keep->plan.head->n_local) {
        child_fail(device->child, NULL,
                   "has reported that it is ready, and the memory of %u of %" PRIu32 " local ranks", device->n_memories,
                   device->keep->plan.head->n_local);
        return;
    }
    if (child_note_ready(device->child))
        device->ops.ready(device->ops.userdata, ready->versions);
}

static void serve_done(struct device *device, const struct device_done *done)
{
    struct child_order *order = child_find(device->child, done->tag);

    if (!order || !child_is_ready(device->child)) {
        child_fail(device->child, NULL, "has reported the end of order %" PRIu64 ", which is not under way", done->tag);
        return;
    }
    child_settle(device->child, order, done->n_bytes_sent, done->n_bytes_received);
    tags_remove(device, done->tag);
    device->ops.done(device->ops.userdata, done);
}

static void serve_failed(struct device *device, const struct device_failed *failed)
{
    bool has_tag = failed->has_tag && child_find(device->child, failed->tag);

    child_say(device->child, has_tag ? &failed->tag : NULL, failed->what);
}

static void serve_report(struct device *device, const struct device_report *report, int *fds, size_t n_fds)
{
    if (n_fds > 0 && report->type != DEVICE_REPORT_MEMORY) {
        child_fail(device->child, NULL, "has sent a descriptor where there is none to be");
        return;
    }
    switch (report->type) {
    case DEVICE_REPORT_MEMORY:
        serve_memory(device, &report->memory, fds, n_fds);
        return;
    case DEVICE_REPORT_VALUE:
        device->ops.put(device->ops.userdata, report->value.key, report->value.value, report->value.n_value_bytes);
        return;
    case DEVICE_REPORT_READY:
        serve_ready(device, &report->ready);
        return;
    case DEVICE_REPORT_DONE:
        serve_done(device, &report->done);
        return;
    case DEVICE_REPORT_FAILED:
        serve_failed(device, &report->failed);
        return;
    case N_DEVICE_REPORT_TYPES:
        break;
    }
    abort(); /* unpacking yields no other type */
}

static void on_packet(void *userdata, const uint8_t *data, size_t n_bytes, int *fds, size_t n_fds)
{
    struct device *device = userdata;
    struct device_report report;
    char why[WIRE_WHY_BYTES];
    int r = device_unpack_report(&device->arena, data, n_bytes, &report, why, sizeof(why));

    if (r == 0)
        serve_report(device, &report, fds, n_fds);
    else
        child_fail(device->child, NULL, "has sent an invalid report: %s", r == WIRE_E_INVALID ? why : strerror(-r));
}

static void on_child_failed(void *userdata, const struct child_failure *failure)
{
    struct device *device = userdata;

    device->ops.failed(device->ops.userdata, &(struct device_failure){
                                                 .said = failure->said,
                                                 .what = failure->what,
                                                 .has_tag = failure->has_tag,
                                                 .tag = failure->tag,
                                             });
}

/* An order whose end was reported counts as done, because the engine may have reused the order's lane since. */
static void on_late(void *userdata, const uint8_t *data, size_t n_bytes)
{
    struct device *device = userdata;
    struct device_report report;
    char why[WIRE_WHY_BYTES];

    if (device_unpack_report(&device->arena, data, n_bytes, &report, why, sizeof(why)) != 0 ||
        report.type != DEVICE_REPORT_DONE || !tags_have(device, report.done.tag))
        return;
    tags_remove(device, report.done.tag);
    if (device->ops.late)
        device->ops.late(device->ops.userdata, &report.done);
}

static void device_free(struct device *device)
{
    wire_arena_deinit(&device->arena);
    free(device->packet);
    free(device->tags);
    free(device);
}

/* Called by child.c when the process has ended. */
static void on_freed(void *userdata)
{
    struct device *device = userdata;

    if (device->started) {
        assert(device->keep->in_use);
        device->keep->in_use = false;
        device->ops.ended(device->ops.userdata);
    }
    device_free(device);
}

/* ---- commands -------------------------------------------------------------------------------------------- */

/* Takes ownership of the descriptors. */
static int submit(struct device *device, const struct device_command *command, int *fds, size_t n_fds)
{
    int n = device_pack_command(&device->arena, command, device->packet, FRAME_MAX_BYTES);

    return child_send(device->child, device->packet, n, fds, n_fds);
}

static void close_all(int *fds, size_t n_fds)
{
    for (size_t i = 0; i < n_fds; i++)
        closep(&fds[i]);
}

/* Duplicates descriptors for the engine. Return: 0, or -errno with no descriptor open. */
static int copy_fds(const int *from, int *fds, size_t n_fds)
{
    for (size_t i = 0; i < n_fds; i++) {
        fds[i] = fcntl(from[i], F_DUPFD_CLOEXEC, 0);
        if (fds[i] < 0) {
            int r = -errno;

            close_all(fds, i);
            return r;
        }
    }
    return 0;
}

static int submit_setup(struct device *device, const struct device_options *options)
{
    const struct device_keep *keep = device->keep;
    const int own[DEVICE_SETUP_FDS] = {keep->plan_segment.fd, keep->inputs_segment.fd, keep->results_segment.fd};
    struct device_command command = {.type = DEVICE_COMMAND_SETUP,
                                     .setup = {.version = DEVICE_WIRE_VERSION,
                                               .generation = options->generation,
                                               .node = options->node,
                                               .n_nodes = options->n_nodes,
                                               .connect_timeout_ms = options->connect_timeout_ms,
                                               .plan_bytes = keep->plan_segment.n_bytes,
                                               .inputs_bytes = keep->inputs_segment.n_bytes,
                                               .results_bytes = keep->results_segment.n_bytes}};
    _Static_assert(DEVICE_SETUP_FDS == 3, "each descriptor of the setup is named above");
    int fds[DEVICE_SETUP_FDS];
    int r = copy_fds(own, fds, DEVICE_SETUP_FDS);

    return r < 0 ? r : submit(device, &command, fds, DEVICE_SETUP_FDS);
}

static int submit_memory(struct device *device, unsigned local_rank)
{
    const struct device_keep *keep = device->keep;
    struct device_piece pieces[DEVICE_N_PIECES];
    struct device_command command = {
        .type = DEVICE_COMMAND_MEMORY,
        .memory = {.local_rank = local_rank, .pieces = pieces, .n_pieces = DEVICE_N_PIECES}};
    int own[DEVICE_N_PIECES + 1], fds[DEVICE_N_PIECES + 1], r;
    size_t n = 0;

    own[n++] = keep->progress_segments[local_rank].fd;
    for (unsigned kind = 0; kind < DEVICE_N_PIECES; kind++) {
        bool has_fd = keep->fds[local_rank][kind] >= 0;

        pieces[kind] = (struct device_piece){
            .kind = kind,
            .n_bytes = has_fd ? keep->facts->n_bytes[local_rank][kind] : keep->places[local_rank].piece_bytes[kind],
            .has_fd = has_fd,
        };
        if (has_fd)
            own[n++] = keep->fds[local_rank][kind];
    }
    r = copy_fds(own, fds, n);
    return r < 0 ? r : submit(device, &command, fds, n);
}

/*
 * Does the order wait for trainers' GPUs? If so, its deadline is at least DEVICE_TRAINER_MS away, because the engine is
 * not to blame for slow trainers.
 */
static bool awaits_trainers(const struct device_command *command)
{
    for (size_t i = 0; command->type == DEVICE_COMMAND_REDUCE && i < command->reduce.n_slots; i++)
        if (command->reduce.slots[i].point > 0)
            return true;
    for (size_t i = 0; command->type == DEVICE_COMMAND_COPY && i < command->copy.n_moves; i++)
        if (command->copy.moves[i].point > 0)
            return true;
    return false;
}

static enum traffic_kind traffic_of(const struct device_command *command)
{
    switch (command->type) {
    case DEVICE_COMMAND_REDUCE:
        return TRAFFIC_REDUCE_SCATTER;
    case DEVICE_COMMAND_GATHER:
        return TRAFFIC_ALL_GATHER;
    case DEVICE_COMMAND_FETCH:
        return TRAFFIC_FETCH;
    default:
        return N_TRAFFIC;
    }
}

int device_order(struct device *device, const struct device_command *command)
{
    struct child_order order = {.kind = traffic_of(command)};
    uint32_t timeout_ms;
    int r;

    if (child_is_over(device->child))
        return -EPIPE;
    if (!device_command_order(command, &order.tag, &timeout_ms) || order.tag > DEVICE_MAX_TAG) {
        child_fail(device->child, NULL, "was given an invalid order");
        return -EINVAL;
    }
    r = tags_add(device, order.tag);
    if (r < 0) {
        child_fail(device->child, NULL, "cannot be given an order: %s", strerror(-r));
        return r;
    }
    if (awaits_trainers(command))
        device->trainers_tag = order.tag;
    /* Orders that follow an order that waits for trainers wait as well. */
    if (order.tag == device->trainers_tag || child_find(device->child, device->trainers_tag))
        timeout_ms = MAX(timeout_ms, (uint32_t)DEVICE_TRAINER_MS);
    r = child_expect(device->child, &order, timeout_ms);
    return r < 0 ? r : submit(device, command, NULL, 0);
}

int device_value(struct device *device, const char *key, const uint8_t *value, size_t n_bytes)
{
    return submit(device,
                  &(struct device_command){.type = DEVICE_COMMAND_VALUE,
                                           .value = {.key = key, .value = value, .n_value_bytes = n_bytes}},
                  NULL, 0);
}

int device_share(struct device *device, uint32_t number, const struct segment *segment)
{
    int fd, r = copy_fds(&segment->fd, &fd, 1);

    if (r < 0) {
        child_fail(device->child, NULL, "cannot be given a segment: %s", strerror(-r));
        return r;
    }
    return submit(device,
                  &(struct device_command){.type = DEVICE_COMMAND_SHARE,
                                           .share = {.number = number, .n_bytes = segment->n_bytes}},
                  &fd, 1);
}

int device_release(struct device *device, uint32_t local_rank, uint64_t point)
{
    return submit(device, &(struct device_command){.type = DEVICE_COMMAND_RELEASE, .release = {local_rank, point}},
                  NULL, 0);
}

int64_t device_pid(const struct device *device)
{
    return child_pid(device->child);
}

/* ---- life ------------------------------------------------------------------------------------------------ */

/*
 * The engine's environment: all variables of CUDA and NCCL, because a cluster may need any of them (the network card,
 * plugins, MPS); HOME, where the driver caches code and NCCL looks for its file; and the variables of the stand-ins.
 * Other variables are not passed, because they may hold secrets.
 */
static const char *const environment[] = {"CUDA_*", "NCCL_*", "HOME", "TMPDIR", "ZEROD_SIM"};

static int make_child(struct device *device, const struct device_options *options, char *why, size_t why_size)
{
    struct child_options child = {
        .loop = options->loop,
        .program = options->program,
        .variable = "ZEROD_DEVICE_ENGINE",
        .name = "zerod-engine-nccl",
        .environment = environment,
        .n_environment = ARRAY_SIZE(environment),
        .gives_fds = true,
        .ready_timeout_ms = options->connect_timeout_ms,
        .traffic = options->traffic,
        .ops = {.packet = on_packet, .failed = on_child_failed, .late = on_late, .freed = on_freed, .userdata = device},
    };

    return child_new(&device->child, &child, why, why_size);
}

static int start_process(struct device *device, const struct device_options *options, char *why, size_t why_size)
{
    int r = submit_setup(device, options);

    for (unsigned i = 0; i < device->keep->plan.head->n_local && r == 0; i++)
        r = submit_memory(device, i);
    if (r < 0) {
        snprintf(why, why_size, "the engine cannot be set up: %s", strerror(-r));
        return r;
    }
    r = child_start(device->child, why, why_size);
    device->started = device->keep->in_use = r == 0;
    return r;
}

int device_new(struct device **out, const struct device_options *options, char *why, size_t why_size)
{
    struct device *device;
    int r = -ENOMEM;

    if (options->keep->in_use) {
        snprintf(why, why_size, "the last engine has not ended");
        return -EBUSY;
    }
    device = calloc(1, sizeof(*device));
    if (device)
        device->packet = malloc(FRAME_MAX_BYTES);
    if (!device || !device->packet || wire_arena_init(&device->arena) < 0) {
        snprintf(why, why_size, "no memory for the engine");
    } else {
        device->ops = options->ops;
        device->keep = options->keep;
        r = make_child(device, options, why, why_size);
        if (!r)
            r = start_process(device, options, why, why_size);
    }
    if (r < 0) {
        device_close(device);
        return r;
    }
    *out = device;
    return 0;
}

void device_close(struct device *device)
{
    if (!device)
        return;
    if (device->child)
        child_close(device->child);
    else
        device_free(device);
}
