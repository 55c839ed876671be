/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Groups of NCCL, and how they run. All calls of one group for one communicator form one launch. It starts when all its
 * streams have reached it and the communicator's earlier launches have ended. It ends on all its streams at once. A
 * launch is in its communicator's list until it has run. It is freed when no stream has it ahead any more.
 */

#include <stdio.h>
#include <string.h>

#include "nccl-inside.h"

/* One call of ncclReduceScatter() or another operation. */
struct task {
    const char *entry;
    enum task_kind kind;
    struct ncclComm *comm;
    struct CUstream_st *stream;
    struct injected injected;
    ncclDataType_t datatype;
    size_t count;
    int peer;        /* of ncclSend() and ncclRecv() */
    uint64_t number; /* number of the collective, or of the send or receive with this peer */
    bool matched;    /* TASK_RECV: acknowledged */
    struct span read, write;
};

struct launch {
    struct launch *next;
    struct ncclComm *comm;
    struct task *tasks;
    size_t n_tasks;
    struct CUstream_st **streams;
    size_t n_streams, n_arrived, n_left; /* n_left: streams that have not passed the launch */
    bool issued, started, done, dropped;
    int64_t issue_ns, end_ns;
};

static _Thread_local struct group {
    unsigned depth;
    ncclResult_t error;
    struct task *tasks;
    size_t n_tasks, n_tasks_alloc;
    struct ncclComm **new_comms;
    size_t n_new_comms;
} group;

/* ---- numbers -------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t n_bytes;
} datatypes[] = {
    [ncclInt8] = {"ncclInt8", 1},         [ncclUint8] = {"ncclUint8", 1},     [ncclInt32] = {"ncclInt32", 4},
    [ncclUint32] = {"ncclUint32", 4},     [ncclInt64] = {"ncclInt64", 8},     [ncclUint64] = {"ncclUint64", 8},
    [ncclFloat16] = {"ncclFloat16", 2},   [ncclFloat32] = {"ncclFloat32", 4}, [ncclFloat64] = {"ncclFloat64", 8},
    [ncclBfloat16] = {"ncclBfloat16", 2},
};

static float from_bfloat16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static uint16_t to_bfloat16(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    if ((bits & 0x7fffffff) > 0x7f800000)
        return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static uint16_t add_bfloat16(uint16_t a, uint16_t b)
{
    return to_bfloat16(from_bfloat16(a) + from_bfloat16(b));
}

#define ADD_ALL(type)                                                                                                  \
    for (size_t i = 0; i < count; i++)                                                                                 \
    ((type *)sum)[i] = (type)(((const type *)x)[i] + ((const type *)sum)[i])

static void add(ncclDataType_t datatype, void *sum, const void *x, size_t count)
{
    switch (datatype) {
    case ncclInt8:
    case ncclUint8:
        ADD_ALL(uint8_t);
        break;
    case ncclInt32:
    case ncclUint32:
        ADD_ALL(uint32_t);
        break;
    case ncclInt64:
    case ncclUint64:
        ADD_ALL(uint64_t);
        break;
    case ncclFloat16:
        ADD_ALL(_Float16);
        break;
    case ncclFloat32:
        ADD_ALL(float);
        break;
    case ncclFloat64:
        ADD_ALL(double);
        break;
    case ncclBfloat16:
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)sum)[i] = add_bfloat16(((const uint16_t *)x)[i], ((const uint16_t *)sum)[i]);
        break;
    }
}

static size_t task_bytes(const struct task *task)
{
    return task->count * datatypes[task->datatype].n_bytes;
}

static bool is_collective(const struct task *task)
{
    return task->kind == TASK_REDUCE_SCATTER || task->kind == TASK_ALL_GATHER;
}

/* ---- what runs: in and out ------------------------------------------------------------------------------ */

static void start_tasks(struct launch *launch)
{
    pthread_mutex_unlock(&sim.lock);
    for (size_t i = 0; i < launch->n_tasks; i++) {
        struct task *task = &launch->tasks[i];

        spans_start(task->entry, &task->read, 1, &task->write, 1);
    }
    pthread_mutex_lock(&sim.lock);
}

/* Sends each rank its part. For an all-gather, every rank gets the same data. */
static void send_task(const struct task *task)
{
    struct header header = {.kind = is_collective(task) ? MESSAGE_COLLECTIVE : MESSAGE_P2P,
                            .what = task->kind,
                            .datatype = task->datatype,
                            .number = task->number,
                            .count = task->count,
                            .n_bytes = task_bytes(task)};

    if (task->kind == TASK_SEND)
        wire_send(task->comm, task->peer, &header, task->read.data);
    for (int rank = 0; is_collective(task) && rank < task->comm->n_ranks; rank++)
        if (rank != task->comm->rank)
            wire_send(task->comm, rank, &header,
                      task->read.data + (task->kind == TASK_REDUCE_SCATTER ? rank * header.n_bytes : 0));
}

static const char *kind_name(unsigned kind)
{
    static const char *const names[] = {[TASK_REDUCE_SCATTER] = "ncclReduceScatter",
                                        [TASK_ALL_GATHER] = "ncclAllGather",
                                        [TASK_SEND] = "ncclSend",
                                        [TASK_RECV] = "ncclRecv"};

    return kind < ARRAY_SIZE(names) ? names[kind] : "?";
}

/* Dies if two ranks disagree. Either rank may detect this first, and both print the same sentence. */
static void check_match(const struct task *task, int rank, const struct message *message)
{
    const struct header *h = &message->header;
    bool kind_fits = is_collective(task) ? h->what == task->kind : h->what == TASK_SEND;
    struct header own = {
        .rank = task->comm->rank, .what = task->kind, .datatype = task->datatype, .count = task->count};
    const struct header *first = is_collective(task) && rank < own.rank ? h : &own;
    const struct header *second = first == h ? &own : h;

    if (kind_fits && h->datatype == task->datatype && h->count == task->count)
        return;
    sim_die(kind_name(first->what), "rank %d calls %s(%zu x %s), rank %d calls %s(%zu x %s), as number %zu",
            first->rank, kind_name(first->what), (size_t)first->count, datatypes[first->datatype].name, second->rank,
            kind_name(second->what), (size_t)second->count, datatypes[second->datatype].name, (size_t)task->number);
}

static bool has_message(struct task *task, int rank, enum message_kind kind)
{
    struct message *message = wire_find(&task->comm->peers[rank], kind, task->number);

    if (message)
        check_match(task, rank, message);
    return message;
}

static bool is_complete(struct task *task)
{
    struct ncclComm *comm = task->comm;

    if (task->kind == TASK_SEND)
        return comm->peers[task->peer].n_acked > task->number;
    if (task->kind == TASK_RECV) {
        struct header ack = {.kind = MESSAGE_ACK};

        if (!task->matched && has_message(task, task->peer, MESSAGE_P2P)) {
            task->matched = true;
            wire_send(comm, task->peer, &ack, NULL);
        }
        return task->matched;
    }
    for (int rank = 0; rank < comm->n_ranks; rank++)
        if (rank != comm->rank && !has_message(task, rank, MESSAGE_COLLECTIVE))
            return false;
    return true;
}

/* Return: the data of a rank in a collective. */
static const uint8_t *given_by(const struct task *task, int rank)
{
    struct ncclComm *comm = task->comm;

    if (rank != comm->rank)
        return wire_find(&comm->peers[rank], MESSAGE_COLLECTIVE, task->number)->payload;
    return task->read.data + (task->kind == TASK_REDUCE_SCATTER ? rank * task_bytes(task) : 0);
}

static void finish_collective(const struct task *task)
{
    struct ncclComm *comm = task->comm;
    size_t n_bytes = task_bytes(task);

    if (n_bytes == 0)
        return;
    /* The ring begins at the rank after the owner and ends at the owner. */
    for (int k = 1; k <= comm->n_ranks; k++) {
        int rank = (comm->rank + k) % comm->n_ranks;

        if (task->kind == TASK_ALL_GATHER)
            memcpy(task->write.at + rank * n_bytes, given_by(task, rank), n_bytes);
        else if (k == 1)
            memcpy(task->write.at, given_by(task, rank), n_bytes);
        else
            add(task->datatype, task->write.at, given_by(task, rank), task->count);
    }
}

static void take_messages(const struct task *task)
{
    struct ncclComm *comm = task->comm;

    if (task->kind == TASK_RECV)
        wire_take(&comm->peers[task->peer], wire_find(&comm->peers[task->peer], MESSAGE_P2P, task->number));
    for (int rank = 0; is_collective(task) && rank < comm->n_ranks; rank++)
        if (rank != comm->rank)
            wire_take(&comm->peers[rank], wire_find(&comm->peers[rank], MESSAGE_COLLECTIVE, task->number));
}

static void finish_tasks(struct launch *launch)
{
    pthread_mutex_unlock(&sim.lock);
    for (size_t i = 0; i < launch->n_tasks; i++) {
        struct task *task = &launch->tasks[i];

        spans_check(task->entry, &task->read, 1, &task->write, 1);
        if (is_collective(task))
            finish_collective(task);
        else if (task->kind == TASK_RECV && task->count > 0)
            memcpy(task->write.at, wire_find(&task->comm->peers[task->peer], MESSAGE_P2P, task->number)->payload,
                   task_bytes(task));
        take_messages(task);
    }
    pthread_mutex_lock(&sim.lock);
}

/* ---- what runs: the launch ------------------------------------------------------------------------------ */

static void launch_free(struct launch *launch)
{
    for (size_t i = 0; i < launch->n_tasks; i++)
        span_drop(&launch->tasks[i].read);
    free(launch->tasks);
    free(launch->streams);
    free(launch);
}

/* Called when a stream has passed the launch. */
static void leave(struct launch *launch)
{
    if (--launch->n_left == 0 && (launch->done || launch->dropped))
        launch_free(launch);
}

void launches_drop(struct ncclComm *comm)
{
    while (comm->launches) {
        struct launch *launch = comm->launches;

        comm->launches = launch->next;
        launch->dropped = true;
        if (launch->n_left == 0)
            launch_free(launch);
    }
}

bool launches_issue(struct ncclComm *comm, int64_t now, int64_t *wake_ns)
{
    bool moved = false;

    for (struct launch *launch = comm->launches; launch; launch = launch->next) {
        if (launch->issued)
            continue;
        if (now < launch->issue_ns) {
            *wake_ns = MIN(*wake_ns, launch->issue_ns);
            break;
        }
        for (size_t i = 0; i < launch->n_streams; i++) {
            struct op *op = op_new("NCCL", OP_LAUNCH, &(struct injected){0});

            op->launch = launch;
            stream_push(launch->streams[i], op);
        }
        launch->n_left = launch->n_streams;
        launch->issued = moved = true;
        if (comm->result == ncclInProgress)
            comm->result = ncclSuccess;
        pthread_cond_broadcast(&sim.changed);
    }
    return moved;
}

/* Starts the launch. Return: whether it can continue. */
static bool start(struct launch *launch, int64_t now)
{
    struct device *device = &sim.devices[launch->comm->device];
    bool hang = false;

    launch->started = true;
    launch->end_ns = now + device_delay_ns(device);
    start_tasks(launch);
    for (size_t i = 0; i < launch->n_tasks; i++) {
        const struct injected *injected = &launch->tasks[i].injected;

        launch->end_ns += injected->delay_ns;
        hang |= injected->hang;
        if (injected->async != 0)
            comm_fail(launch->comm, injected->async, "as ZEROD_SIM wants it");
    }
    if (hang)
        launch->end_ns = INT64_MAX;
    /* ncclInProgress is fine here: a later group is being issued. */
    return !hang && (launch->comm->result == ncclSuccess || launch->comm->result == ncclInProgress);
}

static bool is_through(struct launch *launch)
{
    bool complete = true;

    for (size_t i = 0; i < launch->n_tasks; i++)
        complete &= is_complete(&launch->tasks[i]);
    return complete;
}

int launch_advance(struct op *op, int64_t now, int64_t *wake_ns, bool *moved)
{
    struct launch *launch = op->launch;
    struct ncclComm *comm = launch->comm;

    if (launch->dropped || launch->done || sim.sticky != cudaSuccess) {
        leave(launch);
        return 1;
    }
    if (!op->arrived) {
        op->arrived = *moved = true;
        launch->n_arrived++;
    }
    if (launch->n_arrived < launch->n_streams || comm->launches != launch || comm->end)
        return 0;
    if (!launch->started) {
        *moved = true;
        if (start(launch, now))
            for (size_t i = 0; i < launch->n_tasks; i++)
                send_task(&launch->tasks[i]);
        return 0;
    }
    if (launch->end_ns == INT64_MAX || (comm->result != ncclSuccess && comm->result != ncclInProgress))
        return 0;
    if (!is_through(launch))
        return 0;
    if (now < launch->end_ns) {
        *wake_ns = MIN(*wake_ns, launch->end_ns);
        return 0;
    }
    finish_tasks(launch);
    launch->done = true;
    comm->launches = launch->next;
    leave(launch);
    return 1;
}

void launches_check_unused(const char *entry, const void *at, size_t n_bytes)
{
    for (size_t i = 0; i < sim_comms.n; i++)
        for (const struct launch *l = sim_comms.comms[i]->launches; l; l = l->next)
            for (size_t k = 0; k < l->n_tasks; k++)
                if (memory_overlap(at, n_bytes, l->tasks[k].read.at, l->tasks[k].read.n_bytes) ||
                    memory_overlap(at, n_bytes, l->tasks[k].write.at, l->tasks[k].write.n_bytes))
                    sim_die(entry, "%s still uses this memory", l->tasks[k].entry);
}

/* ---- groups --------------------------------------------------------------------------------------------- */

bool group_takes(struct ncclComm *comm)
{
    if (group.depth == 0)
        return false;
    group.new_comms = reallocarray(group.new_comms, group.n_new_comms + 1, sizeof(comm));
    if (!group.new_comms)
        sim_die("ncclGroupStart", "the process has no memory left");
    group.new_comms[group.n_new_comms++] = comm;
    return true;
}

ncclResult_t group_note(ncclResult_t result)
{
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = result;
    return result;
}

static void group_add(const struct task *task)
{
    if (group.n_tasks == group.n_tasks_alloc) {
        group.n_tasks_alloc = group.n_tasks_alloc * 2 + 16;
        group.tasks = reallocarray(group.tasks, group.n_tasks_alloc, sizeof(*task));
        if (!group.tasks)
            sim_die(task->entry, "the process has no memory left");
    }
    group.tasks[group.n_tasks++] = *task;
}

/* Return: the thread's group. The next group of this thread begins empty. */
static struct group steal_group(void)
{
    struct group taken = group;

    group = (struct group){0};
    return taken;
}

static size_t count_collectives(const struct group *g, const struct ncclComm *comm)
{
    size_t n = 0;

    for (size_t i = 0; i < g->n_tasks; i++)
        n += g->tasks[i].comm == comm && is_collective(&g->tasks[i]);
    return n;
}

/*
 * A thread that drives several ranks must put the collectives of all these ranks into one group. In separate groups,
 * NCCL may wait in the first one for the second one.
 */
static void check_ranks(const struct group *g)
{
    for (size_t i = 0; i < g->n_tasks; i++) {
        const struct ncclComm *comm = g->tasks[i].comm;

        for (size_t k = 0; is_collective(&g->tasks[i]) && k < sim_comms.n; k++) {
            const struct ncclComm *other = sim_comms.comms[k];

            if (!other->end && strcmp(other->id, comm->id) == 0 && pthread_equal(other->caller, comm->caller) &&
                count_collectives(g, other) != count_collectives(g, comm))
                sim_die(g->tasks[i].entry,
                        "the group has %zu collectives for rank %d and %zu for rank %d, which the same thread drives",
                        count_collectives(g, comm), comm->rank, count_collectives(g, other), other->rank);
        }
    }
}

static void check_modes(const struct group *g)
{
    const struct ncclComm *first = g->n_tasks > 0 ? g->tasks[0].comm : g->n_new_comms > 0 ? g->new_comms[0] : NULL;
    bool mixed = false;

    for (size_t i = 0; i < g->n_tasks; i++)
        mixed |= g->tasks[i].comm->blocking != first->blocking;
    for (size_t i = 0; i < g->n_new_comms; i++)
        mixed |= g->new_comms[i]->blocking != first->blocking;
    if (mixed)
        sim_die("ncclGroupEnd", "communicators that block and that do not are in one group");
}

static void check_overlap(const struct task *a, const struct task *b)
{
    if (memory_overlap(a->write.at, a->write.n_bytes, b->write.at, b->write.n_bytes) ||
        memory_overlap(a->write.at, a->write.n_bytes, b->read.at, b->read.n_bytes))
        sim_die(a->entry, "it writes memory that %s of the same group uses", b->entry);
}

static bool has_stream(const struct launch *launch, const struct CUstream_st *stream)
{
    for (size_t i = 0; i < launch->n_streams; i++)
        if (launch->streams[i] == stream)
            return true;
    return false;
}

static void launch_add(struct launch *launch, const struct task *partial)
{
    struct task *task = &launch->tasks[launch->n_tasks++];
    struct ncclComm *comm = launch->comm;

    *task = *partial;
    if (task->kind == TASK_SEND)
        task->number = comm->peers[task->peer].n_sent++;
    else if (task->kind == TASK_RECV)
        task->number = comm->peers[task->peer].n_asked++;
    else
        task->number = comm->n_collectives++;
    if (!has_stream(launch, task->stream))
        launch->streams[launch->n_streams++] = task->stream;
    for (size_t i = 0; i + 1 < launch->n_tasks; i++) {
        check_overlap(task, &launch->tasks[i]);
        check_overlap(&launch->tasks[i], task);
    }
}

/* Marks the launch's streams, because the program does not know whether the launch is on them until it has asked. */
static void hold_streams(struct ncclComm *comm, const struct launch *launch)
{
    comm->unasked = true;
    comm->n_unasked_streams = launch->n_streams;
    comm->unasked_streams = sim_calloc(launch->n_streams, sizeof(comm->unasked_streams[0]));
    for (size_t i = 0; i < launch->n_streams; i++) {
        comm->unasked_streams[i] = launch->streams[i];
        launch->streams[i]->n_unasked++;
    }
}

static void launch_new(const struct group *g, struct ncclComm *comm)
{
    struct launch *launch = sim_calloc(1, sizeof(*launch)), **at = &comm->launches;

    launch->comm = comm;
    launch->tasks = sim_calloc(g->n_tasks, sizeof(launch->tasks[0]));
    launch->streams = sim_calloc(g->n_tasks, sizeof(launch->streams[0]));
    for (size_t i = 0; i < g->n_tasks; i++)
        if (g->tasks[i].comm == comm)
            launch_add(launch, &g->tasks[i]);
    launch->issue_ns = sim_now_ns() + device_delay_ns(&sim.devices[comm->device]);
    while (*at)
        at = &(*at)->next;
    *at = launch;
    /* If the communicator has failed since it got the group's calls, it keeps its error. */
    if (comm->result == ncclSuccess)
        comm->result = ncclInProgress;
    if (!comm->blocking)
        hold_streams(comm, launch);
    device_wake(comm->device);
}

static bool is_first_of_comm(const struct group *g, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (g->tasks[k].comm == g->tasks[i].comm)
            return false;
    return true;
}

static ncclResult_t wait_for(const struct group *g)
{
    ncclResult_t r = ncclSuccess;

    for (size_t i = 0; i < g->n_tasks + g->n_new_comms; i++) {
        const struct ncclComm *comm = i < g->n_tasks ? g->tasks[i].comm : g->new_comms[i - g->n_tasks];

        while (comm->result == ncclInProgress)
            sim_wait(SIM_NS_PER_MS);
        r = r != ncclSuccess ? r : comm->result;
    }
    return r;
}

/* Ends the outermost group. */
static ncclResult_t group_end(void)
{
    struct group g = steal_group();
    ncclResult_t r = g.error;
    bool blocking = true;

    check_modes(&g);
    for (size_t i = 0; r != ncclSuccess && i < g.n_new_comms; i++)
        comm_fail(g.new_comms[i], r, "another call of its group has failed");
    if (r == ncclSuccess) {
        check_ranks(&g);
        for (size_t i = 0; i < g.n_tasks; i++)
            if (is_first_of_comm(&g, i))
                launch_new(&g, g.tasks[i].comm);
        for (size_t i = 0; i < g.n_new_comms; i++)
            comm_start(g.new_comms[i]);
        if (g.n_tasks + g.n_new_comms > 0)
            blocking = (g.n_tasks > 0 ? g.tasks[0].comm : g.new_comms[0])->blocking;
        r = blocking ? wait_for(&g) : ncclInProgress;
    }
    free(g.tasks);
    free(g.new_comms);
    return r;
}

ncclResult_t ncclGroupStart(void)
{
    int r = sim_enter("ncclGroupStart", NULL);

    if (r == 0)
        group.depth++;
    return sim_leave_nccl(r);
}

ncclResult_t ncclGroupEnd(void)
{
    int r = sim_enter("ncclGroupEnd", NULL);

    if (group.depth == 0 && r == 0)
        sim_die("ncclGroupEnd", "there is no group");
    if (group.depth > 0 && group_note(r) != ncclInProgress && --group.depth == 0)
        r = group_end();
    return sim_leave_nccl(r);
}

/* ---- calls ---------------------------------------------------------------------------------------------- */

/* Before version 2.23, a GPU writes straight into the receive buffer of another GPU of the same process. */
static void check_direct_writes(const struct task *task)
{
    for (size_t i = 0; sim.nccl_version < NCCL_VERSION(2, 23, 0) && i < sim_comms.n; i++) {
        const struct ncclComm *other = sim_comms.comms[i];

        if (!other->end && strcmp(other->id, task->comm->id) == 0 &&
            (task->kind != TASK_RECV || task->peer == other->rank))
            memory_check(task->entry, "the receive buffer", task->write.at, task->write.n_bytes, other->device,
                         SPAN_WRITE);
    }
}

static void check_buffers(const struct task *task)
{
    int device = task->comm->device;
    size_t n_bytes = task_bytes(task), part = task->comm->rank * n_bytes;
    const uint8_t *whole = task->kind == TASK_REDUCE_SCATTER ? task->read.at : task->write.at;
    const uint8_t *one = task->kind == TASK_REDUCE_SCATTER ? task->write.at : task->read.at;

    if (task->read.n_bytes > 0)
        memory_check(task->entry, "the send buffer", task->read.at, task->read.n_bytes, device, SPAN_READ);
    if (task->write.n_bytes > 0)
        memory_check(task->entry, "the receive buffer", task->write.at, task->write.n_bytes, device, SPAN_WRITE);
    check_direct_writes(task);
    if (memory_overlap(task->read.at, task->read.n_bytes, task->write.at, task->write.n_bytes) && one != whole + part)
        sim_die(task->entry, "the buffers overlap, but not as for an operation in place");
}

/* Adds the call to the group. A call outside of a group forms its own group. */
static ncclResult_t enqueue(struct task task, const void *send, void *recv)
{
    size_t n_send, n_recv;
    int r = sim_enter(task.entry, &task.injected);

    if (r == 0)
        r = comm_check(task.entry, task.comm);
    if (r == 0 && (unsigned)task.datatype > ncclBfloat16)
        r = ncclInvalidArgument;
    if (r == 0 && (task.peer < 0 || task.peer >= task.comm->n_ranks))
        r = ncclInvalidArgument;
    if (r != 0)
        return sim_leave_nccl(group_note(r));
    stream_check(task.entry, task.stream);
    if (task.stream->device != task.comm->device)
        sim_die(task.entry, "the stream is of device %d, the communicator of device %d", task.stream->device,
                task.comm->device);
    n_send = task.kind == TASK_REDUCE_SCATTER ? (size_t)task.comm->n_ranks : task.kind != TASK_RECV;
    n_recv = task.kind == TASK_ALL_GATHER ? (size_t)task.comm->n_ranks : task.kind != TASK_SEND;
    task.read = (struct span){.at = (uint8_t *)(uintptr_t)send, .n_bytes = n_send * task_bytes(&task)};
    task.write = (struct span){.at = recv, .n_bytes = n_recv * task_bytes(&task)};
    check_buffers(&task);
    group_add(&task);
    return sim_leave_nccl(group.depth > 0 ? ncclSuccess : group_end());
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    struct task task = {.entry = "ncclReduceScatter",
                        .kind = TASK_REDUCE_SCATTER,
                        .comm = comm,
                        .stream = stream,
                        .datatype = datatype,
                        .count = recvcount};

    if (op != ncclSum)
        sim_die(task.entry, "the stand-in only adds");
    return enqueue(task, sendbuff, recvbuff);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream)
{
    struct task task = {.entry = "ncclAllGather",
                        .kind = TASK_ALL_GATHER,
                        .comm = comm,
                        .stream = stream,
                        .datatype = datatype,
                        .count = sendcount};

    return enqueue(task, sendbuff, recvbuff);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    struct task task = {.entry = "ncclSend",
                        .kind = TASK_SEND,
                        .comm = comm,
                        .stream = stream,
                        .datatype = datatype,
                        .count = count,
                        .peer = peer};

    return enqueue(task, sendbuff, NULL);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    struct task task = {.entry = "ncclRecv",
                        .kind = TASK_RECV,
                        .comm = comm,
                        .stream = stream,
                        .datatype = datatype,
                        .count = count,
                        .peer = peer};

    return enqueue(task, NULL, recvbuff);
}
