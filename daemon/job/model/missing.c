/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Finds parameters that ranks have not pushed, counts the steps in which they were missing, and reports them when due.
 */

#include "daemon/job/model/missing.h"

#include <assert.h>
#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <string.h>

#include <xxhash.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/base/strbuf.h"
#include "core/config/config.h"
#include "core/diagnosis/cause-common.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/evidence.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"

enum { STEPS_UNTIL_SAID = 3 }; /* steps in a row; picked: if two parts alternate, neither is missing twice */

static bool misses_all(const struct job *job, unsigned rank, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (job_has_pushed(job, rank, ids[i]))
            return false;
    return true;
}

/* The first ranks of this node that lack parameters of a set, and the parameters that each lacks. */
struct lacking {
    struct evidence_lacking ranks[EVIDENCE_MAX_LACKING];
    unsigned n;
    uint32_t *ids; /* memory for ranks[].params; owned */
};

static void find_lacking(const struct job *job, const uint32_t *ids, uint32_t n, struct lacking *lacking)
{
    lacking->ids = calloc((size_t)EVIDENCE_MAX_LACKING * n, sizeof(*lacking->ids));
    for (unsigned r = job->world.first; lacking->ids && r < job->world.end; r++) {
        bool is_shown = lacking->n < EVIDENCE_MAX_LACKING;
        uint32_t *own = lacking->ids + (size_t)(is_shown ? lacking->n : 0) * n;
        uint32_t n_own = 0;

        for (uint32_t i = 0; i < n; i++) {
            if (job_has_pushed(job, r, ids[i]) || job->ranks[r].kept.left)
                continue;
            if (is_shown)
                own[n_own] = ids[i];
            n_own++;
        }
        if (n_own > 0 && is_shown)
            lacking->ranks[lacking->n] = (struct evidence_lacking){.rank = r, .params = own, .n_params = n_own};
        lacking->n += n_own > 0;
    }
}

static bool has_bit(const uint8_t *bits, uint32_t param)
{
    return bits[param / 8] >> param % 8 & 1;
}

bool missing_any(const struct job *job, const uint8_t *all)
{
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (!has_bit(all, p) && !job->missing.is_declared[p]) /* frozen parameters count as pushed by all */
            return true;
    return false;
}

static bool was_reported(struct job_missing *missing, uint64_t digest)
{
    for (unsigned i = 0; i < MIN(missing->n_seen, (unsigned)ARRAY_SIZE(missing->seen)); i++)
        if (missing->seen[i] == digest)
            return true;
    missing->seen[missing->n_seen++ % ARRAY_SIZE(missing->seen)] = digest;
    return false;
}

/* ---- what the steps so far have shown ------------------------------------------------------------------ */

static bool is_number(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] < '0' || text[i] > '9')
            return false;
    return n > 0;
}

/* Hashes the name without its last numeric component, so that layers.3.experts.7.w is kin of all experts of layer 3. */
static uint64_t kin_of(const struct layout_param *param)
{
    const char *name = param->name, *number = NULL, *end = name + param->name_len, *after = NULL;

    for (const char *c = name; c < end;) {
        const char *dot = memchr(c, '.', (size_t)(end - c)), *stop = dot ? dot : end;

        if (is_number(c, (size_t)(stop - c))) {
            number = c;
            after = stop;
        }
        c = dot ? dot + 1 : end;
    }
    if (!number)
        return XXH3_64bits(name, param->name_len);
    return XXH3_64bits(name, (size_t)(number - name)) ^ XXH3_64bits_withSeed(after, (size_t)(end - after), 1);
}

static bool is_declared(const struct config_names *unused, const struct layout_param *param)
{
    _cleanup_free_ char *name = strndup(param->name, param->name_len);

    for (size_t i = 0; name && i < unused->n_items; i++)
        if (fnmatch(unused->items[i], name, 0) == 0)
            return true;
    return false;
}

int missing_init(struct job *job)
{
    struct job_missing *missing = &job->missing;
    uint32_t n = job->layout->n_params;

    assert(!missing->n_in_a_row && !missing->kin); /* the arrays of the previous job are freed */
    missing->n_in_a_row = calloc(n + 1, sizeof(*missing->n_in_a_row));
    missing->kin = calloc(n + 1, sizeof(*missing->kin));
    missing->was_pushed = calloc(n + 1, sizeof(bool));
    missing->is_declared = calloc(n + 1, sizeof(bool));
    missing->is_said = calloc(n + 1, sizeof(bool));
    if (!missing->n_in_a_row || !missing->kin || !missing->was_pushed || !missing->is_declared || !missing->is_said)
        return -ENOMEM;
    for (uint32_t p = 0; p < n; p++) {
        missing->kin[p] = kin_of(&job->layout->params[p]);
        missing->is_declared[p] = is_declared(&job->config->diagnostics.unused, &job->layout->params[p]);
    }
    return 0;
}

void missing_deinit(struct job_missing *missing)
{
    free(missing->n_in_a_row);
    free(missing->kin);
    free(missing->was_pushed);
    free(missing->is_declared);
    free(missing->is_said);
    *missing = (struct job_missing){0};
}

/* Counts a step. ids: receives the undeclared parameters that some rank did not push. Return: their number. */
static uint32_t note_step(struct job *job, const uint8_t *any, const uint8_t *all, uint32_t *ids)
{
    struct job_missing *missing = &job->missing;
    uint32_t n = 0;

    missing->n_steps++;
    job->kept.n_missing = 0;
    for (uint32_t p = 0; p < job->layout->n_params; p++) {
        bool is_missing = job->layout->params[p].trainable && !has_bit(all, p);

        missing->n_in_a_row[p] = is_missing ? missing->n_in_a_row[p] + 1 : 0;
        missing->was_pushed[p] |= has_bit(any, p);
        job->kept.n_missing += is_missing && !has_bit(any, p);
        if (is_missing && !missing->is_declared[p])
            ids[n++] = p;
    }
    missing->n_missing += n > 0;
    return n;
}

/*
 * Removes from ids the parameters that are reported already, or were missing in too few steps in a row. Return: the
 * number of parameters that stay.
 */
static uint32_t keep_lasting(struct job_missing *missing, uint32_t *ids, uint32_t n)
{
    uint32_t n_left = 0;

    for (uint32_t i = 0; i < n; i++)
        if (missing->n_in_a_row[ids[i]] >= STEPS_UNTIL_SAID && !missing->is_said[ids[i]])
            ids[n_left++] = ids[i];
    return n_left;
}

static int compare_hashes(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Marks the parameters and their kin as reported. */
static void mark_said(struct job *job, const uint32_t *ids, uint32_t n)
{
    struct job_missing *missing = &job->missing;
    _cleanup_free_ uint64_t *kin = calloc(n + 1, sizeof(*kin));

    if (!kin)
        return;
    for (uint32_t i = 0; i < n; i++)
        kin[i] = missing->kin[ids[i]];
    qsort(kin, n, sizeof(*kin), compare_hashes);
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        missing->is_said[p] |= bsearch(&missing->kin[p], kin, n, sizeof(*kin), compare_hashes) != NULL;
}

/* ---- reports ------------------------------------------------------------------------------------------- */

/* Does each parameter of the set have a kin (job_missing.kin) that some rank has pushed? */
static bool kin_were_pushed(const struct job *job, const uint32_t *ids, uint32_t n)
{
    const struct job_missing *missing = &job->missing;
    _cleanup_free_ uint64_t *pushed = calloc(job->layout->n_params + 1, sizeof(*pushed));
    size_t n_pushed = 0;
    bool all = pushed != NULL;

    for (uint32_t p = 0; pushed && p < job->layout->n_params; p++)
        if (missing->was_pushed[p])
            pushed[n_pushed++] = missing->kin[p];
    if (n_pushed > 0)
        qsort(pushed, n_pushed, sizeof(*pushed), compare_hashes);
    for (uint32_t i = 0; all && i < n; i++)
        all = bsearch(&missing->kin[ids[i]], pushed, n_pushed, sizeof(*pushed), compare_hashes) != NULL;
    return all;
}

/*
 * Fills in the evidence about a set of missing parameters: what the clients report about them, and whether they were
 * pushed in earlier steps. called: zeroed memory for n entries.
 */
static void describe_set(struct job *job, struct evidence_missing *e, const uint32_t *ids, uint32_t n,
                         const uint8_t *any, uint8_t *called)
{
    e->params = ids;
    e->n_params = n;
    e->same_on_all_ranks = e->same_every_step = true;
    for (uint32_t i = 0; i < n; i++) {
        e->same_on_all_ranks &= !has_bit(any, ids[i]);
        e->same_every_step &= !job->missing.was_pushed[ids[i]];
    }
    for (unsigned r = 0; r < job->world.size; r++)
        if (job_is_own(job, r) || !job->ranks[r].kept.left) /* other nodes' ranks: evidence as of their last request */
            rank_evidence_add(&job->ranks[r].step.evidence, e, called, misses_all(job, r, ids, n));
}

static void keep_missing(struct job *job, struct evidence_missing *e)
{
    struct lacking lacking = {0};

    find_lacking(job, e->params, (uint32_t)e->n_params, &lacking);
    e->lacking = (struct evidence_lacking_ranks){
        .first = lacking.ranks, .n = lacking.n, .elsewhere = job->world.end - job->world.first < job->world.size};
    job_keep(job, cause_missing(e));
    free(lacking.ids);
}

void missing_report(struct job *job, const uint8_t *any, const uint8_t *all)
{
    _cleanup_free_ uint32_t *ids = calloc(job->layout->n_params + 1, sizeof(*ids));
    _cleanup_free_ uint8_t *called = calloc(job->layout->n_params + 1, 1);
    struct evidence_missing blank = {
        .at = {.layout = job->layout,
               .rank = -1,
               .step = (int64_t)job->ledger.step,
               .micro_batch = -1,
               .client = job_client(job)},
        .warning = true,
        .skipped = job->config->diagnostics.on_missing == CONFIG_MISSING_SKIP,
        .n_trainable = job_n_trainable(job),
        .world_size = job->world.size,
    };
    struct evidence_missing e = blank;
    uint32_t n;

    if (!ids || !called)
        return;
    n = note_step(job, any, all, ids);
    if (n == 0)
        return;
    e.n_steps_seen = blank.n_steps_seen = job->missing.n_steps;
    describe_set(job, &e, ids, n, any, called);
    if (e.skipped || e.dead_segments.first || e.exception.text) {
        if (!was_reported(&job->missing, XXH3_64bits(ids, n * sizeof(*ids))))
            keep_missing(job, &e);
        mark_said(job, ids, n);
        return;
    }
    n = keep_lasting(&job->missing, ids, n);
    if (n == 0)
        return;
    memset(called, 0, job->layout->n_params);
    e = blank;
    describe_set(job, &e, ids, n, any, called);
    e.kin_used = kin_were_pushed(job, ids, n);
    keep_missing(job, &e);
    mark_said(job, ids, n);
}

/* Prints each number of micro-batches with its ranks, greatest first: "4 on rank 0; 2 on ranks 1 to 3". */
static void print_counts(struct strbuf *buf, const struct job *job, bool *set)
{
    int64_t below = INT64_MAX;

    for (bool found = true; found;) {
        int64_t greatest = -1;
        unsigned n_set = 0;

        for (unsigned r = job->world.first; r < job->world.end; r++)
            if (!job->ranks[r].kept.left && job->ledger.ranks[r].n_ended < below)
                greatest = MAX(greatest, (int64_t)job->ledger.ranks[r].n_ended);
        found = greatest >= 0;
        for (unsigned r = job->world.first; found && r < job->world.end; r++) {
            set[r] = !job->ranks[r].kept.left && job->ledger.ranks[r].n_ended == greatest;
            n_set += set[r];
        }
        if (found) {
            strbuf_add(buf, "%s%" PRId64 " on rank%s ", buf->n_bytes ? "; " : "", greatest, n_set == 1 ? "" : "s");
            cause_print_ranks(buf, set, job->world.size);
        }
        below = greatest;
    }
}

static bool counts_differ(const struct job *job)
{
    int64_t first = -1;

    for (unsigned r = job->world.first; r < job->world.end; r++) {
        if (job->ranks[r].kept.left)
            continue;
        if (first >= 0 && job->ledger.ranks[r].n_ended != first)
            return true;
        first = job->ledger.ranks[r].n_ended;
    }
    return false;
}

void missing_note_counts(struct job *job)
{
    _cleanup_free_ bool *set = NULL;
    struct strbuf buf = {0};

    if (job->missing.is_uneven_said || !counts_differ(job))
        return;
    set = calloc(job->world.size, sizeof(*set));
    if (!set)
        return;
    job->missing.is_uneven_said = true;
    print_counts(&buf, job, set);
    log_notice("step %" PRIu64 ": the ranks' numbers of micro-batches differ: %s; gradient_accumulation_steps in the "
               "configuration refuses such steps (said once)",
               job->ledger.step, strbuf_text(&buf));
    strbuf_deinit(&buf);
}
