/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The messages between the daemons of a job, as plain structs. proto/nodes.proto describes the protocol. Unpacking
 * checks the limits of fields. The callers check that numbers suit the job.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "core/wire/wire-request.h"
#include "kernels/exact.h"

enum {
    NODE_MESSAGE_MAX_BYTES = 1 << 20,
    NODE_MAX_NODES = 64, /* number of bits in a mask */
    /*
     * The most parcels that are exchanged at one time: a node has room to receive this many. Picked: enough to hide the
     * wait for the next message, and small compared with a processor's cache.
     */
    NODE_MAX_MOVING = 8,
};

/* The kinds have the numbers of the proto. */
enum node_kind {
    NODE_DECLARED = 1,
    NODE_FORMED,
    NODE_UNFORMED,
    NODE_CONNECTED,
    NODE_BROKEN,
    NODE_VALUE,
    NODE_WEIGHTS,
    NODE_MOVED,
    NODE_READY,
    NODE_PASSED,
    NODE_ASKED,
    NODE_WANT_NORM,
    NODE_SUM,
    NODE_UPDATED,
    NODE_ABORT,
    NODE_UNDECLARED,
    NODE_FETCH,
    NODE_WINDOW,
    NODE_WINDOW_END,
    NODE_STORED,
    NODE_RANK,
    NODE_MANIFEST,
    NODE_BACK,
    NODE_EVIDENCE,
    NODE_WITHDRAW,
    NODE_WANT_SQUARES,
    NODE_SQUARES,
    NODE_KEPT,
    NODE_WANT_SAVE,
    NODE_SAVED,
    NODE_LOADED,

    NODE_FORM = 32,
    NODE_REFUSE,
    NODE_ENGINE,
    NODE_SPREAD,
    NODE_TRAIN,
    NODE_EXCHANGE,
    NODE_SETTLED,
    NODE_MEASURE,
    NODE_NORM,
    NODE_DECIDED,
    NODE_HOLD,
    NODE_GATHER,
    NODE_COMMIT,
    NODE_ABORTED,
    NODE_SERVE,
    NODE_OPEN,
    NODE_WRITE,
    NODE_STORE,
    NODE_CLOSED,
    NODE_SHOW,
    NODE_WITHDRAWN,
    NODE_SAVE,
    NODE_PUBLISH,
    NODE_SAVE_END,
    NODE_LOAD,
    NODE_ENDED, /* a report */
    NODE_WANT_ENDED,
    NODE_MAY_STOP,
    NODE_END_RUN, /* a report */
    NODE_LOOK,
    NODE_STACK,
    NODE_N_KINDS,
};

/*
 * The position of a node that continues a run (KEPT.pass). A step or a write window is open; is decided and in
 * progress; or is completed on this node. The numbers are part of the protocol.
 */
enum node_stand {
    NODE_STANDS_OPEN,
    NODE_STANDS_DECIDED,
    NODE_STANDS_UPDATED,
    NODE_STANDS_WINDOW,
    NODE_STANDS_STORING,
    NODE_STANDS_STORED,
    NODE_N_STANDS,
};

struct node_finding {
    bool found, overflowed;
    uint32_t micro_batch, param, rank;
    uint64_t elem;
    double value;
    uint64_t n_nan, n_inf;
};

struct node_verdict {
    bool apply, nonfinite, found_inf;
    double norm, s, norm_scale;
    const struct wire_hyper *groups;
    size_t n_groups;
    const uint8_t *pushed_any, *pushed_all;
    size_t n_any_bytes, n_all_bytes;
    struct node_finding finding;
};

/* The array of a parameter that is fetched. FETCH_MASTER to FETCH_EXP_AVG_SQ have the numbers of state.h. */
enum fetch_kind {
    FETCH_MASTER,
    FETCH_EXP_AVG,
    FETCH_EXP_AVG_SQ,
    FETCH_PUBLISHED, /* stage 3: weights in their own dtype, fetched into the pool */
    FETCH_GATHERED,  /* stage 3: weights in their own dtype, fetched from GPU to GPU into a rank's pool */
    FETCH_N_KINDS,
};

/* A message. Its texts, bytes and numbers are borrowed. */
struct node_message {
    enum node_kind kind;
    uint64_t step;
    uint32_t attempt, generation;
    uint64_t tag;
    uint32_t parcel, micro_batch, pass;
    const uint64_t *numbers;
    size_t n_numbers;
    uint64_t digest;
    uint32_t node, rank;
    bool has_rank;
    const char *text;
    const uint8_t *bytes;
    size_t n_bytes;
    struct request_step args;
    const uint8_t *pushed_any, *pushed_all;
    size_t n_any_bytes, n_all_bytes;
    const uint8_t *awaited; /* RANK: a bit per parameter: 1 if the open backward has not pushed it yet */
    size_t n_awaited_bytes;
    struct node_finding finding;
    struct node_verdict verdict;
    double norm;
    uint64_t arrived;
    bool proceed, forget;
    const char *reason, *cause_class;
};

/*
 * Unpacks a message. The arrays and texts of *out are in the arena until its next use. Return: the same as
 * wire_unpack_request().
 */
int node_unpack(struct wire_arena *arena, const void *data, size_t n_bytes, struct node_message *out, char *why,
                size_t why_size);

/* Packs a message. Return: the number of bytes in buffer, -EMSGSIZE or -ENOMEM. */
int node_pack(struct wire_arena *arena, const struct node_message *message, void *buffer, size_t size);

/*
 * Copies the sum out of SUM or SQUARES. Return: false if the sum does not have the form that exact_sum_carry() makes,
 * or is so large that the sum over all nodes could overflow.
 */
bool node_exact_sum(const struct node_message *message, struct exact_sum *out);

/* Return: the name of a kind for logs and texts, such as "EXCHANGE". */
const char *node_kind_name(enum node_kind kind);
