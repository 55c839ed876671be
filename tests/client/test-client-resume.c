/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests libzerod while its daemon is replaced. The stand-in of resume-daemon.c dies after each packet of a conversation
 * with all kinds of requests, with and without an answer, once or twice. The next stand-in must receive each recorded
 * request once, in order, byte for byte as in a conversation without a death, and no call may fail.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/wire-request.h"
#include "tests/client/resume-daemon.h"
#include "zerod/client.h"

enum { N_PARAMS = 5, N_ELEMS = 1000, FIRST_PACKETS = 2, USUAL_MS = 20000 };

/* Numbers of packets in a conversation: Hello, Declare, Form, the Inits, Ready. */
enum { AT_FORM = 3, AT_READY = AT_FORM + N_PARAMS + 1 };

static struct resume_seen seen; /* what the daemons of the last run received */
static float values[N_ELEMS];
static char path[64];

/* ---- a job --------------------------------------------------------------------------------------------- */

struct run {
    struct zerod *c;
    struct resume_seen *seen;
    pid_t keeper;
    int fd;
};

static struct run begin_with(const struct resume_options *options, const struct zerod_options *client)
{
    const uint64_t n_elems = N_ELEMS;
    struct zerod_options all = *client;
    struct run run = {0};
    char name[16];

    all.socket = path;
    all.client = "test";
    run.keeper = resume_daemon_start(path, options, &run.seen);
    assert_int_equal(zerod_connect(&run.c, &all), 0);
    run.fd = zerod_fd(run.c);
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(name, sizeof(name), "p%u", p);
        assert_int_equal(
            zerod_declare(
                run.c,
                &(struct zerod_param){.name = name, .ndim = 1, .shape = &n_elems, .trainable = true, .init = values},
                1),
            0);
    }
    return run;
}

static struct run begin(const struct resume_options *options)
{
    return begin_with(options, &(struct zerod_options){.rank = 0});
}

static struct run begin_formed(const struct resume_options *options)
{
    struct run run = begin(options);

    assert_int_equal(zerod_form(run.c), 0);
    return run;
}

static void end(struct run *run)
{
    assert_int_equal(zerod_fd(run->c), run->fd);
    assert_int_equal(fcntl(run->fd, F_GETFD), FD_CLOEXEC);
    zerod_close(run->c);
    atomic_store(&run->seen->end, true);
    assert_true(resume_daemon_end(run->keeper));
    seen = *run->seen;
    munmap(run->seen, sizeof(*run->seen));
    (void)unlink(path);
}

static void wait_for_death(struct run *run)
{
    assert_int_equal(poll(&(struct pollfd){.fd = run->fd, .events = POLLIN}, 1, -1), 1);
}

/* Asserts that the call failed with this text, and that all later calls fail. */
static void check_fatal(struct run *run, int r, int expected, const char *text)
{
    assert_string_equal(zerod_error(run->c)->text, text);
    assert_int_equal(r, expected);
    assert_int_equal(zerod_clear_fault(run->c), expected);
    end(run);
}

/* ---- the conversation ---------------------------------------------------------------------------------- */

static void push(struct zerod *c, unsigned param)
{
    char site[16];

    snprintf(site, sizeof(site), "train.py:%u", param);
    assert_int_equal(
        zerod_push(c,
                   &(struct zerod_push){
                       .param = param, .data = values, .segment = "layer", .site = site, .flags = ZEROD_PUSH_MORE}),
        0);
}

static void first_step(struct zerod *c)
{
    assert_int_equal(zerod_begin_backward(c, NULL), 0);
    for (unsigned p = 0; p < N_PARAMS; p++)
        push(c, p); /* the ring has four slots */
    assert_int_equal(zerod_end_backward(c, "blob", 4), 0);
    assert_int_equal(zerod_report(c, 1102, &(unsigned){1}, 1, "a test"), 0);
    assert_int_equal(zerod_clear_fault(c), 0);
    assert_int_equal(zerod_evidence(c, &(struct zerod_evidence){.site = "train.py:9"}), 0);
    assert_int_equal(zerod_step(c, NULL, NULL), 0);
}

static void step_that_is_aborted_twice(struct zerod *c)
{
    double norm = 0;

    assert_int_equal(zerod_begin_backward(c, NULL), 0);
    push(c, 0);
    assert_int_equal(zerod_abort_step(c, "a test"), 0);
    assert_int_equal(zerod_grad_norm(c, &norm), ZEROD_ABORTED);
    assert_int_equal(zerod_epoch(c).attempt, 2);
    assert_string_equal(zerod_error(c)->text, "E1302 step aborted");
    assert_int_equal(zerod_grad_norm(c, &norm), 0);
    assert_int_equal(zerod_begin_backward(c, NULL), 0);
    push(c, 1);
    assert_int_equal(zerod_abandon_backward(c, "a test"), 0);
    assert_int_equal(zerod_begin_backward(c, NULL), 0);
    push(c, 0);
    push(c, 2);
    assert_int_equal(zerod_end_backward(c, NULL, 0), 0);
    assert_int_equal(zerod_step(c, NULL, NULL), 0);
}

static void between_steps(struct zerod *c)
{
    double norm = 0;

    assert_int_equal(zerod_read_state(c, 0, ZEROD_GRAD_NORM, &norm), 0);
    assert_true(norm == 3);
    assert_int_equal(zerod_prefetch(c, (unsigned[]){0, 1}, 2), 0);
    assert_int_equal(zerod_gather(c, (unsigned[]){0, 1, 0}, 3), 0);
    assert_int_equal(zerod_release(c, (unsigned[]){0}, 1), 0);
    assert_int_equal(zerod_write_begin(c), 0);
    assert_int_equal(zerod_write_end(c), 0);
    assert_int_equal(zerod_epoch(c).n_windows, 1);
}

static void converse(const struct resume_options *options)
{
    struct run run = begin_formed(options);

    first_step(run.c);
    step_that_is_aborted_twice(run.c);
    between_steps(run.c);
    assert_int_equal(zerod_epoch(run.c).step, 2);
    assert_int_equal(zerod_leave(run.c), 0);
    end(&run);
}

static void check_seen(const struct resume_seen *expected)
{
    assert_int_equal(seen.n_recorded, expected->n_recorded);
    for (uint64_t i = 0; i < seen.n_recorded; i++)
        assert_memory_equal(&seen.recorded[i], &expected->recorded[i], sizeof(seen.recorded[i]));
    assert_int_equal(seen.step, 2);
}

static void check_held(const struct resume_seen *expected)
{
    assert_memory_equal(seen.held, expected->held, sizeof(seen.held));
}

static void check_death(uint32_t stage, uint32_t n_packets, bool unanswered, const struct resume_seen *expected)
{
    struct resume_options options = {.stage = stage, .reattach_ms = USUAL_MS};

    options.lives[0] = (struct resume_life){.n_packets = n_packets, .unanswered = unanswered};
    converse(&options);
    assert_int_equal(seen.n_lives, 2);
    check_seen(expected);
    check_held(expected);
    /* The second daemon dies as well: at Hello, between the strings, the Helds, and the recorded requests. */
    for (uint32_t n = 1; n <= 12; n += 1 + n / 4) {
        options.lives[1] = (struct resume_life){.n_packets = n, .unanswered = n % 2 == 1};
        converse(&options);
        assert_true(seen.n_lives >= 2);
        check_seen(expected);
        if (n_packets < expected->n_packets) /* else the rank has left, and sends no Held */
            check_held(expected);
    }
}

static void test_every_packet(uint32_t stage)
{
    static struct resume_seen expected;

    converse(&(struct resume_options){.stage = stage, .reattach_ms = USUAL_MS});
    expected = seen;
    assert_int_equal(expected.n_lives, 1);
    assert_int_equal(expected.held[0], stage == 3 ? 1 : 0);
    assert_int_equal(expected.held[1], stage == 3 ? 1 : 0);
    for (uint32_t n = FIRST_PACKETS; n <= expected.n_packets; n++) {
        if (n < expected.n_packets)
            check_death(stage, n, false, &expected);
        check_death(stage, n, true, &expected);
    }
}

static void test_every_packet_of_stage_2(void **state)
{
    (void)state;
    test_every_packet(2);
}

static void test_every_packet_of_stage_3(void **state)
{
    (void)state;
    test_every_packet(3);
}

/* ---- what is sent again -------------------------------------------------------------------------------- */

static void test_answer_that_comes_by_itself(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 1, .unanswered = true};
    run = begin_formed(&options);
    assert_int_equal(zerod_step(run.c, NULL, NULL), 0);
    end(&run);
    assert_int_equal(seen.n_waits, 1);
    assert_int_equal(seen.n_recorded, 2); /* Ready, Step */
    assert_int_equal(seen.n_packets, 1);  /* Hello */
}

static void test_strings(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    char site[16];
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 1 + 2 * 40 + 1, .unanswered = true};
    run = begin_formed(&options);
    assert_int_equal(zerod_begin_backward(run.c, NULL), 0);
    for (unsigned i = 0; i < 40; i++) { /* all but the first are duplicates, which need no slot */
        snprintf(site, sizeof(site), "train.py:%u", i);
        assert_int_equal(zerod_push(run.c, &(struct zerod_push){.data = values, .site = site}), 0);
    }
    assert_int_equal(zerod_end_backward(run.c, NULL, 0), 0);
    end(&run);
    assert_int_equal(seen.n_interns, 80);
    assert_int_equal(seen.n_packets, 1 + 40);
    assert_int_equal(seen.n_recorded, 1 + 1 + 40 + 1);
}

static void test_many_held(void **state)
{
    enum { N = 40000 };
    struct resume_options options = {.stage = 3, .reattach_ms = USUAL_MS};
    unsigned *params = calloc(N, sizeof(*params));

    (void)state;
    for (unsigned i = 0; i < N; i++)
        params[i] = i % 3;
    /* The daemon dies at each of the three Gathers and three Releases. */
    for (uint32_t n = 1; n <= 6; n++) {
        struct run run;

        options.lives[0] = (struct resume_life){.n_packets = AT_READY + n, .unanswered = true};
        run = begin_formed(&options);
        assert_int_equal(zerod_gather(run.c, params, N), 0);
        assert_int_equal(zerod_release(run.c, params, N - 10), 0);
        assert_int_equal(zerod_clear_fault(run.c), 0);
        end(&run);
        assert_int_equal(seen.held[0] + seen.held[1] + seen.held[2], 10);
        assert_int_equal(seen.n_lives, 2);
    }
    free(params);
}

/*
 * The client notices the death at the first of three Releases. It tells the next daemon what is still gathered, so the
 * other two Releases are not sent.
 */
static void test_many_released(void **state)
{
    enum { N = 40000 };
    struct resume_options options = {.stage = 3, .reattach_ms = USUAL_MS};
    unsigned *params = calloc(N, sizeof(*params));
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 3};
    run = begin_formed(&options);
    assert_int_equal(zerod_gather(run.c, params, N), 0);
    wait_for_death(&run);
    assert_int_equal(zerod_release(run.c, params, N - 10), 0);
    assert_int_equal(zerod_clear_fault(run.c), 0);
    end(&run);
    assert_int_equal(seen.held[0], 10);
    assert_int_equal(seen.n_packets, 1 + 1 + 1); /* Hello, Held, ClearFault */
    free(params);
}

static void test_held_in_several_messages(void **state)
{
    enum { N = 40000 };
    struct resume_options options = {.stage = 3, .reattach_ms = USUAL_MS};
    unsigned *params = calloc(N, sizeof(*params));
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 3 + 1, .unanswered = true};
    run = begin_formed(&options);
    assert_int_equal(zerod_gather(run.c, params, N), 0);
    assert_int_equal(zerod_clear_fault(run.c), 0);
    end(&run);
    assert_int_equal(seen.n_held_messages, 3);
    assert_int_equal(seen.held[0], N);
    free(params);
}

/*
 * Two daemons die without an answer in between, further apart than reattach_ms. Only the time without a daemon counts.
 */
static void test_deaths_far_apart(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = 500};
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 1};
    options.lives[1] = (struct resume_life){.n_packets = 2};
    run = begin_formed(&options);
    assert_int_equal(zerod_begin_backward(run.c, NULL), 0);
    wait_for_death(&run);
    assert_int_equal(zerod_begin_backward(run.c, NULL), 0);
    wait_for_death(&run);
    (void)poll(NULL, 0, 700);
    assert_int_equal(zerod_end_backward(run.c, NULL, 0), 0);
    end(&run);
    assert_int_equal(seen.n_lives, 3);
    assert_int_equal(seen.n_recorded, 1 + 2 + 1);
}

/* ---- forming ------------------------------------------------------------------------------------------- */

/* Until zerod_form() has returned, a lost daemon loses no training state, so forming begins again. */
static void test_forming_begins_again(void **state)
{
    static struct resume_seen expected;
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};

    (void)state;
    converse(&options);
    expected = seen;
    options.lives[1] = (struct resume_life){.hello = HELLO_FRESH};
    for (uint32_t n = 1; n <= AT_READY; n++) {
        options.lives[0] = (struct resume_life){.n_packets = n, .unanswered = true};
        converse(&options);
        check_seen(&expected);
        assert_int_equal(seen.n_formed, n < AT_FORM ? 1 : 2);
    }
}

static void test_another_job(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY, .unanswered = true};
    options.lives[1] = (struct resume_life){.hello = HELLO_OTHER};
    run = begin(&options);
    check_fatal(&run, zerod_form(run.c), -ESTALE,
                "zerod was started anew with another configuration while the job was formed; start the ranks again");
}

/* ---- no next daemon, or not the next one --------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static struct run begin_with_death(struct resume_life first, struct resume_life second, uint64_t reattach_ms)
{
    struct resume_options options = {.stage = 2, .reattach_ms = reattach_ms};

    first.n_packets = AT_READY + 1;
    first.unanswered = true;
    options.lives[0] = first;
    options.lives[1] = second;
    return begin_formed(&options);
}

static const char stopped[] = "zerod has closed the connection: it was stopped or killed; see its log";

static void check_given_up(struct resume_life life)
{
    struct run run = begin_with_death(life, (struct resume_life){0}, USUAL_MS);
    double from = seconds();
    int r = zerod_step(run.c, NULL, NULL);

    assert_true(seconds() - from >= 2);
    check_fatal(&run, r, -ECONNRESET, stopped);
}

static void test_socket_is_gone(void **state)
{
    (void)state;
    check_given_up((struct resume_life){.unlinks = true, .after_ms = 3000});
}

/* The daemon was killed, and its service manager closed the descriptors that it kept. */
static void test_socket_is_closed(void **state)
{
    (void)state;
    check_given_up((struct resume_life){.deaf = true, .after_ms = 3000});
}

static void test_socket_is_made_anew(void **state)
{
    struct run run =
        begin_with_death((struct resume_life){.unlinks = true, .after_ms = 300}, (struct resume_life){0}, USUAL_MS);

    (void)state;
    assert_int_equal(zerod_step(run.c, NULL, NULL), 0);
    end(&run);
}

static void test_nobody_listens(void **state)
{
    struct run run =
        begin_with_death((struct resume_life){.deaf = true, .after_ms = 2000}, (struct resume_life){0}, 500);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNRESET,
                "zerod was stopped or killed, and no other daemon has answered within 500 ms "
                "(limits.reattach_timeout); see its log");
}

/* The listener is kept, so connections wait in its queue. */
static void test_nobody_answers(void **state)
{
    struct run run = begin_with_death((struct resume_life){.after_ms = 1500}, (struct resume_life){0}, 500);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNRESET,
                "zerod was stopped or killed, and no other daemon has answered within 500 ms "
                "(limits.reattach_timeout); see its log");
}

static void test_caller_does_not_wait(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    struct run run;

    (void)state;
    options.lives[0] =
        (struct resume_life){.n_packets = AT_READY + 1, .unanswered = true, .deaf = true, .after_ms = 2000};
    run = begin_with(&options, &(struct zerod_options){.timeout_ms = 500});
    assert_int_equal(zerod_form(run.c), 0);
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ETIMEDOUT,
                "zerod was stopped or killed, and no other daemon has answered within 500 ms (timeout of the call); "
                "see its log");
}

static void test_old_daemon(void **state)
{
    struct run run = begin_with_death((struct resume_life){0}, (struct resume_life){0}, 0);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNRESET, stopped);
}

static void test_closed_alone(void **state)
{
    struct run run = begin_with_death((struct resume_life){.lives_on = true}, (struct resume_life){0}, USUAL_MS);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNRESET,
                "zerod has closed only this connection and is still running; its log has the reason");
}

static void test_state_is_lost(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    struct run run;

    (void)state;
    options.lives[0] = (struct resume_life){.n_packets = AT_READY + 2, .unanswered = true};
    options.lives[1] = (struct resume_life){.hello = HELLO_FRESH};
    run = begin_formed(&options);
    assert_int_equal(zerod_step(run.c, NULL, NULL), 0);
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ESTALE,
                "zerod was started anew and has lost the state of the run, which had reached step 1: nobody kept the "
                "state when the last daemon ended. Start the ranks again from the last checkpoint. To keep the state "
                "of later runs, use zerodrun or the systemd unit, which restart the daemon with its state, or persist: "
                "in the configuration");
}

static void test_state_of_another_moment(void **state)
{
    struct run run = begin_with_death((struct resume_life){0}, (struct resume_life){.hello = HELLO_FOREIGN}, USUAL_MS);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -EPROTO,
                "zerod has received 1002 requests of this rank, expected 1 to 2: the daemon that was started anew has "
                "the state of another moment");
}

static void test_refused(void **state)
{
    struct run run = begin_with_death((struct resume_life){0}, (struct resume_life){.hello = HELLO_DRAINING}, USUAL_MS);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNABORTED, "E1402 the job is being drained");
}

static void test_rank_is_taken(void **state)
{
    struct run run =
        begin_with_death((struct resume_life){0}, (struct resume_life){.hello = HELLO_TAKEN, .n_hellos = 3}, USUAL_MS);

    (void)state;
    assert_int_equal(zerod_step(run.c, NULL, NULL), 0);
    end(&run);
    assert_int_equal(seen.n_hellos, 1 + 3 + 1);
}

static void test_rank_stays_taken(void **state)
{
    struct run run =
        begin_with_death((struct resume_life){0}, (struct resume_life){.hello = HELLO_TAKEN, .n_hellos = 1000}, 500);

    (void)state;
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -ECONNABORTED, "E1301 rank taken");
}

static unsigned n_asked;

static int is_interrupted(void *arg)
{
    (void)arg;
    return ++n_asked > 3;
}

static void test_interrupted(void **state)
{
    struct resume_options options = {.stage = 2, .reattach_ms = USUAL_MS};
    struct run run;

    (void)state;
    n_asked = 0;
    options.lives[0] =
        (struct resume_life){.n_packets = AT_READY + 1, .unanswered = true, .deaf = true, .after_ms = 2000};
    run = begin_with(&options, &(struct zerod_options){.interrupted = is_interrupted});
    assert_int_equal(zerod_form(run.c), 0);
    check_fatal(&run, zerod_step(run.c, NULL, NULL), -EINTR,
                "interrupted while waiting for a daemon: the last one was stopped or killed");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answer_that_comes_by_itself),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_many_held),
        cmocka_unit_test(test_many_released),
        cmocka_unit_test(test_held_in_several_messages),
        cmocka_unit_test(test_deaths_far_apart),
        cmocka_unit_test(test_forming_begins_again),
        cmocka_unit_test(test_another_job),
        cmocka_unit_test(test_socket_is_gone),
        cmocka_unit_test(test_socket_is_closed),
        cmocka_unit_test(test_socket_is_made_anew),
        cmocka_unit_test(test_nobody_listens),
        cmocka_unit_test(test_nobody_answers),
        cmocka_unit_test(test_caller_does_not_wait),
        cmocka_unit_test(test_old_daemon),
        cmocka_unit_test(test_closed_alone),
        cmocka_unit_test(test_state_is_lost),
        cmocka_unit_test(test_state_of_another_moment),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_rank_is_taken),
        cmocka_unit_test(test_rank_stays_taken),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_every_packet_of_stage_2),
        cmocka_unit_test(test_every_packet_of_stage_3),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    snprintf(path, sizeof(path), "/tmp/zerod-test-resume-%d", getpid());
    for (unsigned i = 0; i < N_ELEMS; i++)
        values[i] = (float)i;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
