/* SPDX-License-Identifier: Apache-2.0 */

/* Finds in the ledger what ranks have pushed. */

#include "daemon/job/model/pushed.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/ring.h"

uint32_t job_n_trainable(const struct job *job)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n += job->layout->params[p].trainable;
    return n;
}

bool job_has_pushed(const struct job *job, unsigned rank, uint32_t param)
{
    assert(rank < job->world.size);
    assert(job->layout->params[param].trainable); /* a frozen parameter has no parts */
    return job->ledger.ranks[rank].pushed_in_step[layout_last_part(job->layout, param)];
}

static bool has_pushed_now(const struct job *job, unsigned rank, uint32_t param)
{
    return ledger_entry(&job->ledger, rank, layout_last_part(job->layout, param))->n_pushed > 0;
}

bool job_awaits(const struct job *job, const struct job_rank *rank, uint32_t param)
{
    const struct ring *ring = rank->rings[0];

    return job->layout->params[param].trainable && !has_pushed_now(job, rank->rank, param) &&
           !(ring && ring_is_held_back(ring, param));
}

uint32_t job_n_pushed_open(const struct job *job, const struct job_rank *rank)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < job->layout->n_params; p++)
        n += job->layout->params[p].trainable && has_pushed_now(job, rank->rank, p);
    return n;
}

void job_find_pushed(const struct job *job, uint8_t *any, uint8_t *all)
{
    memset(any, 0, job_bits_bytes(job));
    memset(all, 0, job_bits_bytes(job));
    for (uint32_t p = 0; p < job->layout->n_params; p++) {
        bool by_any = false, by_all = true;

        for (unsigned r = job->world.first; job->layout->params[p].trainable && r < job->world.end; r++) {
            bool pushed = job_has_pushed(job, r, p);

            by_any |= pushed;
            by_all &= pushed || job->ranks[r].kept.left; /* no rank waits for a rank that has left */
        }
        any[p / 8] |= (uint8_t)(by_any << p % 8);
        all[p / 8] |= (uint8_t)(by_all << p % 8);
    }
}
