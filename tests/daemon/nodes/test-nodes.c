/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A job on several nodes and the same job on one, in one process: real jobs and trainers, with engines that copy
 * (node-mesh.h). In any order of messages and bytes, and with breaks, all nodes together must have the bits of the job
 * on one node.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "core/base/base.h"
#include "daemon/job/attendance.h"
#include "daemon/job/model/kept.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/client-report.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/step/executor.h"
#include "tests/daemon/job/job-peer.h"
#include "tests/daemon/nodes/node-mesh.h"
#include "tests/tiers.h"

enum { MAX_NODES = 3, STEPS = 3 };

/* How many ranks each node has. A 0 ends the list. */
struct topology {
    unsigned ranks[MAX_NODES + 1];
};

/* Nodes whose ranks are whole subtrees of the sum; a node whose two ranks are not; three nodes. */
static const struct topology topologies[] = {{{2, 2}}, {{1, 2}}, {{1, 1, 1}}, {{2, 1, 1}}};

/* What all ranks do. */
struct program {
    unsigned stage, n_micro;
    const char *more;
    bool misses;   /* some parameters are pushed by some ranks only, or by none */
    bool tells;    /* clients send evidence about missing gradients */
    bool passes;   /* some parameters are pushed twice */
    bool norm;     /* the ranks ask for the norm before each step */
    bool reads;    /* the ranks read state and weights after each step */
    int leaves;    /* the rank that leaves after the first step; -1: any may; 0: none */
    bool gives_up; /* each rank in turn abandons a backward after its last push */
    bool dies;     /* each rank in turn dies after its last push */
};

struct world {
    const struct program *program;
    unsigned n_nodes, n_ranks;
    struct fixture *fixtures[MAX_NODES];
    struct peer *peers[FIXTURE_MAX_PEERS];
    struct mesh *mesh; /* NULL for a job on one node */
    double norms[STEPS];
    bool gone[FIXTURE_MAX_PEERS];
};

/* ---- life ---------------------------------------------------------------------------------------------- */

static void add_node(struct world *w, const char *world, unsigned n)
{
    const struct program *program = w->program;
    struct fixture *f;
    char more[256];

    snprintf(more, sizeof(more), "%s%s%s",
             program->leaves ? "diagnostics: {stall_warning: 0, stall_timeout: 0, on_leave: continue}\n"
                             : FIXTURE_QUIET,
             w->mesh ? "collective: gloo\n" : "", program->more ? program->more : "");
    f = fixture_new_with(
        &(struct fixture_options){.world = world, .first = w->n_ranks, .n = n, .stage = program->stage, .more = more});
    if (w->mesh) {
        mesh_join(w->mesh, w->n_nodes, f->job, f->pool);
        f->advance = mesh_advance;
        f->advance_userdata = w->mesh;
    }
    for (unsigned i = 0; i < n; i++) {
        f->peers[i].on_duplicate = program->passes ? WIRE_ON_DUPLICATE_ACCUMULATE : WIRE_ON_DUPLICATE_AS_CONFIGURED;
        w->peers[w->n_ranks++] = &f->peers[i];
    }
    w->fixtures[w->n_nodes++] = f;
}

/* Rank 0 dies when it has sent all initial weights. Its successor is not asked for them. */
static void replace_first(struct world *w)
{
    struct peer *p = w->peers[0];

    peer_die(p);
    assert_int_equal(peer_attach(p, "run"), 0);
    peer_declare(p);
    peer_ask_form(p);
    peer_take_formed(p);
    assert_false(p->reply.formed.init_wanted);
    peer_ready(p);
}

/* Forms the job, after all ranks have declared. */
static void finish_forming(struct world *w)
{
    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_take_formed(w->peers[r]);
    peer_init_weights(w->peers[0]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_ready(w->peers[r]);
    if (w->program->dies)
        replace_first(w);
    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_expect(w->peers[r], REPLY_DONE);
}

static void form(struct world *w)
{
    for (unsigned r = 0; r < w->n_ranks; r++) {
        assert_int_equal(peer_attach(w->peers[r], "run"), 0);
        peer_declare(w->peers[r]);
        peer_ask_form(w->peers[r]);
    }
    finish_forming(w);
}

static unsigned count_ranks(const struct topology *topology)
{
    unsigned n = 0;

    for (const unsigned *ranks = topology->ranks; *ranks; ranks++)
        n += *ranks;
    return n;
}

/* Makes a job to which no rank is attached. */
static struct world *world_make(const struct program *program, const struct topology *topology, uint64_t seed,
                                unsigned n_breaks)
{
    struct world *w = calloc(1, sizeof(*w));
    unsigned n_nodes = 0;
    char nodes[128] = "", world[256];

    assert_non_null(w);
    w->program = program;
    while (topology->ranks[n_nodes]) {
        size_t n = strlen(nodes);

        snprintf(nodes + n, sizeof(nodes) - n, "%s{address: 'n%u:1', ranks: %u}", n_nodes ? ", " : "", n_nodes,
                 topology->ranks[n_nodes]);
        n_nodes++;
    }
    w->mesh = mesh_new(n_nodes, seed, n_breaks);
    for (unsigned i = 0; i < n_nodes; i++) {
        snprintf(world, sizeof(world), "{size: %u, nodes: [%s], node: %u, key_file: /nowhere/key}",
                 count_ranks(topology), nodes, i);
        add_node(w, world, topology->ranks[i]);
    }
    return w;
}

static struct world *world_new(const struct program *program, const struct topology *topology, uint64_t seed,
                               unsigned n_breaks)
{
    struct world *w = world_make(program, topology, seed, n_breaks);

    form(w);
    return w;
}

/* Makes a job on one node with the same number of ranks. */
static struct world *world_of_one(const struct program *program, const struct topology *topology)
{
    struct world *w = calloc(1, sizeof(*w));
    char world[32];

    assert_non_null(w);
    w->program = program;
    snprintf(world, sizeof(world), "{size: %u}", count_ranks(topology));
    add_node(w, world, count_ranks(topology));
    form(w);
    return w;
}

static void world_free(struct world *w)
{
    for (unsigned i = 0; i < w->n_nodes; i++)
        w->fixtures[i]->job->run.stopping = true;
    fixture_drain(w->fixtures[0]);
    for (unsigned i = 0; i < w->n_nodes; i++) {
        w->fixtures[i]->advance = NULL; /* other nodes may be freed already */
        fixture_free(w->fixtures[i]);
    }
    if (w->mesh)
        mesh_free(w->mesh);
    free(w);
}

/* Lets a random number of events happen. */
static void stir(struct world *w)
{
    for (uint64_t i = w->mesh ? mesh_draw(w->mesh, 6) : 0; i > 0; i--)
        mesh_advance(w->mesh);
}

/* ---- a step -------------------------------------------------------------------------------------------- */

static bool is_missed(const struct world *w, unsigned rank, uint32_t param, unsigned micro_batch)
{
    if (!w->program->misses)
        return false;
    switch (param) {
    case 2:
        return true;
    case 0:
        return rank != 0;
    case 7: /* the parameter that is larger than a bucket */
        return rank != w->n_ranks - 1 || micro_batch == 0;
    case 3:
        return (rank + micro_batch) % 2;
    default:
        return false;
    }
}

static void push_all(struct world *w, unsigned rank)
{
    struct peer *p = w->peers[rank];

    for (uint32_t i = PUPPET_PARAMS; i-- > 0;) {
        if (puppet_model[i].frozen || is_missed(w, rank, i, p->at.micro_batch))
            continue;
        peer_push(p, i);
        stir(w);
    }
    for (uint32_t i = 0; w->program->passes && i < PUPPET_PARAMS; i += 3)
        if (!puppet_model[i].frozen && !is_missed(w, rank, i, p->at.micro_batch) && (rank + i) % 2)
            peer_push_again(p, i);
}

/*
 * Does a backward and abandons it. If the rank is its node's only one, all its gradients are announced to other nodes.
 */
static void give_up(struct world *w, struct peer *p)
{
    peer_begin(p);
    push_all(w, p->number);
    stir(w);
    job_abandon_backward(
        p->fixture->job, p->rank,
        &(struct request_abandon_backward){
            .step = p->at.step, .micro_batch = p->at.micro_batch, .attempt = p->at.attempt, .why = "bad batch"});
    peer_expect(p, REPLY_DONE);
}

/*
 * The rank dies after its pushes, and its successor pushes the same gradients again. Parcels that other nodes' ranks
 * have not pushed are in no sum.
 */
static void die(struct world *w, struct peer *p)
{
    peer_begin(p);
    push_all(w, p->number);
    stir(w);
    peer_die(p);
    stir(w);
    peer_return(p, "run");
}

static void micro_batch(struct world *w)
{
    unsigned unlucky = (w->peers[0]->at.micro_batch + (unsigned)w->peers[0]->at.step) % w->n_ranks;

    if (w->program->gives_up)
        give_up(w, w->peers[unlucky]);
    if (w->program->dies)
        die(w, w->peers[unlucky]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            peer_begin(w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            push_all(w, r);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            peer_ask_end(w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            peer_expect(w->peers[r], REPLY_DONE);
}

/* Asserts that all ranks get the same norm. */
static void ask_norm(struct world *w, unsigned step)
{
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            job_grad_norm(w->peers[r]->fixture->job, w->peers[r]->rank);
    for (unsigned r = 0; r < w->n_ranks; r++) {
        if (w->gone[r])
            continue;
        peer_expect(w->peers[r], REPLY_DONE);
        if (r == 0)
            w->norms[step] = w->peers[r]->reply.done.norm;
        assert_true(w->peers[r]->reply.done.norm == w->norms[step] && w->norms[step] > 0);
    }
}

/* Sends evidence about missing gradients, different for each rank, and not in every step. */
static void tell_evidence(struct world *w, struct peer *p)
{
    static const uint32_t params[] = {0, 2, 3};
    unsigned n = 1 + p->number % 3;
    const struct request_evidence evidence = {.step = p->at.step,
                                              .attempt = p->at.attempt,
                                              .exception = p->number == 2 ? "ValueError: no tokens" : "",
                                              .raised_at = p->number == 2 ? "moe.py:7" : "",
                                              .swallowed_by = "",
                                              .dead_segment = "",
                                              .site = "",
                                              .n_forwards = 1,
                                              .n_backwards = 1,
                                              .not_called = params,
                                              .n_not_called = n,
                                              .called = params + n,
                                              .n_called = ARRAY_SIZE(params) - n};

    if (w->program->tells && (p->at.step + p->number) % 2 == 0)
        job_evidence(p->fixture->job, p->rank, &evidence);
}

static void finish_step(struct world *w, unsigned step)
{
    if (w->program->norm)
        ask_norm(w, step);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            tell_evidence(w, w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            peer_ask_step(w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++) {
        const struct reply_step_done *done = &w->peers[r]->reply.step_done;

        if (w->gone[r])
            continue;
        peer_expect(w->peers[r], REPLY_STEP_DONE);
        assert_true(done->applied);
        if (r == 0 && !w->program->norm)
            w->norms[step] = done->norm;
        assert_true(done->norm == w->norms[step]);
    }
}

/* ---- what came of it ----------------------------------------------------------------------------------- */

static void assert_same_floats(const float *a, const float *b, uint64_t n)
{
    if (n > 0)
        assert_memory_equal(a, b, n * sizeof(*a));
}

static void compare_state(const struct job *node, const struct job *one)
{
    for (uint32_t b = 0; b < node->layout->n_buckets; b++) {
        const struct state_bucket *bucket = &node->state->buckets[b];

        for (int kind = 0; kind < STATE_N_KINDS; kind++)
            assert_same_floats(state_values(node->state, (enum state_kind)kind, b, bucket->owned_start),
                               state_values(one->state, (enum state_kind)kind, b, bucket->owned_start),
                               bucket->owned_elems);
    }
    assert_int_equal(node->state->weights.n_bytes, one->state->weights.n_bytes);
    if (one->state->weights.n_bytes > 0)
        assert_memory_equal(node->state->weights.map, one->state->weights.map, one->state->weights.n_bytes);
    assert_int_equal(node->state->progress.epoch, one->state->progress.epoch);
    assert_memory_equal(node->state->progress.counts, one->state->progress.counts,
                        node->layout->n_params * sizeof(uint64_t));
}

/* Compares the state that two ranks of different jobs read. */
static void compare_read(struct peer *a, struct peer *b, uint32_t param, enum wire_state_kind kind)
{
    uint64_t n_bytes = puppet_elems(&puppet_model[param]) * sizeof(float);
    void *maps[2];

    for (unsigned i = 0; i < 2; i++) {
        struct peer *p = i ? b : a;

        job_read_state(p->fixture->job, p->rank, &(struct request_read_state){.param = param, .kind = kind});
        peer_expect(p, REPLY_STATE_IS);
        assert_int_equal(p->n_segments, n_bytes > 0);
        if (n_bytes == 0)
            continue;
        maps[i] = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, p->fds[0], 0);
        assert_ptr_not_equal(maps[i], MAP_FAILED);
    }
    if (n_bytes == 0)
        return;
    assert_memory_equal(maps[0], maps[1], n_bytes);
    munmap(maps[0], n_bytes);
    munmap(maps[1], n_bytes);
}

/* All ranks ask at once, so questions of several nodes overlap. */
static void compare_param_norms(struct world *w, struct world *one, uint32_t param)
{
    const struct request_read_state request = {.param = param, .kind = WIRE_STATE_GRAD_NORM};
    double norm;

    job_read_state(one->fixtures[0]->job, one->peers[0]->rank, &request);
    peer_expect(one->peers[0], REPLY_STATE_IS);
    norm = one->peers[0]->reply.state_is.norm;
    assert_true(norm > 0);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (!w->gone[r])
            job_read_state(w->peers[r]->fixture->job, w->peers[r]->rank, &request);
    for (unsigned r = 0; r < w->n_ranks; r++) {
        if (w->gone[r])
            continue;
        peer_expect(w->peers[r], REPLY_STATE_IS);
        assert_true(w->peers[r]->reply.state_is.norm == norm);
        assert_int_equal(w->peers[r]->reply.state_is.count, one->peers[0]->reply.state_is.count);
    }
}

static void assert_gathered_equal(const struct peer *a, const struct peer *b)
{
    const struct layout *layout = a->fixture->job->layout;

    for (uint32_t i = 0; i < PUPPET_PARAMS; i++) {
        uint64_t n = layout->params[i].n_elems * dtype_size(layout->params[i].dtype);

        if (n > 0)
            assert_memory_equal(a->fixture->job->executor->landing->map + layout->params[i].range_offset_bytes,
                                b->fixture->job->executor->landing->map + layout->params[i].range_offset_bytes, n);
    }
}

/* All ranks gather at once, so a node sends more parameters than it has places to round them in. */
static void compare_gathered(struct world *w, struct world *one)
{
    uint32_t params[PUPPET_PARAMS];
    struct peer **peers[] = {w->peers, one->peers};

    for (uint32_t i = 0; i < PUPPET_PARAMS; i++)
        params[i] = i;
    for (unsigned k = 0; k < 2 * w->n_ranks; k++) {
        struct peer *p = peers[k % 2][k / 2];

        job_gather(p->fixture->job, p->rank, &(struct request_gather){.params = params, .n_params = PUPPET_PARAMS});
    }
    for (unsigned k = 0; k < 2 * w->n_ranks; k++)
        peer_expect(peers[k % 2][k / 2], REPLY_DONE);
    for (unsigned r = 0; r < w->n_ranks; r++)
        assert_gathered_equal(w->peers[r], one->peers[r]);
    for (unsigned k = 0; k < 2 * w->n_ranks; k++) {
        struct peer *p = peers[k % 2][k / 2];

        job_release(p->fixture->job, p->rank, &(struct request_release){.params = params, .n_params = PUPPET_PARAMS});
    }
}

static void compare(struct world *w, struct world *one, unsigned step)
{
    assert_true(w->norms[step] == one->norms[step]);
    if (w->program->leaves)
        fixture_drain(w->fixtures[0]); /* on a node without ranks, nothing waited for the end of the step */
    for (unsigned i = 0; i < w->n_nodes; i++)
        compare_state(w->fixtures[i]->job, one->fixtures[0]->job);
    for (uint32_t p = 0; w->program->reads && p < PUPPET_PARAMS; p++)
        if (!puppet_model[p].frozen && puppet_elems(&puppet_model[p]) > 0)
            compare_param_norms(w, one, p);
    for (unsigned r = 0; w->program->reads && r < w->n_ranks; r++) {
        for (uint32_t p = 0; p < PUPPET_PARAMS; p++) {
            compare_read(w->peers[r], one->peers[r], p, WIRE_STATE_MASTER);
            if (!puppet_model[p].frozen)
                compare_read(w->peers[r], one->peers[r], p, WIRE_STATE_EXP_AVG);
        }
    }
    if (w->program->reads && w->program->stage == 3)
        compare_gathered(w, one);
}

/* Compares two texts except for the field "ranks": a node knows only of its own ranks which parameters they miss. */
static void assert_same_but_ranks(const char *a, const char *b)
{
    const char *ranks_a = strstr(a, "\n  ranks "), *ranks_b = strstr(b, "\n  ranks ");
    char head_a[4096], head_b[4096];

    if (!ranks_a || !ranks_b) {
        assert_string_equal(a, b);
        return;
    }
    snprintf(head_a, sizeof(head_a), "%.*s", (int)(ranks_a - a), a);
    snprintf(head_b, sizeof(head_b), "%.*s", (int)(ranks_b - b), b);
    assert_string_equal(head_a, head_b);
    /* The next field is on a line that is indented by two columns. */
    do
        ranks_a = strchr(ranks_a + 1, '\n');
    while (ranks_a && ranks_a[3] == ' ');
    do
        ranks_b = strchr(ranks_b + 1, '\n');
    while (ranks_b && ranks_b[3] == ' ');
    assert_true(ranks_a && ranks_b);
    assert_string_equal(ranks_a, ranks_b);
}

/* Lists the diagnostics except E1111, which a node makes about its own ranks. */
static size_t list_comparable(const struct job *job, const struct diagnostic *list[KEPT_MAX])
{
    size_t n = kept_list(&job->diagnostics.kept, list), n_left = 0;

    for (size_t i = 0; i < n; i++)
        if (list[i]->code != E_ALIKE)
            list[n_left++] = list[i];
    return n_left;
}

/* Asserts that a node's diagnostics about the job are those of the job on one node. */
static void compare_texts(const struct job *node, const struct job *one)
{
    const struct diagnostic *of_node[KEPT_MAX], *of_one[KEPT_MAX];
    size_t n = list_comparable(one, of_one);

    assert_true(n > 0 && list_comparable(node, of_node) == n);
    for (size_t i = 0; i < n; i++)
        assert_same_but_ranks(of_node[i]->text, of_one[i]->text);
}

static void leave(struct world *w, unsigned rank)
{
    peer_leave(w->peers[rank]);
    w->gone[rank] = true;
}

static void step(struct world *w, unsigned number)
{
    for (unsigned m = 0; m < w->program->n_micro; m++)
        micro_batch(w);
    finish_step(w, number);
    if (number == 0 && w->program->leaves > 0)
        leave(w, (unsigned)w->program->leaves);
}

static void run_both(const struct program *program, const struct topology *topology, uint64_t seed, unsigned n_breaks)
{
    struct world *w = world_new(program, topology, seed, n_breaks), *one = world_of_one(program, topology);

    for (unsigned s = 0; s < STEPS; s++) {
        step(w, s);
        step(one, s);
        compare(w, one, s);
    }
    for (unsigned i = 0; program->tells && i < w->n_nodes; i++)
        compare_texts(w->fixtures[i]->job, one->fixtures[0]->job);
    world_free(w);
    world_free(one);
}

/* Runs the program on every topology, with several seeds. */
static void run(const struct program *program, unsigned n_seeds, unsigned n_breaks)
{
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++)
        for (uint64_t seed = 0; seed < tests_some(n_seeds); seed++)
            run_both(program, &topologies[t], seed, n_breaks);
}

/* ---- abort --------------------------------------------------------------------------------------------- */

static void wait_for_answer(struct peer *p)
{
    while (p->n_answers == p->n_heard)
        if (!p->fixture->advance(p->fixture->advance_userdata))
            fail_msg("rank %u: no answer, and nothing is under way", p->number);
    p->n_heard++;
}

/* The rank may end its backward, and ask for the step, before it gets the abort. */
static void expect_aborted(struct peer *p)
{
    for (wait_for_answer(p); p->reply.type == REPLY_DONE; wait_for_answer(p))
        peer_ask_step(p);
    assert_int_equal(p->reply.type, REPLY_REFUSED);
    assert_int_equal(p->code, E_RANK_LOST);
    assert_true(p->reply.refused.aborted);
    assert_non_null(strstr(p->text, "bad batch"));
    peer_see_abort(p);
}

static void abort_by(struct peer *p)
{
    job_abort_step(p->fixture->job, p->rank, "bad batch");
    wait_for_answer(p);
    assert_int_equal(p->reply.type, REPLY_DONE);
    peer_see_abort(p);
}

/* Lets ranks that have had no answer since the abort see it. */
static void catch_up(struct world *w, uint32_t attempt)
{
    fixture_drain(w->fixtures[0]);
    for (unsigned r = 0; r < w->n_ranks; r++) {
        struct peer *p = w->peers[r];

        assert_int_equal(p->fixture->job->ledger.attempt, attempt);
        assert_int_equal(p->fixture->job->phase, JOB_TRAINING);
        if (p->at.attempt < attempt)
            abort_by(p); /* aborted already, so this answer has the new position */
        assert_int_equal(p->at.attempt, attempt);
    }
}

/*
 * In the middle of a backward, a rank aborts the step, and then the next attempt, before others may know of the first.
 */
static void abort_twice(struct world *w, unsigned rank)
{
    uint32_t attempt = w->peers[0]->at.attempt;

    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_begin(w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        push_all(w, r);
    job_abort_step(w->peers[rank]->fixture->job, w->peers[rank]->rank, "bad batch");
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (r != rank)
            peer_ask_end(w->peers[r]);
    wait_for_answer(w->peers[rank]);
    assert_int_equal(w->peers[rank]->reply.type, REPLY_DONE);
    peer_see_abort(w->peers[rank]);
    peer_begin(w->peers[rank]);
    push_all(w, rank);
    abort_by(w->peers[rank]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (r != rank)
            expect_aborted(w->peers[r]);
    catch_up(w, attempt + 2);
}

/* All ranks abort at once, which counts as one abort. */
static void abort_together(struct world *w)
{
    uint32_t attempt = w->peers[0]->at.attempt;

    micro_batch(w);
    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_begin(w->peers[r]);
    for (unsigned r = 0; r < w->n_ranks; r++)
        push_all(w, r);
    for (unsigned r = 0; r < w->n_ranks; r++)
        job_abort_step(w->peers[r]->fixture->job, w->peers[r]->rank, "bad batch");
    for (unsigned r = 0; r < w->n_ranks; r++) {
        wait_for_answer(w->peers[r]);
        assert_int_equal(w->peers[r]->reply.type, REPLY_DONE);
        peer_see_abort(w->peers[r]);
    }
    catch_up(w, attempt + 1);
}

/*
 * After a step, gathered weights are copied again. Meanwhile another rank aborts the next step. That abort must not
 * count for the step that is committed.
 */
static void abort_while_committing(struct world *w, struct world *one)
{
    static const uint32_t param = 0;
    struct peer *p = w->peers[w->n_ranks - 1], *other = w->peers[0];
    uint32_t attempt = other->at.attempt;

    job_gather(p->fixture->job, p->rank, &(struct request_gather){.params = &param, .n_params = 1});
    peer_expect(p, REPLY_DONE);
    micro_batch(w);
    for (unsigned r = 0; r < w->n_ranks; r++)
        peer_ask_step(w->peers[r]);
    peer_expect(other, REPLY_STEP_DONE);
    abort_by(other);
    for (unsigned r = 1; r < w->n_ranks; r++) {
        peer_expect(w->peers[r], REPLY_STEP_DONE);
        assert_true(w->peers[r]->reply.step_done.applied);
        assert_int_equal(w->peers[r]->at.step, other->at.step);
    }
    catch_up(w, attempt + 1);
    job_release(p->fixture->job, p->rank, &(struct request_release){.params = &param, .n_params = 1});
    micro_batch(one);
    finish_step(one, 0);
    w->norms[0] = one->norms[0];
    compare(w, one, 0);
}

static void run_aborts(const struct program *program, const struct topology *topology, uint64_t seed, unsigned n_breaks)
{
    struct world *w = world_new(program, topology, seed, n_breaks), *one = world_of_one(program, topology);

    for (unsigned s = 0; s < STEPS; s++) {
        if (s == 2)
            abort_together(w);
        else
            abort_twice(w, (unsigned)(seed + s) % w->n_ranks);
        step(w, s);
        step(one, s);
        compare(w, one, s);
    }
    if (program->stage == 3)
        abort_while_committing(w, one);
    world_free(w);
    world_free(one);
}

static void test_aborts(void **state)
{
    (void)state;
    for (unsigned stage = 2; stage <= 3; stage++)
        for (size_t t = 0; t < ARRAY_SIZE(topologies); t++)
            for (uint64_t seed = 0; seed < tests_some(8); seed++)
                run_aborts(&(struct program){.stage = stage, .n_micro = 1}, &topologies[t], seed, seed % 4);
}

/* A node must abort its next step (job_aborted()), and gets another reason to abort before it begins that step. */
static void test_aborts_meet(void **state)
{
    const struct program program = {.stage = 2, .n_micro = 1};
    struct world *w = world_new(&program, &topologies[0], 0, 0);
    struct peer *p = w->peers[w->n_ranks - 1];

    (void)state;
    step(w, 0);
    p->fixture->job->abort.next = true;
    job_is_back_late(p->fixture->job, p->rank);
    abort_settle(p->fixture->job); /* the leak sanitizer finds a lost reason */
    assert_int_not_equal(p->fixture->job->ledger.attempt, p->at.attempt);
    world_free(w);
}

/* ---- tests --------------------------------------------------------------------------------------------- */

static void test_stages(void **state)
{
    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        run(&(struct program){.stage = stage, .n_micro = 2}, 3, 0);
}

static void test_breaks(void **state)
{
    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        run(&(struct program){.stage = stage, .n_micro = 2, .reads = stage != 1}, 4, 6);
}

static void test_missing(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .misses = true}, 4, 2);
    run(&(struct program){.stage = 3, .n_micro = 1, .misses = true, .norm = true}, 2, 2);
}

static void test_evidence(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 1, .misses = true, .tells = true}, 4, 0);
}

static void test_passes(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .passes = true}, 3, 2);
    run(&(struct program){.stage = 1, .n_micro = 2, .passes = true, .misses = true}, 3, 2);
}

static void test_norm(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .norm = true}, 3, 2);
}

static void test_reading(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 1, .reads = true}, 2, 0);
    run(&(struct program){.stage = 3, .n_micro = 1, .reads = true}, 2, 0);
}

/* The rank that leaves is one of two of its node, its node's only one, or one of node 0. */
static void test_leaving(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .leaves = 2}, 3, 2);
    run(&(struct program){.stage = 3, .n_micro = 1, .leaves = 1, .norm = true}, 3, 2);
}

/*
 * Abandoned pushes and those of a dead rank have the same effect as in a job on one node. Parcels that other ranks have
 * not pushed are in no sum, so no other rank is disturbed.
 */
static void test_giving_up(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .gives_up = true}, 4, 2);
    run(&(struct program){.stage = 3, .n_micro = 3, .gives_up = true, .passes = true, .misses = true}, 2, 0);
}

static void test_dying(void **state)
{
    (void)state;
    run(&(struct program){.stage = 2, .n_micro = 2, .dies = true}, 4, 2);
    run(&(struct program){.stage = 1, .n_micro = 2, .dies = true, .misses = true}, 2, 0);
}

/* ---- run ids ------------------------------------------------------------------------------------------- */

/* The ranks of each node attach with that node's run id. */
static void attach_as(struct world *w, const char *const *run_ids)
{
    for (unsigned i = 0, r = 0; i < w->n_nodes; i++)
        for (; r < w->fixtures[i]->job->world.end; r++) {
            assert_int_equal(peer_attach(w->peers[r], run_ids[i]), 0);
            peer_declare(w->peers[r]);
            peer_ask_form(w->peers[r]);
        }
}

/* All ranks are refused with both run ids, and may try again. If only some nodes name a run id, it is that of all. */
static void test_runs(void **state)
{
    static const char *const differ[] = {"monday", "tuesday", "monday"}, *const agree[] = {"", "monday", ""};
    static const char said[] = "the ranks of node 1 have the run id tuesday, those of node 0 have monday";

    (void)state;
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++) {
        const struct program program = {.stage = 2, .n_micro = 1};
        struct world *w = world_make(&program, &topologies[t], t, 0);

        attach_as(w, differ);
        for (unsigned r = 0; r < w->n_ranks; r++) {
            peer_expect_refused(w->peers[r], E_OTHER_RUN, false);
            assert_non_null(strstr(w->peers[r]->text, said));
        }
        for (unsigned r = 0; r < w->n_ranks; r++)
            peer_die(w->peers[r]);
        fixture_drain(w->fixtures[0]);
        attach_as(w, agree);
        finish_forming(w);
        for (unsigned i = 0; i < w->n_nodes; i++)
            assert_string_equal(w->fixtures[i]->job->kept.run_id, "monday");
        step(w, 0);
        world_free(w);
    }
}

/* No node has enough memory. Each rank is refused with its own node's shortage, not another node's. */
static void test_over_quota(void **state)
{
    const struct program program = {.stage = 2, .n_micro = 1, .more = "limits: {memory: 64KiB}\n"};
    static const char *const runs[] = {"run", "run", "run"};

    (void)state;
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++) {
        struct world *w = world_make(&program, &topologies[t], t, 0);
        char said[64];

        attach_as(w, runs);
        for (unsigned i = 0, r = 0; i < w->n_nodes; i++) {
            snprintf(said, sizeof(said), "memory of the job on node %u (limits.memory)", i);
            for (; r < w->fixtures[i]->job->world.end; r++) {
                peer_expect_refused(w->peers[r], E_QUOTA, false);
                assert_non_null(strstr(w->peers[r]->text, said));
            }
        }
        fixture_drain(w->fixtures[0]);
        for (unsigned i = 0; i < w->n_nodes; i++)
            assert_int_equal(fixture_n_kept(w->fixtures[i], E_QUOTA), 1);
        world_free(w);
    }
}

/* ---- coming back --------------------------------------------------------------------------------------- */

static void come_back(struct world *w, unsigned rank)
{
    peer_return(w->peers[rank], "run");
    w->gone[rank] = false;
    stir(w);
}

/* All ranks leave and come back, in random order, while other events happen. */
static void all_leave_and_return(struct world *w)
{
    unsigned first = w->mesh ? (unsigned)mesh_draw(w->mesh, w->n_ranks) : 0;

    for (unsigned r = 0; r < w->n_ranks; r++) {
        if (!w->gone[(first + r) % w->n_ranks])
            leave(w, (first + r) % w->n_ranks);
        stir(w);
    }
    fixture_drain(w->fixtures[0]); /* all nodes must know it before the processes are started again */
    first = w->mesh ? (unsigned)mesh_draw(w->mesh, w->n_ranks) : 0;
    for (unsigned r = 0; r < w->n_ranks; r++)
        come_back(w, (first + r) % w->n_ranks);
}

/* All ranks leave between two steps and come back. The first ones wait for the others. */
static void test_all_return(void **state)
{
    const struct program program = {.stage = 2, .n_micro = 1};

    (void)state;
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++)
        for (uint64_t seed = 0; seed < tests_some(6); seed++) {
            struct world *w = world_new(&program, &topologies[t], seed, seed % 3);
            struct world *one = world_of_one(&program, &topologies[t]);

            for (unsigned s = 0; s < STEPS; s++) {
                step(w, s);
                step(one, s);
                compare(w, one, s);
                all_leave_and_return(w);
            }
            assert_int_equal(w->fixtures[0]->job->kept.n_aborts, 0);
            world_free(w);
            world_free(one);
        }
}

/*
 * All ranks leave within a step and continue where they were. If one rank continued alone, its work is lost, and all
 * ranks begin the step again.
 */
static void run_within(const struct program *program, const struct topology *topology, uint64_t seed, bool alone)
{
    struct world *w = world_new(program, topology, seed, alone ? 0 : seed % 3);
    struct world *one = world_of_one(program, topology);

    for (unsigned s = 0; s < STEPS; s++) {
        micro_batch(w);
        if (alone) {
            for (unsigned r = 1; r < w->n_ranks; r++)
                leave(w, r);
            micro_batch(w);
        }
        all_leave_and_return(w);
        for (unsigned r = 0; r < w->n_ranks; r++)
            assert_int_equal(w->peers[r]->at.micro_batch, !alone);
        if (alone)
            micro_batch(w);
        micro_batch(w);
        finish_step(w, s);
        step(one, s);
        compare(w, one, s);
    }
    for (unsigned i = 0; i < w->n_nodes; i++)
        assert_int_equal(w->fixtures[i]->job->kept.n_aborts, alone ? STEPS : 0);
    world_free(w);
    world_free(one);
}

static void test_all_return_within(void **state)
{
    (void)state;
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++)
        for (uint64_t seed = 0; seed < tests_some(6); seed++) {
            run_within(&(struct program){.stage = 2, .n_micro = 2}, &topologies[t], seed, false);
            run_within(&(struct program){.stage = 2, .n_micro = 2, .leaves = -1}, &topologies[t], seed, true);
        }
}

/* Expects the rank's next request to be refused with an abort. */
static void expect_late(struct peer *p)
{
    peer_ask_step(p);
    peer_expect_abort(p, "a rank that had left is back, step aborted");
}

/*
 * One rank misses a step that the others do without it. It comes back between two steps, or too late for the current
 * one.
 */
static void run_return(const struct program *program, const struct topology *topology, uint64_t seed, bool late)
{
    struct world *w = world_new(program, topology, seed, 0), *one = world_of_one(program, topology);
    unsigned rank = (unsigned)program->leaves;

    for (unsigned s = 0; s < STEPS; s++) {
        if (s == 2 && late) {
            micro_batch(w);
            fixture_drain(w->fixtures[0]);
        }
        if (s == 2) {
            come_back(w, rank);
            come_back(one, rank);
        }
        for (unsigned r = 0; s == 2 && late && r < w->n_ranks; r++)
            if (r != rank)
                expect_late(w->peers[r]);
        step(w, s);
        step(one, s);
        compare(w, one, s);
    }
    for (unsigned i = 0; i < w->n_nodes; i++)
        assert_int_equal(w->fixtures[i]->job->kept.n_aborts, late);
    world_free(w);
    world_free(one);
}

static void test_one_returns(void **state)
{
    (void)state;
    for (size_t t = 0; t < ARRAY_SIZE(topologies); t++)
        for (uint64_t seed = 0; seed < tests_some(8); seed++)
            run_return(&(struct program){.stage = 2 + seed % 2, .n_micro = 1, .leaves = 1 + (int)(seed / 2 % 2)},
                       &topologies[t], seed, seed / 4);
}

/* ---- madness ------------------------------------------------------------------------------------------- */

static void pass(struct world *w, unsigned ms)
{
    while (mesh_advance(w->mesh))
        continue;
    for (unsigned i = 0; i < w->n_nodes; i++)
        w->fixtures[i]->now_ns += ms * UINT64_C(1000000);
}

/*
 * The only rank of a node is slow. Its own daemon knows that others wait for it, and the other daemons know what they
 * wait for.
 */
static void test_slow_node(void **userdata)
{
    const struct program program = {.stage = 2, .n_micro = 1};
    struct world *w = world_new(&program, &(struct topology){{1, 1, 1}}, 1, 0);

    (void)userdata;
    micro_batch(w);
    peer_ask_step(w->peers[0]);
    pass(w, 200);
    peer_ask_step(w->peers[1]);
    pass(w, 50);
    peer_ask_step(w->peers[2]);
    for (unsigned r = 0; r < 3; r++)
        peer_expect(w->peers[r], REPLY_STEP_DONE);
    for (unsigned r = 0; r < 3; r++) {
        static const unsigned waits_ms[] = {250, 50, 0}, behind_ms[] = {0, 200, 250};
        const struct job *job = w->fixtures[r]->job;

        assert_int_equal(job->ranks[r].waits.total_ns[WAIT_STEP][WAIT_FOR_NODES], waits_ms[r] * UINT64_C(1000000));
        assert_int_equal(job->ranks[r].waits.behind_total_ns, behind_ms[r] * UINT64_C(1000000));
        assert_int_equal(job->stats.times.wait_last_ns, waits_ms[r] * UINT64_C(1000000));
    }
    world_free(w);
}

static uint64_t pick(struct world *w, uint64_t n)
{
    return mesh_draw(w->mesh, 8) ? mesh_draw(w->mesh, n) : mesh_draw(w->mesh, UINT64_MAX);
}

/* Makes evidence that a client may or may not send, about parameters that may not exist. */
static size_t make_evidence(struct world *w, struct wire_arena *arena, uint8_t *bytes, size_t size)
{
    const uint32_t params[] = {(uint32_t)pick(w, PUPPET_PARAMS), (uint32_t)pick(w, PUPPET_PARAMS)};
    const struct request request = {.type = REQUEST_EVIDENCE,
                                    .evidence = {.exception = "mad",
                                                 .raised_at = "",
                                                 .swallowed_by = "",
                                                 .dead_segment = "",
                                                 .site = "",
                                                 .not_called = params,
                                                 .n_not_called = mesh_draw(w->mesh, 3),
                                                 .called = params,
                                                 .n_called = mesh_draw(w->mesh, 3)}};
    int n = wire_pack_request(arena, &request, bytes, size);

    assert_true(n > 0);
    return (size_t)n - (mesh_draw(w->mesh, 4) ? 0 : 1);
}

/* Makes a random message. Most of its numbers are in range. */
static size_t make_message(struct world *w, struct wire_arena *arena, const struct job *job, void *buffer)
{
    static uint8_t bytes[192];
    static const struct wire_hyper groups[2] = {{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}};
    uint64_t numbers[4] = {pick(w, 12), pick(w, 12), pick(w, 12), pick(w, 12)};
    const size_t bits = mesh_draw(w->mesh, 4) ? PUPPET_PARAMS / 8 + 1 : 0;
    uint32_t kind = (uint32_t)(mesh_draw(w->mesh, 2) ? 1 + mesh_draw(w->mesh, 24) : 32 + mesh_draw(w->mesh, 20));
    uint8_t said[128];
    const bool says = kind == NODE_EVIDENCE && mesh_draw(w->mesh, 4);
    const size_t n_said = says ? make_evidence(w, arena, said, sizeof(said)) : 0;
    const struct node_message message = {
        .kind = (enum node_kind)kind,
        .step = mesh_draw(w->mesh, 8) && job->layout ? job->ledger.step : pick(w, 3),
        .attempt = mesh_draw(w->mesh, 8) && job->layout ? job->ledger.attempt : (uint32_t)pick(w, 3),
        .generation = (uint32_t)mesh_draw(w->mesh, 1 + mesh_n_failures(w->mesh) + 3),
        .tag = pick(w, 40),
        .parcel = (uint32_t)pick(w, 12),
        .micro_batch = (uint32_t)pick(w, 2),
        .pass = (uint32_t)pick(w, 4),
        .numbers = numbers,
        .n_numbers = mesh_draw(w->mesh, 5),
        .digest = pick(w, 4),
        .node = (uint32_t)pick(w, 3),
        .rank = (uint32_t)pick(w, 4),
        .has_rank = mesh_draw(w->mesh, 2),
        .text = "mad",
        .bytes = says ? said : bytes,
        .n_bytes = says                    ? n_said
                   : mesh_draw(w->mesh, 4) ? sizeof(bytes)
                                           : mesh_draw(w->mesh, sizeof(bytes)),
        .args = {.loss_scale = (double)mesh_draw(w->mesh, 3), .groups = groups, .n_groups = mesh_draw(w->mesh, 3)},
        .pushed_any = bytes,
        .pushed_all = bytes,
        .n_any_bytes = bits,
        .n_all_bytes = bits,
        .finding = {.found = mesh_draw(w->mesh, 2),
                    .param = (uint32_t)pick(w, PUPPET_PARAMS),
                    .rank = (uint32_t)pick(w, 4),
                    .elem = pick(w, 100),
                    .value = NAN},
        .verdict = {.apply = mesh_draw(w->mesh, 2),
                    .norm = NAN,
                    .s = 1,
                    .groups = groups,
                    .n_groups = mesh_draw(w->mesh, 3),
                    .pushed_any = bytes,
                    .pushed_all = bytes,
                    .n_any_bytes = bits,
                    .n_all_bytes = bits},
        .arrived = pick(w, 4),
        .proceed = mesh_draw(w->mesh, 2),
        .forget = mesh_draw(w->mesh, 2),
    };
    int n = node_pack(arena, &message, buffer, NODE_MESSAGE_MAX_BYTES);

    assert_true(n > 0);
    return (size_t)n;
}

/* Closes the connections of dropped peers, as a server does after each message. */
static void close_dropped(struct world *w)
{
    for (unsigned r = 0; r < w->n_ranks; r++)
        if (w->peers[r]->dropped && w->peers[r]->rank)
            peer_die(w->peers[r]);
}

/* A node with the key may send anything. The step may be lost, but no daemon may fail. */
static void test_madness(void **state)
{
    struct wire_arena arena;
    uint8_t *buffer = malloc(NODE_MESSAGE_MAX_BYTES);

    (void)state;
    assert_int_equal(wire_arena_init(&arena), 0);
    for (uint64_t seed = 0; seed < tests_some(60); seed++) {
        const struct program program = {.stage = 1 + (unsigned)seed % 3, .n_micro = 1};
        struct world *w = world_new(&program, &topologies[seed % 2], seed, 0);

        step(w, 0);
        mesh_allow_nonsense(w->mesh);
        for (unsigned r = 0; r < w->n_ranks; r++)
            peer_begin(w->peers[r]);
        for (unsigned i = 0; i < 400; i++) {
            unsigned to = (unsigned)mesh_draw(w->mesh, w->n_nodes);
            struct job *job = w->fixtures[to]->job;
            size_t n = make_message(w, &arena, job, buffer);

            (void)nodes_hear(nodes_of(job), to == 0 ? 1 : 0, buffer, n);
            if (i < 2 * w->n_ranks && i % 2 && job->phase == JOB_TRAINING && !w->peers[i / 2]->dropped)
                push_all(w, i / 2);
            stir(w);
            close_dropped(w);
        }
        for (unsigned i = 0; i < w->n_nodes; i++) {
            w->fixtures[i]->advance = NULL;
            fixture_free(w->fixtures[i]);
        }
        mesh_free(w->mesh);
        free(w);
    }
    wire_arena_deinit(&arena);
    free(buffer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stages),      cmocka_unit_test(test_runs),
        cmocka_unit_test(test_over_quota),  cmocka_unit_test(test_missing),
        cmocka_unit_test(test_passes),      cmocka_unit_test(test_evidence),
        cmocka_unit_test(test_aborts),      cmocka_unit_test(test_aborts_meet),
        cmocka_unit_test(test_leaving),     cmocka_unit_test(test_madness),
        cmocka_unit_test(test_all_return),  cmocka_unit_test(test_all_return_within),
        cmocka_unit_test(test_one_returns), cmocka_unit_test(test_norm),
        cmocka_unit_test(test_reading),     cmocka_unit_test(test_breaks),
        cmocka_unit_test(test_giving_up),   cmocka_unit_test(test_dying),
        cmocka_unit_test(test_slow_node),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
