/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The links of several daemons in one process. Each node has its own loop, and counts its events. A test can freeze a
 * node by not running its loop. A proxy between the nodes can cut connections, and change and record bytes. Log lines
 * are kept. Messages between nodes are numbered and filled by this harness, which asserts that each arrives once and in
 * order.
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
    /* Events and messages, for each other node. */
    unsigned n_up[MAX_NODES], n_down[MAX_NODES], n_reborn[MAX_NODES], n_reborn_at_up[MAX_NODES];
    bool others_have_run[MAX_NODES]; /* what the other node said */
    uint32_t n_sent[MAX_NODES], n_received[MAX_NODES];
    uint32_t expected[MAX_NODES]; /* the number of the next message */
    char why[MAX_NODES][700];     /* the reason given to the last down() */
};

struct node_options {
    unsigned node, n_nodes; /* n_nodes 0 means 2 */
    const char *key;        /* NULL means the usual key */
    const char *yaml;       /* more configuration, or NULL */
    uint64_t incarnation;   /* 0 means a new one */
};

/* One connection through the proxy. */
struct channel {
    int from, to; /* -1 means none */
    size_t n_passed, budget;
};

struct proxy {
    int listener;
    uint16_t port;
    bool on;        /* whether all nodes connect through the proxy */
    bool cuts;      /* closes each connection after a random number of bytes */
    bool hole;      /* passes no bytes, and closes nothing */
    size_t flip_at; /* which of the next bytes to node 0 to change, from 1; 0: none */
    unsigned n_cuts;
    struct channel channels[MAX_CHANNELS];
    uint8_t recorded[RECORDED_BYTES]; /* the bytes of the first connection to node 0 */
    size_t n_recorded;
};

extern struct proxy proxy;
extern uint16_t node_port; /* where node 0 listens */

void harness_begin(void);
void harness_end(void);

/* Return: the result of cluster_new(). */
int node_try(struct node *node, const struct node_options *options, char *why, size_t why_size);
void node_start(struct node *node, const struct node_options *options);
/* Closes the node's links, runs its loop until it is empty, and frees everything. */
void node_stop(struct node *node);

/* Sends the next message to another node. */
void node_send(struct node *node, unsigned to, size_t n_bytes);
bool node_is_up(const struct node *node, unsigned other);

/* Runs the loops of all nodes that are not frozen, and the proxy, once. */
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

/* Return: a stranger's socket, which is connected to node 0. */
int knock(void);
/* Turns until the other end has closed. Return: how many bytes it sent. */
size_t wait_until_dropped(int fd, unsigned ms);
bool is_dropped(int fd);

/* Return: how many log lines since harness_begin() or log_forget() have this text. */
unsigned n_logged(const char *part);
unsigned n_logged_in_all(void);
void log_forget(void);

/* Cuts all connections through the proxy now. */
void proxy_cut(void);
