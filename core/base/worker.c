/* SPDX-License-Identifier: Apache-2.0 */

/* The worker pool: its threads, the queue of works, and the list of works that are done. */

#include "core/base/worker.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>

#include "core/base/base.h"
#include "core/base/recorder.h"
#include "kernels/kernels.h"

/* Posted works with items left to start. */
struct queue {
    struct work *head, **tail;
};

/* In the order in which workers look for items. */
enum { FIRST, LATER, N_QUEUES };

struct worker_pool {
    pthread_mutex_t lock;
    pthread_cond_t work_posted;
    pthread_cond_t work_done;
    struct queue queues[N_QUEUES];
    struct work *done, **done_tail; /* finished, to be reaped */
    uint64_t n_items_done;
    _Atomic(uint64_t) n_raised; /* the counter of worker_progress() */
    unsigned n_under_way;       /* posted and not yet in the done list */
    bool stop;
    bool bad_float_env;
    void (*notify)(void *userdata);
    void *userdata;
    unsigned n_threads, n_ready;
    pthread_t threads[];
};

static __thread unsigned number;

unsigned worker_number(void)
{
    return number;
}

/* Moves a finished work to the done list. The caller holds the lock. */
static void pool_finish(struct worker_pool *pool, struct work *work)
{
    assert(pool->n_under_way > 0);
    assert(work->n_finished == work->n_items);
    work->next = NULL;
    *pool->done_tail = work;
    pool->done_tail = &work->next;
    pool->n_under_way--;
    pthread_cond_broadcast(&pool->work_done);
}

/* The caller holds the lock. Return: the first queue with items, or NULL. */
static struct queue *find_queue(struct worker_pool *pool)
{
    for (unsigned i = 0; i < N_QUEUES; i++)
        if (pool->queues[i].head)
            return &pool->queues[i];
    return NULL;
}

/* Takes the next item of the queue's first work. The caller holds the lock. Return: the work. */
static struct work *take_item(struct queue *queue, uint32_t *item)
{
    struct work *work = queue->head;

    assert(work->n_started < work->n_items);
    *item = work->n_started++;
    if (work->n_started == work->n_items) {
        queue->head = work->next;
        if (!queue->head)
            queue->tail = &queue->head;
    }
    return work;
}

static void pool_work(struct worker_pool *pool)
{
    struct work *work, *last = NULL;
    struct queue *queue = NULL;
    uint32_t item;
    bool finished;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && !(queue = find_queue(pool))) {
            recorder_rest();
            pthread_cond_wait(&pool->work_posted, &pool->lock);
        }
        if (pool->stop)
            break;
        work = take_item(queue, &item);
        if (work != last)
            recorder_rest();
        last = work;
        pthread_mutex_unlock(&pool->lock);
        work->run(work, item);
        pthread_mutex_lock(&pool->lock);
        pool->n_items_done++;
        assert(work->n_finished < work->n_started);
        finished = ++work->n_finished == work->n_items;
        if (finished) {
            recorder_rest(); /* before notify(), because the next step may begin then */
            pool_finish(pool, work);
            pthread_mutex_unlock(&pool->lock);
            pool->notify(pool->userdata);
            pthread_mutex_lock(&pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *arg)
{
    struct worker_pool *pool = arg;
    char why[128];

    pthread_mutex_lock(&pool->lock);
    /* A library linked with -ffast-math switches flush-to-zero on for every new thread, which changes the bits of
     * results. */
    if (kernels_assert_float_env(why, sizeof(why)) < 0)
        pool->bad_float_env = true;
    number = ++pool->n_ready;
    pthread_cond_broadcast(&pool->work_done);
    pthread_mutex_unlock(&pool->lock);

    pool_work(pool);
    return NULL;
}

/* Starts a worker without signals, because the loop's thread handles them. */
static int start_thread(struct worker_pool *pool)
{
    sigset_t all, old;
    int r;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    r = pthread_create(&pool->threads[pool->n_threads], NULL, worker_main, pool);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r)
        return -r;
    pthread_setname_np(pool->threads[pool->n_threads], "zerod-worker");
    pool->n_threads++;
    return 0;
}

int worker_pool_new(struct worker_pool **out, unsigned n_threads, void (*notify)(void *userdata), void *userdata)
{
    struct worker_pool *pool;
    int r = 0;

    assert(n_threads >= 1);
    pool = calloc(1, sizeof(*pool) + n_threads * sizeof(pool->threads[0]));
    if (!pool)
        return -ENOMEM;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work_posted, NULL);
    pthread_cond_init(&pool->work_done, NULL);
    for (unsigned i = 0; i < N_QUEUES; i++)
        pool->queues[i].tail = &pool->queues[i].head;
    pool->done_tail = &pool->done;
    pool->notify = notify;
    pool->userdata = userdata;

    while (r == 0 && pool->n_threads < n_threads)
        r = start_thread(pool);

    pthread_mutex_lock(&pool->lock);
    while (pool->n_ready < pool->n_threads)
        pthread_cond_wait(&pool->work_done, &pool->lock);
    if (r == 0 && pool->bad_float_env)
        r = -ENOTSUP;
    pthread_mutex_unlock(&pool->lock);

    if (r < 0) {
        worker_pool_free(pool);
        return r;
    }
    *out = pool;
    return 0;
}

void worker_pool_free(struct worker_pool *pool)
{
    if (!pool)
        return;
    assert(number == 0); /* a worker would wait for itself */
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work_posted);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work_done);
    pthread_cond_destroy(&pool->work_posted);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static void append(struct queue *queue, struct work *work)
{
    work->next = NULL;
    *queue->tail = work;
    queue->tail = &work->next;
}

static void prepend(struct queue *queue, struct work *work)
{
    work->next = queue->head;
    queue->head = work;
    if (!work->next)
        queue->tail = &work->next;
}

static void post(struct worker_pool *pool, struct work *work, struct queue *queue,
                 void (*add)(struct queue *queue, struct work *work))
{
    assert(work->done);
    assert(work->run || work->n_items == 0);
    work->n_started = 0;
    work->n_finished = 0;

    pthread_mutex_lock(&pool->lock);
    pool->n_under_way++;
    if (work->n_items == 0) {
        pool_finish(pool, work);
        pthread_mutex_unlock(&pool->lock);
        pool->notify(pool->userdata);
        return;
    }
    add(queue, work);
    pthread_cond_broadcast(&pool->work_posted);
    pthread_mutex_unlock(&pool->lock);
}

void worker_post(struct worker_pool *pool, struct work *work)
{
    post(pool, work, &pool->queues[FIRST], append);
}

void worker_post_later(struct worker_pool *pool, struct work *work)
{
    post(pool, work, &pool->queues[LATER], prepend);
}

unsigned worker_pool_reap(struct worker_pool *pool)
{
    struct work *done, *next;
    unsigned n = 0;

    assert(number == 0); /* done() belongs to the loop's thread */
    pthread_mutex_lock(&pool->lock);
    done = pool->done;
    pool->done = NULL;
    pool->done_tail = &pool->done;
    pthread_mutex_unlock(&pool->lock);

    for (; done; done = next, n++) {
        next = done->next;
        done->done(done);
    }
    return n;
}

unsigned worker_pool_wait(struct worker_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    while (!pool->done && pool->n_under_way > 0)
        pthread_cond_wait(&pool->work_done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return worker_pool_reap(pool);
}

unsigned worker_pool_n_threads(const struct worker_pool *pool)
{
    return pool->n_threads;
}

_Atomic(uint64_t) *worker_progress(struct worker_pool *pool)
{
    return &pool->n_raised;
}

bool worker_pool_progress(struct worker_pool *pool, uint64_t *n_items_done)
{
    bool busy;

    pthread_mutex_lock(&pool->lock);
    busy = pool->n_under_way > 0;
    *n_items_done = pool->n_items_done + atomic_load_explicit(&pool->n_raised, memory_order_relaxed);
    pthread_mutex_unlock(&pool->lock);
    return busy;
}
