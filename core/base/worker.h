/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The worker pool: a fixed number of threads that run kernels over ranges.
 *
 * A work is n_items calls of run(work, item), in any order, on any threads. When all have returned, the pool puts the
 * work into its done list, and a worker calls notify(), once or more. The owner of the pool, the loop, then calls
 * worker_pool_reap(), which calls done(work) for each finished work on the loop's thread. A work is embedded in the
 * struct that it works on, and must stay alive until done(). Works start in the order of posting, except those of
 * worker_post_later(); several may be under way.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct work {
    void (*run)(struct work *work, uint32_t item); /* on a worker */
    void (*done)(struct work *work);               /* on the thread that reaps */
    uint32_t n_items;                              /* 0: the work is done at once */
    /* The pool uses the fields below. */
    uint32_t n_started;
    uint32_t n_finished;
    struct work *next;
};

struct worker_pool;

/*
 * n_threads >= 1. notify must be safe to call from any thread.
 * Return: 0 or -errno; -ENOTSUP when the floating point environment of a new thread flushes subnormals.
 */
int worker_pool_new(struct worker_pool **out, unsigned n_threads, void (*notify)(void *userdata), void *userdata);

/* Frees the pool. Waits for running items, drops the waiting ones, and does not call done(). NULL is fine. */
void worker_pool_free(struct worker_pool *pool);

void worker_post(struct worker_pool *pool, struct work *work);
/* As worker_post(), but an item starts only when no work of worker_post() has items to start. The last posted work is
 * the first to start. */
void worker_post_later(struct worker_pool *pool, struct work *work);

/* Calls done() for each finished work. Return: their number. */
unsigned worker_pool_reap(struct worker_pool *pool);

/* Waits until a work has finished, then reaps. For tests and programs without a loop. Return: as worker_pool_reap(); 0
 * if no work is under way. */
unsigned worker_pool_wait(struct worker_pool *pool);

/* Return: the number of the calling worker, from 1; 0 on other threads. */
unsigned worker_number(void);

/* Return: a counter that long items raise while they run. */
_Atomic(uint64_t) *worker_progress(struct worker_pool *pool);

unsigned worker_pool_n_threads(const struct worker_pool *pool);

/*
 * For a watchdog. Return: true if works are under way. *n_items_done grows with each item that ends, and with the
 * counter of worker_progress().
 */
bool worker_pool_progress(struct worker_pool *pool, uint64_t *n_items_done);
