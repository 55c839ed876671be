/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A communicator of the stand-ins, shared by wire.c (peers and messages), comm.c (a communicator's life) and launch.c
 * (groups, and how they run).
 *
 * All ranks of a communicator talk through sockets, also those of one process. In a collective, each rank sends one
 * message to each other rank. ncclSend() sends one message, which the receiver acknowledges when it has asked for it.
 * Sockets and messages belong to the thread of the communicator's device; the lock protects the rest.
 */

#include "inside.h"

enum message_kind { MESSAGE_HELLO, MESSAGE_COLLECTIVE, MESSAGE_P2P, MESSAGE_ACK, MESSAGE_FIN };

struct header {
    uint32_t kind;
    uint32_t what, datatype; /* of a collective or ncclSend(); what is an enum task_kind */
    int32_t rank, pid;       /* of the sender */
    uint32_t n_ranks;        /* as the sender believes */
    uint64_t number;         /* number of the collective, or of the message to this peer */
    uint64_t count, n_bytes; /* n_bytes of data follow the header */
};

struct message {
    struct message *next;
    struct header header;
    uint8_t *payload;
};

struct buffer;

struct peer {
    int fd; /* -1: not connected, or closed */
    bool known, local, fin, gone;
    struct header in;
    size_t n_in; /* bytes received of the header, then of its data */
    struct message *incoming, *inbox, **inbox_tail;
    struct buffer *out, **out_tail;
    uint64_t n_sent, n_asked; /* ncclSend() to and ncclRecv() from the peer, under the lock */
    uint64_t n_acked;
};

enum comm_phase { COMM_NEW, COMM_CONNECTING, COMM_READY, COMM_FINALIZING, COMM_FINALIZED };

struct ncclComm {
    uint64_t magic;
    enum comm_phase phase;
    const char *end; /* "aborted" or "destroyed"; NULL: still in use */
    bool torn_down, blocking, fin_sent;
    bool unasked; /* ncclCommGetAsyncError() has not yet returned the last call's result */
    struct CUstream_st **unasked_streams;
    size_t n_unasked_streams;
    ncclResult_t result;
    char text[200];
    int rank, n_ranks, device;
    pthread_t caller;              /* thread that created it */
    char id[NCCL_UNIQUE_ID_BYTES]; /* path of its directory */
    struct injected injected;
    int64_t start_ns;
    int listener;
    int *strangers; /* accepted connections that have not said hello */
    size_t n_strangers;
    struct peer *peers;
    struct launch *launches;
    uint64_t n_collectives;
};

enum task_kind { TASK_REDUCE_SCATTER, TASK_ALL_GATHER, TASK_SEND, TASK_RECV };

/* ---- wire ----------------------------------------------------------------------------------------------- */

/* Continues to connect. Return: whether all peers are connected. */
bool wire_connect(struct ncclComm *comm, int64_t now, int64_t *wake_ns);
/* Receives and sends what it can without waiting. Return: whether anything has changed. */
bool wire_move(struct ncclComm *comm);
void wire_send(struct ncclComm *comm, int rank, const struct header *header, const void *payload);
bool wire_is_flushed(const struct ncclComm *comm);
void wire_close(struct ncclComm *comm);
struct message *wire_find(struct peer *peer, enum message_kind kind, uint64_t number);
void wire_take(struct peer *peer, struct message *message); /* removes the message from the inbox and frees it */

/* ---- communicators -------------------------------------------------------------------------------------- */

extern struct comm_list {
    struct ncclComm **comms;
    size_t n, n_alloc;
} sim_comms;

/* Marks the communicator as failed. It keeps its first failure. */
void comm_fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Dies on a wrong use. Return: 0, or the communicator's error. */
ncclResult_t comm_check(const char *entry, struct ncclComm *comm);
void comm_start(struct ncclComm *comm); /* begins to connect */

/* ---- launches ------------------------------------------------------------------------------------------- */

bool launches_issue(struct ncclComm *comm, int64_t now, int64_t *wake_ns);
void launches_drop(struct ncclComm *comm);
/*
 * If the thread is in a group, adds the new communicator to it, to be started with the group. Return: whether there is
 * a group.
 */
bool group_takes(struct ncclComm *comm);
/* Stores an error within a group, which ncclGroupEnd() also returns. */
ncclResult_t group_note(ncclResult_t result);
