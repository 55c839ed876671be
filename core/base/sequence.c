/* SPDX-License-Identifier: Apache-2.0 */

/* Runs stages one after the other, until one waits or fails. */

#include "core/base/sequence.h"

#include <assert.h>

/* Runs stages until one waits or all are over. Return: 0, or the -errno of a stage that failed. */
static int begin_stages(struct sequence *sequence)
{
    while (sequence->stages[sequence->at]) {
        int r = sequence->stages[sequence->at](sequence->userdata);

        if (r == SEQUENCE_WAITS) /* the stage may have freed the sequence */
            return 0;
        if (r < 0)
            return r;
        assert(r == SEQUENCE_OVER);
        sequence->at++;
    }
    sequence->ended(sequence->userdata, 0);
    return 0;
}

int sequence_start(struct sequence *sequence)
{
    sequence->at = 0;
    return begin_stages(sequence);
}

void sequence_run(struct sequence *sequence)
{
    int r = begin_stages(sequence);

    if (r < 0)
        sequence->ended(sequence->userdata, r);
}

void sequence_advance(struct sequence *sequence, int result)
{
    assert(sequence->stages[sequence->at]); /* the list has not ended, so a stage waits */
    if (result < 0) {
        sequence->ended(sequence->userdata, result);
        return;
    }
    sequence->at++;
    sequence_run(sequence);
}

void sequence_done(void *sequence, int result)
{
    sequence_advance(sequence, result);
}
