/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Shared by the files of the stand-ins: one struct for the whole process, under one lock, and the operations that
 * devices carry out. sim.h describes the behaviour of the stand-ins.
 *
 * Order of files, each using the ones before it: control (environment, wrong uses, errors), memory (regions and their
 * devices), device (threads and operations), stream (streams, events, copies, launches), driver (the driver's names for
 * these, contexts), wire (a communicator's connections), comm (its life), launch (groups and their operations). cublas
 * is a library of its own, and finds what it uses of the program by cublas.list.
 *
 * The lock is held while a function of this file is called, unless it says otherwise. A device's thread releases it
 * only to access memory of the program and to run kernels. Handles are never freed, so that a use after their end is
 * noticed.
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

/* The fault that is ordered for one call; all zero: none. */
struct injected {
    bool hang, kill;
    int error; /* to be returned */
    int async; /* of the operation, or of the communicator */
    int64_t delay_ns;
    uint64_t turns; /* of a kernel's threads, after which the process dies; 0: it does not */
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

/* The state of everything; under the lock. */
extern struct sim {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation has ended, a communicator has changed */
    pid_t pid;              /* of who has used the stand-ins first; 0: nobody yet */
    int n_devices, driver_version, runtime_version, nccl_version;
    size_t n_bytes_memory; /* of each device */
    char machine[16];      /* whose processes share the devices' memory; "": this process has devices of its own */
    int64_t max_delay_ns;
    bool silent, peers, values, open, mps, never_blocks;
    enum cudaComputeMode compute_mode;
    cudaError_t sticky;
    struct device devices[SIM_MAX_DEVICES];
    struct injection injections[SIM_MAX_INJECTIONS];
    unsigned n_injections;
} sim;

/* ---- control -------------------------------------------------------------------------------------------- */

/* A wrong use: one line, and the end. */
_Noreturn void sim_die(const char *entry, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * Every entry point begins with one of these and ends with a leave. Takes the lock, reads the environment at the first
 * call, and looks up the ordered fault. An entry point that starts something gets the fault in *injected; for another
 * one (NULL) it is carried out here. Return: 0, or the error to return (the lock is held in both cases).
 */
int sim_enter(const char *entry, struct injected *injected);

/* As sim_enter(), for calls that ask about an earlier error: that error does not make them fail. */
int sim_enter_anyway(const char *entry);

cudaError_t sim_leave(cudaError_t error); /* keeps it as the thread's last */
CUresult sim_leave_driver(CUresult error);
ncclResult_t sim_leave_nccl(ncclResult_t result);
int sim_leave_cublas(int status);

const char *sim_cublas_text(int status); /* any time, no lock */

const char *sim_error_name(int error, bool nccl);

int64_t sim_now_ns(void);             /* any time, no lock */
uint64_t sim_random(uint64_t *state); /* any time, no lock */

/* ---- memory --------------------------------------------------------------------------------------------- */

/* Memory that an operation reads or writes. The two copies are its device's. */
struct span {
    uint8_t *at;
    size_t n_bytes;
    uint8_t *data; /* read: what was there at the start */
    uint8_t
        *seen; /* read: what must be there at the end; data, or where the operation writes over it a copy of its own */
};

enum span_use { SPAN_READ, SPAN_WRITE };
enum memory_kind { MEMORY_NONE, MEMORY_HOST, MEMORY_DEVICE };

/* Dies unless a device may use all of it so. Return: where it is. */
enum memory_kind memory_check(const char *entry, const char *which, const void *at, size_t n_bytes, int device,
                              enum span_use use);
bool memory_overlap(const void *a, size_t n_bytes_a, const void *b, size_t n_bytes_b);

/* Called by a device's thread, without the lock: copies the memory to read, and poisons the memory to write... */
void spans_start(const char *entry, struct span *reads, size_t n_reads, struct span *writes, size_t n_writes);
/* ...and dies if either is not as it was left. */
void spans_check(const char *entry, const struct span *reads, size_t n_reads, const struct span *writes,
                 size_t n_writes);
void span_drop(struct span *span);

void memory_fill(void *at, size_t n_bytes); /* with SIM_POISON */
void memory_init(void);
void memory_admit_thread(void); /* lets the calling thread touch device memory */

/* ---- devices -------------------------------------------------------------------------------------------- */

/* What operations on several devices use of an event. */
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
    uint64_t number; /* of the recording that is made, or waited for; OP_VALUE: that is written */
    uint64_t *at;    /* OP_VALUE */
    struct launch *launch;
    bool arrived; /* OP_LAUNCH: counted by the launch */
};

struct CUstream_st {
    uint64_t magic;
    int device;
    bool dead;
    unsigned n_unasked; /* groups of NCCL on it of which nobody knows yet whether they are issued */
    struct op *head, **tail;
};

/* Streams of all devices. */
extern struct stream_list {
    struct CUstream_st **streams;
    size_t n, n_alloc;
} sim_streams;

void device_need(int device); /* starts it */
void device_wake(int device);
int device_current(void);
void device_set_current(int device);
bool device_is_bound(void); /* has this thread a context? the driver makes none by itself */
void device_unbind(void);
int64_t device_delay_ns(struct device *device);

/* Dies if such a call would wait for work on a stream, and the process says that it never blocks. */
void device_check_idle(const char *entry);
/* Whose memory goes: dies if an operation that has not ended uses some of it. */
void device_check_unused(const char *entry, const void *at, size_t n_bytes);
/* The process is lost: every later call answers this. */
void device_lose(cudaError_t error);

/* Waits for something to change, at most so long; the lock is released meanwhile. */
void sim_wait(int64_t max_ns);

void *sim_calloc(size_t n, size_t size); /* never NULL */

/* ---- streams -------------------------------------------------------------------------------------------- */

struct CUstream_st *stream_check(const char *entry, struct CUstream_st *stream);
struct op *op_new(const char *entry, enum op_kind kind, const struct injected *injected);
void stream_push(struct CUstream_st *stream, struct op *op);
bool stream_is_idle(const struct CUstream_st *stream);

/* ---- NCCL ----------------------------------------------------------------------------------------------- */

/* By a device's thread. Lets the communicators of a device move; true: something has changed. */
bool comms_advance(struct device *device, int64_t now, int64_t *wake_ns);
/* A stream has reached its part of a launch. 1: that part has ended, 0: not yet. */
int launch_advance(struct op *op, int64_t now, int64_t *wake_ns, bool *moved);
/* Dies if a launch uses it. */
void launches_check_unused(const char *entry, const void *at, size_t n_bytes);

struct pollfd;
/* Adds what the device's communicators wait for. */
void comms_poll_fds(int device, struct pollfd **fds, size_t *n, size_t *n_alloc);
