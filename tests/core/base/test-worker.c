/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The worker pool runs every item once, on a worker. After all items of a work, done() is called on the thread that
 * calls worker_pool_reap(). Workers write plain memory and the loop reads it, so under thread sanitizer this file also
 * tests that the pool's locks order these writes and reads. Where threads must meet, they wait for each other; if the
 * pool does not let them meet, the test hangs until its time limit ends it.
 */

#include <fenv.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/worker.h"
#include "tests/group.h"

enum { N_THREADS = 4, MAX_ITEMS = 2000 };

/* A loop. The pool notifies it through an eventfd. */
struct fixture {
    struct worker_pool *pool;
    int event_fd;
    pthread_t thread; /* the thread that reaps */
    unsigned n_done;
    struct task *done[8]; /* in the order of done() */
};

/* A work and what happened to it. */
struct task {
    struct work work;
    struct fixture *f;
    uint8_t n_runs[MAX_ITEMS]; /* plain memory, a byte for each item */
    unsigned n_done;
    unsigned n_posts; /* how often done() still posts the work again */
};

static void wake_up(void *userdata)
{
    const struct fixture *f = userdata;

    (void)eventfd_write(f->event_fd, 1); /* fails only after 2^64 unread notices */
}

static void make(struct fixture *f, unsigned n_threads)
{
    *f = (struct fixture){.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), .thread = pthread_self()};
    assert_true(f->event_fd >= 0);
    assert_int_equal(worker_pool_new(&f->pool, n_threads, wake_up, f), 0);
    assert_int_equal(worker_pool_n_threads(f->pool), n_threads);
}

static void done_with(struct fixture *f)
{
    worker_pool_free(f->pool);
    close(f->event_fd);
}

/* Sleeps until there is a notice, then reaps, as the daemon's loop does. */
static unsigned loop_once(struct fixture *f)
{
    struct pollfd poll_fd = {.fd = f->event_fd, .events = POLLIN};
    eventfd_t n;

    assert_int_equal(poll(&poll_fd, 1, -1), 1);
    assert_int_equal(eventfd_read(f->event_fd, &n), 0);
    return worker_pool_reap(f->pool);
}

static void loop_until(struct fixture *f, unsigned n_done)
{
    while (f->n_done < n_done)
        loop_once(f);
    assert_int_equal(f->n_done, n_done);
}

static void run_item(struct work *work, uint32_t item)
{
    struct task *task = container_of(work, struct task, work);

    task->n_runs[item]++;
}

static void note_done(struct work *work)
{
    struct task *task = container_of(work, struct task, work);
    struct fixture *f = task->f;

    assert_true(pthread_equal(pthread_self(), f->thread));
    for (uint32_t i = 0; i < work->n_items && i < MAX_ITEMS; i++)
        assert_int_equal(task->n_runs[i], task->n_done + 1);
    task->n_done++;
    if (f->n_done < ARRAY_SIZE(f->done))
        f->done[f->n_done] = task;
    f->n_done++;
    if (task->n_posts > 0) {
        task->n_posts--;
        worker_post(f->pool, work);
    }
}

static struct task task_of(struct fixture *f, uint32_t n_items)
{
    return (struct task){.f = f, .work = {.run = run_item, .done = note_done, .n_items = n_items}};
}

/* ---- running ------------------------------------------------------------------------------------------- */

static void test_items(void **state)
{
    static const uint32_t counts[] = {1, 2, N_THREADS, N_THREADS + 1, MAX_ITEMS};
    struct fixture f;
    uint64_t n_items = 0, n_items_done;

    (void)state;
    make(&f, N_THREADS);
    for (unsigned i = 0; i < ARRAY_SIZE(counts); i++) {
        struct task task = task_of(&f, counts[i]);

        worker_post(f.pool, &task.work);
        loop_until(&f, i + 1);
        for (uint32_t k = 0; k < MAX_ITEMS; k++)
            assert_int_equal(task.n_runs[k], k < counts[i]);
        n_items += counts[i];
        assert_false(worker_pool_progress(f.pool, &n_items_done));
        assert_int_equal(n_items_done, n_items);
    }
    assert_int_equal(worker_pool_reap(f.pool), 0);
    assert_int_equal(worker_pool_wait(f.pool), 0); /* returns at once */
    done_with(&f);
}

/* A work without items is complete at once, but done() is called only when a thread reaps. */
static void test_no_items(void **state)
{
    struct fixture f;
    struct task task;

    (void)state;
    make(&f, 1);
    task = task_of(&f, 0);
    worker_post(f.pool, &task.work);
    assert_int_equal(f.n_done, 0);
    assert_int_equal(loop_once(&f), 1);
    assert_int_equal(task.n_done, 1);
    done_with(&f);
}

/* A work may be posted again, from its own done() or later. */
static void test_again(void **state)
{
    struct fixture f;
    struct task task;

    (void)state;
    make(&f, N_THREADS);
    task = task_of(&f, 7);
    task.n_posts = 20;
    worker_post(f.pool, &task.work);
    loop_until(&f, 21);
    worker_post(f.pool, &task.work);
    loop_until(&f, 22);
    assert_int_equal(task.n_done, 22);
    done_with(&f);
}

static void free_task(struct work *work)
{
    struct task *task = container_of(work, struct task, work);

    note_done(work);
    memset(task, 0xff, sizeof(*task)); /* a later use would crash */
    free(task);
}

/* Many works run at once. Only done() reports their ends. */
static void test_many(void **state)
{
    struct fixture f;

    (void)state;
    make(&f, N_THREADS);
    for (unsigned i = 0; i < 300; i++) {
        struct task *task = malloc(sizeof(*task));

        assert_non_null(task);
        *task = task_of(&f, i * 7 % 41);
        task->work.done = free_task;
        worker_post(f.pool, &task->work);
        if (i % 10 == 9)
            loop_once(&f);
    }
    loop_until(&f, 300);
    done_with(&f);
}

/* The thread waits with worker_pool_wait() instead of a loop. */
static void test_wait(void **state)
{
    struct fixture f;
    struct task tasks[3];
    unsigned n = 0;

    (void)state;
    make(&f, 2);
    for (unsigned i = 0; i < ARRAY_SIZE(tasks); i++) {
        tasks[i] = task_of(&f, 50 * i);
        worker_post(f.pool, &tasks[i].work);
    }
    while (n < ARRAY_SIZE(tasks)) {
        unsigned here = worker_pool_wait(f.pool);

        assert_true(here > 0);
        n += here;
        assert_int_equal(f.n_done, n);
    }
    assert_int_equal(worker_pool_wait(f.pool), 0);
    done_with(&f);
}

/* ---- order --------------------------------------------------------------------------------------------- */

struct ordered {
    struct task task;
    unsigned *n_started;
    unsigned place; /* how many items of all works started before its first */
};

static void run_ordered(struct work *work, uint32_t item)
{
    struct ordered *ordered = container_of(work, struct ordered, task.work);

    if (item == 0)
        ordered->place = *ordered->n_started;
    ++*ordered->n_started;
    run_item(work, item);
}

/* With one thread, works start, run and are done in the order of posting. */
static void test_order(void **state)
{
    struct ordered works[5];
    unsigned n_started = 0;
    struct fixture f;

    (void)state;
    make(&f, 1);
    for (unsigned i = 0; i < ARRAY_SIZE(works); i++) {
        works[i] = (struct ordered){.task = task_of(&f, 100), .n_started = &n_started};
        works[i].task.work.run = run_ordered;
        worker_post(f.pool, &works[i].task.work);
    }
    loop_until(&f, ARRAY_SIZE(works));
    for (unsigned i = 0; i < ARRAY_SIZE(works); i++) {
        assert_int_equal(works[i].place, 100 * i);
        assert_ptr_equal(f.done[i], &works[i].task);
    }
    done_with(&f);
}

struct opener {
    struct task task;
    sem_t started, may_end;
};

static void run_opener(struct work *work, uint32_t item)
{
    struct opener *opener = container_of(work, struct opener, task.work);

    sem_post(&opener->started);
    sem_wait(&opener->may_end);
    run_item(work, item);
}

/* Works for later start after works that were posted after them, and among each other the last posted first. */
static void test_later(void **state)
{
    static const unsigned places[] = {300, 200, 0, 100};
    struct ordered works[4];
    struct opener opener;
    unsigned n_started = 0;
    struct fixture f;

    (void)state;
    make(&f, 1);
    sem_init(&opener.started, 0, 0);
    sem_init(&opener.may_end, 0, 0);
    opener.task = task_of(&f, 1);
    opener.task.work.run = run_opener;
    worker_post_later(f.pool, &opener.task.work);
    sem_wait(&opener.started);
    for (unsigned i = 0; i < ARRAY_SIZE(works); i++) {
        works[i] = (struct ordered){.task = task_of(&f, 100), .n_started = &n_started};
        works[i].task.work.run = run_ordered;
        (i < 2 ? worker_post_later : worker_post)(f.pool, &works[i].task.work);
    }
    sem_post(&opener.may_end);
    loop_until(&f, 1 + ARRAY_SIZE(works));
    for (unsigned i = 0; i < ARRAY_SIZE(works); i++)
        assert_int_equal(works[i].place, places[i]);
    sem_destroy(&opener.started);
    sem_destroy(&opener.may_end);
    done_with(&f);
}

struct meeting {
    struct task task;
    pthread_barrier_t *barrier;
    _Atomic unsigned n_on_loop; /* items that ran on the loop's thread */
};

static void run_meeting(struct work *work, uint32_t item)
{
    struct meeting *meeting = container_of(work, struct meeting, task.work);

    if (pthread_equal(pthread_self(), meeting->task.f->thread))
        meeting->n_on_loop++;
    pthread_barrier_wait(meeting->barrier);
    run_item(work, item);
}

static void meet(unsigned n_works, uint32_t n_items)
{
    struct meeting works[N_THREADS];
    pthread_barrier_t barrier;
    struct fixture f;

    pthread_barrier_init(&barrier, NULL, n_works * n_items);
    make(&f, n_works * n_items);
    for (unsigned i = 0; i < n_works; i++) {
        works[i] = (struct meeting){.task = task_of(&f, n_items), .barrier = &barrier};
        works[i].task.work.run = run_meeting;
    }
    for (unsigned i = 0; i < n_works; i++)
        worker_post(f.pool, &works[i].task.work);
    loop_until(&f, n_works);
    for (unsigned i = 0; i < n_works; i++)
        assert_int_equal(works[i].n_on_loop, 0);
    done_with(&f);
    pthread_barrier_destroy(&barrier);
}

/* Each item waits for all others, so each item must have a thread. */
static void test_several_at_once(void **state)
{
    (void)state;
    meet(1, N_THREADS);
    meet(N_THREADS, 1);
    meet(2, 2);
}

/* ---- progress ------------------------------------------------------------------------------------------ */

struct gated {
    struct task task;
    sem_t started, go;
    _Atomic unsigned n_inside;
};

static void run_gated(struct work *work, uint32_t item)
{
    struct gated *gated = container_of(work, struct gated, task.work);

    (void)item;
    gated->n_inside++;
    sem_post(&gated->started);
    sem_wait(&gated->go);
    gated->n_inside--;
}

static void gated_init(struct gated *gated, struct fixture *f, uint32_t n_items)
{
    *gated = (struct gated){.task = task_of(f, n_items)};
    gated->task.work.run = run_gated;
    sem_init(&gated->started, 0, 0);
    sem_init(&gated->go, 0, 0);
}

static void gated_deinit(struct gated *gated)
{
    sem_destroy(&gated->started);
    sem_destroy(&gated->go);
}

static void note_gated(struct work *work)
{
    container_of(work, struct gated, task.work)->task.f->n_done++;
}

/* worker_pool_progress() says whether there is work, and counts what was done, for the watchdog. */
static void test_progress(void **state)
{
    struct fixture f;
    struct gated gated;
    uint64_t n;

    (void)state;
    make(&f, 1);
    assert_false(worker_pool_progress(f.pool, &n));
    assert_int_equal(n, 0);
    gated_init(&gated, &f, 2);
    gated.task.work.done = note_gated;
    worker_post(f.pool, &gated.task.work);
    assert_true(worker_pool_progress(f.pool, &n));
    assert_int_equal(n, 0);

    sem_wait(&gated.started);
    sem_post(&gated.go);
    sem_wait(&gated.started); /* the second item runs, so the first has ended */
    assert_true(worker_pool_progress(f.pool, &n));
    assert_int_equal(n, 1);
    atomic_fetch_add(worker_progress(f.pool), 1); /* as a long item does */
    assert_true(worker_pool_progress(f.pool, &n));
    assert_int_equal(n, 2);
    assert_int_equal(worker_pool_reap(f.pool), 0); /* a work with an item left is not done */
    sem_post(&gated.go);
    loop_until(&f, 1);
    assert_false(worker_pool_progress(f.pool, &n));
    assert_int_equal(n, 3);
    gated_deinit(&gated);
    done_with(&f);
}

/* A running work does not delay the done() of another. */
static void test_later_work_ends_first(void **state)
{
    struct fixture f;
    struct gated gated;
    struct task later;
    uint64_t n;

    (void)state;
    make(&f, 2);
    gated_init(&gated, &f, 1);
    gated.task.work.done = note_gated;
    later = task_of(&f, 10);
    worker_post(f.pool, &gated.task.work);
    worker_post(f.pool, &later.work);
    loop_until(&f, 1);
    assert_int_equal(later.n_done, 1);
    assert_true(worker_pool_progress(f.pool, &n));
    sem_post(&gated.go);
    loop_until(&f, 2);
    gated_deinit(&gated);
    done_with(&f);
}

static void *open_gate(void *arg)
{
    struct gated *gated = arg;

    for (unsigned i = 0; i < N_THREADS; i++)
        sem_post(&gated->go);
    return NULL;
}

/* worker_pool_wait() blocks until the first work is done, not until all are, and not if there is no work. */
static void test_wait_blocks(void **state)
{
    struct fixture f;
    struct gated gated;
    struct task quick;
    pthread_t opener;

    (void)state;
    make(&f, 2);
    gated_init(&gated, &f, 1);
    gated.task.work.done = note_gated;
    quick = task_of(&f, 1);
    worker_post(f.pool, &gated.task.work);
    worker_post(f.pool, &quick.work);
    assert_int_equal(worker_pool_wait(f.pool), 1);
    assert_int_equal(quick.n_done, 1);
    assert_int_equal(pthread_create(&opener, NULL, open_gate, &gated), 0);
    assert_int_equal(worker_pool_wait(f.pool), 1);
    assert_int_equal(f.n_done, 2);
    assert_int_equal(worker_pool_wait(f.pool), 0);
    pthread_join(opener, NULL);
    gated_deinit(&gated);
    done_with(&f);
}

/* ---- shutdown ------------------------------------------------------------------------------------------ */

static void run_nothing(struct work *work, uint32_t item)
{
    (void)work;
    (void)item;
}

/*
 * When worker_pool_free() returns, running items have ended, and items that have not started never run. The second work
 * would take minutes, so a pool that runs all of it exceeds the time limit.
 */
static void test_free_while_busy(void **state)
{
    struct fixture f;
    struct gated gated;
    struct task endless;
    pthread_t opener;

    (void)state;
    make(&f, N_THREADS);
    gated_init(&gated, &f, N_THREADS);
    endless = task_of(&f, UINT32_MAX);
    endless.work.run = run_nothing;
    worker_post(f.pool, &gated.task.work);
    worker_post(f.pool, &endless.work);
    for (unsigned i = 0; i < N_THREADS; i++)
        sem_wait(&gated.started);
    assert_int_equal(gated.n_inside, N_THREADS);
    assert_int_equal(pthread_create(&opener, NULL, open_gate, &gated), 0);
    worker_pool_free(f.pool);
    assert_int_equal(gated.n_inside, 0);
    assert_int_equal(f.n_done, 0); /* done() is called only when a thread reaps */
    pthread_join(opener, NULL);
    gated_deinit(&gated);
    close(f.event_fd);
}

static void test_free_idle(void **state)
{
    struct fixture f;
    struct task task;
    eventfd_t n;
    struct pollfd poll_fd;

    (void)state;
    worker_pool_free(NULL);
    make(&f, 1); /* never used */
    done_with(&f);

    make(&f, N_THREADS); /* finished, not reaped */
    task = task_of(&f, 3);
    worker_post(f.pool, &task.work);
    poll_fd = (struct pollfd){.fd = f.event_fd, .events = POLLIN};
    assert_int_equal(poll(&poll_fd, 1, -1), 1);
    assert_int_equal(eventfd_read(f.event_fd, &n), 0);
    worker_pool_free(f.pool);
    assert_int_equal(task.n_done, 0);
    close(f.event_fd);
}

/* ---- threads ------------------------------------------------------------------------------------------- */

struct masked {
    struct task task;
    sigset_t mask; /* mask of the worker that ran the item */
};

static void run_masked(struct work *work, uint32_t item)
{
    struct masked *masked = container_of(work, struct masked, task.work);

    pthread_sigmask(SIG_BLOCK, NULL, &masked->mask);
    run_item(work, item);
}

/* Workers block signals, because the loop handles them. */
static void test_signals_are_blocked(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM};
    struct fixture f;
    struct masked masked;
    sigset_t none, after;

    (void)state;
    sigemptyset(&none);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
    make(&f, 1);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    masked = (struct masked){.task = task_of(&f, 1)};
    masked.task.work.run = run_masked;
    worker_post(f.pool, &masked.task.work);
    loop_until(&f, 1);
    for (size_t i = 0; i < ARRAY_SIZE(signals); i++) {
        assert_int_equal(sigismember(&masked.mask, signals[i]), 1);
        assert_int_equal(sigismember(&after, signals[i]), 0);
    }
    done_with(&f);
}

static int try_pool(void)
{
    struct fixture f = {.event_fd = -1};
    int r = worker_pool_new(&f.pool, 2, wake_up, &f);

    worker_pool_free(f.pool);
    return r;
}

/*
 * Workers inherit the floating-point environment. A pool is refused if it is unusual, because kernels would give other
 * bits.
 */
static void test_float_environment(void **state)
{
    int r;

    (void)state;
    assert_int_equal(fesetround(FE_UPWARD), 0);
    r = try_pool();
    fesetround(FE_TONEAREST);
    assert_int_equal(r, -ENOTSUP);
#ifdef __SSE2__
    for (unsigned bit = 6; bit <= 15; bit += 9) { /* denormals-are-zero, flush-to-zero */
        unsigned before = _mm_getcsr();

        _mm_setcsr(before | 1u << bit);
        r = try_pool();
        _mm_setcsr(before);
        assert_int_equal(r, -ENOTSUP);
    }
#endif
    assert_int_equal(try_pool(), 0);
}

TEST_GROUP(worker)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_items),
        cmocka_unit_test(test_no_items),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_wait),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_later),
        cmocka_unit_test(test_several_at_once),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_later_work_ends_first),
        cmocka_unit_test(test_wait_blocks),
        cmocka_unit_test(test_free_while_busy),
        cmocka_unit_test(test_free_idle),
        cmocka_unit_test(test_signals_are_blocked),
        cmocka_unit_test(test_float_environment),
    };

    return cmocka_run_group_tests_name("worker", tests, NULL, NULL);
}
