/* SPDX-License-Identifier: Apache-2.0 */

/* Missing parameters: a step without their gradients is reported once for each set. */

#include "daemon/job/model/missing.h"

#include <xxhash.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/evidence.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/pushed.h"

static bool misses_all(const struct job *job, unsigned rank, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (job_has_pushed(job, rank, ids[i]))
            return false;
    return true;
}

static bool has_bit(const uint8_t *bits, uint32_t param)
{
    return bits[param / 8] >> param % 8 & 1;
}

/* Has a rank not pushed a parameter that is trained? */
bool missing_any(const struct job *job, const uint8_t *all)
{
    for (uint32_t p = 0; p < job->layout->n_params; p++)
        if (!has_bit(all, p)) /* frozen ones count as pushed by all */
            return true;
    return false;
}

static bool was_reported(struct job *job, uint64_t digest)
{
    for (unsigned i = 0; i < MIN(job->missing.n_seen, (unsigned)ARRAY_SIZE(job->missing.seen)); i++)
        if (job->missing.seen[i] == digest)
            return true;
    job->missing.seen[job->missing.n_seen++ % ARRAY_SIZE(job->missing.seen)] = digest;
    return false;
}

/* Which parameters are missing, on whom; a warning once per set. any, all: who of the world has pushed them. */
void missing_report(struct job *job, const uint8_t *any, const uint8_t *all)
{
    uint32_t n_params = job->layout->n_params;
    _cleanup_free_ uint8_t *flags = calloc(n_params + 1, 1);
    _cleanup_free_ uint32_t *ids = calloc(n_params + 1, sizeof(*ids));
    _cleanup_free_ uint8_t *called = calloc(n_params + 1, 1);
    uint32_t n = 0, n_all = 0;
    uint64_t digest;
    struct evidence_missing evidence = {
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

    if (!flags || !ids)
        return;
    for (uint32_t p = 0; p < n_params; p++) {
        flags[p] = job->layout->params[p].trainable && !has_bit(all, p);
        if (flags[p])
            ids[n++] = p;
        n_all += flags[p] && !has_bit(any, p);
    }
    job->missing.n_params = n_all;
    digest = n ? XXH3_64bits(flags, n_params) : 0;
    job->missing.n_last = digest == job->missing.last ? job->missing.n_last + 1 : 1;
    evidence.same_every_step = n && job->missing.n_last == job->ledger.step + 1;
    job->missing.last = digest;
    if (n == 0 || was_reported(job, digest))
        return;
    evidence.params = ids;
    evidence.n_params = n;
    for (unsigned r = 0; r < job->world.size; r++)
        if (job_is_own(job, r) || !job->ranks[r].left) /* of another node's it is what it asked with last */
            rank_evidence_add(&job->ranks[r].evidence, &evidence, called, misses_all(job, r, ids, n));
    evidence.same_on_all_ranks = n == n_all;
    evidence.n_ranks_missing = n == n_all ? job->world.size : 1;
    evidence.n_steps_seen = job->ledger.step + 1;
    job_keep(job, cause_missing(&evidence));
}
