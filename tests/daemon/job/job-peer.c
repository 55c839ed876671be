/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/daemon/job/job-peer.h"

#include <stdio.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "core/base/base.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/form.h"
#include "daemon/job/init.h"
#include "daemon/job/job.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/stall.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/memory/ring.h"
#include "daemon/job/transaction/boundary.h"

/* ---- what the job says --------------------------------------------------------------------------------- */

static void take_position(struct peer *p)
{
    switch (p->reply.type) {
    case REPLY_FORMED:
        p->at = p->reply.formed.position;
        break;
    case REPLY_DONE:
        p->at = p->reply.done.position;
        break;
    case REPLY_STEP_DONE:
        p->at = p->reply.step_done.position;
        break;
    case REPLY_REFUSED:
        p->at = p->reply.refused.position;
        break;
    default:
        break;
    }
}

static void close_fds(struct peer *p)
{
    for (size_t i = 0; i < p->n_segments; i++)
        close(p->fds[i]);
    p->n_segments = 0;
}

static void on_answer(void *userdata, void *peer, const struct reply *reply, int *fds, size_t n_fds)
{
    struct peer *p = peer;

    (void)userdata;
    if (reply->type == REPLY_STEP_DONE && reply->step_done.is_decision) { /* a decision is no answer */
        p->decision = reply->step_done;
        p->n_decisions++;
        return;
    }
    assert_int_equal(p->n_answers, p->n_heard); /* one request at a time, with one answer each */
    close_fds(p);
    p->n_answers++;
    p->fixture->n_answers++;
    p->reply = *reply;
    p->n_segments = n_fds;
    for (size_t i = 0; i < n_fds; i++) {
        p->fds[i] = fds[i];
        if (reply->type == REPLY_FORMED)
            p->segments[i] = reply->formed.segments[i];
        if (reply->type == REPLY_STATE_IS)
            p->segments[i] = reply->state_is.segments[i];
    }
    p->code = 0;
    if (reply->type == REPLY_REFUSED) {
        p->code = reply->refused.diagnostic.code;
        snprintf(p->text, sizeof(p->text), "%s", reply->refused.diagnostic.text);
    }
    if (reply->type != REPLY_REFUSED || reply->refused.aborted)
        take_position(p);
}

static void on_drop(void *userdata, void *peer, const struct diagnostic *diagnostic)
{
    struct peer *p = peer;

    (void)userdata;
    p->dropped = true;
    p->dropped_code = diagnostic ? diagnostic->code : 0;
}

static void on_log(void *userdata, const struct diagnostic *diagnostic)
{
    (void)userdata;
    assert_non_null(diagnostic->text);
}

static uint64_t on_now(void *userdata)
{
    return ((struct fixture *)userdata)->now_ns;
}

static void on_soon(void *userdata, unsigned delay_ms)
{
    assert_true(delay_ms > 0);
    ((struct fixture *)userdata)->n_soon++;
}

/* ---- fixture ------------------------------------------------------------------------------------------- */

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static struct config *load(const struct fixture_options *options)
{
    static const char format[] = "listen: {socket: /run/zerod/unused.sock}\n"
                                 "world: %s\n"
                                 "zero_optimization: {stage: %u, reduce_bucket_size: 2000, stage3_on_one_node: gathered}\n"
                                 "%s";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    char text[1024];
    int r;

    snprintf(text, sizeof(text), format, options->world, options->stage, options->more);
    r = config_load_string(&config, &(struct config_source){.text = {"f.yaml", text, strlen(text)}}, &problems);
    if (r != 0)
        config_problems_print(stderr, &problems);
    assert_int_equal(r, 0);
    config_problems_deinit(&problems);
    return config;
}

struct fixture *fixture_new(const char *more)
{
    return fixture_new_with(&(struct fixture_options){.world = "{size: 2}", .n = PEERS, .stage = 2, .more = more});
}

struct fixture *fixture_new_with(const struct fixture_options *options)
{
    struct fixture *f = calloc(1, sizeof(*f));
    const struct job_ops ops = {
        .answer = on_answer, .drop = on_drop, .log = on_log, .now_ns = on_now, .soon = on_soon, .userdata = f};
    const struct kernels *kernels;
    char why[128];

    assert_non_null(f);
    f->config = load(options);
    f->now_ns = UINT64_C(1000000000);
    assert_int_equal(kernels_select(&kernels, NULL, why, sizeof(why)), 0);
    assert_int_equal(worker_pool_new(&f->pool, 2, ignore_notice, NULL), 0);
    assert_int_equal(job_new(&f->job, f->config, kernels, f->pool, &ops), 0);
    for (unsigned i = 0; i < options->n; i++)
        f->peers[i] = (struct peer){.fixture = f, .number = options->first + i};
    return f;
}

/* Waits for the next event. Return: whether anything happened. Settles the job before and after it, like a server. */
static bool advance(struct fixture *f)
{
    unsigned n_answers = f->n_answers;
    bool any;

    job_settle(f->job);
    any = f->advance ? f->advance(f->advance_userdata) : worker_pool_wait(f->pool) > 0;
    job_settle(f->job);
    return any || f->n_answers > n_answers;
}

void fixture_drain(struct fixture *f)
{
    while (advance(f))
        ;
}

void fixture_free(struct fixture *f)
{
    f->job->run.stopping = true;
    for (unsigned i = 0; i < FIXTURE_MAX_PEERS; i++)
        if (f->peers[i].rank)
            peer_die(&f->peers[i]);
    fixture_drain(f);
    job_free(f->job);
    worker_pool_free(f->pool);
    config_free(f->config);
    free(f);
}

void fixture_tick(struct fixture *f, uint64_t later_ms)
{
    f->now_ns += later_ms * UINT64_C(1000000);
    job_settle(f->job);
    job_tick(f->job);
    job_settle(f->job);
}

uint64_t fixture_bits(const struct fixture *f)
{
    const struct state *state = f->job->state;

    return XXH3_64bits_withSeed(state->weights.map, state->weights.n_bytes,
                                XXH3_64bits(state->state.map, state->state.n_bytes));
}

unsigned fixture_n_kept(const struct fixture *f, unsigned code)
{
    const struct diagnostic *kept[KEPT_MAX];
    size_t n_kept = kept_list(&f->job->diagnostics.kept, kept);
    unsigned n = 0;

    for (size_t i = 0; i < n_kept; i++)
        n += kept[i]->code == code;
    return n;
}

/* ---- answers ------------------------------------------------------------------------------------------- */

void peer_expect(struct peer *p, enum reply_type type)
{
    job_settle(p->fixture->job);
    while (p->n_answers == p->n_heard)
        if (!advance(p->fixture))
            fail_msg("rank %u: no %s, and nothing is under way", p->number, reply_type_name(type));
    p->n_heard++;
    if (p->reply.type != type)
        fail_msg("rank %u: expected %s, got %s\n%s", p->number, reply_type_name(type), reply_type_name(p->reply.type),
                 p->code ? p->text : "");
}

void peer_expect_refused(struct peer *p, unsigned code, bool aborted)
{
    peer_expect(p, REPLY_REFUSED);
    if (p->code != code || p->reply.refused.aborted != aborted)
        fail_msg("rank %u: expected E%u%s, got\n%s", p->number, code, aborted ? " and an abort" : "", p->text);
}

void peer_expect_silence(struct peer *p)
{
    fixture_drain(p->fixture);
    if (p->n_answers != p->n_heard)
        fail_msg("rank %u: expected nothing, got %s\n%s", p->number, reply_type_name(p->reply.type),
                 p->code ? p->text : "");
    assert_false(p->dropped);
}

void peer_expect_dropped(struct peer *p, unsigned code)
{
    job_settle(p->fixture->job);
    assert_true(p->dropped);
    assert_int_equal(p->dropped_code, code);
    p->dropped = false;
}

/* ---- coming and going ---------------------------------------------------------------------------------- */

unsigned peer_attach(struct peer *p, const char *run_id)
{
    struct fixture *f = p->fixture;
    struct diagnostic *refusal = NULL;
    struct request_hello hello = {.version_min = WIRE_VERSION,
                                  .version_max = WIRE_VERSION,
                                  .rank = p->number,
                                  .run_id = run_id,
                                  .incarnation = UINT64_C(0x5ec4e7) + ++f->n_incarnations,
                                  .client = "test",
                                  .on_duplicate = p->on_duplicate};
    unsigned code;

    p->incarnation = hello.incarnation;
    p->sequence = 0;
    p->n_heard = p->n_answers;
    if (job_attach(f->job,
                   &(struct job_attach){
                       .peer = p, .hello = &hello, .pid = 1000 + p->number, .all_had_left = job_all_left(f->job)},
                   &p->rank, &refusal) == 0)
        return 0;
    code = refusal->code;
    diagnostic_unref(refusal);
    return code;
}

static void unmap(void *p, size_t n_bytes)
{
    if (p)
        munmap(p, n_bytes);
}

static void forget_segments(struct peer *p)
{
    close_fds(p);
    unmap(p->ring, p->ring_bytes);
    unmap(p->overflow, p->overflow_bytes);
    unmap((void *)(uintptr_t)p->credit, p->credit_bytes);
    p->ring = p->overflow = NULL;
    p->credit = NULL;
}

void peer_die(struct peer *p)
{
    struct job_rank *rank = steal_ptr(p->rank);

    job_detach(p->fixture->job, rank);
    job_settle(p->fixture->job);
    forget_segments(p);
}

void peer_leave(struct peer *p)
{
    job_leave(p->fixture->job, p->rank);
    job_settle(p->fixture->job);
    peer_expect(p, REPLY_DONE);
    peer_die(p);
}

void peer_declare(struct peer *p)
{
    struct layout_decl decls[PUPPET_PARAMS];

    for (uint32_t i = 0; i < PUPPET_PARAMS; i++) {
        const struct puppet_param *m = &puppet_model[i];

        decls[i] = (struct layout_decl){
            .name = m->name,
            .name_len = strlen(m->name),
            .dtype = (enum dtype)m->dtype,
            .grad_dtype = (enum dtype)m->grad_dtype,
            .group = m->group,
            .trainable = !m->frozen,
            .n_dims = m->n_dims,
            .shape = m->shape,
        };
    }
    job_declare(p->fixture->job, p->rank, &(struct request_declare){.params = decls, .n_params = PUPPET_PARAMS});
}

void peer_ask_form(struct peer *p)
{
    job_form(p->fixture->job, p->rank,
             &(struct request_form){.n_params = PUPPET_PARAMS, .wants_published = p->overlaps});
}

static void *map(int fd, size_t n_bytes, int protection)
{
    void *p = mmap(NULL, n_bytes, protection, MAP_SHARED, fd, 0);

    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

void peer_take_formed(struct peer *p)
{
    peer_expect(p, REPLY_FORMED);
    assert_int_equal(p->n_segments, 4 + p->overlaps);
    for (size_t i = 0; i < p->n_segments; i++) {
        size_t n = p->segments[i].n_bytes;

        switch (p->segments[i].kind) {
        case WIRE_SEGMENT_RING:
            p->ring = map(p->fds[i], p->ring_bytes = n, PROT_READ | PROT_WRITE);
            break;
        case WIRE_SEGMENT_OVERFLOW:
            p->overflow = map(p->fds[i], p->overflow_bytes = n, PROT_READ | PROT_WRITE);
            break;
        case WIRE_SEGMENT_CREDIT:
            p->credit = map(p->fds[i], p->credit_bytes = n, PROT_READ);
            break;
        case WIRE_SEGMENT_PUBLISHED:
            break;
        default:
            assert_int_equal(p->segments[i].kind,
                             p->fixture->config->zero.stage == 3 ? WIRE_SEGMENT_POOL : WIRE_SEGMENT_WEIGHTS);
        }
    }
    p->n_tickets = p->reply.formed.n_tickets;
    p->next_ticket = 0;
    p->next_place_bytes = 0;
    assert_int_equal(p->credit->n_tickets, p->n_tickets);
    assert_true(p->fixture->job->layout->n_parcels <= PEER_MAX_PARCELS);
    memset(p->slots, 0, sizeof(p->slots));
}

void peer_init_weights(struct peer *p)
{
    for (uint32_t i = 0; i < PUPPET_PARAMS; i++) {
        uint64_t n = puppet_elems(&puppet_model[i]);

        for (uint64_t k = 0; k < n; k++)
            puppet_store(p->ring, puppet_model[i].dtype, k, puppet_initial(i, k));
        job_init(p->fixture->job, p->rank, &(struct request_init){.param = i, .n_elems = n});
        peer_expect(p, REPLY_DONE);
    }
}

void peer_ready(struct peer *p)
{
    job_ready(p->fixture->job, p->rank);
}

void peer_return(struct peer *p, const char *run_id)
{
    assert_int_equal(peer_attach(p, run_id), 0);
    peer_declare(p);
    peer_ask_form(p);
    peer_take_formed(p);
    assert_true(p->reply.formed.resumed);
    peer_ready(p);
    peer_expect(p, REPLY_DONE);
}

void fixture_form(struct fixture *f, const char *run_id)
{
    for (unsigned i = 0; i < PEERS; i++) {
        assert_int_equal(peer_attach(&f->peers[i], run_id), 0);
        peer_declare(&f->peers[i]);
        peer_ask_form(&f->peers[i]);
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_take_formed(&f->peers[i]);
    peer_init_weights(&f->peers[0]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_ready(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
}

/* ---- a micro-batch ------------------------------------------------------------------------------------- */

static const struct layout *layout_of(const struct peer *p)
{
    return p->fixture->job->layout;
}

/* Opens a slot behind the last one in the ring. The ring is far larger than all slots in use at one time. */
static void open_slot(struct peer *p, uint32_t parcel, uint32_t pass)
{
    uint64_t n_bytes = round_up(layout_parcel_bytes(layout_of(p), parcel), 64);
    uint32_t ticket = p->next_ticket++ % p->n_tickets;

    if (p->next_place_bytes + n_bytes > p->rank->rings[0]->ring_bytes) /* the mapping has whole pages */
        p->next_place_bytes = 0;
    p->slots[parcel] = (struct peer_slot){
        .open = true,
        .ticket = ticket,
        .use = atomic_load(&p->credit->credits[ticket]),
        .pass = pass,
        .offset_bytes = p->next_place_bytes,
    };
    p->next_place_bytes += n_bytes;
}

void peer_push_part(struct peer *p, uint32_t part, bool other)
{
    const struct layout_part *lp = &layout_of(p)->parts[part];
    uint32_t param = lp->param, first = layout_of(p)->params[param].first_part;
    float factor = p->factor ? p->factor(p, param) : 1;
    const struct peer_slot *slot;
    uint8_t *data;

    if (!p->slots[lp->parcel].open)
        open_slot(p, lp->parcel, 0);
    slot = &p->slots[lp->parcel];
    data = p->ring + slot->offset_bytes + layout_part_offset_bytes(layout_of(p), part);
    for (uint64_t i = 0; i < lp->n_elems; i++)
        puppet_store(data, (int)layout_of(p)->params[param].grad_dtype, i,
                     factor * puppet_gradient(p->at.step, p->at.micro_batch, p->number, param, lp->start_elem + i) +
                         (other ? 0.25f : 0));
    job_push(p->fixture->job, p->rank,
             &(struct request_push){.sequence = ++p->sequence,
                                    .attempt = p->at.attempt,
                                    .step = p->at.step,
                                    .micro_batch = p->at.micro_batch,
                                    .param = param,
                                    .part = part - first,
                                    .ticket = slot->ticket,
                                    .use = slot->use,
                                    .offset_bytes = slot->offset_bytes,
                                    .pass = slot->pass});
}

static void push(struct peer *p, uint32_t param, bool other)
{
    const struct layout_param *lp = &layout_of(p)->params[param];

    for (uint32_t i = 0; i < lp->n_parts; i++)
        peer_push_part(p, lp->first_part + i, other);
}

void peer_begin(struct peer *p)
{
    memset(p->slots, 0, sizeof(p->slots));
    job_begin_backward(p->fixture->job, p->rank,
                       &(struct request_begin_backward){
                           .step = p->at.step, .micro_batch = p->at.micro_batch, .attempt = p->at.attempt});
}

void peer_push(struct peer *p, uint32_t param)
{
    push(p, param, false);
}

void peer_push_other(struct peer *p, uint32_t param)
{
    push(p, param, true);
}

void peer_push_bucket(struct peer *p, uint32_t bucket)
{
    const struct layout_bucket *b = &layout_of(p)->buckets[bucket];

    for (uint32_t i = 0; i < b->n_params; i++)
        peer_push(p, layout_of(p)->bucket_params[b->first_param + i]);
}

void peer_push_all(struct peer *p)
{
    for (uint32_t i = PUPPET_PARAMS; i-- > 0;)
        if (!puppet_model[i].frozen)
            peer_push(p, i);
}

void peer_push_again(struct peer *p, uint32_t param)
{
    const struct layout_param *lp = &layout_of(p)->params[param];

    for (uint32_t i = 0; i < lp->n_parts; i++) {
        uint32_t parcel = layout_of(p)->parts[lp->first_part + i].parcel;

        open_slot(p, parcel, p->slots[parcel].pass + 1);
    }
    push(p, param, false);
}

void peer_ask_end(struct peer *p)
{
    job_end_backward(
        p->fixture->job, p->rank,
        &(struct request_end_backward){.step = p->at.step, .micro_batch = p->at.micro_batch, .attempt = p->at.attempt});
}

void peer_ask_step(struct peer *p)
{
    job_step(
        p->fixture->job, p->rank,
        &(struct request_step){
            .step = p->at.step, .attempt = p->at.attempt, .found_inf = p->finds_inf, .wants_decision = p->overlaps});
}

void peer_ask_slot(struct peer *p, uint32_t bucket)
{
    const struct request_slot_request request = {.bucket = bucket};

    job_slot_request(p->fixture->job, p->rank, &request);
    if (p->n_answers == p->n_heard || p->reply.type != REPLY_SLOT_GRANT || !p->reply.slot_grant.in_ring)
        return;
    p->n_heard++; /* the grant says that slots are free again, so a client looks, and asks again */
    job_slot_request(p->fixture->job, p->rank, &request);
}

void peer_see_abort(struct peer *p)
{
    job_abort_seen(p->fixture->job, p->rank, p->at.attempt);
}

void peer_expect_abort(struct peer *p, const char *reason)
{
    peer_expect_refused(p, E_RANK_LOST, true);
    if (!strstr(p->text, reason))
        fail_msg("\"%s\" is not in:\n%s", reason, p->text);
    peer_see_abort(p);
}

/* ---- all ranks ----------------------------------------------------------------------------------------- */

void fixture_micro_batch(struct fixture *f)
{
    for (unsigned i = 0; i < PEERS; i++) {
        peer_begin(&f->peers[i]);
        peer_push_all(&f->peers[i]);
    }
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_end(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++)
        peer_expect(&f->peers[i], REPLY_DONE);
}

void fixture_finish_step(struct fixture *f)
{
    for (unsigned i = 0; i < PEERS; i++)
        peer_ask_step(&f->peers[i]);
    for (unsigned i = 0; i < PEERS; i++) {
        peer_expect(&f->peers[i], REPLY_STEP_DONE);
        assert_true(f->peers[i].reply.step_done.applied);
    }
}

void fixture_steps(struct fixture *f, unsigned n_steps, unsigned n_micro)
{
    for (unsigned step = 0; step < n_steps; step++) {
        while (f->peers[0].at.micro_batch < n_micro)
            fixture_micro_batch(f);
        fixture_finish_step(f);
    }
}

uint64_t fixture_undisturbed(void)
{
    static uint64_t bits;

    if (!bits) {
        struct fixture *f = fixture_start(FIXTURE_QUIET);

        fixture_steps(f, FIXTURE_STEPS - 1, FIXTURE_MICRO);
        bits = fixture_bits(f);
        fixture_free(f);
    }
    return bits;
}

struct fixture *fixture_start(const char *more)
{
    struct fixture *f = fixture_new(more);

    fixture_form(f, "run");
    fixture_steps(f, 1, FIXTURE_MICRO);
    return f;
}

void fixture_finish(struct fixture *f)
{
    fixture_steps(f, FIXTURE_STEPS - 1, FIXTURE_MICRO);
    assert_int_equal(f->job->state->progress.epoch, FIXTURE_STEPS);
    assert_int_equal(fixture_bits(f), fixture_undisturbed());
    fixture_free(f);
}

uint32_t fixture_bucket(const struct fixture *f, bool several)
{
    const struct layout *layout = f->job->layout;

    for (uint32_t b = 0; b < layout->n_buckets; b++)
        if ((layout->buckets[b].n_params > 1) == several && layout->buckets[b].n_parcels == 1)
            return b;
    fail_msg("the model has no such bucket");
    return 0;
}

uint32_t fixture_first_param(const struct fixture *f, uint32_t bucket)
{
    return f->job->layout->bucket_params[f->job->layout->buckets[bucket].first_param];
}
