/* SPDX-License-Identifier: Apache-2.0 */

/* A communicator's life, from the unique id to abort or destroy. */

#include <stdio.h>
#include <string.h>

#include "nccl-inside.h"

#define COMM_MAGIC UINT64_C(0x73696d2d636f6d6d)

enum { MAX_DIRECTORY = 96 }; /* a socket's path has at most 108 bytes */

struct comm_list sim_comms;

/* ---- the process ---------------------------------------------------------------------------------------- */

ncclResult_t ncclGetVersion(int *version)
{
    int r = sim_enter("ncclGetVersion", NULL);

    if (r == 0 && !version)
        r = ncclInvalidArgument;
    if (r == 0)
        *version = sim.nccl_version;
    return sim_leave_nccl(r);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
    int r = sim_enter("ncclGetUniqueId", NULL);
    const char *tmp = getenv("TMPDIR");

    if (r == 0 && !uniqueId)
        r = ncclInvalidArgument;
    if (r != 0)
        return sim_leave_nccl(r);
    memset(uniqueId, 0, sizeof(*uniqueId));
    if (!tmp || strlen(tmp) > MAX_DIRECTORY - sizeof("/zerod-sim-XXXXXX"))
        tmp = "/tmp";
    snprintf(uniqueId->internal, sizeof(uniqueId->internal), "%s/zerod-sim-XXXXXX", tmp);
    if (!mkdtemp(uniqueId->internal))
        r = ncclSystemError;
    return sim_leave_nccl(r);
}

/* ---- making --------------------------------------------------------------------------------------------- */

static bool is_id(const ncclUniqueId *id)
{
    return id->internal[0] == '/' && memchr(id->internal, '\0', sizeof(id->internal)) &&
           strstr(id->internal, "/zerod-sim-") && strlen(id->internal) <= MAX_DIRECTORY;
}

static struct ncclComm *comm_new(int n_ranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config)
{
    struct comm_list *list = &sim_comms;
    struct ncclComm *comm = sim_calloc(1, sizeof(*comm));

    if (list->n == list->n_alloc) {
        list->n_alloc = list->n_alloc * 2 + 8;
        list->comms = reallocarray(list->comms, list->n_alloc, sizeof(list->comms[0]));
        if (!list->comms)
            sim_die("ncclCommInitRankConfig", "the process has no memory left");
    }
    *comm = (struct ncclComm){.magic = COMM_MAGIC,
                              .result = ncclInProgress,
                              .blocking = !config || config->blocking != 0,
                              .rank = rank,
                              .n_ranks = n_ranks,
                              .device = device_current(),
                              .caller = pthread_self(),
                              .listener = -1};
    comm->unasked = !comm->blocking;
    memcpy(comm->id, id->internal, sizeof(comm->id));
    comm->peers = sim_calloc(n_ranks, sizeof(comm->peers[0]));
    for (int i = 0; i < n_ranks; i++) {
        comm->peers[i].fd = -1;
        comm->peers[i].inbox_tail = &comm->peers[i].inbox;
        comm->peers[i].out_tail = &comm->peers[i].out;
    }
    list->comms[list->n++] = comm;
    return comm;
}

/*
 * Refuses two ranks of one communicator on one device, as NCCL does. Devices of other processes count as different
 * devices.
 */
static void check_device(struct ncclComm *comm)
{
    for (size_t i = 0; i < sim_comms.n; i++) {
        const struct ncclComm *other = sim_comms.comms[i];

        if (other != comm && !other->end && strcmp(other->id, comm->id) == 0 && other->device == comm->device)
            comm_fail(comm, ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x",
                      comm->rank, other->rank, 0x10 + comm->device);
    }
}

void comm_start(struct ncclComm *comm)
{
    struct device *device = &sim.devices[comm->device];

    comm->phase = COMM_CONNECTING;
    comm->start_ns = sim_now_ns() + comm->injected.delay_ns + device_delay_ns(device);
    if (comm->injected.async != 0)
        comm_fail(comm, comm->injected.async, "as ZEROD_SIM wants it");
    check_device(comm);
    device_wake(comm->device);
}

static bool is_config(const ncclConfig_t *config)
{
    static const ncclConfig_t usual = NCCL_CONFIG_INITIALIZER;

    return config->size == sizeof(*config) && config->magic == usual.magic &&
           (config->blocking == 0 || config->blocking == 1 || config->blocking == NCCL_CONFIG_UNDEF_INT);
}

static ncclResult_t wait_for(struct ncclComm *comm)
{
    while (comm->result == ncclInProgress)
        sim_wait(SIM_NS_PER_MS);
    return comm->result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *newcomm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config)
{
    struct injected injected;
    int r = sim_enter("ncclCommInitRankConfig", &injected);
    struct ncclComm *comm;

    if (r == 0 &&
        (!newcomm || nranks < 1 || rank < 0 || rank >= nranks || !is_id(&commId) || (config && !is_config(config))))
        r = ncclInvalidArgument;
    if (r != 0)
        return sim_leave_nccl(group_note(r));
    device_need(device_current());
    *newcomm = comm = comm_new(nranks, &commId, rank, config);
    comm->injected = injected;
    if (group_takes(comm))
        return sim_leave_nccl(comm->blocking ? ncclSuccess : ncclInProgress);
    comm_start(comm);
    return sim_leave_nccl(comm->blocking ? wait_for(comm) : ncclInProgress);
}

/* ---- how it is ------------------------------------------------------------------------------------------ */

void comm_fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...)
{
    va_list args;

    if (comm->end || (comm->result != ncclSuccess && comm->result != ncclInProgress))
        return;
    comm->result = result;
    va_start(args, format);
    vsnprintf(comm->text, sizeof(comm->text), format, args);
    va_end(args);
    pthread_cond_broadcast(&sim.changed);
}

static void comm_known(const char *entry, const struct ncclComm *comm)
{
    if (!comm || comm->magic != COMM_MAGIC)
        sim_die(entry, "this is no communicator");
    if (comm->end)
        sim_die(entry, "the communicator was %s", comm->end);
}

ncclResult_t comm_check(const char *entry, struct ncclComm *comm)
{
    comm_known(entry, comm);
    if (comm->unasked)
        sim_die(entry, "the communicator's last call may be in progress: ncclCommGetAsyncError() first");
    if (comm->phase >= COMM_FINALIZING)
        sim_die(entry, "the communicator was finalized");
    return comm->result;
}

static void is_asked(struct ncclComm *comm)
{
    comm->unasked = false;
    for (size_t i = 0; i < comm->n_unasked_streams; i++)
        comm->unasked_streams[i]->n_unasked--;
    free(steal_ptr(comm->unasked_streams));
    comm->n_unasked_streams = 0;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
{
    static const char entry[] = "ncclCommGetAsyncError";
    int r = sim_enter(entry, NULL);

    if (r != 0 && r != ncclUnhandledCudaError)
        return sim_leave_nccl(r);
    comm_known(entry, comm);
    if (!asyncError)
        return sim_leave_nccl(ncclInvalidArgument);
    if (r != 0)
        comm_fail(comm, r, "%s", cudaGetErrorString(sim.sticky));
    *asyncError = comm->result;
    if (comm->result != ncclInProgress)
        is_asked(comm);
    return sim_leave_nccl(ncclSuccess);
}

/* Return: the text of the communicator's last error. Without a communicator it is empty. */
const char *ncclGetLastError(ncclComm_t comm)
{
    const char *text = "";

    (void)sim_enter_anyway("ncclGetLastError");
    if (comm) {
        comm_known("ncclGetLastError", comm);
        text = comm->text;
    }
    pthread_mutex_unlock(&sim.lock);
    return text;
}

/* ---- the end -------------------------------------------------------------------------------------------- */

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    static const char entry[] = "ncclCommFinalize";
    int r = sim_enter(entry, NULL);

    if (r == 0)
        r = comm_check(entry, comm);
    if (r != 0)
        return sim_leave_nccl(r);
    comm->phase = COMM_FINALIZING;
    comm->result = ncclInProgress;
    comm->unasked = !comm->blocking;
    device_wake(comm->device);
    return sim_leave_nccl(comm->blocking ? wait_for(comm) : ncclInProgress);
}

/* Marks the communicator as ended. The device's thread tears it down, because that thread may be using it. */
static void end(struct ncclComm *comm, const char *how)
{
    is_asked(comm);
    comm->end = how;
    device_wake(comm->device);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    static const char entry[] = "ncclCommDestroy";
    int r = sim_enter(entry, NULL);

    if (r != 0 || !comm)
        return sim_leave_nccl(r);
    comm_known(entry, comm);
    if (comm->unasked || comm->launches)
        sim_die(entry, "the communicator is still at work: it would wait");
    if (comm->result != ncclSuccess)
        sim_die(entry, "after an error (%s) a communicator is aborted", sim_error_name(comm->result, true));
    end(comm, "destroyed");
    return sim_leave_nccl(ncclSuccess);
}

/* Also works for a communicator that has failed, and when the device is lost. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    static const char entry[] = "ncclCommAbort";
    int r = sim_enter(entry, NULL);

    if (!comm || (r != 0 && r != ncclUnhandledCudaError))
        return sim_leave_nccl(r);
    comm_known(entry, comm);
    end(comm, "aborted");
    return sim_leave_nccl(r);
}

/* ---- on the device's thread ----------------------------------------------------------------------------- */

/* Closes the communicator. A destroyed one first sends its end to its peers; an aborted one sends nothing. */
static void tear_down(struct ncclComm *comm)
{
    bool aborted = strcmp(comm->end, "aborted") == 0;
    struct header fin = {.kind = MESSAGE_FIN};

    if (!aborted && !comm->fin_sent)
        for (int rank = 0; rank < comm->n_ranks; rank++)
            if (rank != comm->rank)
                wire_send(comm, rank, &fin, NULL);
    comm->fin_sent = true;
    if (!aborted)
        (void)wire_move(comm);
    if (!aborted && !wire_is_flushed(comm))
        return;
    launches_drop(comm);
    wire_close(comm);
    comm->torn_down = true;
    pthread_cond_broadcast(&sim.changed);
}

/* Finalizing ends when this rank has no launches left and all peers have sent their end. */
static bool finalize(struct ncclComm *comm)
{
    struct header fin = {.kind = MESSAGE_FIN};
    bool all = true;

    if (comm->launches)
        return false;
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        if (rank != comm->rank && !comm->fin_sent)
            wire_send(comm, rank, &fin, NULL);
        all = all && (rank == comm->rank || comm->peers[rank].fin);
    }
    comm->fin_sent = true;
    (void)wire_move(comm);
    if (!all || !wire_is_flushed(comm) || comm->result != ncclInProgress)
        return false;
    comm->phase = COMM_FINALIZED;
    comm->result = ncclSuccess;
    pthread_cond_broadcast(&sim.changed);
    return true;
}

static bool connect_all(struct ncclComm *comm, int64_t now, int64_t *wake_ns)
{
    if (comm->injected.hang || comm->result != ncclInProgress)
        return false;
    if (now < comm->start_ns) {
        *wake_ns = MIN(*wake_ns, comm->start_ns);
        return false;
    }
    if (!wire_connect(comm, now, wake_ns))
        return false;
    comm->phase = COMM_READY;
    comm->result = ncclSuccess;
    pthread_cond_broadcast(&sim.changed);
    return true;
}

static bool comm_advance(struct ncclComm *comm, int64_t now, int64_t *wake_ns)
{
    bool moved = false;

    if (comm->torn_down)
        return false;
    if (comm->end) {
        tear_down(comm);
        return comm->torn_down;
    }
    if (comm->phase == COMM_NEW)
        return false;
    if (comm->phase == COMM_CONNECTING)
        return connect_all(comm, now, wake_ns);
    moved |= wire_move(comm);
    moved |= launches_issue(comm, now, wake_ns);
    if (comm->phase == COMM_FINALIZING)
        moved |= finalize(comm);
    return moved;
}

bool comms_advance(struct device *device, int64_t now, int64_t *wake_ns)
{
    bool moved = false;

    for (size_t i = 0; i < sim_comms.n; i++)
        if (sim_comms.comms[i]->device == device->index)
            moved |= comm_advance(sim_comms.comms[i], now, wake_ns);
    return moved;
}
