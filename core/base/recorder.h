/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The recorder keeps what the loop and the workers of a daemon did in the last steps, as small records in rings. It is
 * always on; `zerodctl trace` makes a timeline of it.
 *
 * Each thread has a ring of its own: the loop's ring has number 0, and a worker's ring its worker_number(). Other
 * threads must not record. When a ring is full, the newest record replaces the oldest. Recording takes no lock, and
 * rings may be copied meanwhile. Nothing is recorded before recorder_start().
 *
 * Times are CLOCK_MONOTONIC in nanoseconds.
 */

#include <stddef.h>
#include <stdint.h>

/* zerodctl reads these numbers, so a kind keeps its number, and new kinds come at the end. */
enum record_kind {
    /* Records of one rank, whose number is `rank`: */
    RECORD_FORWARD,  /* from the rank's last answer to its next backward: loading data and the forward */
    RECORD_BACKWARD, /* until the rank ends the micro-batch */
    RECORD_WAIT,     /* the rank waits; item: enum job_wait */
    RECORD_PUSHED,   /* a moment: the rank has pushed its last gradient of a parcel; item: the parcel */
    /* Sums of a parcel, which is a bucket or a piece of a large parameter; item: parcel. */
    RECORD_REDUCE,  /* from posting the sum over this node's ranks until all workers have finished */
    RECORD_COMBINE, /* the same for the sum over all nodes */
    /* A worker's time on one parcel, until the worker begins another parcel or has nothing to do. item: parcel */
    RECORD_WORK_REDUCE,
    RECORD_WORK_UPDATE,
    /* Records of the whole job: */
    RECORD_ASKED,      /* from the first rank's request for the step until the step is decided */
    RECORD_UPDATE,     /* from that decision to the commit */
    RECORD_COLLECTIVE, /* a collective runs; item: enum traffic_kind */
    RECORD_SAVE,       /* a checkpoint is being written; step: the checkpoint's */
    RECORD_ABORTED,    /* a moment: the step begins again */
    RECORD_DIAGNOSTIC, /* a moment; item: its code; rank: its rank, or RECORD_NO_RANK */
    RECORD_WORK_EARLY, /* as RECORD_WORK_UPDATE, but before the step is decided (daemon/step/speculation.h) */
    N_RECORD_KINDS,
};

enum {
    RECORD_NO_RANK = UINT16_MAX,
    RECORDER_LOOP_RECORDS = 1 << 16,
    RECORDER_WORKER_RECORDS = 1 << 14,
};

struct record {
    uint64_t begin_ns, end_ns; /* if both are equal, the record is a moment */
    uint32_t step;             /* lower 32 bits of the step; set by the recorder */
    uint32_t item;
    uint16_t rank, micro_batch;
    uint16_t thread; /* set by the recorder */
    uint8_t kind;    /* enum record_kind */
    uint8_t unused;
};
_Static_assert(sizeof(struct record) == 32, "a record is passed on as it is");

/* Starts the recorder. Call it before the worker pool is made. n_workers: number of the pool's threads. Return: 0 or
 * -ENOMEM. */
int recorder_start(unsigned n_workers);
/* Stops the recorder. Call it after the worker pool has been freed. */
void recorder_stop(void);

/* Return: the time, or 0 while the recorder is stopped. */
uint64_t recorder_now(void);

/* Sets the step of the records that follow. */
void recorder_set_step(uint64_t step);

void recorder_note(const struct record *record);

/*
 * Records that this thread begins a piece of work. If the open record has the same kind, parcel and micro-batch, that
 * record continues, and no clock is read; otherwise it ends now. recorder_rest() also ends the open record: the worker
 * pool calls it when the thread begins another work, or waits for one.
 */
void recorder_work(enum record_kind kind, uint32_t parcel, uint32_t micro_batch);
void recorder_rest(void);

/*
 * Copies the records of the open step and of the last n_steps committed steps, in no order. *oldest: the first step
 * with all its records. Return: an array, which the caller frees, or NULL without memory.
 */
struct record *recorder_copy(uint64_t n_steps, size_t *n_records, uint64_t *oldest);
