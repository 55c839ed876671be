/* SPDX-License-Identifier: Apache-2.0 */

/* The stand-in for NCCL behaves as tests/sim/sim.h promises. Ranks are devices of one process, or of several. */

#include <ftw.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "sim-child.h"

enum { MAX_RANKS = 4, N = 257 }; /* N: elements of each rank */

/* The ranks of this process. */
struct world {
    int n_ranks, first, n_local;
    ncclUniqueId id;
    ncclComm_t comms[MAX_RANKS];
    cudaStream_t streams[MAX_RANKS];
    void *in[MAX_RANKS], *out[MAX_RANKS];
};

/* ---- ranks ---------------------------------------------------------------------------------------------- */

static ncclResult_t settled(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress;

    while (result == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(comm, &result) == ncclSuccess);
        sleep_ms(1);
    }
    return result;
}

/* Waits until the communicator reports an error. Without an error, the test runs into its time limit. */
static void expect_error(ncclComm_t comm, ncclResult_t expected)
{
    ncclResult_t result = ncclSuccess;

    while (result == ncclSuccess || result == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(comm, &result) == ncclSuccess);
        sleep_ms(1);
    }
    CHECK(result == expected);
}

static void settle(struct world *w)
{
    for (int i = 0; i < w->n_local; i++)
        CHECK(settled(w->comms[i]) == ncclSuccess);
}

static ncclComm_t new_comm(const struct world *w, int local, int blocking)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;

    config.blocking = blocking;
    CHECK(cudaSetDevice(local) == cudaSuccess);
    CHECK(ncclCommInitRankConfig(&comm, w->n_ranks, w->id, w->first + local, &config) ==
          (blocking ? ncclSuccess : ncclInProgress));
    return comm;
}

static void start(struct world *w, int blocking)
{
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < w->n_local; i++)
        w->comms[i] = new_comm(w, i, blocking);
    CHECK(ncclGroupEnd() == (blocking ? ncclSuccess : ncclInProgress));
    for (int i = 0; i < w->n_local; i++) {
        w->streams[i] = new_stream(i);
        w->in[i] = new_memory(i, sizeof(double) * N * MAX_RANKS);
        w->out[i] = new_memory(i, sizeof(double) * N * MAX_RANKS);
    }
    settle(w);
}

static struct world *new_world(int n_ranks)
{
    struct world *w = calloc(1, sizeof(*w));

    CHECK(w);
    w->n_ranks = w->n_local = n_ranks;
    CHECK(ncclGetUniqueId(&w->id) == ncclSuccess);
    return w;
}

static struct world *started_world(int n_ranks)
{
    struct world *w = new_world(n_ranks);

    start(w, 0);
    return w;
}

static void wait_for_all(const struct world *w)
{
    for (int i = 0; i < w->n_local; i++)
        CHECK(cudaStreamSynchronize(w->streams[i]) == cudaSuccess);
}

/* Called after a group call. Asks until the group is issued, then waits for its end. */
static void finish(struct world *w)
{
    settle(w);
    wait_for_all(w);
}

static void end(struct world *w)
{
    for (int i = 0; i < w->n_local; i++)
        CHECK(ncclCommFinalize(w->comms[i]) == ncclInProgress);
    settle(w);
    for (int i = 0; i < w->n_local; i++)
        CHECK(ncclCommDestroy(w->comms[i]) == ncclSuccess);
}

/* ---- values --------------------------------------------------------------------------------------------- */

/* Values of very different sizes, so that the order of a sum shows. */
static float value(int rank, size_t i)
{
    static const float sizes[] = {1.0f, 1e7f, 1e-3f, -1e7f, 33.3f};

    return sizes[(rank * 3 + i) % ARRAY_SIZE(sizes)] * (1.0f + i % 97 + rank);
}

/* Sums element i along the ring that ends at its owner. */
static float ring_sum(int n_ranks, size_t i)
{
    int owner = i / N;
    float sum = value((owner + 1) % n_ranks, i);

    for (int k = 2; k <= n_ranks; k++)
        sum = value((owner + k) % n_ranks, i) + sum;
    return sum;
}

static void put_values(const struct world *w, int local)
{
    float *values = calloc((size_t)w->n_ranks * N, sizeof(*values));

    CHECK(values);
    for (size_t i = 0; i < (size_t)w->n_ranks * N; i++)
        values[i] = value(w->first + local, i);
    put(w->in[local], values, sizeof(*values) * w->n_ranks * N, w->streams[local]);
    free(values);
}

static void check_sum(const struct world *w, int local, const void *memory)
{
    float sums[N];

    get(sums, memory, sizeof(sums), w->streams[local]);
    for (size_t i = 0; i < N; i++) {
        float expected = ring_sum(w->n_ranks, (size_t)(w->first + local) * N + i);

        CHECK(memcmp(&sums[i], &expected, sizeof(expected)) == 0);
    }
}

static void check_gathered(const struct world *w, int local, const void *memory)
{
    float *all = calloc((size_t)w->n_ranks * N, sizeof(*all));

    CHECK(all);
    get(all, memory, sizeof(*all) * w->n_ranks * N, w->streams[local]);
    for (size_t i = 0; i < (size_t)w->n_ranks * N; i++) {
        float expected = ring_sum(w->n_ranks, i);

        CHECK(memcmp(&all[i], &expected, sizeof(expected)) == 0);
    }
    free(all);
}

/* ---- collectives ---------------------------------------------------------------------------------------- */

static ncclResult_t reduce_scatter(const struct world *w, bool in_place)
{
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < w->n_local; i++) {
        void *out = in_place ? (float *)w->in[i] + (w->first + i) * N : w->out[i];

        CHECK(ncclReduceScatter(w->in[i], out, N, ncclFloat32, ncclSum, w->comms[i], w->streams[i]) == ncclSuccess);
    }
    return ncclGroupEnd();
}

/* Gathers the results of a reduce-scatter, which was in place if in_place is set. */
static ncclResult_t all_gather(const struct world *w, bool in_place)
{
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < w->n_local; i++) {
        void *from = in_place ? (float *)w->in[i] + (w->first + i) * N : w->out[i];

        CHECK(ncclAllGather(from, w->in[i], N, ncclFloat32, w->comms[i], w->streams[i]) == ncclSuccess);
    }
    return ncclGroupEnd();
}

static void reduce_and_gather(struct world *w, bool in_place)
{
    for (int i = 0; i < w->n_local; i++)
        put_values(w, i);
    CHECK(reduce_scatter(w, in_place) == ncclInProgress);
    finish(w);
    for (int i = 0; i < w->n_local; i++)
        check_sum(w, i, in_place ? (float *)w->in[i] + (w->first + i) * N : w->out[i]);
    CHECK(all_gather(w, in_place) == ncclInProgress);
    finish(w);
    for (int i = 0; i < w->n_local; i++)
        check_gathered(w, i, w->in[i]);
}

static void collectives(void *arg)
{
    struct world *w = started_world(*(int *)arg);

    reduce_and_gather(w, false);
    reduce_and_gather(w, true);
    end(w);
    free(w);
}

static void test_collectives(void **state)
{
    static const char *const environments[] = {"", "delay-us=0", "seed=5,delay-us=2000"};

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(environments); i++)
        for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++)
            child_passes(environments[i], collectives, &n_ranks);
}

/* A call on blocking communicators returns when the group is issued. */
static void blocking(void *arg)
{
    struct world *w = new_world(2);

    (void)arg;
    start(w, 1);
    for (int i = 0; i < w->n_local; i++)
        put_values(w, i);
    CHECK(reduce_scatter(w, false) == ncclSuccess);
    wait_for_all(w);
    for (int i = 0; i < w->n_local; i++)
        check_sum(w, i, w->out[i]);
    free(w);
}

static void test_blocking(void **state)
{
    (void)state;
    child_passes("", blocking, NULL);
}

struct sum_case {
    ncclDataType_t datatype;
    size_t n_bytes;
    uint64_t a, b, sum; /* bits */
};

static void sum_two(void *arg)
{
    const struct sum_case *c = arg;
    struct world *w = started_world(2);
    uint64_t sums[2] = {0};

    for (int i = 0; i < 2; i++) {
        uint8_t both[16];

        memcpy(both, i ? &c->b : &c->a, c->n_bytes);
        memcpy(both + c->n_bytes, i ? &c->b : &c->a, c->n_bytes);
        put(w->in[i], both, 2 * c->n_bytes, w->streams[i]);
    }
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < 2; i++)
        CHECK(ncclReduceScatter(w->in[i], w->out[i], 1, c->datatype, ncclSum, w->comms[i], w->streams[i]) ==
              ncclSuccess);
    CHECK(ncclGroupEnd() == ncclInProgress);
    finish(w);
    for (int i = 0; i < 2; i++)
        get(&sums[i], w->out[i], c->n_bytes, w->streams[i]);
    CHECK(sums[0] == c->sum && sums[1] == c->sum);
    free(w);
}

static void test_datatypes(void **state)
{
    static struct sum_case cases[] = {
        {ncclInt8, 1, 0xff, 3, 2},
        {ncclUint8, 1, 200, 100, 44},
        {ncclInt32, 4, UINT32_MAX, 3, 2},
        {ncclUint32, 4, UINT32_C(1) << 31, UINT32_C(1) << 31, 0},
        {ncclInt64, 8, UINT64_MAX, 3, 2},
        {ncclUint64, 8, UINT64_MAX, 1, 0},
        {ncclFloat16, 2, 0x3c00, 0x1400, 0x3c01}, /* 1 + 2^-10 */
        {ncclFloat16, 2, 0x3c00, 0x1000, 0x3c00}, /* 1 + 2^-11: a tie, rounds to even */
        {ncclFloat32, 4, 0x3f800000, 0x34000000, 0x3f800001},
        {ncclFloat64, 8, UINT64_C(0x3ff0000000000000), UINT64_C(0x3cb0000000000000), UINT64_C(0x3ff0000000000001)},
        {ncclBfloat16, 2, 0x3f80, 0x3c00, 0x3f81}, /* 1 + 2^-7 */
        {ncclBfloat16, 2, 0x3f80, 0x3b80, 0x3f80}, /* 1 + 2^-8: a tie */
        {ncclBfloat16, 2, 0x7fc1, 0x3f80, 0x7fc1}, /* a NaN keeps its bits */
    };

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(cases); i++)
        child_passes("", sum_two, &cases[i]);
}

/* Each rank sends a part to each rank, including itself, in one group. The counts differ. */
static void exchange(struct world *w)
{
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < w->n_local; i++)
        for (int peer = 0; peer < w->n_ranks; peer++) {
            int rank = w->first + i;
            float *out = (float *)w->out[i] + peer * N, *in = (float *)w->in[i] + peer * N;

            CHECK(ncclSend(in, N - rank - peer, ncclFloat32, peer, w->comms[i], w->streams[i]) == ncclSuccess);
            CHECK(ncclRecv(out, N - rank - peer, ncclFloat32, peer, w->comms[i], w->streams[i]) == ncclSuccess);
        }
    CHECK(ncclGroupEnd() == ncclInProgress);
    finish(w);
}

static void check_exchange(const struct world *w, int local)
{
    int rank = w->first + local;
    float got[N];

    for (int peer = 0; peer < w->n_ranks; peer++) {
        get(got, (float *)w->out[local] + peer * N, sizeof(got), w->streams[local]);
        for (int k = 0; k < N - rank - peer; k++)
            CHECK(got[k] == value(peer, rank * N + k));
        for (int k = N - rank - peer; k < N; k++) {
            uint32_t bits;

            memcpy(&bits, &got[k], sizeof(bits));
            CHECK(bits == SIM_POISON); /* not written */
        }
    }
}

static void send_and_receive(void *arg)
{
    struct world *w = started_world(*(int *)arg);

    for (int i = 0; i < w->n_local; i++)
        put_values(w, i);
    exchange(w);
    for (int i = 0; i < w->n_local; i++)
        check_exchange(w, i);
    exchange(w);
    end(w);
    free(w);
}

static void test_send_and_receive(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++)
        child_passes("", send_and_receive, &n_ranks);
}

/*
 * Issues one group after another without waiting for the streams. Groups run in order, even on different streams of a
 * rank.
 */
static void in_flight(void *arg)
{
    struct world *w = started_world(2);
    cudaStream_t others[2] = {new_stream(0), new_stream(1)};

    (void)arg;
    for (int i = 0; i < 2; i++)
        put_values(w, i);
    CHECK(reduce_scatter(w, false) == ncclInProgress);
    settle(w);
    for (int i = 0; i < 2; i++) { /* the gather, which needs the sum, runs on another stream */
        cudaStream_t stream = w->streams[i];

        w->streams[i] = others[i];
        others[i] = stream;
    }
    CHECK(all_gather(w, false) == ncclInProgress);
    finish(w);
    for (int i = 0; i < 2; i++) {
        check_gathered(w, i, w->in[i]);
        CHECK(cudaStreamQuery(others[i]) == cudaSuccess);
    }
    free(w);
}

/*
 * The stream reaches a group while the next group is being issued, and the last one while the communicator finalizes.
 */
static void queued(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    for (int i = 0; i < 2; i++) {
        put_values(w, i);
        CHECK(cudaMemsetAsync(w->out[i], 0, 4, w->streams[i]) == cudaSuccess); /* slow */
    }
    for (int k = 0; k < 8; k++) {
        settle(w);
        CHECK(reduce_scatter(w, false) == ncclInProgress);
    }
    settle(w);
    end(w);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamQuery(w->streams[i]) == cudaSuccess);
        check_sum(w, i, w->out[i]);
    }
    free(w);
}

/* A held stream delays later groups of the communicator, and the other streams of its own group. */
static void held_up(void *arg)
{
    const bool same_group = *(bool *)arg;
    struct world *w = started_world(1);
    cudaStream_t held = new_stream(0), other = new_stream(0);
    float *in = w->in[0], *out = w->out[0];

    CHECK(cudaMemsetAsync(new_memory(0, 4), 0, 4, held) == cudaSuccess); /* hangs */
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclAllGather(in, out, 1, ncclFloat32, w->comms[0], held) == ncclSuccess);
    if (!same_group) {
        CHECK(ncclGroupEnd() == ncclInProgress);
        settle(w);
        CHECK(ncclGroupStart() == ncclSuccess);
    }
    CHECK(ncclAllGather(in + 1, out + 1, 1, ncclFloat32, w->comms[0], other) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclInProgress);
    settle(w);
    sleep_ms(100);
    CHECK(cudaStreamQuery(other) == cudaErrorNotReady);
    free(w);
}

static void test_in_flight(void **state)
{
    bool same_group = true, next_group = false;

    (void)state;
    child_passes("cudaMemsetAsync:hang", held_up, &same_group);
    child_passes("cudaMemsetAsync:hang", held_up, &next_group);
    child_passes("cudaMemsetAsync:delay=50@*,delay-us=0", queued, NULL);
    child_passes("cudaMemsetAsync:delay=1@*,delay-us=5000,seed=3", queued, NULL);
    child_passes("cudaMemsetAsync:delay=10@*,delay-us=10000,seed=4", queued, NULL);
    child_passes("", in_flight, NULL);
    child_passes("seed=9,delay-us=5000", in_flight, NULL);
}

/* ---- several processes ---------------------------------------------------------------------------------- */

static ncclUniqueId new_id(void)
{
    ncclUniqueId id = {"/"};
    int fds[2];
    pid_t pid;

    /* Uses a child process, because a process that has used the stand-ins may not fork. */
    CHECK(pipe(fds) == 0);
    pid = fork();
    if (pid == 0) {
        CHECK(ncclGetUniqueId(&id) == ncclSuccess);
        CHECK(write(fds[1], &id, sizeof(id)) == sizeof(id));
        _exit(0);
    }
    CHECK(read(fds[0], &id, sizeof(id)) == sizeof(id));
    CHECK(waitpid(pid, NULL, 0) == pid);
    close(fds[0]);
    close(fds[1]);
    return id;
}

/* Starts two processes with two ranks each. Return: the other process's id, or 0 in that process. */
static pid_t two_nodes(struct world *w)
{
    pid_t pid;

    *w = (struct world){.n_ranks = 4, .n_local = 2, .id = new_id()};
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        w->first = 2;
    return pid;
}

static void nodes(void *arg)
{
    struct world w;
    pid_t pid = two_nodes(&w);
    int status;

    (void)arg;
    start(&w, 0);
    reduce_and_gather(&w, false);
    for (int i = 0; i < 2; i++) {
        put_values(&w, i);
        w.out[i] = new_memory(i, sizeof(float) * N * MAX_RANKS);
    }
    exchange(&w);
    for (int i = 0; i < 2; i++)
        check_exchange(&w, i);
    end(&w);
    if (pid == 0)
        _exit(0);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(access(w.id.internal, F_OK) < 0 && errno == ENOENT);
}

static void test_nodes(void **state)
{
    (void)state;
    child_passes("", nodes, NULL);
    child_passes("seed=4,delay-us=3000", nodes, NULL);
}

/* The other node dies during a collective. Pending operations end when the communicators are aborted. */
static void death(void *arg)
{
    const bool told = *(bool *)arg;
    struct world w;
    pid_t pid;
    uint32_t word;

    pid = two_nodes(&w);
    start(&w, 0);
    if (pid == 0) {
        sleep_ms(60000); /* killed earlier */
        _exit(1);
    }
    for (int i = 0; i < 2; i++)
        put_values(&w, i);
    CHECK(reduce_scatter(&w, false) == ncclInProgress);
    settle(&w);
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    sleep_ms(100);
    for (int i = 0; i < 2; i++) {
        if (told)
            expect_error(w.comms[i], ncclRemoteError);
        CHECK(settled(w.comms[i]) == (told ? ncclRemoteError : ncclSuccess));
        CHECK(!told || strstr(ncclGetLastError(w.comms[i]), "connection closed by remote peer"));
        CHECK(cudaStreamQuery(w.streams[i]) == cudaErrorNotReady);
        CHECK(ncclCommAbort(w.comms[i]) == ncclSuccess);
    }
    wait_for_all(&w);
    get(&word, w.out[0], 4, w.streams[0]);
    CHECK(word == poison_at(w.out[0]));
}

/* A rank of this process aborts. Its peers in the process get no error. */
static void neighbour_aborts(void *arg)
{
    struct world *w = started_world(2);
    ncclResult_t result;

    (void)arg;
    CHECK(reduce_scatter(w, false) == ncclInProgress); /* hangs */
    settle(w);
    CHECK(ncclCommAbort(w->comms[0]) == ncclSuccess);
    CHECK(cudaStreamSynchronize(w->streams[0]) == cudaSuccess);
    sleep_ms(100);
    CHECK(ncclCommGetAsyncError(w->comms[1], &result) == ncclSuccess && result == ncclSuccess);
    CHECK(cudaStreamQuery(w->streams[1]) == cudaErrorNotReady);
    free(w);
}

/* A node destroys its communicators, which sends their end, and then dies. The other node gets no error. */
static void leaves(void *arg)
{
    struct world w;
    char word = 0;
    int fds[2];
    pid_t pid;

    (void)arg;
    CHECK(pipe(fds) == 0);
    pid = two_nodes(&w);
    close(fds[pid > 0]); /* so that read() ends if the other process dies early */
    start(&w, 0);
    reduce_and_gather(&w, false);
    if (pid == 0) {
        for (int i = 0; i < 2; i++)
            CHECK(ncclCommDestroy(w.comms[i]) == ncclSuccess);
        CHECK(write(fds[1], &word, 1) == 1);
        sleep_ms(60000); /* killed earlier */
        _exit(1);
    }
    CHECK(read(fds[0], &word, 1) == 1);
    sleep_ms(1000); /* the devices' threads send the end, after ncclCommDestroy() has returned */
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    sleep_ms(100);
    settle(&w);
}

static void test_death(void **state)
{
    bool told = true, silent = false;

    (void)state;
    child_passes("", death, &told);
    child_passes("silent", death, &silent);
    child_passes("ncclReduceScatter:hang@*", neighbour_aborts, NULL);
    child_passes("", leaves, NULL);
}

/* ---- on order ------------------------------------------------------------------------------------------- */

static void never_ready(void *arg)
{
    struct world *w = new_world(1);
    ncclResult_t result;

    (void)arg;
    w->comms[0] = new_comm(w, 0, 0);
    sleep_ms(100);
    CHECK(ncclCommGetAsyncError(w->comms[0], &result) == ncclSuccess && result == ncclInProgress);
    CHECK(ncclCommAbort(w->comms[0]) == ncclSuccess);
    free(w);
}

static void fails_to_start(void *arg)
{
    struct world *w = new_world(1);

    (void)arg;
    w->comms[0] = new_comm(w, 0, 0);
    CHECK(settled(w->comms[0]) == ncclSystemError);
    CHECK(ncclCommAbort(w->comms[0]) == ncclSuccess);
    free(w);
}

/* Both ranks' operations wait forever. An error of one rank does not reach the other one in the same process. */
static void fails_to_run(void *arg)
{
    ncclResult_t expected = *(ncclResult_t *)arg;
    struct world *w = started_world(2);

    CHECK(reduce_scatter(w, false) == ncclInProgress);
    if (expected != ncclSuccess)
        expect_error(w->comms[0], expected);
    sleep_ms(100);
    CHECK(settled(w->comms[0]) == expected && settled(w->comms[1]) == ncclSuccess);
    CHECK(cudaStreamQuery(w->streams[0]) == cudaErrorNotReady && cudaStreamQuery(w->streams[1]) == cudaErrorNotReady);
    for (int i = 0; i < 2; i++)
        CHECK(ncclCommAbort(w->comms[i]) == ncclSuccess);
    wait_for_all(w);
    free(w);
}

static void refused_call(void *arg)
{
    struct world *w = started_world(1);
    ncclResult_t result;

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclAllGather(w->in[0], w->out[0], 1, ncclFloat32, w->comms[0], w->streams[0]) == ncclInternalError);
    CHECK(ncclGroupEnd() == ncclInternalError);
    CHECK(cudaStreamQuery(w->streams[0]) == cudaSuccess);
    CHECK(ncclAllGather(w->in[0], w->out[0], 1, ncclFloat32, w->comms[0], w->streams[0]) == ncclInProgress);
    finish(w);
    CHECK(ncclCommGetAsyncError(w->comms[0], &result) == ncclSuccess && result == ncclSuccess);
    free(w);
}

/* A running operation fails after a call of the next group was accepted and before that group ends. */
static void fails_within_a_group(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(cudaMemsetAsync(w->out[0], 0, 4, w->streams[0]) == cudaSuccess);
    CHECK(ncclAllGather(w->in[0], w->out[0], 1, ncclFloat32, w->comms[0], w->streams[0]) == ncclInProgress);
    CHECK(settled(w->comms[0]) == ncclSuccess);
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclAllGather(w->in[0], w->out[0], 1, ncclFloat32, w->comms[0], w->streams[0]) == ncclSuccess);
    sleep_ms(300);
    CHECK(ncclGroupEnd() == ncclInProgress);
    expect_error(w->comms[0], ncclInternalError);
    CHECK(ncclCommAbort(w->comms[0]) == ncclSuccess);
    free(w);
}

static void lost_device(void *arg)
{
    struct world *w = started_world(1);
    ncclResult_t result;

    (void)arg;
    CHECK(cudaMemsetAsync(w->in[0], 0, 4, w->streams[0]) == cudaSuccess);
    CHECK(cudaStreamSynchronize(w->streams[0]) == cudaErrorECCUncorrectable);
    CHECK(ncclGroupStart() == ncclUnhandledCudaError);
    CHECK(ncclCommGetAsyncError(w->comms[0], &result) == ncclSuccess && result == ncclUnhandledCudaError);
    CHECK(strcmp(ncclGetLastError(w->comms[0]), "uncorrectable ECC error encountered") == 0);
    CHECK(ncclCommAbort(w->comms[0]) == ncclUnhandledCudaError);
    free(w);
}

static void test_on_order(void **state)
{
    ncclResult_t hang = ncclSuccess, error = ncclInternalError;

    (void)state;
    child_passes("ncclCommInitRankConfig:hang", never_ready, NULL);
    child_passes("ncclCommInitRankConfig:async=ncclSystemError", fails_to_start, NULL);
    child_passes("ncclReduceScatter:hang", fails_to_run, &hang);
    child_passes("ncclReduceScatter:async=ncclInternalError", fails_to_run, &error);
    child_passes("cudaMemsetAsync:delay=100,ncclAllGather:async=ncclInternalError", fails_within_a_group, NULL);
    child_passes("ncclAllGather:error=ncclInternalError", refused_call, NULL);
    child_passes("cudaMemsetAsync:async=cudaErrorECCUncorrectable", lost_device, NULL);
}

static void refusals(void *arg)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct world *w = started_world(2);
    ncclUniqueId none = {"paint"};
    ncclComm_t comm;
    int version;

    (void)arg;
    CHECK(ncclGetVersion(&version) == ncclSuccess && version == 21901);
    CHECK(ncclCommInitRankConfig(&comm, 2, w->id, 2, &config) == ncclInvalidArgument);
    CHECK(ncclCommInitRankConfig(&comm, 2, none, 0, &config) == ncclInvalidArgument);
    config.magic = 0;
    CHECK(ncclCommInitRankConfig(&comm, 2, w->id, 0, &config) == ncclInvalidArgument);
    CHECK(ncclSend(w->in[0], 1, ncclFloat32, 2, w->comms[0], w->streams[0]) == ncclInvalidArgument);
    CHECK(ncclSend(w->in[0], 1, (ncclDataType_t)10, 1, w->comms[0], w->streams[0]) == ncclInvalidArgument);
    CHECK(ncclCommDestroy(NULL) == ncclSuccess && ncclCommAbort(NULL) == ncclSuccess);
    CHECK(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
    free(w);
}

/* Puts two ranks on one device. */
static void duplicate(void *arg)
{
    struct world *w = new_world(2);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    (void)arg;
    config.blocking = 0;
    w->comms[0] = new_comm(w, 0, 0);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(ncclCommInitRankConfig(&w->comms[1], 2, w->id, 1, &config) == ncclInProgress);
    CHECK(settled(w->comms[1]) == ncclInvalidUsage);
    CHECK(strcmp(ncclGetLastError(w->comms[1]), "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10") ==
          0);
    free(w);
}

static void test_refusals(void **state)
{
    (void)state;
    child_passes("nccl=21901", refusals, NULL);
    child_passes("", duplicate, NULL);
}

/* ---- wrong uses ----------------------------------------------------------------------------------------- */

static ncclResult_t gather_one(const struct world *w, int local, size_t count)
{
    return ncclAllGather(w->out[local], w->in[local], count, ncclFloat32, w->comms[local], w->streams[local]);
}

static void wrong_unready(void *arg)
{
    struct world *w = new_world(1);

    (void)arg;
    w->comms[0] = new_comm(w, 0, 0);
    w->streams[0] = new_stream(0);
    sleep_ms(50); /* it may be ready, but ncclCommGetAsyncError() was not called */
    (void)gather_one(w, 0, 1);
}

static void wrong_unasked(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(gather_one(w, 0, 1) == ncclInProgress);
    sleep_ms(50);
    (void)cudaEventRecord(new_event(0, cudaEventDisableTiming), w->streams[0]);
}

/* Allocates memory that only its own device may use, as an engine maps a piece. */
static void *private_memory(int device)
{
    enum { GRANULE = 2 << 20 };
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location};
    CUmemAccessDesc access = {location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;

    CHECK(cuMemCreate(&handle, GRANULE, &prop, 0) == CUDA_SUCCESS);
    CHECK(cuMemAddressReserve(&at, GRANULE, 0, 0, 0) == CUDA_SUCCESS);
    CHECK(cuMemMap(at, GRANULE, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(cuMemSetAccess(at, GRANULE, &access, 1) == CUDA_SUCCESS);
    return (void *)(uintptr_t)at;
}

/* Allowed with versions of NCCL that write through their own buffers. */
static void receives_in_private(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(w->in[0], 3, ncclFloat32, 1, w->comms[0], w->streams[0]) == ncclSuccess);
    CHECK(ncclRecv(private_memory(1), 3, ncclFloat32, 0, w->comms[1], w->streams[1]) == ncclSuccess);
    (void)ncclGroupEnd();
    finish(w);
    end(w);
    free(w);
}

static void test_private_memory(void **state)
{
    (void)state;
    child_passes("", receives_in_private, NULL);
    child_dies("nccl=22203", receives_in_private, NULL,
               "ncclRecv: the receive buffer is memory of device 1, which device 0 may not write");
}

static void wrong_second_call(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(gather_one(w, 0, 1) == ncclInProgress);
    sleep_ms(50);
    w->streams[0] = new_stream(0);
    (void)gather_one(w, 0, 1);
}

static void wrong_ranks(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    (void)gather_one(w, 1, 1);
}

static void wrong_count(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(gather_one(w, 0, 3) == ncclSuccess && gather_one(w, 1, 4) == ncclSuccess);
    (void)ncclGroupEnd();
    sleep_ms(10000); /* the child dies earlier */
}

static void wrong_kind(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(gather_one(w, 0, 3) == ncclSuccess);
    CHECK(ncclReduceScatter(w->in[1], w->out[1], 3, ncclFloat32, ncclSum, w->comms[1], w->streams[1]) == ncclSuccess);
    (void)ncclGroupEnd();
    sleep_ms(10000); /* the child dies earlier */
}

static void wrong_message(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(w->in[0], 3, ncclFloat32, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    CHECK(ncclRecv(w->out[0], 3, ncclBfloat16, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    (void)ncclGroupEnd();
    sleep_ms(10000); /* the child dies earlier */
}

static void wrong_after_abort(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclCommAbort(w->comms[0]) == ncclSuccess);
    (void)gather_one(w, 0, 1);
}

static void wrong_after_destroy(void *arg)
{
    struct world *w = started_world(1);
    ncclResult_t result;

    (void)arg;
    CHECK(ncclCommDestroy(w->comms[0]) == ncclSuccess);
    (void)ncclCommGetAsyncError(w->comms[0], &result);
}

static void wrong_after_finalize(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclCommFinalize(w->comms[0]) == ncclInProgress);
    settle(w);
    (void)gather_one(w, 0, 1);
}

static void wrong_destroy(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(gather_one(w, 0, 1) == ncclInProgress);
    settle(w);
    (void)ncclCommDestroy(w->comms[0]);
}

static void wrong_destroy_unasked(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclCommFinalize(w->comms[0]) == ncclInProgress);
    sleep_ms(50);
    (void)ncclCommDestroy(w->comms[0]);
}

static void wrong_destroy_after_error(void *arg)
{
    struct world *w = new_world(1);

    (void)arg;
    w->comms[0] = new_comm(w, 0, 0);
    CHECK(settled(w->comms[0]) == ncclSystemError);
    (void)ncclCommDestroy(w->comms[0]);
}

static void wrong_end(void *arg)
{
    (void)arg;
    (void)ncclGroupEnd();
}

static void wrong_modes(void *arg)
{
    struct world *w = new_world(2);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    w->comms[0] = new_comm(w, 0, 0);
    w->comms[1] = new_comm(w, 1, 1);
    (void)ncclGroupEnd();
}

static void wrong_stream(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    w->streams[0] = w->streams[1];
    (void)gather_one(w, 0, 1);
}

static void wrong_overlap(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    w->out[0] = (float *)w->in[0] + 1;
    (void)gather_one(w, 0, 2);
}

static void wrong_two_writers(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(w->in[0], 3, ncclFloat32, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    CHECK(ncclRecv((float *)w->in[0] + 2, 3, ncclFloat32, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    (void)ncclGroupEnd();
}

static void wrong_reader(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclRecv((float *)w->in[0] + 2, 3, ncclFloat32, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    CHECK(ncclSend(w->in[0], 3, ncclFloat32, 0, w->comms[0], w->streams[0]) == ncclSuccess);
    (void)ncclGroupEnd();
}

static void wrong_buffer(void *arg)
{
    struct world *w = started_world(2);

    (void)arg;
    w->in[0] = new_memory(0, 7 * 4);
    (void)gather_one(w, 0, 4);
}

static void wrong_free(void *arg)
{
    struct world *w = started_world(1);

    (void)arg;
    CHECK(gather_one(w, 0, 1) == ncclInProgress);
    settle(w);
    (void)cudaFree(w->in[0]);
}

static void test_wrong_uses(void **state)
{
    static const struct {
        void (*body)(void *arg);
        const char *env, *sentence;
    } uses[] = {
        {wrong_unready, "",
         "ncclAllGather: the communicator's last call may be in progress: ncclCommGetAsyncError() first"},
        {wrong_unasked, "",
         "cudaEventRecord: the stream has a group of NCCL that may not be issued yet: ncclCommGetAsyncError() first"},
        {wrong_second_call, "",
         "ncclAllGather: the communicator's last call may be in progress: ncclCommGetAsyncError() first"},
        {wrong_ranks, "",
         "ncclAllGather: the group has 1 collectives for rank 1 and 0 for rank 0, which the same thread drives"},
        {wrong_count, "",
         "ncclAllGather: rank 0 calls ncclAllGather(3 x ncclFloat32), rank 1 calls ncclAllGather(4 x ncclFloat32), "
         "as number 0"},
        {wrong_kind, "",
         "ncclAllGather: rank 0 calls ncclAllGather(3 x ncclFloat32), rank 1 calls ncclReduceScatter(3 x ncclFloat32), "
         "as number 0"},
        {wrong_after_abort, "", "ncclAllGather: the communicator was aborted"},
        {wrong_after_destroy, "", "ncclCommGetAsyncError: the communicator was destroyed"},
        {wrong_after_finalize, "", "ncclAllGather: the communicator was finalized"},
        {wrong_destroy, "ncclAllGather:hang", "ncclCommDestroy: the communicator is still at work: it would wait"},
        {wrong_destroy_unasked, "", "ncclCommDestroy: the communicator is still at work: it would wait"},
        {wrong_destroy_after_error, "ncclCommInitRankConfig:async=ncclSystemError",
         "ncclCommDestroy: after an error (ncclSystemError) a communicator is aborted"},
        {wrong_end, "", "ncclGroupEnd: there is no group"},
        {wrong_modes, "", "ncclGroupEnd: communicators that block and that do not are in one group"},
        {wrong_stream, "", "ncclAllGather: the stream is of device 1, the communicator of device 0"},
        {wrong_overlap, "", "ncclAllGather: the buffers overlap, but not as for an operation in place"},
        {wrong_two_writers, "", "ncclRecv: it writes memory that ncclSend of the same group uses"},
        {wrong_reader, "", "ncclRecv: it writes memory that ncclSend of the same group uses"},
        {wrong_buffer, "", "ncclAllGather: the receive buffer (32 bytes) goes 4 bytes beyond the end of its memory"},
        {wrong_free, "ncclAllGather:hang", "cudaFree: ncclAllGather still uses this memory"},
        {wrong_message, "",
         "ncclRecv: rank 0 calls ncclRecv(3 x ncclBfloat16), rank 0 calls ncclSend(3 x ncclFloat32), as number 0"},
    };

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(uses); i++)
        child_dies(uses[i].env, uses[i].body, NULL, uses[i].sentence);
}

/* Makes a directory for the sockets, because ranks that end before they are connected leave their sockets. */
static int set_up(void **state)
{
    static char directory[] = "/tmp/test-sim-XXXXXX";

    if (!mkdtemp(directory) || setenv("TMPDIR", directory, 1) < 0)
        return -1;
    *state = directory;
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st;
    (void)type;
    (void)where;
    return remove(path);
}

static int tear_down(void **state)
{
    return nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),    cmocka_unit_test(test_blocking),
        cmocka_unit_test(test_datatypes),      cmocka_unit_test(test_send_and_receive),
        cmocka_unit_test(test_in_flight),      cmocka_unit_test(test_nodes),
        cmocka_unit_test(test_death),          cmocka_unit_test(test_on_order),
        cmocka_unit_test(test_private_memory), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_wrong_uses),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
