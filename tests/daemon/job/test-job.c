/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The job through the verbs of daemon/job/model/model.h: forming, who may attach, the step as a transaction, room for
 * gradients, and time. test-job-ranks.c tests ranks that abort, die and leave.
 */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/mman.h>

#include "core/base/base.h"
#include "daemon/job/attendance.h"
#include "daemon/job/form.h"
#include "daemon/job/job.h"
#include "daemon/job/resize.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/client-report.h"
#include "daemon/job/request.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/collect.h"
#include "daemon/memory/ring.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/group.h"

static const char quiet[] = FIXTURE_QUIET;
static const char sgd[] = "optimizer: {type: SGD, params: {lr: 0.5}}\ngradient_clipping: 0\n";

/* ---- forming ------------------------------------------------------------------------------------------- */

static void check_access(const struct peer *p)
{
    bool seen[8] = {false};

    for (size_t i = 0; i < p->n_segments; i++) {
        bool writable = (fcntl(p->fds[i], F_GETFL) & O_ACCMODE) == O_RDWR;
        enum wire_segment_kind kind = p->segments[i].kind;

        assert_int_equal(writable, kind == WIRE_SEGMENT_RING || kind == WIRE_SEGMENT_OVERFLOW);
        if (!writable) {
            assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, p->fds[i], 0), MAP_FAILED);
            assert_int_equal(errno, EACCES);
        }
        assert_false(seen[kind]);
        seen[kind] = true;
    }
}

static void test_forming(void **userdata)
{
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    assert_int_equal(peer_attach(a, "run"), 0);
    assert_int_equal(peer_attach(b, "run"), 0);
    peer_declare(a);
    peer_ask_form(a);
    peer_expect_silence(a); /* the other rank has not declared */
    peer_declare(b);
    peer_expect_silence(a);
    peer_ask_form(b);
    peer_take_formed(a);
    assert_true(a->reply.formed.init_wanted);
    assert_false(a->reply.formed.resumed);
    check_access(a);
    peer_take_formed(b);
    assert_false(b->reply.formed.init_wanted);
    assert_int_equal(b->reply.formed.digest, a->reply.formed.digest);
    check_access(b);

    peer_ready(b);
    peer_expect_silence(b); /* waits for the weights of rank 0 */
    peer_init_weights(a);
    assert_int_equal(f->job->phase, JOB_INITIALISING);
    peer_ready(a);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(f->job->phase, JOB_TRAINING);
    for (uint32_t i = 0; i < 50 * 16; i++)
        assert_true(((const float *)state_weights(f->job->state, 0, 0))[i] == puppet_initial(0, i));
    fixture_free(f);
}

static void declare_one(struct peer *p, uint64_t n_elems)
{
    const struct layout_decl decl = {.name = "w", .name_len = 1, .trainable = true, .n_dims = 1, .shape = &n_elems};

    job_declare(p->fixture->job, p->rank, &(struct request_declare){.params = &decl, .n_params = 1});
}

/* If manifests differ, all ranks are refused at the same time, and may declare again. */
static void test_manifests_differ(void **userdata)
{
    struct fixture *f = fixture_new(quiet);

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(peer_attach(&f->peers[i], "run"), 0);
        declare_one(&f->peers[i], 5 + i);
        job_form(f->job, f->peers[i].rank, &(struct request_form){.n_params = 1});
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect_refused(&f->peers[i], E_MANIFEST, false);
    assert_int_equal(f->job->phase, JOB_WAITING);
    assert_int_equal(f->job->memory.quota.used, 0);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_declare(&f->peers[i]);
        peer_ask_form(&f->peers[i]);
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_take_formed(&f->peers[i]);
    fixture_free(f);
}

static void test_form_refusals(void **userdata)
{
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0];

    (void)userdata;
    assert_int_equal(peer_attach(a, "run"), 0);
    job_form(f->job, a->rank, &(struct request_form){.n_params = 0});
    peer_expect_refused(a, E_MANIFEST, false);
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    peer_declare(a);
    job_form(f->job, a->rank, &(struct request_form){.n_params = PUPPET_PARAMS + 1});
    peer_expect_dropped(a, E_BAD_MESSAGE);
    peer_ask_form(a);
    peer_declare(a); /* too late, so the next answer reports it */
    peer_expect_silence(a);
    assert_int_equal(a->rank->process.fault.code, E_MANIFEST);
    job_report(f->job, a->rank, &(struct request_report){.code = E_DRIFTED, .detail = "another one"});
    assert_int_equal(a->rank->process.fault.code, E_MANIFEST); /* the first fault is kept */
    assert_int_equal(fixture_n_kept(f, E_DRIFTED), 1);
    fixture_free(f);
}

/* A job that does not fit into limits.memory is refused before it allocates anything. */
static void test_too_large(void **userdata)
{
    struct fixture *f = fixture_new("limits: {memory: 1MiB}\n");

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(peer_attach(&f->peers[i], "run"), 0);
        peer_declare(&f->peers[i]);
        peer_ask_form(&f->peers[i]);
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect_refused(&f->peers[i], E_QUOTA, false);
    assert_null(f->job->state);
    assert_int_equal(f->job->memory.quota.used, 0);
    fixture_free(f);
}

/* ---- who may attach ------------------------------------------------------------------------------------ */

static void test_attach(void **userdata)
{
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0], other = {.fixture = f, .number = 0};
    struct peer beyond = {.fixture = f, .number = PEERS};

    (void)userdata;
    assert_int_equal(peer_attach(&beyond, "run"), E_BAD_MESSAGE);
    assert_int_equal(peer_attach(a, "run"), 0);
    assert_int_equal(peer_attach(&other, "run"), E_RANK_TAKEN);
    other.number = 1;
    assert_int_equal(peer_attach(&other, "another run"), E_OTHER_RUN);
    peer_die(a); /* no rank is attached, so the run has ended */
    assert_int_equal(peer_attach(a, "another run"), 0);
    f->job->kept.draining = true;
    assert_int_equal(peer_attach(&other, "another run"), E_NOT_ALLOWED);
    fixture_free(f);
}

/* The run has ended because of another node's daemon, but work of it is still unfinished on this node. */
static void test_attach_to_what_ends(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    enum job_phase phase = f->job->phase;

    (void)userdata;
    f->job->work.n_io++;
    f->job->run.drop_why = strdup("the daemon of node 1 (b:7700) was started anew");
    peer_die(a);
    assert_int_equal(peer_attach(a, "run"), E_GENERATION);
    f->job->kept.has_weights = false;
    f->job->run.drop_code = E_QUOTA;
    assert_int_equal(peer_attach(a, "run"), E_QUOTA);
    f->job->phase = JOB_RESERVING; /* then the refusal goes to all attached ranks, which may declare again */
    assert_int_equal(peer_attach(a, "run"), 0);
    f->job->phase = phase;
    f->job->work.n_io--;
    fixture_free(f);
}

/* If a process connects again, the new connection gets its rank. The old connection is closed without a message. */
static void test_reconnect(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], again = {.fixture = f, .number = 0};
    struct request_hello hello = {.rank = 0, .incarnation = a->incarnation, .run_id = "run", .client = "test"};
    struct job_rank *rank = a->rank;
    struct diagnostic *refusal = NULL;

    (void)userdata;
    assert_int_equal(job_attach(f->job, &(struct job_attach){.peer = &again, .hello = &hello, .pid = rank->kept.pid},
                                &again.rank, &refusal),
                     0);
    peer_expect_dropped(a, 0);
    assert_ptr_equal(again.rank, rank);
    assert_ptr_equal(rank->peer, &again);
    assert_true(rank->kept.formed);
    rank->peer = a; /* a has the mappings that the rest of the test needs */
    fixture_finish(f);
}

static unsigned refused_attach(struct fixture *f, const struct job_attach *attach)
{
    struct diagnostic *refusal = NULL;
    struct job_rank *rank = NULL;
    unsigned code;

    if (job_attach(f->job, attach, &rank, &refusal) == 0)
        return 0;
    code = refusal->code;
    diagnostic_unref(refusal);
    return code;
}

/*
 * Another process cannot take the rank, neither with the incarnation that is shown nor with the secret one. After the
 * rank's death, only its user may attach.
 */
static void test_thief(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], thief = {.fixture = f, .number = 0};
    struct job_rank *rank = a->rank;
    struct request_hello shown = {.rank = 0, .incarnation = rank->kept.incarnation, .run_id = "run", .client = "test"};
    struct request_hello secret = {.rank = 0, .incarnation = a->incarnation, .run_id = "run", .client = "test"};
    struct request_hello own = {.rank = 0, .incarnation = 4711, .run_id = "run", .client = "test"};
    int64_t pid = rank->kept.pid;

    (void)userdata;
    assert_int_not_equal(rank->kept.incarnation, a->incarnation);
    assert_int_equal(refused_attach(f, &(struct job_attach){.peer = &thief, .hello = &shown, .pid = pid}), 1301);
    assert_int_equal(refused_attach(f, &(struct job_attach){.peer = &thief, .hello = &secret, .pid = pid + 1}), 1301);
    assert_int_equal(refused_attach(f, &(struct job_attach){.peer = &thief, .hello = &secret, .pid = pid, .uid = 1}),
                     1301);
    assert_ptr_equal(rank->peer, a);
    peer_die(a);
    assert_int_equal(refused_attach(f, &(struct job_attach){.peer = &thief, .hello = &own, .uid = 1}), 1402);
    assert_int_equal(refused_attach(f, &(struct job_attach){.peer = &thief, .hello = &secret, .pid = pid, .uid = 1}),
                     1402);
    peer_return(a, "run");
    fixture_finish(f);
}

/* After a resize, another user still may not attach as any rank. */
static void test_thief_after_resize(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    _cleanup_free_ char *why = NULL;

    (void)userdata;
    for (unsigned r = 0; r < f->job->world.size; r++)
        peer_die(&f->peers[r]);
    assert_int_equal(job_resize(f->job, 5, &why), 0);
    for (unsigned r = 0; r < 5; r++) {
        struct request_hello hello = {.rank = r, .incarnation = 4711, .run_id = "run", .client = "test"};

        assert_int_equal(refused_attach(f, &(struct job_attach){.peer = f, .hello = &hello, .pid = 7, .uid = 1}), 1402);
    }
    fixture_free(f);
}

static void test_administrator_succeeds(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    struct job_rank *rank = a->rank;
    struct request_hello hello = {.rank = 0, .incarnation = 4711, .run_id = "run", .client = "test"};

    (void)userdata;
    peer_die(a);
    assert_int_equal(
        refused_attach(f, &(struct job_attach){.peer = a, .hello = &hello, .pid = 7, .uid = 1, .is_admin = true}), 0);
    assert_int_equal(rank->kept.owner, 0);
    fixture_free(f);
}

static void test_drop(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    char *why = NULL;

    (void)userdata;
    assert_int_equal(job_drop(f->job, &why), 1);
    assert_non_null(strstr(why, "still attached"));
    free(why);
    for (unsigned i = 0; i < PEERS; i++)
        peer_leave(&f->peers[i]);
    assert_int_equal(peer_attach(&f->peers[0], "another run"), E_OTHER_RUN);
    assert_true(job_is_idle(f->job));
    assert_int_equal(job_drop(f->job, &why), 0);
    assert_int_equal(f->job->memory.quota.used, 0);
    fixture_form(f, "another run");
    assert_int_equal(f->peers[0].at.step, 0);
    fixture_steps(f, FIXTURE_STEPS, FIXTURE_MICRO);
    assert_int_equal(fixture_bits(f), fixture_undisturbed());
    fixture_free(f);
}

/* ---- the step ------------------------------------------------------------------------------------------ */

static bool has_segment(const struct peer *p, enum wire_segment_kind kind)
{
    for (size_t i = 0; i < p->n_segments; i++)
        if (p->segments[i].kind == kind)
            return true;
    return false;
}

static void take_step(struct fixture *f)
{
    fixture_micro_batch(f);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_step(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
}

/*
 * Only a rank that wants the decision gets it, once and with the same values as the answer. A skipped step has no
 * decision.
 */
static void test_decision(void **userdata)
{
    struct fixture *f = fixture_new(sgd);
    struct peer *p = &f->peers[0];
    struct reply_step_done *answer = &p->reply.step_done;

    (void)userdata;
    p->overlaps = true;
    fixture_form(f, "run");
    take_step(f);
    assert_int_equal(p->n_decisions, 1);
    assert_int_equal(f->peers[1].n_decisions, 0);
    assert_int_equal(p->decision.position.step, 1);
    assert_int_equal(p->decision.position.micro_batch, 0);
    assert_int_equal(p->decision.position.attempt, answer->position.attempt);
    assert_true(p->decision.applied && answer->applied && answer->norm > 0);
    assert_true(p->decision.norm == answer->norm && p->decision.lr == answer->lr);
    assert_true(p->decision.loss_scale == answer->loss_scale && p->decision.n_missing == answer->n_missing);
    assert_false(answer->is_decision);
    p->finds_inf = true;
    take_step(f);
    assert_false(answer->applied);
    assert_int_equal(p->n_decisions, 1);
    fixture_free(f);
}

/* Only a client that asks for the segment gets it, because earlier versions do not know it. */
static void test_published_page_is_asked_for(void **userdata)
{
    struct fixture *f = fixture_new(sgd);

    (void)userdata;
    f->peers[0].overlaps = true;
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(peer_attach(&f->peers[i], "run"), 0);
        peer_declare(&f->peers[i]);
        peer_ask_form(&f->peers[i]);
    }
    for (unsigned i = 0; i < PEERS; i++) {
        peer_take_formed(&f->peers[i]);
        assert_int_equal(has_segment(&f->peers[i], WIRE_SEGMENT_PUBLISHED), i == 0);
        assert_true(has_segment(&f->peers[i], WIRE_SEGMENT_CREDIT));
    }
    fixture_free(f);
}

/* Compares the step with SGD, which the test computes itself. */
static void test_step(void **userdata)
{
    struct fixture *f = fixture_new(sgd);
    const float *weights;

    (void)userdata;
    fixture_form(f, "run");
    weights = (const float *)state_weights(f->job->state, 0, 0);
    fixture_micro_batch(f);
    assert_int_equal(f->peers[0].at.micro_batch, 1);
    fixture_micro_batch(f);
    peer_ask_step(&f->peers[0]);
    peer_expect_silence(&f->peers[0]); /* the other rank has not asked */
    assert_true(weights[0] == puppet_initial(0, 0));
    peer_ask_step(&f->peers[1]);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
        assert_true(f->peers[i].reply.step_done.applied);
        assert_true(f->peers[i].reply.step_done.lr == 0.5);
        assert_int_equal(f->peers[i].reply.step_done.n_missing, 0);
        assert_int_equal(f->peers[i].at.step, 1);
        assert_int_equal(f->peers[i].at.micro_batch, 0);
    }
    for (uint32_t i = 0; i < 50 * 16; i++) {
        double sum = 0;

        for (unsigned rank = 0; rank < PEERS; rank++)
            for (uint32_t m = 0; m < 2; m++)
                sum += (double)puppet_gradient(0, m, rank, 0, i);
        assert_true(fabs((double)weights[i] - ((double)puppet_initial(0, i) - 0.5 * sum / PEERS)) < 1e-6);
    }
    assert_int_equal(f->job->state->progress.epoch, 1);
    assert_int_equal(f->job->state->progress.counts[0], 1);
    fixture_free(f);
}

/* A bucket is reduced when both ranks have pushed all of it. Its slots are then free again. */
static void test_position(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, true), ticket, use;
    uint32_t parcel = f->job->layout->buckets[bucket].first_parcel;
    const struct parcel_position *at = &f->job->work.parcels[parcel].at;

    (void)userdata;
    peer_begin(a);
    peer_begin(b);
    peer_push_bucket(a, bucket);
    ticket = a->slots[parcel].ticket;
    use = a->slots[parcel].use;
    peer_push(b, fixture_first_param(f, bucket));
    fixture_drain(f);
    assert_int_equal(at->pass, 0);
    assert_int_equal(atomic_load(&a->credit->credits[ticket]), use);
    for (uint32_t i = 1; i < f->job->layout->buckets[bucket].n_params; i++)
        peer_push(b, f->job->layout->bucket_params[f->job->layout->buckets[bucket].first_param + i]);
    fixture_drain(f);
    assert_int_equal(at->micro_batch, 0);
    assert_int_equal(at->pass, 1);
    assert_int_equal(atomic_load(&a->credit->credits[ticket]), use + 1);

    for (uint32_t other = 0; other < f->job->layout->n_buckets; other++)
        if (other != bucket) {
            peer_push_bucket(a, other);
            peer_push_bucket(b, other);
        }
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE); /* all pushes of a are in the sums */
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE);
    assert_int_equal(at->micro_batch, 1);
    assert_int_equal(at->pass, 0);
    fixture_micro_batch(f);
    fixture_finish_step(f);
    assert_int_equal(at->micro_batch, 0);
    assert_int_equal(at->pass, 0);
    fixture_steps(f, FIXTURE_STEPS - 2, FIXTURE_MICRO);
    assert_int_equal(fixture_bits(f), fixture_undisturbed());
    fixture_free(f);
}

/*
 * A rank ends its micro-batch without a bucket. The bucket is then reduced with the gradients of the other rank only.
 */
static void test_bucket_of_one_rank(void **userdata)
{
    struct fixture *f = fixture_new(sgd);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t param = 0, bucket;
    const float *weights;

    (void)userdata;
    fixture_form(f, "run");
    weights = (const float *)state_weights(f->job->state, param, 0);
    bucket = f->job->layout->params[param].bucket;
    peer_begin(a);
    peer_begin(b);
    peer_push(a, param);
    peer_ask_end(a);
    peer_expect_silence(a);
    for (uint32_t i = 0; i < PUPPET_PARAMS; i++)
        if (!puppet_model[i].frozen && f->job->layout->params[i].bucket != bucket)
            peer_push(b, i);
    peer_ask_end(b);
    peer_expect(a, REPLY_DONE);
    peer_expect(b, REPLY_DONE);
    fixture_finish_step(f);
    assert_int_equal(a->reply.step_done.n_missing, f->job->layout->buckets[bucket].n_params - 1);
    for (uint32_t i = 0; i < 50 * 16; i++)
        assert_true(fabs((double)weights[i] -
                         ((double)puppet_initial(0, i) - 0.5 * (double)puppet_gradient(0, 0, 0, 0, i) / PEERS)) < 1e-6);
    fixture_free(f);
}

/* A retry is not a duplicate. A duplicate is refused until its rank clears the fault, and the first push stays. */
static void test_duplicate(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];

    (void)userdata;
    for (unsigned i = 0; i < PEERS; i++) {
        peer_begin(&f->peers[i]);
        peer_push_all(&f->peers[i]);
    }
    a->sequence--;
    peer_push(a, 0); /* repeats the last push, of parameter 0, as after a lost connection */
    assert_int_equal(f->job->stats.counters.retried, 1);
    job_push(
        f->job, a->rank,
        &(struct request_push){
            .sequence = ++a->sequence, .attempt = a->at.attempt, .step = a->at.step, .record_only = true, .sum = 1});
    peer_expect_silence(a);
    peer_ask_end(a);
    peer_expect_refused(a, E_DUPLICATE, false);
    peer_ask_end(a);
    peer_expect_refused(a, E_DUPLICATE, false); /* refused until it is cleared */
    peer_ask_end(b);
    peer_expect(b, REPLY_DONE); /* the other rank is not refused */
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    assert_int_equal(fixture_n_kept(f, E_DUPLICATE), 1);
    fixture_finish(f);
}

/* ---- requests for the step ------------------------------------------------------------------------------ */

/* Rank 0 asks for the first step without a gradient that rank 1, which is behind, may still push. */
static struct fixture *start_missing(void)
{
    struct fixture *f = fixture_new("diagnostics: {on_missing: error, stall_warning: 0, stall_timeout: 0}\n");
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t missing;

    fixture_form(f, "run");
    missing = fixture_first_param(f, fixture_bucket(f, false));
    peer_begin(a);
    peer_begin(b);
    for (uint32_t i = 0; i < PUPPET_PARAMS; i++) {
        if (puppet_model[i].frozen || i == missing)
            continue;
        peer_push(a, i);
        peer_push(b, i);
    }
    peer_ask_end(a);
    peer_expect(a, REPLY_DONE);
    peer_ask_step(a);
    peer_expect_silence(a);
    return f;
}

/* The cause in a rank's refusal depends on what the other rank does next. */
static void test_others_tell_why(void **userdata)
{
    static const char *const causes[] = {"differs between ranks", "is missing on all 2 ranks", "one rank in one step",
                                         "differs between ranks"};

    (void)userdata;
    for (unsigned i = 0; i < ARRAY_SIZE(causes); i++) {
        struct fixture *f = start_missing();
        struct peer *a = &f->peers[0], *b = &f->peers[1];

        if (i == 0 || i == 3) /* the other rank is still in its backward */
            peer_push(b, fixture_first_param(f, fixture_bucket(f, false)));
        if (i < 2) {
            peer_ask_end(b);
            peer_expect(b, REPLY_DONE);
        } else if (i == 2) {
            fixture_tick(f, 29900);
            peer_expect_silence(a);
            fixture_tick(f, 100); /* the limit of the wait */
        }
        peer_expect_refused(a, E_MISSING, false);
        if (!strstr(a->text, causes[i]))
            fail_msg("\"%s\" is not in:\n%s", causes[i], a->text);
        fixture_free(f);
    }
}

/* While a refusal waits for the other rank, an abort of that rank is reported instead. */
static void test_abort_while_others_are_awaited(void **userdata)
{
    struct fixture *f = start_missing();

    (void)userdata;
    job_abort_step(f->job, f->peers[1].rank, "why not");
    peer_expect_abort(&f->peers[0], "why not");
    fixture_free(f);
}

/* ---- room for gradients -------------------------------------------------------------------------------- */

/* Pushes one parameter in many passes, until each ticket has a slot that is free only after the other rank's push. */
static void use_up_tickets(struct peer *p, uint32_t param)
{
    peer_begin(p);
    peer_push(p, param);
    for (uint32_t i = 1; i < p->n_tickets; i++)
        peer_push_again(p, param);
    assert_int_equal(p->rank->rings[0]->n_held, p->n_tickets);
    peer_expect_silence(p);
}

static struct fixture *start_accumulating(void)
{
    struct fixture *f = fixture_new(quiet);

    f->peers[0].on_duplicate = WIRE_ON_DUPLICATE_ACCUMULATE;
    fixture_form(f, "run");
    fixture_steps(f, 1, FIXTURE_MICRO);
    return f;
}

/* E1401 repeats until it is cleared, and the step can begin again. */
static void give_up(struct fixture *f)
{
    struct peer *a = &f->peers[0];

    peer_ask_end(a);
    peer_expect_refused(a, E_QUOTA, false);
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    job_abort_step(f->job, a->rank, "out of slots");
    peer_expect(a, REPLY_DONE);
    peer_see_abort(a);
    assert_int_equal(a->rank->rings[0]->n_held, 0);
    peer_ask_end(&f->peers[1]);
    peer_expect_abort(&f->peers[1], "out of slots");
    fixture_finish(f);
}

static void test_tickets_used_up(void **userdata)
{
    struct fixture *f = start_accumulating();
    struct peer *a = &f->peers[0];
    uint32_t bucket = fixture_bucket(f, true);

    (void)userdata;
    use_up_tickets(a, fixture_first_param(f, bucket));
    peer_ask_slot(a, bucket);
    peer_expect_refused(a, E_QUOTA, false);
    assert_non_null(strstr(a->text, "slots"));
    give_up(f);
}

/* A full slot may be free soon, after another rank's push. A rank waits for that, but only for a limited time. */
static void test_tickets_used_up_by_full_slots(void **userdata)
{
    struct fixture *f = start_accumulating();
    struct peer *a = &f->peers[0];
    uint32_t bucket = fixture_bucket(f, false);
    unsigned n_soon = f->n_soon;

    (void)userdata;
    use_up_tickets(a, fixture_first_param(f, bucket));
    peer_ask_slot(a, bucket);
    peer_expect_silence(a);
    assert_true(f->n_soon > n_soon);
    fixture_tick(f, 100);
    peer_expect_silence(a);
    fixture_tick(f, 200);
    peer_expect_refused(a, E_QUOTA, false);
    give_up(f);
}

/* After a wait in vain, the next waits are short, until a slot is free in time. */
static void test_little_patience(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, false);

    (void)userdata;
    for (unsigned i = 0; i < 3; i++) { /* micro-batches: waits in vain, briefly in vain, successfully */
        peer_begin(a);
        peer_begin(b);
        peer_push_bucket(a, bucket);
        peer_ask_slot(a, bucket);
        fixture_tick(f, i == 0 ? 200 : 10);
        peer_expect_silence(a);
        if (i == 2)
            peer_push_bucket(b, bucket);
        else
            fixture_tick(f, i == 0 ? 100 : 10);
        peer_expect(a, REPLY_SLOT_GRANT);
        assert_int_equal(a->reply.slot_grant.in_ring, i == 2);
        assert_int_equal(a->rank->process.waited_in_vain, i < 2);
        for (unsigned k = 0; k < PEERS; k++) {
            job_abandon_backward(f->job, f->peers[k].rank,
                                 &(struct request_abandon_backward){.step = 1, .why = "enough"});
            if (i < 2)
                peer_expect(&f->peers[k], REPLY_DONE);
        }
    }
    fixture_free(f);
}

/*
 * If the other rank has pushed what this rank has not, that rank may wait for this one. Then this rank does not wait
 * for a slot.
 */
static void test_others_come_another_way(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, false), other = fixture_bucket(f, true);

    (void)userdata;
    peer_begin(a);
    peer_begin(b);
    peer_push_bucket(b, other);
    peer_push_bucket(a, bucket);
    peer_ask_slot(a, bucket);
    peer_expect(a, REPLY_SLOT_GRANT);
    assert_false(a->reply.slot_grant.in_ring);
    fixture_free(f);
}

/* The other rank's gradient empties a slot, and the client is told to look again. */
static void test_room_comes_back(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, false);

    (void)userdata;
    peer_begin(a);
    peer_begin(b);
    peer_push_bucket(a, bucket);
    peer_ask_slot(a, bucket);
    peer_expect_silence(a);
    peer_push_bucket(b, bucket);
    peer_expect(a, REPLY_SLOT_GRANT);
    assert_true(a->reply.slot_grant.in_ring);
    fixture_free(f);
}

/* With tickets left, and no slot that could become free, a push may use the overflow memory. */
static void test_overflow(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    uint32_t bucket = fixture_bucket(f, false), param = fixture_first_param(f, bucket);
    struct request_push push = {.param = param, .overflow = true};

    (void)userdata;
    assert_int_equal(f->job->layout->params[param].grad_dtype, puppet_model[param].grad_dtype);
    peer_begin(a);
    peer_begin(b);
    peer_ask_slot(a, bucket);
    peer_expect(a, REPLY_SLOT_GRANT);
    assert_false(a->reply.slot_grant.in_ring);
    push.offset_bytes = a->reply.slot_grant.offset_bytes;
    push.step = a->at.step;
    push.sequence = ++a->sequence;
    push.ticket = a->next_ticket++ % a->n_tickets;
    push.use = atomic_load(&a->credit->credits[push.ticket]);
    for (uint64_t i = 0; i < puppet_elems(&puppet_model[param]); i++)
        puppet_store(a->overflow + push.offset_bytes, puppet_model[param].grad_dtype, i,
                     puppet_gradient(a->at.step, a->at.micro_batch, 0, param, i));
    job_push(f->job, a->rank, &push);
    for (uint32_t i = 0; i < PUPPET_PARAMS; i++)
        if (!puppet_model[i].frozen && i != param)
            peer_push(a, i);
    peer_push_all(b);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_end(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
    fixture_finish(f);
}

/* A place that was not granted, a ticket out of range, and a slot of another bucket. */
static void test_bad_places(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    struct request_push push = {.sequence = a->sequence + 1, .step = a->at.step, .param = 0, .ticket = a->next_ticket};
    uint64_t before = f->job->kept.n_admitted;

    (void)userdata;
    push.ticket %= a->n_tickets;
    push.use = atomic_load(&a->credit->credits[push.ticket]);
    peer_begin(a);
    push.overflow = true;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    push.overflow = false;
    push.offset_bytes = a->ring_bytes - 64;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    push.offset_bytes = 0;
    push.use++;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    push.use--;
    push.ticket = a->n_tickets;
    job_push(f->job, a->rank, &push);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    peer_ask_slot(a, f->job->layout->n_buckets);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    assert_int_equal(f->job->kept.n_admitted, before);
    fixture_free(f);
}

/* ---- several pushes in one request --------------------------------------------------------------------- */

/* Return: a request that pushes the first parameter of a bucket of several, and the others, into one slot. */
static struct request several(struct peer *p, const uint32_t *others, size_t n_others)
{
    uint32_t ticket = p->next_ticket % p->n_tickets;

    return (struct request){
        .type = REQUEST_PUSHES,
        .pushes = {.first = {.sequence = p->sequence + 1,
                             .attempt = p->at.attempt,
                             .step = p->at.step,
                             .micro_batch = p->at.micro_batch,
                             .param = fixture_first_param(p->fixture, fixture_bucket(p->fixture, true)),
                             .ticket = ticket,
                             .use = atomic_load(&p->credit->credits[ticket])},
                   .others = others,
                   .n_others = n_others},
    };
}

static uint32_t second_of_bucket(const struct fixture *f)
{
    const struct layout *layout = f->job->layout;

    return layout->bucket_params[layout->buckets[fixture_bucket(f, true)].first_param + 1];
}

static void test_several(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    uint32_t second = second_of_bucket(f);
    uint64_t before = f->job->kept.n_admitted;
    struct request request = several(a, &second, 1);

    (void)userdata;
    peer_begin(a);
    request_serve(f->job, a->rank, &request);
    assert_int_equal(f->job->kept.n_admitted, before + 2);
    assert_int_equal(f->job->ledger.ranks[0].last_sequence, request.pushes.first.sequence + 1);
    assert_int_equal(ledger_entry(&f->job->ledger, 0, f->job->layout->params[second].first_part)->n_pushed, 1);
    /* A repeated request admits no push twice. */
    request_serve(f->job, a->rank, &request);
    assert_int_equal(f->job->kept.n_admitted, before + 2);
    assert_int_equal(f->job->stats.counters.retried, 2);
    fixture_free(f);
}

/* A push of another bucket closes the connection. The pushes behind it do not count. */
static void test_several_end_early(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    const uint32_t others[] = {fixture_first_param(f, fixture_bucket(f, false)), second_of_bucket(f)};
    uint64_t before = f->job->kept.n_admitted;
    struct request request = several(a, others, 2);

    (void)userdata;
    peer_begin(a);
    request_serve(f->job, a->rank, &request);
    peer_expect_dropped(a, E_BAD_MESSAGE);
    assert_int_equal(f->job->kept.n_admitted, before + 1);
    fixture_free(f);
}

/* One of the pushes aborts the step. The pushes behind it belong to the aborted attempt. */
static void test_several_with_an_abort(void **userdata)
{
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0];
    uint32_t others[3];
    uint64_t before;
    struct request request;

    (void)userdata;
    a->on_duplicate = WIRE_ON_DUPLICATE_ABORT_STEP;
    fixture_form(f, "run");
    before = f->job->kept.n_admitted;
    others[0] = fixture_first_param(f, fixture_bucket(f, true));
    others[1] = others[2] = second_of_bucket(f);
    request = several(a, others, 3);
    peer_begin(a);
    request_serve(f->job, a->rank, &request);
    assert_int_equal(f->job->ledger.attempt, 1);
    assert_int_equal(f->job->kept.n_admitted, before + 1);
    assert_int_equal(f->job->stats.counters.dropped, 2);
    assert_false(a->dropped);
    fixture_free(f);
}

/* ---- time ---------------------------------------------------------------------------------------------- */

static void test_stall(void **userdata)
{
    struct fixture *f = fixture_start("diagnostics: {stall_warning: 5s, stall_timeout: 60s}\n");
    struct peer *a = &f->peers[0];

    (void)userdata;
    peer_begin(a);
    peer_push_all(a);
    peer_ask_end(a);
    fixture_tick(f, 4999);
    assert_int_equal(fixture_n_kept(f, E_STALLED), 0);
    fixture_tick(f, 1);
    assert_int_equal(fixture_n_kept(f, E_STALLED), 1);
    fixture_tick(f, 4999); /* repeated, but less and less often */
    assert_int_equal(fixture_n_kept(f, E_STALLED), 1);
    fixture_tick(f, 1);
    assert_int_equal(fixture_n_kept(f, E_STALLED), 2);
    fixture_tick(f, 9999);
    assert_int_equal(fixture_n_kept(f, E_STALLED), 2);
    fixture_tick(f, 1);
    assert_int_equal(fixture_n_kept(f, E_STALLED), 3);
    peer_expect_silence(a);
    fixture_tick(f, 40001);
    peer_expect_abort(&f->peers[0], "E1303");
    peer_ask_end(&f->peers[1]);
    peer_expect_abort(&f->peers[1], "E1303");
    fixture_finish(f);
}

/* Before there are weights, there is no step to abort. The waiting rank is refused, and may declare again. */
static void test_stall_while_forming(void **userdata)
{
    struct fixture *f = fixture_new("diagnostics: {stall_warning: 0, stall_timeout: 10s}\n");
    struct peer *a = &f->peers[0];

    (void)userdata;
    assert_int_equal(peer_attach(a, "run"), 0);
    peer_declare(a);
    peer_ask_form(a);
    fixture_tick(f, 10001);
    peer_expect_refused(a, E_STALLED, false);
    assert_non_null(strstr(a->text, "rank 1"));
    peer_declare(a);
    peer_ask_form(a);
    peer_expect_silence(a);
    fixture_free(f);
}

/* ---- small things -------------------------------------------------------------------------------------- */

/* A client that interns too many strings is refused, and keeps those that it has. */
static void test_intern_limit(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    char text[1001];

    (void)userdata;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    for (uint32_t i = 0; i < 5000 && !a->rank->process.fault.code; i++)
        job_intern(f->job, a->rank, &(struct request_intern){.id = i, .text = text});
    assert_int_equal(a->rank->process.fault.code, E_QUOTA);
    assert_true(a->rank->process.string_bytes <= 4 << 20);
    assert_true(a->rank->process.string_bytes > (4 << 20) - 2 * sizeof(text));
    fixture_free(f);
}

static void test_read_state(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];
    float *values;

    (void)userdata;
    job_read_state(f->job, a->rank, &(struct request_read_state){.param = 0, .kind = WIRE_STATE_MASTER});
    peer_expect(a, REPLY_STATE_IS);
    assert_int_equal(a->reply.state_is.n_elems, 50 * 16);
    assert_int_equal(a->reply.state_is.count, 1);
    assert_int_equal(a->n_segments, 1);
    values = mmap(NULL, 50 * 16 * sizeof(float), PROT_READ, MAP_SHARED, a->fds[0], 0);
    assert_ptr_not_equal(values, MAP_FAILED);
    assert_memory_equal(values, state_weights(f->job->state, 0, 0), 50 * 16 * sizeof(float));
    munmap(values, 50 * 16 * sizeof(float));
    /* A question that cannot be answered is refused, and leaves no fault. */
    job_read_state(f->job, a->rank, &(struct request_read_state){.param = PUPPET_PARAMS, .kind = WIRE_STATE_MASTER});
    peer_expect_refused(a, E_BAD_MESSAGE, false);
    job_read_state(f->job, a->rank, &(struct request_read_state){.param = 8, .kind = WIRE_STATE_EXP_AVG});
    peer_expect_refused(a, E_BAD_MESSAGE, false);
    fixture_finish(f);
}

/* The client's evidence is used in the refusal of its step and attempt, and in no other. */
static void test_evidence(void **userdata)
{
    static const uint32_t ids[] = {1, 2};
    struct fixture *f = fixture_new(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    struct request_evidence evidence = {.exception = "MemoryError: later",
                                        .raised_at = "train.py:7",
                                        .swallowed_by = "train.py:9 main",
                                        .in_forward = true,
                                        .not_called = ids,
                                        .n_not_called = ARRAY_SIZE(ids)};

    (void)userdata;
    fixture_form(f, "run");
    evidence.attempt++;
    job_evidence(f->job, a->rank, &evidence); /* not the open attempt */
    assert_false(a->rank->step.evidence.present);
    evidence.attempt--;
    evidence.exception = "MemoryError: first";
    job_evidence(f->job, a->rank, &evidence);
    evidence.exception = "MemoryError: second";
    job_evidence(f->job, a->rank, &evidence);
    peer_ask_step(a);
    peer_expect_refused(a, E_MISSING, false);
    assert_non_null(strstr(a->text, "MemoryError: second\n                 raised at train.py:7\n"));
    assert_null(strstr(a->text, "first"));
    assert_non_null(strstr(a->text, "not called in this step: h.0.attn"));
    job_abort_step(f->job, a->rank, "test");
    peer_expect(a, REPLY_DONE);
    a->at = a->reply.done.position;
    job_abort_seen(f->job, a->rank, a->at.attempt);
    assert_false(a->rank->step.evidence.present);
    peer_begin(b);
    peer_push_all(b);
    peer_ask_end(b);
    peer_expect_abort(b, "test");

    evidence.attempt = a->at.attempt;
    job_evidence(f->job, a->rank, &evidence);
    fixture_steps(f, 1, FIXTURE_MICRO); /* no gradient is missing this time */
    assert_false(a->rank->step.evidence.present);
    evidence.step++;
    job_evidence(f->job, a->rank, &evidence);
    assert_true(a->rank->step.evidence.present);
    peer_die(a);
    peer_return(a, "run");
    assert_false(a->rank->step.evidence.present);
    fixture_finish(f);
}

static void test_evidence_of_nothing(void **userdata)
{
    static const uint32_t ids[] = {0, PUPPET_PARAMS};
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0];

    (void)userdata;
    job_evidence(f->job, a->rank,
                 &(struct request_evidence){
                     .step = a->at.step, .attempt = a->at.attempt, .called = ids, .n_called = ARRAY_SIZE(ids)});
    peer_expect_dropped(a, E_BAD_MESSAGE);
    fixture_free(f);
}

/* A successor's counters start at 0. Counters of an aborted attempt do not count for the step. */
static void test_counters_of_backwards(void **userdata)
{
    struct fixture *f = fixture_start(quiet);
    struct peer *a = &f->peers[0], *b = &f->peers[1];
    struct request_begin_backward begin = {.step = a->at.step, .n_forwards = 900, .n_backwards = 900};

    (void)userdata;
    job_begin_backward(f->job, a->rank, &begin);
    job_abort_step(f->job, a->rank, "test");
    peer_expect(a, REPLY_DONE);
    a->at = a->reply.done.position;
    job_abort_seen(f->job, a->rank, a->at.attempt);
    peer_ask_step(a);
    peer_expect_refused(a, E_MISSING, false);
    assert_non_null(strstr(a->text, "no gradient reached zerod in this step"));
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    peer_die(a);
    peer_return(a, "run");
    begin.attempt = a->at.attempt;
    begin.n_forwards = 2;
    begin.n_backwards = 0;
    job_begin_backward(f->job, a->rank, &begin);
    job_abandon_backward(f->job, a->rank, &(struct request_abandon_backward){.why = "zero_grad() came first"});
    peer_expect(a, REPLY_DONE);
    assert_int_equal(a->rank->kept.n_forwards - a->rank->step.n_forwards_before, 2);
    peer_ask_step(a);
    peer_expect_refused(a, E_MISSING, false);
    assert_non_null(strstr(a->text, "  reason         zero_grad() came first\n"));
    job_clear_fault(f->job, a->rank);
    peer_expect(a, REPLY_DONE);
    peer_begin(b);
    peer_push_all(b);
    peer_ask_end(b);
    peer_expect_abort(b, "test");
    fixture_finish(f);
}

TEST_GROUP(job)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forming),
        cmocka_unit_test(test_manifests_differ),
        cmocka_unit_test(test_form_refusals),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_attach),
        cmocka_unit_test(test_attach_to_what_ends),
        cmocka_unit_test(test_reconnect),
        cmocka_unit_test(test_thief),
        cmocka_unit_test(test_thief_after_resize),
        cmocka_unit_test(test_administrator_succeeds),
        cmocka_unit_test(test_drop),
        cmocka_unit_test(test_decision),
        cmocka_unit_test(test_published_page_is_asked_for),
        cmocka_unit_test(test_step),
        cmocka_unit_test(test_position),
        cmocka_unit_test(test_bucket_of_one_rank),
        cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_others_tell_why),
        cmocka_unit_test(test_abort_while_others_are_awaited),
        cmocka_unit_test(test_tickets_used_up),
        cmocka_unit_test(test_tickets_used_up_by_full_slots),
        cmocka_unit_test(test_little_patience),
        cmocka_unit_test(test_others_come_another_way),
        cmocka_unit_test(test_room_comes_back),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_bad_places),
        cmocka_unit_test(test_several),
        cmocka_unit_test(test_several_end_early),
        cmocka_unit_test(test_several_with_an_abort),
        cmocka_unit_test(test_stall),
        cmocka_unit_test(test_stall_while_forming),
        cmocka_unit_test(test_intern_limit),
        cmocka_unit_test(test_read_state),
        cmocka_unit_test(test_evidence),
        cmocka_unit_test(test_evidence_of_nothing),
        cmocka_unit_test(test_counters_of_backwards),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
