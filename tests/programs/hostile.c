/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attacks on a daemon. Usage: hostile ATTACK [NUMBER], with $ZEROD_SOCKET. hostile --list prints the name and a
 * description of each attack. Each attack expects a certain answer of the daemon; if the answer differs, the program
 * ends with status 1 and a sentence. The texts of refusals are printed on standard output. Attacks as a rank are rank 1
 * of a job of two ranks that trains the model of puppet-model.h.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/example/random.h"
#include "core/base/base.h"
#include "core/layout/manifest.h"
#include "tests/core/wire/wire-examples.h"
#include "tests/programs/puppet-model.h"
#include "tests/programs/raw-client.h"

static uint8_t packet[256 * 1024];

static uint64_t draw(uint64_t *state)
{
    *state = random_mix(*state);
    return *state;
}

/* ---- before Hello -------------------------------------------------------------------------------------- */

static struct request hello(enum wire_role role, unsigned rank)
{
    return (struct request){
        .type = REQUEST_HELLO,
        .hello = {.version_min = WIRE_VERSION,
                  .version_max = WIRE_VERSION,
                  .role = role,
                  .rank = rank,
                  .incarnation = 77,
                  .client = "hostile"},
    };
}

static void other_version(unsigned n)
{
    struct request request = hello(WIRE_ROLE_TRAINER, 1);
    struct raw c;

    request.hello.version_min = WIRE_VERSION + 1;
    request.hello.version_max = 9;
    raw_open(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "Hello.version: the client speaks 4 to 9, this daemon 3");
    raw_close(&c);
}

static void rank_beyond_world(unsigned n)
{
    struct request request = hello(WIRE_ROLE_TRAINER, 2);
    struct raw c;

    raw_open(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "Hello.rank: 2, expected 0 to 1");
    raw_close(&c);
}

static void not_hello(unsigned n)
{
    for (unsigned type = REQUEST_HELLO + 1; type < N_REQUEST_TYPES; type++) {
        struct raw c;

        raw_open(&c);
        raw_say(&c, &example_requests[type]);
        raw_expect_dropped(&c, 1403, "is not allowed before Hello");
        raw_close(&c);
    }
}

static void hello_twice(unsigned n)
{
    struct request request = hello(WIRE_ROLE_CONTROL, 0);
    struct raw c;

    raw_open(&c);
    raw_say(&c, &request);
    raw_expect(&c, REPLY_WELCOME);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "Hello is not allowed on a control connection");
    raw_close(&c);

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    request = hello(WIRE_ROLE_TRAINER, 1);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "Hello is not allowed before Formed");
    raw_close(&c);
}

/* recv() returns 0 for an empty packet and for the end, so the daemon closes the connection. */
static void empty_packet(unsigned n)
{
    struct raw c;

    raw_open(&c);
    EXPECT(raw_send(&c, "", 0, NULL, 0) == 0, "cannot send an empty packet");
    raw_expect_closed(&c);
    raw_close(&c);
}

static void truncated(unsigned n)
{
    struct request request = hello(WIRE_ROLE_CONTROL, 0);
    size_t whole = raw_pack(&request, packet);

    for (size_t size = 1; size < whole; size++) {
        struct raw c;

        raw_open(&c);
        raw_send(&c, packet, size, NULL, 0);
        raw_expect_dropped(&c, 1403, "got ");
        raw_close(&c);
    }
}

static void oversized(unsigned n)
{
    static const size_t sizes[] = {FRAME_MAX_BYTES + 1, FRAME_MAX_BYTES + 2, 200000};

    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        struct raw c;

        raw_open(&c);
        EXPECT(raw_send(&c, packet, sizes[i], NULL, 0) == 0, "cannot send %zu bytes", sizes[i]);
        raw_expect_dropped(&c, 1403, "a packet of more than 131071 bytes");
        raw_close(&c);
    }
}

/* Sends random bytes, and bytes that begin like a message. */
static void garbage(unsigned n)
{
    uint64_t random = 1;

    for (unsigned i = 0; i < n; i++) {
        size_t size = 1 + draw(&random) % (i % 10 ? 200 : FRAME_MAX_BYTES);
        struct raw c;
        int got;

        for (size_t k = 0; k < size; k++)
            packet[k] = (uint8_t)draw(&random);
        if (i % 2) { /* a field number from 1 to 24, and a length */
            packet[0] = (uint8_t)((1 + draw(&random) % 24) << 3 | 2);
            packet[1 % size] = (uint8_t)(size > 2 ? (size - 2) & 127 : 0);
        }
        raw_open(&c);
        raw_send(&c, packet, size, NULL, 0);
        got = raw_hear(&c, raw_patience());
        EXPECT(got == REPLY_REFUSED && c.reply.refused.diagnostic.code == 1403, "garbage %u was answered with %d", i,
               got);
        raw_expect_closed(&c);
        raw_close(&c);
    }
}

/* Sends 1 to 253 descriptors (the kernel's limit) with an otherwise valid message. */
static void descriptors(unsigned n)
{
    static const size_t counts[] = {1, 3, FRAME_MAX_FDS + 1, 253};
    struct request request = hello(WIRE_ROLE_CONTROL, 0);
    size_t size = raw_pack(&request, packet);
    int fds[253];

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = memfd_create("hostile", MFD_CLOEXEC);
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
        struct raw c;

        raw_open(&c);
        EXPECT(raw_send(&c, packet, size, fds, counts[i]) == 0, "cannot send %zu descriptors", counts[i]);
        raw_expect_dropped(&c, 1403, "descriptors travel from the daemon to the client only");
        raw_close(&c);
    }
}

/* Opens n connections that send nothing, until standard input ends. */
static void idle(unsigned n)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct rlimit limit = {n + 100, n + 100};
    char byte;

    EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit: %s", strerror(errno));
    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", getenv("ZEROD_SOCKET"));
    for (unsigned i = 0; i < n; i++)
        EXPECT(connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&sa, sizeof(sa)) == 0,
               "connection %u: %s", i, strerror(errno));
    printf("%u are open\n", n);
    fflush(stdout);
    (void)!read(STDIN_FILENO, &byte, 1);
}

/* The daemon closes connections that send nothing. */
static void idle_closed(unsigned n)
{
    struct raw c;

    raw_open(&c);
    raw_expect_closed(&c);
    raw_close(&c);
}

/* ---- control connections ------------------------------------------------------------------------------- */

static void ask(struct raw *c, const char *command)
{
    raw_say(c, &(struct request){.type = REQUEST_ADMIN, .admin = {.command = command}});
}

static void control_pushes(unsigned n)
{
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    raw_say(&c, &example_requests[REQUEST_PUSH]);
    raw_expect_dropped(&c, 1403, "Push is not allowed on a control connection");
    raw_close(&c);
}

static void control_unknown(unsigned n)
{
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    ask(&c, "make-coffee");
    raw_expect(&c, REPLY_ADMIN_PART);
    EXPECT(c.reply.admin_part.exit_code == 64, "exit code %u", c.reply.admin_part.exit_code);
    ask(&c, "status"); /* the connection still serves */
    raw_expect(&c, REPLY_ADMIN_PART);
    raw_close(&c);
}

/* Sends Hello and nothing more. */
static void control_idle(unsigned n)
{
    struct raw c;
    char byte;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    printf("welcome\n");
    fflush(stdout);
    (void)!read(STDIN_FILENO, &byte, 1);
    raw_close(&c);
}

/* Asks again and again and never reads an answer. The daemon soon stops reading the connection, and then closes it. */
static void never_reads(unsigned n)
{
    struct pollfd writable = {.events = POLLOUT};
    bool is_full = false;
    struct raw c;
    int r = 0;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    writable.fd = c.fd;
    for (unsigned i = 0; i < n && r == 0; i++) {
        struct request request = {.type = REQUEST_ADMIN, .admin = {.command = i % 2 ? "report" : "status"}};

        is_full = is_full || poll(&writable, 1, 300) == 0;
        r = raw_send(&c, packet, raw_pack(&request, packet), NULL, 0);
    }
    EXPECT(r == -EPIPE || r == -ECONNRESET, "all %u requests were taken: %d", n, r);
    EXPECT(is_full, "it was read until it was closed");
    raw_close(&c);
}

/* Keeps eight unanswered questions on each of n connections, until standard input ends. */
static void asks(unsigned n)
{
    enum { MAX_ASKERS = 64, UNDER_WAY = 8 };
    static struct raw askers[MAX_ASKERS];
    struct pollfd polled[MAX_ASKERS + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    unsigned long n_answers = 0;

    n = MIN(n, (unsigned)MAX_ASKERS);
    for (unsigned i = 0; i < n; i++) {
        raw_open(&askers[i]);
        raw_say(&askers[i], &(struct request){.type = REQUEST_HELLO, .hello = hello(WIRE_ROLE_CONTROL, 0).hello});
        for (unsigned k = 0; k < UNDER_WAY; k++)
            ask(&askers[i], "status");
        polled[i + 1] = (struct pollfd){.fd = askers[i].fd, .events = POLLIN};
    }
    while (poll(polled, n + 1, -1) > 0 && !polled[0].revents) {
        for (unsigned i = 0; i < n; i++) {
            if (!polled[i + 1].revents)
                continue;
            if (raw_hear(&askers[i], 0) == RAW_CLOSED) {
                polled[i + 1].fd = -1;
                continue;
            }
            n_answers++;
            ask(&askers[i], "status");
        }
    }
    printf("%lu answers\n", n_answers);
}

/* Sends command n of an administrator, as the user that runs this program. Prints the answer. */
static void admin(unsigned n)
{
    static const char *const commands[] = {"drain", "abort-step", "drop"};
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    ask(&c, commands[n % ARRAY_SIZE(commands)]);
    raw_expect(&c, REPLY_ADMIN_PART);
    printf("%u %.*s\n", c.reply.admin_part.exit_code, (int)c.reply.admin_part.n_json_bytes,
           (const char *)c.reply.admin_part.json);
    raw_close(&c);
}

static bool is_anybody_attached(void)
{
    struct raw c;
    bool attached;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    ask(&c, "ranks");
    raw_expect(&c, REPLY_ADMIN_PART);
    attached = memmem(c.reply.admin_part.json, c.reply.admin_part.n_json_bytes, "\"attached\":true", 15) ||
               memmem(c.reply.admin_part.json, c.reply.admin_part.n_json_bytes, "\"attached\": true", 16);
    raw_close(&c);
    return attached;
}

/*
 * A formed rank loses its connection, and the step is aborted. The rank reconnects and pushes as if it still had its
 * ring.
 */
static void reconnects(unsigned n)
{
    struct raw before, after;
    struct request push;

    (void)n;
    raw_attach(&before, 0);
    raw_begin(&before);
    push = raw_push(&before, 0);
    close(steal_fd(&before.fd));
    while (is_anybody_attached())
        ;
    admin(1);
    raw_open(&after);
    after.incarnation = before.incarnation;
    raw_hello(&after, WIRE_ROLE_TRAINER, 0);
    push.push.attempt = 1;
    raw_say(&after, &push);
    raw_expect_dropped(&after, 1403, "Push is not allowed");
    raw_close(&after);
    raw_close(&before);
}

static void foreign(unsigned n)
{
    struct request request = hello(n ? WIRE_ROLE_TRAINER : WIRE_ROLE_CONTROL, 1);
    struct raw c;

    raw_open(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1402, "connect (listen.allow_users, listen.allow_groups)");
    raw_close(&c);
}

/* ---- as a rank: places and tickets --------------------------------------------------------------------- */

/* Attaches as rank 1 and opens a micro-batch. Return: the first push, packed but not sent. */
static struct request attack(struct raw *c)
{
    raw_attach(c, 1);
    raw_begin(c);
    return raw_push(c, 0);
}

static void ticket_range(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.ticket = c.n_tickets;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.ticket: not free");
    raw_close(&c);
}

static void ticket_use(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.use++;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.ticket: not free");
    raw_close(&c);
}

/* Uses one ticket for two buckets. */
static void ticket_shared(unsigned n)
{
    struct raw c;
    struct request push = attack(&c), other = raw_push(&c, 2);

    other.push.ticket = push.push.ticket;
    other.push.use = push.push.use;
    other.push.offset_bytes = push.push.offset_bytes;
    raw_say(&c, &push);
    raw_say(&c, &other);
    raw_expect_dropped(&c, 1403, "Push.ticket: not free");
    raw_close(&c);
}

/* Uses two tickets for one bucket and pass, so that the bucket's gradients would be in two slots. */
static void slot_twice(unsigned n)
{
    struct raw c;
    struct request push = attack(&c), other = raw_push(&c, 6);

    EXPECT(c.layout->params[0].bucket == c.layout->params[6].bucket, "the parameters share no bucket");
    other.push.ticket = push.push.ticket + 5;
    other.push.offset_bytes += 64 * 1024;
    raw_say(&c, &push);
    raw_say(&c, &other);
    raw_expect_dropped(&c, 1403, "Push.ticket: not free");
    raw_close(&c);
}

static void offset_outside(unsigned n)
{
    static const uint64_t offsets[] = {UINT64_MAX - 63, UINT64_C(1) << 40};

    for (size_t i = 0; i <= ARRAY_SIZE(offsets); i++) {
        struct raw c;
        struct request push = attack(&c);

        /* The last push begins inside the ring and ends outside. */
        push.push.offset_bytes = i < ARRAY_SIZE(offsets) ? offsets[i] : c.ring_bytes - 64;
        raw_say(&c, &push);
        raw_expect_dropped(&c, 1403, "Push.offset_bytes: outside the ring");
        raw_close(&c);
    }
}

static void offset_unaligned(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.offset_bytes += 4;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.offset_bytes: 4");
    raw_close(&c);
}

static void overflow_not_granted(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.overflow = true;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.offset_bytes: outside the ring, or not granted");
    raw_close(&c);
}

static void wrong_pass(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.pass = 3;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.pass: not the pass of this push");
    raw_close(&c);
}

static void record_only_first(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.record_only = true;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.record_only: not a duplicate");
    raw_close(&c);
}

static void newer_attempt(unsigned n)
{
    struct raw c;
    struct request push = attack(&c), end = raw_end(&c);

    push.push.attempt += 7;
    raw_say(&c, &push);
    raw_say(&c, &end);
    raw_expect_refused(&c, 1003, "early push");
    raw_close(&c);
}

static void unknown_bucket(unsigned n)
{
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 4000}});
    raw_expect_dropped(&c, 1403, "SlotRequest.bucket: no such bucket");
    raw_close(&c);
}

/* Places all slots at one offset. This spoils only this rank's own gradients, and the rank aborts the step. */
static void overlap(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    raw_say(&c, &push);
    for (uint32_t i = 1; i < PUPPET_PARAMS; i++) {
        if (!c.layout->params[i].trainable)
            continue;
        push = raw_push(&c, i);
        push.push.offset_bytes = 0;
        raw_say(&c, &push);
    }
    raw_say(&c, &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "spoilt"}});
    raw_expect(&c, REPLY_DONE);
    raw_close(&c);
}

/*
 * Asks for an overflow extent. The daemon may answer once with room in the ring, because an earlier push has freed
 * some.
 */
static uint64_t get_extent(struct raw *c, uint32_t bucket)
{
    for (int i = 0; i < 2; i++) {
        raw_say(c, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = bucket}});
        raw_expect(c, REPLY_SLOT_GRANT);
        if (!c->reply.slot_grant.in_ring)
            return c->reply.slot_grant.offset_bytes;
    }
    raw_fail("room in the ring was granted, nothing was in the way");
}

/*
 * Places two slots in one overflow extent. The daemon must refuse the second one, because it frees the extent after the
 * first.
 */
static void overlap_extent(unsigned n)
{
    struct raw c;
    struct request push = attack(&c), other = raw_push(&c, 2);
    uint64_t extent = get_extent(&c, c.layout->params[0].bucket);

    push.push.overflow = other.push.overflow = true;
    push.push.offset_bytes = other.push.offset_bytes = extent;
    raw_say(&c, &push);
    raw_say(&c, &other);
    raw_expect_dropped(&c, 1403, "Push.offset_bytes: outside the ring, or not granted");
    raw_close(&c);
}

/* Requests overflow extents until the daemon refuses with E1401. Clearing the fault must not free any extent. */
static void overflow_hoard(unsigned n)
{
    struct raw c;
    int got = REPLY_SLOT_GRANT;

    raw_attach(&c, 1);
    raw_begin(&c);
    for (unsigned i = 0; i < 200 && got == REPLY_SLOT_GRANT; i++) {
        raw_say(&c, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 0}});
        got = raw_hear(&c, raw_patience());
    }
    EXPECT(got == REPLY_REFUSED && c.reply.refused.diagnostic.code == 1401, "never refused: %d", got);
    raw_say(&c, &(struct request){.type = REQUEST_CLEAR_FAULT});
    raw_expect(&c, REPLY_DONE);
    raw_say(&c, &(struct request){.type = REQUEST_SLOT_REQUEST, .slot_request = {.bucket = 0}});
    raw_expect_refused(&c, 1401, "gradient slots");
    raw_close(&c);
}

/* Punches holes into its ring while the daemon reads it, and tries what the seals and modes forbid. */
static void holes(unsigned n)
{
    struct raw c;
    struct request request;

    raw_attach(&c, 1);
    raw_begin(&c);
    raw_push_all(&c);
    for (unsigned i = 0; i < 50; i++) {
        EXPECT(fallocate(c.ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)c.ring_bytes) == 0,
               "punching: %s", strerror(errno));
        fallocate(c.overflow_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 20);
    }
    EXPECT(ftruncate(c.ring_fd, 0) < 0 && errno == EPERM, "the ring can be cut");
    EXPECT(ftruncate(c.ring_fd, (off_t)c.ring_bytes * 2) < 0 && errno == EPERM, "the ring can be grown");
    EXPECT(fcntl(c.ring_fd, F_ADD_SEALS, F_SEAL_WRITE) < 0, "the ring can be sealed against the daemon");
    EXPECT(fcntl(c.weights_fd, F_ADD_SEALS, F_SEAL_WRITE) < 0, "the weights can be sealed against the daemon");
    EXPECT(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, c.credit_fd, 0) == MAP_FAILED,
           "the credit page is writable");
    EXPECT(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, c.weights_fd, 0) == MAP_FAILED,
           "the weights are writable");
    EXPECT(fallocate(c.weights_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0,
           "the weights can be punched");
    request = (struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "spoilt"}};
    raw_say(&c, &request);
    raw_expect(&c, REPLY_DONE);
    raw_close(&c);
}

/* Reopens a read-only descriptor for writing. Return: the new descriptor or -errno. */
static int reopen(int fd)
{
    char path[64];
    int again;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    again = open(path, O_RDWR | O_CLOEXEC);
    return again < 0 ? -errno : again;
}

/* The memory is published: it can be opened for writing, but not changed. */
static void expect_published(int fd, const char *what)
{
    uint8_t byte = 0xa5;
    int again = reopen(fd);

    EXPECT(again >= 0, "%s: %s", what, strerror(-again));
    EXPECT(pwrite(again, &byte, 1, 64) < 0 && errno == EPERM, "%s: can be written", what);
    EXPECT(fallocate(again, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0 && errno == EPERM,
           "%s: can be punched", what);
    EXPECT(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED && errno == EPERM,
           "%s: can be mapped for writing", what);
    close(again);
}

static void expect_foreign(int fd, const char *what)
{
    EXPECT(reopen(fd) == -EACCES, "%s: can be opened", what);
    EXPECT(fchmod(fd, 0666) < 0 && errno == EPERM, "%s: its mode can be changed", what);
}

/*
 * Reopens the daemon's read-only descriptors for writing. n is 0: with the daemon's uid; 1: with another uid; 2: with
 * the daemon's uid in stage 3, where this may write the pool of gathered parameters, which is no state.
 */
static void reopened(unsigned n)
{
    uint8_t garbage[4096];
    struct raw c;
    int again;

    raw_attach(&c, 1);
    if (n == 1) {
        expect_foreign(c.credit_fd, "the credit page");
        expect_foreign(c.weights_fd, "the weights");
    } else if (n == 0) {
        expect_published(c.credit_fd, "the credit page");
        if (!c.on_gpu)
            expect_published(c.weights_fd, "the weights");
    } else {
        expect_published(c.credit_fd, "the credit page");
        memset(garbage, 0xa5, sizeof(garbage));
        again = reopen(c.weights_fd);
        EXPECT(again >= 0, "the pool: %s", strerror(-again));
        EXPECT(pwrite(again, garbage, sizeof(garbage), 0) == sizeof(garbage), "the pool: %s", strerror(errno));
        close(again);
    }
    raw_close(&c);
}

/* ---- as a rank: the order of things -------------------------------------------------------------------- */

static void push_before_begin(unsigned n)
{
    struct raw c;
    struct request request;

    raw_attach(&c, 1);
    request = raw_push(&c, 0);
    raw_say(&c, &request);
    request = raw_end(&c);
    raw_say(&c, &request);
    raw_expect_refused(&c, 1003, "early push refused");
    raw_say(&c, &request); /* the refusal persists */
    raw_expect_refused(&c, 1003, "early push refused");
    raw_close(&c);
}

static void push_after_end(unsigned n)
{
    struct raw c;
    struct request request;

    raw_attach(&c, 1);
    raw_begin(&c);
    raw_push_all(&c);
    request = raw_end(&c);
    raw_say(&c, &request);
    raw_expect(&c, REPLY_DONE);
    request = raw_push(&c, 0);
    request.push.ticket = c.next_ticket;
    request.push.use = 0;
    raw_say(&c, &request);
    request = raw_step(&c);
    raw_say(&c, &request);
    raw_expect_refused(&c, 1004, "push after the boundary refused");
    raw_close(&c);
}

/* Sends a push of a step that was committed long ago. */
static void stale_push(unsigned n)
{
    struct raw c;
    struct request request = attack(&c);

    request.push.step = 0;
    request.push.ordinal = 1;
    raw_say(&c, &request);
    request = raw_end(&c);
    raw_say(&c, &request);
    raw_expect_refused(&c, 1002, "stale push refused");
    raw_close(&c);
}

static void step_while_open(unsigned n)
{
    struct raw c;
    struct request request = attack(&c);

    raw_say(&c, &request);
    request = raw_step(&c);
    raw_say(&c, &request);
    raw_expect_refused(&c, 1003, "refused");
    raw_close(&c);
}

/* Asks for the step without AbortSeen after an abort. */
static void abort_unseen(unsigned n)
{
    struct raw c;
    struct request request = attack(&c);

    raw_say(&c, &request);
    raw_say(&c, &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "once more"}});
    raw_expect(&c, REPLY_DONE);
    c.at = c.reply.done.position;
    request = raw_step(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "AbortSeen was not sent");
    raw_close(&c);
}

/* Sends a push of the aborted attempt before AbortSeen. */
static void aborted_pushes(unsigned n)
{
    struct raw c;
    struct request request = attack(&c), late;
    uint32_t attempt = c.at.attempt;

    late = raw_push(&c, 2);
    raw_say(&c, &request);
    raw_say(&c, &(struct request){.type = REQUEST_ABORT_STEP, .abort_step = {.why = "once more"}});
    raw_expect(&c, REPLY_DONE);
    raw_say(&c, &late); /* the daemon drops it silently */
    c.at = c.reply.done.position;
    raw_say(&c, &(struct request){.type = REQUEST_ABORT_SEEN, .abort_seen = {.attempt = c.at.attempt}});
    raw_begin(&c);
    c.next_ticket = 10;
    raw_push_all(&c);
    EXPECT(c.at.attempt == attempt + 1, "attempt %u after %u", c.at.attempt, attempt);
    raw_close(&c);
}

static void step_of_tomorrow(unsigned n)
{
    struct raw c;
    struct request request;

    raw_attach(&c, 1);
    request = raw_step(&c);
    request.step.step++;
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "Step.step: not the open step");
    raw_close(&c);
}

/* Sends a request while another one is unanswered: WriteBegin waits because rank 0 opens no window. */
static void unanswered(unsigned n)
{
    static const enum request_type types[] = {REQUEST_READ_STATE, REQUEST_CLEAR_FAULT, REQUEST_ABORT_SEEN, REQUEST_PUSH,
                                              REQUEST_LEAVE};

    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        struct raw c;
        struct request request;

        raw_attach(&c, 1);
        raw_say(&c, &(struct request){.type = REQUEST_WRITE_BEGIN});
        request = (struct request){.type = types[i]};
        raw_say(&c, &request);
        if (types[i] == REQUEST_LEAVE) { /* Leave is allowed while a request waits */
            raw_close(&c);
            continue;
        }
        raw_expect_dropped(&c, 1403, "while the last request has not been answered");
        raw_close(&c);
    }
}

static void late_init(unsigned n)
{
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_INIT, .init = {.n_elems = 10}});
    raw_expect_dropped(&c, 1403, "only rank 0 sends initial weights");
    raw_close(&c);
}

static void late_declare(unsigned n)
{
    struct raw c;

    raw_attach(&c, 1);
    raw_declare(&c);
    raw_expect_dropped(&c, 1403, "Declare is not allowed on a formed rank");
    raw_close(&c);
}

static void other_manifest(unsigned n)
{
    struct layout_decl decl = {.name = "x", .name_len = 1, .trainable = true};
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    raw_say(&c, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = &decl, .n_params = 1}});
    raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 1}});
    raw_expect_refused(&c, 1101, "the manifest is not the one that this run was formed with");
    raw_close(&c);
}

static void wrong_count(unsigned n)
{
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    raw_declare(&c);
    raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 5}});
    raw_expect_dropped(&c, 1403, "Form.n_params: 5, but 11 parameters were declared");
    raw_close(&c);
}

/* Declares more than a million parameters, as many in each packet as fit. */
static void huge_manifest(unsigned n)
{
    enum { PER_PACKET = 8000 };
    _cleanup_free_ struct layout_decl *decls = calloc(PER_PACKET, sizeof(*decls));
    struct raw c;

    for (unsigned i = 0; i < PER_PACKET; i++)
        decls[i] = (struct layout_decl){.name = "a name", .name_len = 6};
    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    for (unsigned sent = 0; sent <= MANIFEST_MAX_PARAMS; sent += PER_PACKET)
        raw_say(&c, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = decls, .n_params = PER_PACKET}});
    raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 1}});
    raw_expect_refused(&c, 1401, "manifest");
    raw_close(&c);
}

/* Interns five megabytes of strings. */
static void intern(unsigned n)
{
    char text[1001];
    struct raw c;

    memset(text, 'x', sizeof(text) - 1);
    text[1000] = '\0';
    raw_attach(&c, 1);
    for (unsigned i = 0; i < 5000; i++)
        raw_say(&c, &(struct request){.type = REQUEST_INTERN, .intern = {.id = 1 + i, .text = text}});
    raw_say(&c, &(struct request){.type = REQUEST_READ_STATE});
    raw_expect_refused(&c, 1401, "interned strings");
    raw_close(&c);
}

static void large_blob(unsigned n)
{
    struct raw c;
    struct request request = attack(&c);

    raw_say(&c, &request);
    request = raw_end(&c);
    request.end_backward.has_blob = true;
    request.end_backward.blob = packet;
    request.end_backward.n_blob_bytes = WIRE_MAX_BLOB_BYTES + 1;
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1403, "EndBackward.blob: 65537 bytes");
    raw_close(&c);
}

static void fd_as_rank(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);
    int fd = memfd_create("hostile", MFD_CLOEXEC);

    raw_send(&c, packet, raw_pack(&push, packet), &fd, 1);
    raw_expect_dropped(&c, 1403, "descriptors travel from the daemon to the client only");
    raw_close(&c);
}

/* Asks for a parameter's state again and again and never reads the answers. */
static void never_reads_state(unsigned n)
{
    struct raw c;
    int r = 0;

    raw_attach(&c, 1);
    for (unsigned i = 0; i < n && r == 0; i++) {
        struct request request = {.type = REQUEST_READ_STATE, .read_state = {.param = 7}};

        r = raw_send(&c, packet, raw_pack(&request, packet), NULL, 0);
        usleep(200); /* so that most requests are answered before the next one */
    }
    EXPECT(r == -EPIPE || r == -ECONNRESET, "all %u requests were taken: %d", n, r);
    raw_close(&c);
}

static uint64_t held_bytes(int fd)
{
    struct stat status;

    EXPECT(fstat(fd, &status) == 0, "fstat: %s", strerror(errno));
    return (uint64_t)status.st_blocks * 512;
}

/* Asks n times for the state of a large parameter and keeps the descriptors. Only the last answer may hold memory. */
static void hoards_state(unsigned n)
{
    static const uint64_t shape[] = {2 << 20};
    struct layout_decl decl = {.name = "big", .name_len = 3, .trainable = true, .n_dims = 1, .shape = shape};
    struct request request = {.type = REQUEST_READ_STATE};
    uint64_t n_bytes = shape[0] * sizeof(float), sum = 0;
    int fds[256], n_fds = 0;
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 0);
    raw_say(&c, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = &decl, .n_params = 1}});
    raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = 1}});
    raw_expect(&c, REPLY_FORMED);
    raw_say(&c, &(struct request){.type = REQUEST_READY});
    raw_expect(&c, REPLY_DONE);
    for (unsigned i = 0; i < MIN(n, (unsigned)ARRAY_SIZE(fds)); i++) {
        raw_say(&c, &request);
        if (raw_hear(&c, raw_patience()) == REPLY_REFUSED)
            break;
        EXPECT(c.reply.type == REPLY_STATE_IS && c.in.n_fds == 1, "answered with %s", reply_type_name(c.reply.type));
        fds[n_fds++] = steal_fd(&c.in.fds[0]);
    }
    if (c.reply.type == REPLY_REFUSED) {
        printf("%s\n", c.reply.refused.diagnostic.text);
        EXPECT(n_fds == 0, "refused after %d answers", n_fds);
        raw_close(&c);
        return;
    }
    for (int i = 0; i < n_fds; i++)
        sum += held_bytes(fds[i]);
    EXPECT(sum <= n_bytes + 65536, "%d answers hold %llu bytes", n_fds, (unsigned long long)sum);
    raw_say(&c, &(struct request){.type = REQUEST_CLEAR_FAULT}); /* allowed, because the last answer has been read */
    raw_expect(&c, REPLY_DONE);
    for (int i = 0; i < 1000 && held_bytes(fds[n_fds - 1]) > 0; i++)
        usleep(10000);
    EXPECT(held_bytes(fds[n_fds - 1]) == 0, "the last answer holds memory after the next request");
    printf("%d answers\n", n_fds);
    raw_close(&c);
}

/* Pushes the same gradient again for up to n rounds of 1,000. These pushes are duplicates; the first one counts. */
static void flood(unsigned n)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    struct raw c;
    struct request request = attack(&c);
    unsigned long sent = 0;
    size_t size;

    raw_say(&c, &request);
    size = raw_pack(&request, packet);
    printf("begins\n");
    fflush(stdout);
    for (unsigned round = 0; poll(&input, 1, 0) == 0 && round < n; round++)
        for (unsigned i = 0; i < 1000; i++, sent++)
            EXPECT(raw_send(&c, packet, size, NULL, 0) == 0, "the daemon has closed the connection");
    printf("%lu pushes\n", sent);
    raw_close(&c);
}

/* Dies while its child holds the socket and keeps pushing. */
static void orphan_flood(unsigned n)
{
    struct raw c;
    struct request request = attack(&c);
    size_t size;

    raw_say(&c, &request);
    size = raw_pack(&request, packet);
    if (fork() == 0) {
        while (raw_send(&c, packet, size, NULL, 0) == 0)
            ;
        _exit(0);
    }
    usleep(200000);
    _exit(0);
}

/* A second connection of the same incarnation takes over the rank. The daemon closes the first connection. */
static void taken_over(unsigned n)
{
    struct raw first, second;
    struct request request;

    raw_attach(&first, 1);
    raw_begin(&first);
    raw_open(&second);
    second.incarnation = first.incarnation;
    raw_hello(&second, WIRE_ROLE_TRAINER, 1);
    request = raw_push(&first, 0);
    raw_say(&first, &request);
    raw_expect_closed(&first);
    raw_say(&second, &(struct request){.type = REQUEST_CLEAR_FAULT});
    raw_expect(&second, REPLY_DONE);
    raw_close(&first);
    raw_close(&second);
}

/* Another process uses the rank's incarnation. The daemon refuses it, and the rank keeps its connection. */
static void stolen(unsigned n)
{
    struct raw victim, thief;
    int status = -1;
    pid_t pid;

    raw_attach(&victim, 1);
    raw_begin(&victim);
    pid = fork();
    if (pid == 0) {
        struct request request = hello(WIRE_ROLE_TRAINER, 1);

        request.hello.incarnation = victim.incarnation;
        raw_open(&thief);
        raw_say(&thief, &request);
        raw_expect_dropped(&thief, 1301, "held by");
        _exit(0);
    }
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0, "the thief ended with %d", status);
    raw_say(&victim, &(struct request){.type = REQUEST_CLEAR_FAULT});
    raw_expect(&victim, REPLY_DONE);
    raw_close(&victim);
}

static void rank_taken(unsigned n)
{
    struct request request = hello(WIRE_ROLE_TRAINER, 0);
    struct raw c;

    raw_open(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1301, "held by");
    raw_close(&c);
}

/* `zerodctl ranks` shows an incarnation to everyone. A process cannot attach as a rank with it. */
static void steals_shown(unsigned n)
{
    static const char key[] = "\"incarnation\":";
    struct request request = hello(WIRE_ROLE_TRAINER, 0);
    const char *shown;
    struct raw c;

    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_CONTROL, 0);
    ask(&c, "ranks");
    raw_expect(&c, REPLY_ADMIN_PART);
    shown = memmem(c.reply.admin_part.json, c.reply.admin_part.n_json_bytes, key, strlen(key));
    EXPECT(shown, "ranks does not show incarnations");
    shown += strlen(key);
    request.hello.incarnation = strtoull(shown + strspn(shown, " \""), NULL, 16);
    EXPECT(request.hello.incarnation > 0, "ranks shows no incarnation");
    raw_close(&c);
    raw_open(&c);
    raw_say(&c, &request);
    raw_expect_dropped(&c, 1301, "held by");
    raw_close(&c);
}

static void after_leave(unsigned n)
{
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_LEAVE});
    raw_expect(&c, REPLY_DONE);
    raw_begin(&c);
    raw_expect_dropped(&c, 1403, "BeginBackward is not allowed after Leave");
    raw_close(&c);
}

/* Stage 3. Gathers one parameter more often than a 16-bit counter can count, then releases it as often. */
static void gather_many(unsigned n)
{
    _cleanup_free_ uint32_t *ids = calloc(30000, sizeof(*ids));
    struct raw c;
    int got = REPLY_DONE;

    raw_attach(&c, 1);
    if (c.welcome.cuda) { /* everything in one gather does not fit into the pool of a GPU */
        raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = 30000}});
        raw_expect_dropped(&c, 1403, "Gather.params: more than fits into the rank's pool");
        raw_close(&c);
        return;
    }
    for (unsigned i = 0; i < 3 && got == REPLY_DONE; i++) {
        raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = 30000}});
        got = raw_hear(&c, raw_patience());
    }
    EXPECT(got == REPLY_DONE, "gathering was answered with %d", got);
    for (unsigned i = 0; i < 3; i++)
        raw_say(&c, &(struct request){.type = REQUEST_RELEASE, .release = {.params = ids, .n_params = 30000}});
    raw_say(&c, &(struct request){.type = REQUEST_READ_STATE, .read_state = {.param = 0}});
    raw_expect(&c, REPLY_STATE_IS);
    raw_say(&c, &(struct request){.type = REQUEST_RELEASE, .release = {.params = ids, .n_params = 1}});
    raw_expect_dropped(&c, 1403, "Release.params: not gathered by this rank");
    raw_close(&c);
}

static void gather_unknown(unsigned n)
{
    uint32_t id = PUPPET_PARAMS;
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = &id, .n_params = 1}});
    raw_expect_dropped(&c, 1403, "Gather.params: no such parameter");
    raw_close(&c);
}

/* Prefetch has no answer. If it is wrong, the daemon closes the connection. */
static void prefetch_unknown(unsigned n)
{
    uint32_t ids[] = {0, PUPPET_PARAMS};
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_PREFETCH, .prefetch = {.params = ids, .n_params = 2}});
    raw_expect_dropped(&c, 1403, "Prefetch.params: no such parameter");
    raw_close(&c);
}

/* Pushes with a point of no known process. In host memory there are no points. */
static void point_unknown(unsigned n)
{
    struct raw c;
    struct request push = attack(&c);

    push.push.point = 1;
    raw_say(&c, &push);
    raw_expect_dropped(&c, 1403, "Push.point: no work waits for this point");
    raw_close(&c);
}

/* Gathers before Ready, when rank 0's initial weights are not there yet. */
static void gather_early(unsigned n)
{
    uint32_t ids[] = {0, 1, 2};
    struct raw c;

    (void)n;
    raw_open(&c);
    raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    raw_declare(&c);
    raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = PUPPET_PARAMS}});
    raw_expect(&c, REPLY_FORMED);
    raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = ARRAY_SIZE(ids)}});
    raw_expect_dropped(&c, 1403, "Gather: sent before the answer to Ready");
    raw_close(&c);
}

static void gather_and_die(unsigned n)
{
    uint32_t ids[] = {0, 1, 7, 0};
    struct raw c;

    raw_attach(&c, 1);
    raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = 4}});
    raw_expect(&c, REPLY_DONE);
    raw_say(&c, &(struct request){.type = REQUEST_GATHER, .gather = {.params = ids, .n_params = 4}});
    raw_close(&c);
}

/* Closes the connection after the first n requests of a step. The pushes before that are correct. */
static void hang_up(unsigned n)
{
    static const struct request middle[] = {
        {.type = REQUEST_SLOT_REQUEST}, {.type = REQUEST_READ_STATE}, {.type = REQUEST_WRITE_BEGIN},
        {.type = REQUEST_GRAD_NORM},    {.type = REQUEST_GATHER},     {.type = REQUEST_ABORT_STEP},
    };
    struct request request;
    struct raw c;

    raw_open(&c);
    if (n >= 1)
        raw_hello(&c, WIRE_ROLE_TRAINER, 1);
    if (n >= 2)
        raw_declare(&c);
    if (n == 3)
        raw_say(&c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = PUPPET_PARAMS}});
    if (n >= 4)
        raw_form(&c);
    if (n >= 5 && n < 5 + ARRAY_SIZE(middle))
        raw_say(&c, &middle[n - 5]);
    if (n >= 11) {
        raw_begin(&c);
        request = raw_push(&c, 3);
        raw_say(&c, &request);
    }
    if (n == 12)
        raw_say(&c, &middle[0]);
    if (n == 13)
        raw_say(&c, &(struct request){.type = REQUEST_ABANDON_BACKWARD});
    for (uint32_t i = 0; n >= 14 && i < PUPPET_PARAMS; i++) {
        if (i == 3 || !c.layout->params[i].trainable)
            continue;
        request = raw_push(&c, i);
        raw_say(&c, &request);
    }
    if (n >= 15) {
        request = raw_end(&c);
        raw_say(&c, &request);
    }
    if (n >= 16) {
        raw_expect(&c, REPLY_DONE);
        request = raw_step(&c);
        raw_say(&c, &request);
    }
    raw_close(&c);
}

/* ---- monkeys ------------------------------------------------------------------------------------------- */

static struct request_push near_right_push(struct raw *c, uint32_t param, uint64_t *random)
{
    struct request_push push = {
        .sequence = ++c->sequence - draw(random) % 2,
        .attempt = c->at.attempt,
        .step = c->at.step,
        .micro_batch = (uint32_t)(draw(random) % 3),
        .param = param,
        .ticket = (uint32_t)(draw(random) % 20),
        .offset_bytes = draw(random) % 1024 * 64,
        .pass = draw(random) % 8 == 0,
        .overflow = draw(random) % 16 == 0,
    };

    push.use = atomic_load(&c->credit->credits[push.ticket]);
    return push;
}

/* Return: a request of any type with numbers that are near to correct ones. */
static struct request near_right(struct raw *c, uint64_t *random)
{
    struct request request = example_requests[2 + draw(random) % (N_REQUEST_TYPES - 2)];
    static uint32_t ids[4];

    for (size_t i = 0; i < ARRAY_SIZE(ids); i++)
        ids[i] = (uint32_t)(draw(random) % (PUPPET_PARAMS + (draw(random) % 50 == 0)));
    switch (request.type) {
    case REQUEST_BEGIN_BACKWARD:
        request.begin_backward.step = c->at.step;
        request.begin_backward.micro_batch = (uint32_t)(draw(random) % 3);
        request.begin_backward.attempt = c->at.attempt;
        break;
    case REQUEST_PUSH:
        request.push = near_right_push(c, ids[0], random);
        request.push.part = draw(random) % 8 == 0;
        request.push.record_only = draw(random) % 16 == 0;
        break;
    case REQUEST_PUSHES:
        request.pushes.first = near_right_push(c, ids[0], random);
        request.pushes.others = ids + 1;
        request.pushes.n_others = draw(random) % ARRAY_SIZE(ids);
        break;
    case REQUEST_SLOT_REQUEST:
        request.slot_request.bucket = (uint32_t)(draw(random) % c->layout->n_buckets);
        request.slot_request.parcel = draw(random) % 8 == 0;
        break;
    case REQUEST_END_BACKWARD:
        request = raw_end(c);
        request.end_backward.micro_batch = (uint32_t)(draw(random) % 3);
        break;
    case REQUEST_STEP:
        request = raw_step(c);
        request.step.found_inf = draw(random) % 4 == 0;
        break;
    case REQUEST_ABANDON_BACKWARD:
        request.abandon_backward.step = c->at.step;
        break;
    case REQUEST_GATHER:
        request.gather = (struct request_gather){.params = ids, .n_params = 1 + draw(random) % 4};
        break;
    case REQUEST_RELEASE:
        request.release = (struct request_release){.params = ids, .n_params = 1};
        break;
    case REQUEST_PREFETCH:
        request.prefetch = (struct request_prefetch){.params = ids, .n_params = 1 + draw(random) % 4};
        break;
    case REQUEST_READ_STATE:
        request.read_state.param = ids[0];
        break;
    case REQUEST_WRITE_STATE:
        request.write_state = (struct request_write_state){.param = ids[0], .kind = draw(random) % 3};
        break;
    case REQUEST_ABORT_SEEN:
        request.abort_seen.attempt = c->at.attempt;
        break;
    default:
        break;
    }
    return request;
}

static bool is_answered(enum request_type type)
{
    switch (type) {
    case REQUEST_DECLARE:
    case REQUEST_BEGIN_BACKWARD:
    case REQUEST_INTERN:
    case REQUEST_PUSH:
    case REQUEST_PUSHES:
    case REQUEST_RELEASE:
    case REQUEST_PREFETCH:
    case REQUEST_HELD:
    case REQUEST_ABORT_SEEN:
    case REQUEST_REPORT:
        return false;
    default:
        return true;
    }
}

static void note_position(struct raw *c)
{
    switch (c->reply.type) {
    case REPLY_DONE:
        c->at = c->reply.done.position;
        break;
    case REPLY_STEP_DONE:
        c->at = c->reply.step_done.position;
        break;
    case REPLY_REFUSED:
        if (c->reply.refused.aborted)
            c->at = c->reply.refused.position;
        break;
    default:
        break;
    }
}

/* One connection of a monkey: sends requests until the daemon closes it, or an answer waits for another rank. */
static void monkey_life(unsigned rank, uint64_t *random)
{
    struct raw c;
    int got = RAW_SILENCE;

    raw_open(&c);
    raw_say(&c, &(struct request){
                    .type = REQUEST_HELLO,
                    .hello = {.version_min = WIRE_VERSION,
                              .version_max = WIRE_VERSION,
                              .rank = rank,
                              .incarnation = c.incarnation,
                              .on_duplicate = (enum wire_on_duplicate)(draw(random) % 4)},
                });
    if (raw_hear(&c, raw_patience()) != REPLY_WELCOME) {
        raw_close(&c);
        return;
    }
    c.rank = rank;
    c.welcome = c.reply.welcome;
    raw_declare(&c);
    if (!raw_try_form(&c)) { /* a request of its predecessor waits for the other rank */
        raw_close(&c);
        return;
    }
    for (unsigned i = 0; i < 400 && got != RAW_CLOSED; i++) {
        struct request request = near_right(&c, random);

        if (request.type == REQUEST_ADMIN || request.type == REQUEST_FORM || request.type == REQUEST_DECLARE ||
            request.type == REQUEST_INIT || (request.type == REQUEST_LEAVE && draw(random) % 20))
            continue;
        if (raw_say(&c, &request) < 0)
            break;
        if (!is_answered(request.type))
            continue;
        got = raw_hear(&c, 40);
        if (got == RAW_SILENCE)
            break;
        if (got != RAW_CLOSED)
            note_position(&c);
    }
    raw_close(&c);
}

static void monkey(unsigned n)
{
    uint64_t random = n;

    for (unsigned i = 0; i < 40; i++)
        monkey_life(n % 2, &random);
}

/* ---- the list ------------------------------------------------------------------------------------------ */

static const struct {
    const char *group, *name;
    void (*run)(unsigned n);
} attacks[] = {
    {"stranger", "other-version", other_version},
    {"stranger", "rank-beyond-world", rank_beyond_world},
    {"stranger", "not-hello", not_hello},
    {"stranger", "empty-packet", empty_packet},
    {"stranger", "truncated", truncated},
    {"stranger", "oversized", oversized},
    {"stranger", "garbage", garbage},
    {"stranger", "descriptors", descriptors},
    {"stranger", "control-pushes", control_pushes},
    {"stranger", "control-unknown", control_unknown},
    {"stranger", "never-reads", never_reads},
    {"stranger", "rank-taken", rank_taken},
    {"stranger", "steals-shown", steals_shown},
    {"rank", "hello-twice", hello_twice},
    {"rank", "ticket-range", ticket_range},
    {"rank", "ticket-use", ticket_use},
    {"rank", "ticket-shared", ticket_shared},
    {"rank", "slot-twice", slot_twice},
    {"rank", "offset-outside", offset_outside},
    {"rank", "offset-unaligned", offset_unaligned},
    {"rank", "overflow-not-granted", overflow_not_granted},
    {"rank", "wrong-pass", wrong_pass},
    {"rank", "point-unknown", point_unknown},
    {"rank", "record-only-first", record_only_first},
    {"rank", "newer-attempt", newer_attempt},
    {"rank", "unknown-bucket", unknown_bucket},
    {"rank", "overlap", overlap},
    {"rank", "overlap-extent", overlap_extent},
    {"rank", "overflow-hoard", overflow_hoard},
    {"rank", "holes", holes},
    {"rank", "reopened", reopened},
    {"rank", "push-before-begin", push_before_begin},
    {"rank", "push-after-end", push_after_end},
    {"rank", "stale-push", stale_push},
    {"rank", "step-while-open", step_while_open},
    {"rank", "step-of-tomorrow", step_of_tomorrow},
    {"rank", "abort-unseen", abort_unseen},
    {"rank", "aborted-pushes", aborted_pushes},
    {"rank", "unanswered", unanswered},
    {"rank", "late-init", late_init},
    {"rank", "late-declare", late_declare},
    {"rank", "other-manifest", other_manifest},
    {"rank", "wrong-count", wrong_count},
    {"rank", "huge-manifest", huge_manifest},
    {"rank", "intern", intern},
    {"rank", "large-blob", large_blob},
    {"rank", "descriptor-as-rank", fd_as_rank},
    {"rank", "never-reads-state", never_reads_state},
    {"rank", "taken-over", taken_over},
    {"rank", "stolen", stolen},
    {"stage3", "gather-many", gather_many},
    {"stage3", "gather-unknown", gather_unknown},
    {"stage3", "prefetch-unknown", prefetch_unknown},
    {"stage3", "gather-and-die", gather_and_die},
    {"other", "gather-early", gather_early},
    {"other", "reconnects", reconnects},
    {"other", "after-leave", after_leave},
    {"other", "hang-up", hang_up},
    {"other", "flood", flood},
    {"other", "orphan-flood", orphan_flood},
    {"other", "idle", idle},
    {"other", "idle-closed", idle_closed},
    {"other", "control-idle", control_idle},
    {"other", "asks", asks},
    {"other", "hoards-state", hoards_state},
    {"other", "admin", admin},
    {"other", "foreign", foreign},
    {"other", "monkey", monkey},
};

int main(int argc, char **argv)
{
    const char *wanted = argc > 1 ? argv[1] : "";
    unsigned n = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 0;

    for (size_t i = 0; i < ARRAY_SIZE(attacks); i++) {
        if (strcmp(wanted, "--list") == 0)
            printf("%s %s\n", attacks[i].group, attacks[i].name);
        else if (strcmp(wanted, attacks[i].name) == 0) {
            attacks[i].run(n);
            return 0;
        }
    }
    if (strcmp(wanted, "--list") == 0)
        return 0;
    fprintf(stderr, "usage: hostile ATTACK [NUMBER] | --list\n");
    return 64;
}
