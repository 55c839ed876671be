/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The journal lets the next daemon continue the job of a killed daemon. It is in memory that outlives the daemon
 * (keep.h). Only journal.c uses the format of this memory:
 *
 *     base    records that are valid as long as the job exists: the job's configuration and manifest
 *     head    the caller's bytes: the state of the job when the step was opened
 *     log     one record for each event of the open step, in order
 *
 * An event is recorded before it is handled, so that the next daemon can replay it. A record is valid when all of it is
 * written. journal_turn() makes a new head valid and begins an empty log, both with one store. So a step is committed
 * or aborted atomically. When the daemon is killed, the journal contains its stores up to some point in program order.
 * The journal does not survive a failure of the machine.
 *
 * If there is no memory for a record, the journal gives up. It logs this once, and records nothing until
 * journal_clear(). Then the job's state is lost when the daemon ends, as without a journal.
 *
 * Every function accepts a NULL journal and then does nothing. All functions run on the loop thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct journal;

enum {
    JOURNAL_VERSION = 2,
    JOURNAL_MAX_HEAD_BYTES = 64 << 20,
};

/* The numbers are part of the format, so the number of a type never changes. */
enum journal_type {
    JOURNAL_CONFIG = 1,  /* base: lines "key=value" */
    JOURNAL_DECLARE = 2, /* base: a packed Declare */
    JOURNAL_REQUEST = 3, /* a packed request of a rank */
    JOURNAL_ATTACH = 4,  /* struct journal_attach, and a packed Hello */
    JOURNAL_DETACH = 5,
    JOURNAL_FORMED = 6,    /* the layout is being sent to a rank */
    JOURNAL_GRANT = 7,     /* struct journal_grant */
    JOURNAL_POSTED = 8,    /* struct journal_posted */
    JOURNAL_SUMMED = 9,    /* struct journal_summed, and the 64-bit sums of each rank's gradients */
    JOURNAL_COMPARED = 10, /* struct journal_compared */
    JOURNAL_WINDOW = 11,   /* a write window is open, and shows the weights */
    JOURNAL_EDIT = 12,     /* struct journal_edit */
    JOURNAL_STORING = 13,  /* the window is being stored */
    JOURNAL_NODE = 14,     /* several nodes: a packed NodeMessage of node 0 */
    JOURNAL_STORED = 15,   /* several nodes: this node stored the window, and may receive other nodes' weights */
    JOURNAL_SPREAD = 16,   /* several nodes: this node has the initial weights */
    JOURNAL_COMBINED = 17, /* several nodes: as JOURNAL_SUMMED, but the sums are over all nodes */
    JOURNAL_BRINGING = 18, /* GPUs: the staging copy has the edited state, which is being copied to the GPUs */
    JOURNAL_N_TYPES,
};

struct journal_attach {
    int64_t pid;
    uint32_t uid, gid;
    uint32_t is_admin;     /* 0 or 1; earlier versions used 64 bits, all_had_left included, for is_admin */
    uint32_t all_had_left; /* 0 or 1: every rank of all nodes had left when Hello arrived */
};

struct journal_grant {
    uint64_t offset_bytes, n_bytes;
};

struct journal_posted {
    uint64_t op;
    uint32_t parcel, micro_batch, pass, unused;
};

struct journal_summed {
    uint32_t parcel, n_sums;
    uint64_t sums[];
};

struct journal_compared {
    uint32_t ticket, part, pass, unused;
    uint64_t sum;
};

struct journal_edit {
    uint32_t param, kind; /* kind: enum state_kind, or STATE_N_KINDS for the step count */
    uint64_t count, is_marked;
};

struct journal_record {
    enum journal_type type;
    unsigned rank;
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    const void *data; /* in the journal; aligned to 8 bytes */
    size_t n_bytes;
};

/* Makes an empty journal, or opens the journal that an earlier daemon kept. Return: 0 or -errno. */
int journal_new(struct journal **out);
void journal_free(struct journal *journal);

/*
 * Return: whether the journal has a valid head. Then an earlier daemon wrote the journal, and this daemon adopts the
 * job.
 */
bool journal_is_valid(const struct journal *journal);

/*
 * Return: whether the first page of a kept journal is invalid. The page is also invalid if a daemon was killed while it
 * made the journal. Then the daemon kept nothing else.
 */
bool journal_is_damaged(const struct journal *journal);

/* Return: the format version of the journal. This daemon can read only JOURNAL_VERSION. */
uint32_t journal_version(const struct journal *journal);

/* Gives up the journal, because an event cannot be recorded. r: the reason, a negative errno. */
void journal_give_up(struct journal *journal, int r);

/* Deletes all records, because the job is gone. The next job begins a new base. */
void journal_clear(struct journal *journal);

/* Appends a record to the base. Must be called before the first journal_turn(). */
void journal_found(struct journal *journal, enum journal_type type, const void *data, size_t n_bytes);

/*
 * Appends a record to the log of the open step. The record's data are record->data followed by n_more bytes of `more`.
 */
void journal_append(struct journal *journal, const struct journal_record *record, const void *more, size_t n_more);

/* Replaces the head, and begins an empty log. */
void journal_turn(struct journal *journal, const void *head, size_t n_bytes);

/* Records that this daemon is alive. Called several times a second. */
void journal_beat(struct journal *journal, uint64_t now_ns);
/* Return: the word that journal_beat() writes, or NULL if the journal is NULL. */
_Atomic(uint64_t) *journal_beat_place(struct journal *journal);
/* Return: the time of the last journal_beat(), of this daemon or an earlier one. */
uint64_t journal_last_beat(const struct journal *journal);

/* Return: the valid head, or NULL if it is damaged. *n_bytes: its size. */
const void *journal_head(const struct journal *journal, size_t *n_bytes);

/*
 * Reads the next record of the base, or of the log. *at: 0 for the first call. Return: false at the end or at a damaged
 * record.
 */
bool journal_read_base(const struct journal *journal, uint64_t *at, struct journal_record *record);
bool journal_read(const struct journal *journal, uint64_t *at, struct journal_record *record);
