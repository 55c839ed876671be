/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The parts of the module `membership`. No other file includes this header.
 *
 *   engine-restart.c   the engine between nodes: its start, and its replacement after a failure
 *   membership.c       the links, and the life of struct membership
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/engines/engine.h"
#include "daemon/nodes/membership.h"

enum {
    MEMBERSHIP_MAX_HOST_BYTES = 256,
};

/* A value from another node's engine, received before this node's engine has started. */
struct early_value {
    struct early_value *next;
    char key[ENGINE_MAX_KEY_BYTES + 1];
    size_t n_bytes;
    uint8_t bytes[];
};

struct membership {
    uv_loop_t *loop;
    struct job *job;
    struct nodes *nodes; /* the job frees it */
    void (*after)(void *userdata);
    void *userdata;
    struct cluster *cluster;
    struct engine *engine;
    uv_async_t wake;
    uv_timer_t pause;
    unsigned n_ending;  /* killed engines that have not ended and may still write into the segments */
    unsigned n_handles; /* open handles, and n_ending */
    bool starts;        /* the next engine starts when the pause is over and n_ending is 0 */
    char host[MEMBERSHIP_MAX_HOST_BYTES];
    uint32_t generation;
    const struct segment *const *segments;
    struct early_value *early, **last_early;
    struct traffic traffic[N_TRAFFIC];
    unsigned n_failures; /* since the last order that was done */
    bool has_worked;     /* some engine of this job has done an order */
    uint64_t told_ms;    /* when this daemon was told to stop; 0: not yet */
    bool closing;
};

/* ---- membership.c -------------------------------------------------------------------------------------- */

/* Call it after each event. Calls the server, which handles the changes. */
void membership_after(struct membership *m);

/* Counts one of n_handles as ended. Frees m after the last one. */
void membership_drop_handle(struct membership *m);

/* ---- engine-restart.c, as struct nodes_ops has them -------------------------------------------------------- */

int membership_start_engine(void *userdata, uint32_t generation, const struct segment *const *segments, char *why,
                            size_t why_size);
int membership_order(void *userdata, const struct engine_order *o);
int membership_give_value(void *userdata, const char *key, const uint8_t *value, size_t n_bytes);
int membership_share(void *userdata, unsigned number, const struct segment *segment);
void membership_stop_engine(void *userdata);

/* Kills the engine. The next engine starts when this one has ended. */
void membership_end_engine(struct membership *m);

/* Forgets values that other nodes' engines sent before this node's engine started. */
void membership_forget_values(struct membership *m);

/* Ends the pause before the next engine. Call it when a link is up again, because the next engine may now work. */
void membership_hurry_engine(struct membership *m);
