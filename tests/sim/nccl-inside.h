/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A communicator of the stand-ins, as its files see it: wire.c (peers and messages), comm.c (its life), launch.c
 * (groups, and what runs).
 *
 * All ranks of a communicator talk through sockets, those of one process too. A collective is a message from each rank
 * to each other; ncclSend() is one message, which the receiver acknowledges when it has asked for it. Sockets and
 * messages belong to the thread of the communicator's device; the rest is under the lock.
 */

#include "inside.h"

enum message_kind { MESSAGE_HELLO, MESSAGE_COLLECTIVE, MESSAGE_P2P, MESSAGE_ACK, MESSAGE_FIN };

struct header {
    uint32_t kind;
    uint32_t what, datatype; /* of a collective or ncclSend(); what: enum task_kind */
    int32_t rank, pid;       /* of the sender */
    uint32_t n_ranks;        /* as the sender knows it */
    uint64_t number;         /* of the collective, or of the message to this peer */
    uint64_t count, n_bytes; /* n_bytes follow */
};

struct message {
    struct message *next;
    struct header header;
    uint8_t *payload;
};

struct buffer;

struct peer {
    int fd; /* -1: none, or not any more */
    bool known, local, fin, gone;
    struct header in;
    size_t n_in; /* bytes of the header, then of what follows it */
    struct message *incoming, *inbox, **inbox_tail;
    struct buffer *out, **out_tail;
    uint64_t n_sent, n_asked; /* ncclSend() to it, ncclRecv() from it, under the lock */
    uint64_t n_acked;
};

enum comm_phase { COMM_NEW, COMM_CONNECTING, COMM_READY, COMM_FINALIZING, COMM_FINALIZED };

struct ncclComm {
    uint64_t magic;
    enum comm_phase phase;
    const char *end; /* "aborted", "destroyed"; NULL: neither */
    bool torn_down, blocking, fin_sent;
    bool unasked; /* ncclCommGetAsyncError() has not said yet how the last call went */
    struct CUstream_st **unasked_streams;
    size_t n_unasked_streams;
    ncclResult_t result;
    char text[200];
    int rank, n_ranks, device;
    pthread_t caller;              /* which has made it */
    char id[NCCL_UNIQUE_ID_BYTES]; /* the directory */
    struct injected injected;
    int64_t start_ns;
    int listener;
    int *strangers; /* accepted, and not known yet */
    size_t n_strangers;
    struct peer *peers;
    struct launch *launches;
    uint64_t n_collectives;
};

enum task_kind { TASK_REDUCE_SCATTER, TASK_ALL_GATHER, TASK_SEND, TASK_RECV };

/* ---- wire ----------------------------------------------------------------------------------------------- */

/* One more step towards all peers. Return: whether they are all there. */
bool wire_connect(struct ncclComm *comm, int64_t now, int64_t *wake_ns);
/* Takes what is there, gives what is wanted. Return: whether anything has moved. */
bool wire_move(struct ncclComm *comm);
void wire_send(struct ncclComm *comm, int rank, const struct header *header, const void *payload);
bool wire_is_flushed(const struct ncclComm *comm);
void wire_close(struct ncclComm *comm);
struct message *wire_find(struct peer *peer, enum message_kind kind, uint64_t number);
void wire_take(struct peer *peer, struct message *message); /* out of the inbox, and frees it */

/* ---- communicators -------------------------------------------------------------------------------------- */

extern struct comm_list {
    struct ncclComm **comms;
    size_t n, n_alloc;
} sim_comms;

/* The first failure stays. */
void comm_fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Dies of a wrong use. Return: 0, or the error that the communicator has. */
ncclResult_t comm_check(const char *entry, struct ncclComm *comm);
void comm_start(struct ncclComm *comm); /* begins to connect */

/* ---- launches ------------------------------------------------------------------------------------------- */

bool launches_issue(struct ncclComm *comm, int64_t now, int64_t *wake_ns);
void launches_drop(struct ncclComm *comm);
/* The group of this thread takes it, to be started with the others. Return: whether there is one. */
bool group_takes(struct ncclComm *comm);
/* Notes an error within a group, which the end of the group returns, too. */
ncclResult_t group_note(ncclResult_t result);
