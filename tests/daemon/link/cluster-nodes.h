/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Several daemons' links in one process: each node has a loop of its own, and counts its events. If a test does not run
 * the loop, the node is frozen. A proxy may stand between the nodes, to cut connections, and to spoil and record bytes;
 * log lines are kept. The harness numbers and fills the messages between nodes, and checks that they come in order and
 * once.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include <cmocka.h>

#include "daemon/link/cluster.h"
#include "daemon/link/secure-stream.h"

enum { MAX_NODES = 8, MAX_CHANNELS = 16, RECORDED_BYTES = 64 * 1024 };

struct config;

struct node {
    uv_loop_t loop;
    struct config *config;
    struct cluster *cluster;
    unsigned node;
    bool frozen;
    bool closes_when_up, closes_when_down, talks_when_reborn, has_run;
    /* Counts of the node's events about each other node, and of messages. */
    unsigned n_up[MAX_NODES], n_down[MAX_NODES], n_reborn[MAX_NODES], n_reborn_at_up[MAX_NODES];
    bool others_have_run[MAX_NODES]; /* as they said */
    uint32_t n_sent[MAX_NODES], n_received[MAX_NODES];
    uint32_t expected[MAX_NODES]; /* number of the next message */
    char why[MAX_NODES][700];     /* of the last down() */
};

struct node_options {
    unsigned node, n_nodes; /* n_nodes 0: 2 */
    const char *key;        /* 0: the key of all */
    const char *yaml;       /* more configuration, or NULL */
    uint64_t incarnation;   /* 0: a new one */
};

/* One connection through the proxy. */
struct channel {
    int from, to; /* -1: none */
    size_t n_passed, budget;
};

struct proxy {
    int listener;
    uint16_t port;
    bool on;        /* connections of all nodes go through it */
    bool cuts;      /* each after a random number of bytes */
    bool hole;      /* passes nothing, and ends nothing */
    size_t flip_at; /* of what goes to node 0 next, the byte to spoil, counted from 1; 0: none */
    unsigned n_cuts;
    struct channel channels[MAX_CHANNELS];
    uint8_t recorded[RECORDED_BYTES]; /* what the first connection said to node 0 */
    size_t n_recorded;
};

extern struct proxy proxy;
extern uint16_t node_port; /* where node 0 listens */

void harness_begin(void);
void harness_end(void);

/* Return: what cluster_new() said. */
int node_try(struct node *node, const struct node_options *options, char *why, size_t why_size);
void node_start(struct node *node, const struct node_options *options);
/* Closes, runs the loop until it is empty, and frees all. */
void node_stop(struct node *node);

/* Sends the next message to a node. */
void node_send(struct node *node, unsigned to, size_t n_bytes);
bool node_is_up(const struct node *node, unsigned other);

/* One round of all nodes that are not frozen, and of the proxy. */
void turn(void);
void turn_for(unsigned ms);
uint64_t now_ms(void);

#define WAIT_FOR(condition, ms)                                                                                        \
    do {                                                                                                               \
        uint64_t end_ms_ = now_ms() + (ms);                                                                            \
        while (!(condition) && now_ms() < end_ms_)                                                                     \
            turn();                                                                                                    \
        if (!(condition))                                                                                              \
            fail_msg("not within %u ms: %s", (unsigned)(ms), #condition);                                              \
    } while (0)

/* A socket of a stranger, connected to node 0. */
int knock(void);
/* Turns until the other end has closed. Return: how many bytes it said before. */
size_t wait_until_dropped(int fd, unsigned ms);
bool is_dropped(int fd);

/* Log lines with this in them since harness_begin() or log_forget(). */
unsigned n_logged(const char *part);
unsigned n_logged_in_all(void);
void log_forget(void);

/* Cuts all connections through the proxy now. */
void proxy_cut(void);
