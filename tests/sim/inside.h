/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Shared by the files of the stand-ins: one struct for the whole process under one lock, and the operations that
 * devices carry out. sim.h describes the behaviour of the stand-ins.
 *
 * Order of files, each using the ones before it: control (environment, wrong uses, errors), memory (regions and their
 * devices), device (threads and operations), stream (streams, events, copies, launches), driver (the driver's names for
 * these, contexts), wire (a communicator's connections), comm (a communicator's life), launch (groups and their
 * operations). cublas is a separate library; cublas.list names the functions of the program that it uses.
 *
 * The caller of a function in this file holds the lock, unless its comment says otherwise. A device's thread releases
 * the lock only to access memory of the program and to run kernels. Handles are never freed, so that a use of a
 * destroyed handle is detected.
 */

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "core/base/base.h"

#include "cuda.h"
#include "cuda_runtime_api.h"
#include "nccl.h"
#include "sim.h"

enum {
    SIM_MAX_DEVICES = 16,
    SIM_MAX_KERNELS = 128,
    SIM_MAX_INJECTIONS = 32,
    OP_MAX_READS = 3,
    SIM_NS_PER_US = 1000,
    SIM_NS_PER_MS = 1000000
};

/* The fault that is ordered for one call. All fields are zero if none is ordered. */
struct injected {
    bool hang, kill;
    int error; /* error that the call returns */
    int async; /* error of the operation or communicator that the call starts */
    int64_t delay_ns;
    uint64_t turns; /* turns of a kernel's threads until the process dies; 0: it does not */
};

struct injection {
    int entry;
    uint64_t call; /* 0: every call */
    struct injected what;
};

struct device {
    pthread_t thread;
    bool running;
    int index, wake_fd;
    uint64_t random;
    size_t n_bytes_used;
};

/* The state of the stand-ins, protected by the lock. */
extern struct sim {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation has ended, a communicator has changed */
    pid_t pid;              /* process that first used the stand-ins; 0: none yet */
    int n_devices, driver_version, runtime_version, nccl_version;
    size_t n_bytes_memory; /* of each device */
    char machine[16];      /* all processes with this name share the devices' memory; "": nothing is shared */
    int64_t max_delay_ns;
    bool silent, peers, values, open, mps, never_blocks;
    enum cudaComputeMode compute_mode;
    cudaError_t sticky;
    struct device devices[SIM_MAX_DEVICES];
    struct injection injections[SIM_MAX_INJECTIONS];
    unsigned n_injections;
} sim;

/* ---- control -------------------------------------------------------------------------------------------- */

/* Reports a wrong use in one line and aborts. */
_Noreturn void sim_die(const char *entry, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * Every entry point begins with sim_enter() or sim_enter_anyway() and ends with a sim_leave function. sim_enter() takes
 * the lock, reads the environment at the first call, and looks up the ordered fault. An entry point that starts an
 * operation gets the fault in *injected. For other entry points injected is NULL, and sim_enter() carries out the
 * fault. Return: 0, or the error to return. The lock is held in both cases.
 */
int sim_enter(const char *entry, struct injected *injected);

/* As sim_enter(), but does not fail after an earlier error. For calls that return that error. */
int sim_enter_anyway(const char *entry);

cudaError_t sim_leave(cudaError_t error); /* stores the error as the thread's last one */
CUresult sim_leave_driver(CUresult error);
ncclResult_t sim_leave_nccl(ncclResult_t result);
int sim_leave_cublas(int status);

const char *sim_cublas_text(int status); /* callable at any time, without the lock */

const char *sim_error_name(int error, bool nccl);

int64_t sim_now_ns(void);             /* callable at any time, without the lock */
uint64_t sim_random(uint64_t *state); /* callable at any time, without the lock */

/* ---- memory --------------------------------------------------------------------------------------------- */

/* Memory that an operation reads or writes. The device's thread owns the two copies. */
struct span {
    uint8_t *at;
    size_t n_bytes;
    uint8_t *data; /* read: contents at the start */
    uint8_t
        *seen; /* read: contents expected at the end, data or, if the operation overwrites them, a copy of its own */
};

enum span_use { SPAN_READ, SPAN_WRITE };
enum memory_kind { MEMORY_NONE, MEMORY_HOST, MEMORY_DEVICE };

/* Dies unless the device may use all of the memory in this way. Return: the kind of memory. */
enum memory_kind memory_check(const char *entry, const char *which, const void *at, size_t n_bytes, int device,
                              enum span_use use);
bool memory_overlap(const void *a, size_t n_bytes_a, const void *b, size_t n_bytes_b);

/* Called by a device's thread, without the lock. Copies the memory to read, and poisons the memory to write. */
void spans_start(const char *entry, struct span *reads, size_t n_reads, struct span *writes, size_t n_writes);
/* Dies if the memory has changed since spans_start(). */
void spans_check(const char *entry, const struct span *reads, size_t n_reads, const struct span *writes,
                 size_t n_writes);
void span_drop(struct span *span);

void memory_fill(void *at, size_t n_bytes); /* with SIM_POISON */
void memory_init(void);
void memory_admit_thread(void); /* lets the calling thread access device memory */

/* ---- devices -------------------------------------------------------------------------------------------- */

/* The part of an event that operations on several devices use. */
struct event_page {
    _Atomic uint64_t recorded, done; /* numbers of recordings */
};

struct CUevent_st {
    uint64_t magic;
    int device;
    bool dead;
    struct event_page page;
};

enum op_kind { OP_COPY, OP_SET, OP_KERNEL, OP_VALUE, OP_RECORD, OP_WAIT, OP_LAUNCH };

struct launch;

struct op {
    struct op *next;
    enum op_kind kind;
    const char *entry;
    struct injected injected;
    bool started;
    int64_t end_ns;
    struct span reads[OP_MAX_READS], write;
    int value; /* OP_SET */
    void (*run)(void *args);
    void (*free_args)(void *args);
    void *args;
    struct event_page *page;
    bool shared;     /* another device records the event, without a notice to this one */
    uint64_t number; /* number of the recording to make or to wait for; OP_VALUE: value to write */
    uint64_t *at;    /* OP_VALUE: address to write to */
    struct launch *launch;
    bool arrived; /* OP_LAUNCH: the launch has counted this stream */
};

struct CUstream_st {
    uint64_t magic;
    int device;
    bool dead;
    unsigned n_unasked; /* NCCL groups on the stream, not yet known to be issued */
    struct op *head, **tail;
};

/* Streams of all devices. */
extern struct stream_list {
    struct CUstream_st **streams;
    size_t n, n_alloc;
} sim_streams;

void device_need(int device); /* starts the device's thread, if it does not run */
void device_wake(int device);
int device_current(void);
void device_set_current(int device);
bool device_is_bound(void); /* whether this thread has a context; the driver creates none */
void device_unbind(void);
int64_t device_delay_ns(struct device *device);

/* Dies if the process never blocks (sim.h) and a stream has work, because the call could wait for that work. */
void device_check_idle(const char *entry);
/* Called before the memory is freed. Dies if an unfinished operation uses any of it. */
void device_check_unused(const char *entry, const void *at, size_t n_bytes);
/* The process has lost its devices: every later call returns this error. */
void device_lose(cudaError_t error);

/* Waits for a change, at most max_ns. Releases the lock while it waits. */
void sim_wait(int64_t max_ns);

void *sim_calloc(size_t n, size_t size); /* never NULL */

/* ---- streams -------------------------------------------------------------------------------------------- */

struct CUstream_st *stream_check(const char *entry, struct CUstream_st *stream);
struct op *op_new(const char *entry, enum op_kind kind, const struct injected *injected);
void stream_push(struct CUstream_st *stream, struct op *op);
bool stream_is_idle(const struct CUstream_st *stream);

/* ---- NCCL ----------------------------------------------------------------------------------------------- */

/* Called by a device's thread. Advances the communicators of the device. Return: whether anything has changed. */
bool comms_advance(struct device *device, int64_t now, int64_t *wake_ns);
/* Called when a stream has reached its part of a launch. Return: 1 if that part has ended, 0 if not. */
int launch_advance(struct op *op, int64_t now, int64_t *wake_ns, bool *moved);
/* Dies if a launch uses the memory. */
void launches_check_unused(const char *entry, const void *at, size_t n_bytes);

struct pollfd;
/* Adds the descriptors that the device's communicators wait for. */
void comms_poll_fds(int device, struct pollfd **fds, size_t *n, size_t *n_alloc);
