/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The messages to a supervisor, at a socket of the test: the daemon is ready, its status, it is alive. The main point
 * is the watchdog: its message is sent only if the loop turns and the workers make progress. The test replaces the
 * daemon's clock (--wrap=clock_gettime), so that hours pass at once and no assertion depends on time.
 */

#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/base/notify.h"
#include "core/base/worker.h"
#include "tests/daemon/server/local-server.h"

int __wrap_clock_gettime(clockid_t clock, struct timespec *ts);

static uint64_t clock_ns = UINT64_C(1000000000000);
static unsigned n_looks; /* reads of the clock */

int __wrap_clock_gettime(clockid_t clock, struct timespec *ts)
{
    (void)clock;
    n_looks++;
    *ts = (struct timespec){.tv_sec = (time_t)(clock_ns / 1000000000u), .tv_nsec = (long)(clock_ns % 1000000000u)};
    return 0;
}

/* ---- a supervisor -------------------------------------------------------------------------------------- */

static char folder[] = "/tmp/zerod-test-XXXXXX", path[64];
static int supervisor;

static int make_supervisor(void **userdata)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};

    (void)userdata;
    supervisor = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (supervisor < 0 || !mkdtemp(folder))
        return -1;
    snprintf(path, sizeof(path), "%s/notify", folder);
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
    return bind(supervisor, (struct sockaddr *)&sa, sizeof(sa));
}

static int remove_supervisor(void **userdata)
{
    (void)userdata;
    close(supervisor);
    return unlink(path) < 0 ? -1 : rmdir(folder);
}

static int supervise(void **userdata)
{
    char byte;

    (void)userdata;
    while (recv(supervisor, &byte, 1, 0) >= 0)
        ; /* messages of an earlier test's server */
    setenv("NOTIFY_SOCKET", path, 1);
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    return 0;
}

/* Receives the next message. Return: false if there is none. */
static bool hear(char *text, size_t size)
{
    ssize_t n = recv(supervisor, text, size - 1, 0);

    text[MAX(n, (ssize_t)0)] = '\0';
    return n >= 0;
}

static void expect(const char *expected)
{
    char text[512];

    if (!hear(text, sizeof(text)))
        fail_msg("expected \"%s\", nothing was said", expected);
    assert_string_equal(text, expected);
}

/* Reads all messages. Return: how many fed the watchdog. */
static unsigned n_fed(void)
{
    char text[512];
    unsigned n = 0;

    while (hear(text, sizeof(text)))
        n += strcmp(text, "WATCHDOG=1") == 0;
    return n;
}

static void set_watchdog(const char *us, pid_t pid)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", pid);
    setenv("WATCHDOG_USEC", us, 1);
    setenv("WATCHDOG_PID", text, 1);
}

/* ---- words --------------------------------------------------------------------------------------------- */

static void test_state(void **userdata)
{
    char text[16];

    (void)userdata;
    notify_state("READY=1");
    notify_state("STATUS=training, 2 of 2 ranks");
    expect("READY=1");
    expect("STATUS=training, 2 of 2 ranks");
    unsetenv("NOTIFY_SOCKET"); /* no supervisor */
    notify_state("READY=1");
    assert_false(hear(text, sizeof(text)));
}

static void test_watchdog_us(void **userdata)
{
    (void)userdata;
    assert_int_equal(notify_watchdog_us(), 0);
    set_watchdog("3000000", getpid());
    assert_int_equal(notify_watchdog_us(), 3000000);
    set_watchdog("3000000", getppid()); /* for another process */
    assert_int_equal(notify_watchdog_us(), 0);
    set_watchdog("soon", getpid());
    assert_int_equal(notify_watchdog_us(), 0);
}

/* ---- the life of a server ------------------------------------------------------------------------------ */

static void on_due(uv_timer_t *timer)
{
    uv_close((uv_handle_t *)timer, NULL);
    raise(SIGTERM);
}

/* The server announces a status and READY when it serves, and STOPPING at its end. */
static void test_life(void **userdata)
{
    struct local local;
    uv_timer_t timer;
    char text[512], last[512] = "";

    (void)userdata;
    assert_int_equal(keep_init(), 0); /* as in main() */
    local_start(&local, 2, "");
    expect("FDSTORE=1\nFDPOLL=0\nFDNAME=listen");
    assert_false(hear(text, sizeof(text))); /* nothing is sent before the loop runs */
    uv_timer_init(server_service(local.server)->loop, &timer);
    uv_timer_start(&timer, on_due, 0, 0);
    assert_int_equal(server_run(local.server), 0);
    expect("STATUS=waiting for ranks, 0 of 2 ranks, step 0");
    expect("READY=1");
    while (hear(text, sizeof(text)))
        strcpy(last, text);
    assert_string_equal(last, "STOPPING=1");
    local_stop(&local);
    expect("FDSTOREREMOVE=1\nFDNAME=listen");
    keep_deinit();
}

/* Lets time pass until the loop has ticked once. The tick is the only reader of the clock in an idle loop. */
static void tick(struct local *local, unsigned later_ms)
{
    unsigned before = n_looks;

    clock_ns += later_ms * UINT64_C(1000000);
    while (n_looks == before)
        local_turn(local);
}

static void test_status(void **userdata)
{
    struct local local;
    struct client c;
    char text[512];

    (void)userdata;
    local_start(&local, 2, "");
    client_open(&c, &local);
    client_hello(&c, WIRE_ROLE_TRAINER, 1);
    while (hear(text, sizeof(text)))
        ;
    tick(&local, 2000);
    expect("STATUS=waiting for ranks, 1 of 2 ranks, step 0");
    tick(&local, 1999); /* less than 2 s after the last status */
    assert_false(hear(text, sizeof(text)));
    client_close(&c);
    local_stop(&local);
}

static void test_fed_by_the_loop(void **userdata)
{
    struct local local;

    (void)userdata;
    set_watchdog("4000000", getpid());
    local_start(&local, 1, "");
    clock_ns += UINT64_C(20000000000);
    assert_int_equal(n_fed(), 0); /* time alone does not feed the watchdog */
    tick(&local, 0);
    assert_int_equal(n_fed(), 1);
    tick(&local, 0);
    tick(&local, 999);
    assert_int_equal(n_fed(), 0); /* four times in the watchdog's period are enough */
    tick(&local, 1);
    assert_int_equal(n_fed(), 1);
    clock_ns += UINT64_C(20000000000);
    assert_int_equal(n_fed(), 0);
    local_stop(&local);
}

static void test_no_watchdog(void **userdata)
{
    struct local local;

    (void)userdata;
    local_start(&local, 1, "");
    for (unsigned i = 0; i < 3; i++)
        tick(&local, 5000);
    assert_int_equal(n_fed(), 0);
    local_stop(&local);
}

/* Each item of this work ends when the test posts `go`. */
struct held_work {
    struct work work;
    sem_t go;
    bool is_done;
};

static void held_run(struct work *work, uint32_t item)
{
    (void)item;
    while (sem_wait(&container_of(work, struct held_work, work)->go) < 0)
        ;
}

static void held_done(struct work *work)
{
    container_of(work, struct held_work, work)->is_done = true;
}

static struct worker_pool *post(struct local *local, struct held_work *held, uint32_t n_items)
{
    struct worker_pool *pool = server_service(local->server)->job->pool;

    *held = (struct held_work){.work = {.run = held_run, .done = held_done, .n_items = n_items}};
    assert_int_equal(sem_init(&held->go, 0, 0), 0);
    worker_post(pool, &held->work);
    return pool;
}

static void let_one_go(struct held_work *held, struct worker_pool *pool)
{
    uint64_t before, now;

    worker_pool_progress(pool, &before);
    sem_post(&held->go);
    do {
        sched_yield();
        worker_pool_progress(pool, &now);
    } while (now == before);
}

/*
 * If a worker hangs while the loop turns, the watchdog is no longer fed after one period. When the item ends, it is fed
 * again.
 */
static void test_not_fed_while_stuck(void **userdata)
{
    struct held_work held;
    struct worker_pool *pool;
    struct local local;

    (void)userdata;
    set_watchdog("4000000", getpid());
    local_start(&local, 1, "");
    tick(&local, 0);
    assert_int_equal(n_fed(), 1);
    pool = post(&local, &held, 1);
    tick(&local, 0); /* notices the work, as the event that posts work would wake the loop */
    for (unsigned i = 0; i < 4; i++) {
        tick(&local, 1000);
        assert_int_equal(n_fed(), 1); /* the item may only take long */
    }
    for (unsigned i = 0; i < 4; i++) {
        tick(&local, 1000);
        assert_int_equal(n_fed(), 0);
    }
    let_one_go(&held, pool);
    while (!held.is_done)
        local_turn(&local);
    tick(&local, 1000);
    assert_in_range(n_fed(), 1, 2); /* the turns before may have ticked */
    local_stop(&local);
    sem_destroy(&held.go);
}

/* A long work counts as progress, as long as its items end. */
static void test_fed_while_items_end(void **userdata)
{
    enum { N = 4 }; /* items of 3 s */
    struct held_work held;
    struct worker_pool *pool;
    struct local local;

    (void)userdata;
    set_watchdog("4000000", getpid());
    local_start(&local, 1, "");
    tick(&local, 0);
    pool = post(&local, &held, N);
    for (unsigned i = 0; i < N; i++) {
        n_fed();
        tick(&local, 3000);
        assert_int_equal(n_fed(), 1);
        let_one_go(&held, pool);
    }
    while (!held.is_done)
        local_turn(&local);
    local_stop(&local);
    sem_destroy(&held.go);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_state, supervise),
        cmocka_unit_test_setup(test_watchdog_us, supervise),
        cmocka_unit_test_setup(test_life, supervise),
        cmocka_unit_test_setup(test_status, supervise),
        cmocka_unit_test_setup(test_fed_by_the_loop, supervise),
        cmocka_unit_test_setup(test_no_watchdog, supervise),
        cmocka_unit_test_setup(test_not_fed_while_stuck, supervise),
        cmocka_unit_test_setup(test_fed_while_items_end, supervise),
    };

    return cmocka_run_group_tests(tests, make_supervisor, remove_supervisor);
}
