/* SPDX-License-Identifier: Apache-2.0 */

/* Counts for each parameter the steps in a row in which its gradient was exactly zero. */

#include "daemon/job/model/zero-gradient.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/job/model/model.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"
#include "kernels/exact.h"

enum {
    STEPS_UNTIL_SAID = 100, /* steps in a row; picked */
    MAX_LOOKED_AT = 1024,   /* parameters per step: 200 KiB of sums, some 10 us */
    MAX_NAMED = 8,          /* picked: if more are zero, they have one cause */
    NAME_BYTES = 200,
};

#define NO_KIN UINT32_MAX

/* Is the parameter an expert's? An expert without tokens may have a gradient of zeros instead of none. */
static bool is_expert(const struct layout_param *param)
{
    static const char *const words[] = {"expert", "moe"};

    for (size_t w = 0; w < ARRAY_SIZE(words); w++)
        for (size_t i = 0, n = strlen(words[w]); i + n <= param->name_len; i++)
            if (strncasecmp(param->name + i, words[w], n) == 0)
                return true;
    return false;
}

struct kin {
    uint64_t hash;
    uint32_t param;
};

static int compare_kin(const void *a, const void *b)
{
    const struct kin *x = a, *y = b;

    return x->hash != y->hash ? (x->hash > y->hash) - (x->hash < y->hash)
                              : (x->param > y->param) - (x->param < y->param);
}

/* Finds the first expert of each expert's kin. Return: 0 or -ENOMEM. */
static int find_kin(struct job *job)
{
    uint32_t n = job->layout->n_params;
    _cleanup_free_ struct kin *kin = calloc(n + 1, sizeof(*kin));
    uint32_t *first = job->zero_gradient.kin;

    if (!kin)
        return -ENOMEM;
    for (uint32_t p = 0; p < n; p++)
        kin[p] = (struct kin){job->missing.kin[p], p};
    qsort(kin, n, sizeof(*kin), compare_kin);
    for (uint32_t i = 0; i < n; i++) {
        bool has_another = i > 0 && kin[i].hash == kin[i - 1].hash && first[kin[i - 1].param] != NO_KIN;

        if (!is_expert(&job->layout->params[kin[i].param]))
            first[kin[i].param] = NO_KIN;
        else
            first[kin[i].param] = has_another ? first[kin[i - 1].param] : kin[i].param;
    }
    return 0;
}

int zero_gradient_init(struct job *job)
{
    struct job_zero_gradient *zero = &job->zero_gradient;
    uint32_t n = job->layout->n_params;

    assert(!zero->n_in_a_row && !zero->kin); /* the arrays of the previous job are freed */
    zero->n_in_a_row = calloc(n + 1, sizeof(*zero->n_in_a_row));
    zero->kin = calloc(n + 1, sizeof(*zero->kin));
    zero->is_used = calloc(n + 1, sizeof(*zero->is_used));
    return zero->n_in_a_row && zero->kin && zero->is_used ? find_kin(job) : -ENOMEM;
}

void zero_gradient_deinit(struct job_zero_gradient *zero)
{
    free(zero->n_in_a_row);
    free(zero->kin);
    free(zero->is_used);
    *zero = (struct job_zero_gradient){0};
}

/* Does this node own the whole parameter? A sum of zero over its own part says nothing about parts on other nodes. */
static bool is_here(const struct job *job, const struct layout_param *param)
{
    for (uint32_t c = param->first_chunk; c < param->first_chunk + param->n_chunks; c++)
        if (!state_owns(job->state, job->layout->chunks[c].rank))
            return false;
    return true;
}

/* Can the gradient be judged in this step? missing.h handles missing gradients. */
static bool can_be_judged(const struct job *job, uint32_t p, const uint8_t *all)
{
    const struct layout_param *param = &job->layout->params[p];

    return param->trainable && param->n_elems > 0 && all[p / 8] >> p % 8 & 1 && !job->missing.is_declared[p] &&
           is_here(job, param);
}

static void count_zero_gradient(struct job *job, uint32_t p)
{
    struct job_zero_gradient *zero = &job->zero_gradient;

    if (exact_sum_is_zero(step_squares(job->step, p))) {
        zero->n_in_a_row[p]++;
        return;
    }
    zero->n_in_a_row[p] = 0;
    assert(zero->kin[p] == NO_KIN || zero->kin[p] < job->layout->n_params);
    if (zero->kin[p] != NO_KIN)
        zero->is_used[zero->kin[p]] = true;
}

void zero_gradient_note_step(struct job *job, const uint8_t *all)
{
    uint32_t n = job->layout->n_params, p = job->zero_gradient.next;

    if (!job->kept.applied)
        return;
    assert(p < n);
    for (uint32_t i = 0; i < MIN(n, (uint32_t)MAX_LOOKED_AT); i++, p = (p + 1) % n)
        if (can_be_judged(job, p, all))
            count_zero_gradient(job, p);
    job->zero_gradient.next = p % n;
}

/* ---- findings ------------------------------------------------------------------------------------------ */

/* Is the parameter an expert whose kin has had a gradient? Then perhaps the expert got no tokens. */
static bool is_idle_expert(const struct job *job, uint32_t p)
{
    const struct job_zero_gradient *zero = &job->zero_gradient;

    return zero->kin[p] != NO_KIN && zero->is_used[zero->kin[p]];
}

static void describe_finding(const struct job *job, struct finding *finding, uint32_t p, uint32_t n_more)
{
    char name[NAME_BYTES], more[64] = "";

    layout_print_name(name, sizeof(name), job->layout->params[p].name, job->layout->params[p].name_len);
    if (n_more > 0)
        snprintf(more, sizeof(more), ", and %" PRIu32 " more parameter%s", n_more, n_more > 1 ? "s" : "");
    finding->param = p;
    snprintf(finding->text, sizeof(finding->text),
             "%s%s: the gradient was exactly zero in the last %" PRIu32
             " steps that were looked at, summed over all ranks; if that is meant, freeze it, or name it in "
             "diagnostics.unused",
             name, more, job->zero_gradient.n_in_a_row[p]);
}

void zero_gradient_find(const struct job *job, struct findings *findings)
{
    struct finding *last = NULL;
    uint32_t n_named = 0, n_more = 0, last_param = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++) {
        struct finding *finding;

        if (job->zero_gradient.n_in_a_row[p] < STEPS_UNTIL_SAID || is_idle_expert(job, p))
            continue;
        finding = n_named < MAX_NAMED ? findings_add(findings, FINDING_ZERO_GRADIENT) : NULL;
        n_more += finding == NULL;
        if (!finding)
            continue;
        n_named++;
        last = finding;
        last_param = p;
        describe_finding(job, finding, p, 0);
    }
    if (last && n_more > 0)
        describe_finding(job, last, last_param, n_more);
}
