/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The handle, and what the files of libzerod share:
 *
 *   handle.c   the handle's life, one request and its answer, errors, small calls
 *   form.c     declaring, forming, initial weights
 *   push.c     slots, pushes, micro-batches
 *   cuda.c     jobs on GPUs: device memory, streams, events
 *   range.c    jobs on GPUs in stage 3: where gathered weights are read
 *   report.c   what the client knows of faults: evidence, reports
 *   weights.c  weights, gather and release, write windows, state
 *   written.c  writes to published weights outside of a window (E1106)
 *   fault.c    the handler of SIGSEGV: lets such a write happen, explains what cannot (E1106, E1110)
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/un.h>

#include "client/lib/cuda.h"
#include "client/lib/range.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "kernels/kernels.h"
#include "proto/credit.h"
#include "zerod/client.h"

enum {
    CLIENT_MAX_FIELDS = DIAGNOSTIC_MAX_FIELDS,
    CLIENT_NO_TICKET = UINT32_MAX,
    CLIENT_PLACE_ALIGN_BYTES = 64,
    CLIENT_HOLD_BYTES = 64 * 1024, /* of gradients. Picked: beside such a copy a send costs little */
};

struct mapping {
    uint8_t *base;
    size_t n_bytes;
    int fd;            /* -1: none */
    struct cuda *cuda; /* not NULL: it is device memory, which the host must not touch */
};

#define MAPPING_NULL ((struct mapping){.fd = -1})

/* An error and everything it points to. */
struct client_error {
    struct zerod_error public;
    char *text, *cause_class;
    char *params[DIAGNOSTIC_MAX_PARAMS];
    struct zerod_field fields[CLIENT_MAX_FIELDS];
};

/* A slot of the ring or the overflow segment, as the client counts. */
struct ticket {
    bool in_use;
    bool pushed; /* the daemon knows of it: comes back as a credit */
    bool overflow;
    uint32_t use;
    uint32_t parcel, pass;
    uint64_t offset_bytes, n_bytes;
    uint32_t next; /* next ticket of the parcel in this micro-batch */
};

struct interned {
    char *text;
    uint32_t id;
};

struct zerod {
    int fd;
    struct sockaddr_un address; /* of the daemon */
    bool *mine; /* a page of its own, which a forked child finds wiped */
    int fatal;  /* sticky -errno */
    int timeout_ms;
    unsigned flags;
    bool formed, left;
    bool resumed, init_wanted; /* as Formed said */
    const char *waits_for;     /* name of the request whose answer a call waits for, or that it sends; static */
    int (*interrupted)(void *arg);
    void *interrupted_arg;
    bool is_torch; /* whose syntax texts are in */
    struct client_error error;
    struct frame_buffer in;
    struct wire_arena arena;
    uint8_t *out;                          /* FRAME_MAX_BYTES */
    struct request_push held[HELD_PUSHES]; /* not sent yet; packed when they are: side by side that is faster */
    size_t n_held;
    uint64_t n_held_grad_bytes;

    unsigned rank;
    uint64_t incarnation;
    struct reply_welcome welcome; /* its strings are run_id and optimizer */
    char *run_id, *optimizer;
    const struct kernels *kernels;
    struct manifest manifest;
    const void **inits; /* per parameter, until formed */
    struct layout *layout;
    struct wire_position position;
    struct wire_position last; /* of the last micro-batch that was ended */
    void *blob;
    size_t n_blob_bytes;
    double loss_scale;

    struct cuda *cuda; /* of a job on GPUs, else NULL: ring and weights are device memory */
    void *stream;      /* on which gradients are computed; NULL: the default one */
    struct mapping ring, overflow, credit;
    struct mapping weights;   /* shared weights, or the range of stage 3 in host memory */
    struct mapping pool;      /* stage 3 on GPUs: what was gathered last, until the next message */
    struct range *range;      /* stage 3 on GPUs, else NULL: where it is copied to */
    uint8_t *private_weights; /* the copy that the caller sees, or NULL */
    _Atomic int written;      /* what written.c knows of writes to them */
    uint64_t ring_bytes;
    uint32_t *gathered; /* stage 3, per parameter */
    bool in_window;
    struct mapping window; /* of a job on GPUs: host memory beside the weights */

    bool open; /* a micro-batch is */
    uint32_t ordinal;
    uint64_t sequence;
    uint16_t *n_pushed; /* per parameter, in the open micro-batch */
    bool *slotted;      /* per parameter: zerod_slot() said where the next push is to be written */
    uint8_t **places;   /* per parameter: where zerod_slot() has a gradient of several parts written, or NULL */
    uint32_t *slots;    /* per parcel: first ticket of the open micro-batch */
    struct ticket *tickets;
    uint32_t *used; /* tickets in use */
    uint32_t n_used, n_tickets, next_ticket;
    uint8_t *scratch; /* where a duplicate's bytes go, so that they never overwrite the first's */
    size_t n_scratch_bytes;
    uint8_t *device_scratch; /* the same on a GPU; scratch then has the host's copy of it */
    size_t n_device_scratch_bytes;

    struct interned *strings; /* open addressing, capacity a power of two */
    uint32_t n_strings, string_capacity;
};

/*
 * Sends without waiting for an answer, after what is held. Return: 0; 1 when the daemon has hung up, perhaps with
 * an answer that says why; or a sticky fatal error.
 */
int client_send(struct zerod *c, const struct request *request);

/* The same for a push that others follow at once: several are sent with one system call. */
int client_hold(struct zerod *c, const struct request_push *push, uint64_t n_grad_bytes);

/* Sends what is held. Return: as client_send(). */
int client_flush(struct zerod *c);

/*
 * One request and its answer of that type. On ZEROD_ABORTED the abort has been acknowledged and
 * the position is the one to begin again at. Return: 0, ZEROD_REFUSED, ZEROD_ABORTED, or fatal.
 */
int client_call(struct zerod *c, const struct request *request, enum reply_type type, struct reply *reply);

/* Return: 0, or the reason why this call may not be made. */
int client_check(struct zerod *c, bool needs_formed);

/* Notes a local error. Return: status. */
int client_fail(struct zerod *c, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
int client_fatal(struct zerod *c, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

struct client_text {
    char bytes[WIRE_MAX_TEXT_BYTES + 1];
};

/* Return: text (NULL is ""), or as much of it as a message may hold, in room. */
const char *client_fitting(struct client_text *room, const char *text);

/* Forgets what the open micro-batch holds: it has ended, or was aborted. */
void push_close(struct zerod *c);
int push_init(struct zerod *c, uint32_t n_tickets);
void push_deinit(struct zerod *c);

/* What failed with the driver is the end of the connection: a slot may be half written. Return: r. */
int client_cuda_failed(struct zerod *c, int r);

/* Jobs on GPUs: waits until the caller's stream is done with the weights. Return: 0 or fatal. */
int client_wait_for_stream(struct zerod *c);

/* Maps a descriptor that came with the last answer; takes it. Return: 0 or -errno. */
int mapping_init(struct mapping *mapping, int fd, size_t n_bytes, int protection);
int mapping_init_device(struct mapping *mapping, struct cuda *cuda, int fd, size_t n_bytes, bool read_only);
void mapping_deinit(struct mapping *mapping);

int weights_init(struct zerod *c, enum wire_segment_kind kind, int fd, size_t n_bytes);
void weights_deinit(struct zerod *c);
int weights_init_pool(struct zerod *c, int fd, size_t n_bytes);
/* Has Formed brought the weights, or a pool with room for each parameter? Return: 0 or a negative errno. */
int weights_check(struct zerod *c);
void weights_forget_device(struct zerod *c); /* in a forked child */

/* After a step or window: private copies follow, and what is gathered on a GPU. Return: 0 or fatal. */
int weights_refresh(struct zerod *c);
void weights_close_window(struct zerod *c);

/* Where the layout has it: in the weight segment, or, in stage 3, in the range in host memory and in windows. */
uint64_t weights_offset(const struct zerod *c, uint32_t param);

/* In the handler of SIGSEGV: a write to published weights. Return: it may be done again, and succeeds. */
bool written_begin(struct zerod *c);

/* The weights are the published ones again. _reported: if E1106 has told of what was written. */
void written_forget(struct zerod *c);
void written_forget_reported(struct zerod *c);

void fault_register(struct zerod *c, const uint8_t *base, size_t n_bytes);
void fault_unregister(const struct zerod *c);
