/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The journal lets the next daemon go on where this one was killed. It lies in memory that somebody keeps (keep.h), and
 * no other file knows where in it something stands:
 *
 *     base    records that hold as long as the job is formed: its configuration and manifest
 *     head    what was true when the step was opened, as bytes of the caller
 *     log     a record of each event of the open step, in the order in which they came
 *
 * An event is recorded before anything is done about it, so that the next daemon can do the same about it. A record
 * holds only once all of it is there. journal_turn() makes another head valid and begins an empty log, with one store:
 * so a step is committed, or aborted, at one moment. A killed process has made its stores in the order of the program;
 * nothing here protects from a machine that fails.
 *
 * If there is no memory for a record, the journal gives up: it says so once, nothing is recorded until journal_clear(),
 * and a daemon that ends takes the state with it, as without a journal.
 *
 * Every function takes NULL for a journal: nothing is kept, and nothing happens. Loop thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct journal;

enum {
    JOURNAL_VERSION = 2,
    JOURNAL_MAX_HEAD_BYTES = 64 << 20,
};

/* The numbers are part of the format: a type keeps its number for ever. */
enum journal_type {
    JOURNAL_CONFIG = 1,  /* base: lines "key=value" */
    JOURNAL_DECLARE = 2, /* base: a packed Declare */
    JOURNAL_REQUEST = 3, /* a packed request of a rank */
    JOURNAL_ATTACH = 4,  /* struct journal_attach, and a packed Hello */
    JOURNAL_DETACH = 5,
    JOURNAL_FORMED = 6,    /* a rank is being told the layout */
    JOURNAL_GRANT = 7,     /* struct journal_grant */
    JOURNAL_POSTED = 8,    /* struct journal_posted */
    JOURNAL_SUMMED = 9,    /* struct journal_summed, and the 64-bit sums of what each rank has pushed */
    JOURNAL_COMPARED = 10, /* struct journal_compared */
    JOURNAL_WINDOW = 11,   /* a write window shows the weights */
    JOURNAL_EDIT = 12,     /* struct journal_edit */
    JOURNAL_STORING = 13,  /* the window is being stored */
    JOURNAL_NODE = 14,     /* several nodes: a packed NodeMessage of node 0 */
    JOURNAL_STORED = 15,   /* several nodes: the window is stored here, and weights of other nodes may come */
    JOURNAL_SPREAD = 16,   /* several nodes: the initial weights are here */
    JOURNAL_COMBINED =
        17, /* several nodes: as JOURNAL_SUMMED, of sums that are known when all nodes' pieces are here */
    JOURNAL_BRINGING = 18, /* GPUs: the staging copy is what the window makes of the state, and goes back to them */
    JOURNAL_N_TYPES,
};

struct journal_attach {
    int64_t pid;
    uint32_t uid, gid;
    uint32_t is_admin;     /* 0 or 1; with the next one in the 64 bits that it once had alone */
    uint32_t all_had_left; /* 0 or 1: every rank of the world, of other nodes too */
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
    uint32_t param, kind; /* enum state_kind; STATE_N_KINDS: the count */
    uint64_t count, is_marked;
};

struct journal_record {
    enum journal_type type;
    unsigned rank;
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    const void *data; /* in the journal; aligned to 8 bytes */
    size_t n_bytes;
};

/* Makes an empty journal, or finds the one that was kept. Return: 0 or -errno. */
int journal_new(struct journal **out);
void journal_free(struct journal *journal);

/* Has it a head? Then its memory was kept, and is to be taken over. */
bool journal_is_valid(const struct journal *journal);

/* One that was found: is its first page as no daemon leaves it? So is that of a daemon that was killed before it had
 * kept anything else. */
bool journal_is_damaged(const struct journal *journal);

/* The version of the daemon that wrote it: differs from JOURNAL_VERSION when this one cannot read it. */
uint32_t journal_version(const struct journal *journal);

/* An event cannot be recorded: gives up. r: why, a negative errno. */
void journal_give_up(struct journal *journal, int r);

/* Forgets everything: the job is gone, and the next one begins a new base. */
void journal_clear(struct journal *journal);

/* Appends to the base. Before the first journal_turn(). */
void journal_found(struct journal *journal, enum journal_type type, const void *data, size_t n_bytes);

/* Appends to the log of the open step. data: n_bytes of it, then n_more of more. */
void journal_append(struct journal *journal, const struct journal_record *record, const void *more, size_t n_more);

/* The head becomes what is true now, and the log is empty. */
void journal_turn(struct journal *journal, const void *head, size_t n_bytes);

/* This daemon lives. Several times a second. */
void journal_beat(struct journal *journal, uint64_t now_ns);
/* Where that is noted; NULL: nowhere. */
_Atomic(uint64_t) *journal_beat_place(struct journal *journal);
/* When a daemon lived last. */
uint64_t journal_last_beat(const struct journal *journal);

/* Return: the valid head, and its size. */
const void *journal_head(const struct journal *journal, size_t *n_bytes);

/* Reads the records of the base, or of the log. *at: 0 at first. Return: false at the end, or at damage. */
bool journal_read_base(const struct journal *journal, uint64_t *at, struct journal_record *record);
bool journal_read(const struct journal *journal, uint64_t *at, struct journal_record *record);
