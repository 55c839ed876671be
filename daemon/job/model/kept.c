/* SPDX-License-Identifier: Apache-2.0 */
/* The last diagnostics, in one ring for ranks and one for strangers. */

#include "daemon/job/model/kept.h"

#include <assert.h>

#include "core/base/base.h"

void kept_deinit(struct kept_diagnostics *kept)
{
    for (size_t i = 0; i < KEPT_OF_RANKS; i++)
        diagnostic_unref(kept->of_ranks[i]);
    for (size_t i = 0; i < KEPT_OF_STRANGERS; i++)
        diagnostic_unref(kept->of_strangers[i]);
    *kept = (struct kept_diagnostics){0};
}

void kept_add(struct kept_diagnostics *kept, struct diagnostic *diagnostic, bool stranger)
{
    struct diagnostic **place = stranger ? &kept->of_strangers[kept->n_of_strangers++ % KEPT_OF_STRANGERS]
                                         : &kept->of_ranks[kept->n_of_ranks++ % KEPT_OF_RANKS];

    diagnostic->id = kept->n_of_ranks + kept->n_of_strangers;
    diagnostic_unref(*place);
    *place = diagnostic;
}

/* Return: the nth diagnostic of the ring, counted from the oldest; NULL after the newest. */
static const struct diagnostic *nth(struct diagnostic *const *ring, size_t size, uint64_t n_added, size_t n)
{
    uint64_t n_here = MIN(n_added, (uint64_t)size);

    return n < n_here ? ring[(n_added - n_here + n) % size] : NULL;
}

size_t kept_list(const struct kept_diagnostics *kept, const struct diagnostic **list)
{
    size_t n_ranks = 0, n_strangers = 0;

    for (;;) {
        const struct diagnostic *a = nth(kept->of_ranks, KEPT_OF_RANKS, kept->n_of_ranks, n_ranks);
        const struct diagnostic *b = nth(kept->of_strangers, KEPT_OF_STRANGERS, kept->n_of_strangers, n_strangers);

        if (!a && !b)
            return n_ranks + n_strangers;
        if (!b || (a && a->id < b->id)) {
            list[n_ranks + n_strangers] = a;
            n_ranks++;
        } else {
            list[n_ranks + n_strangers] = b;
            n_strangers++;
        }
    }
}

const struct diagnostic *kept_last(const struct kept_diagnostics *kept)
{
    const struct diagnostic *list[KEPT_MAX];
    size_t n = kept_list(kept, list);

    return n > 0 ? list[n - 1] : NULL;
}
