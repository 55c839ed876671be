/* SPDX-License-Identifier: Apache-2.0 */

/* Copies whole parameters between the state and a segment on the workers. */

#include "daemon/memory/transfer.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "daemon/memory/weights.h"

/* About a millisecond of copying; picked, not measured. */
#define PIECE_ELEMS (UINT64_C(256) * 1024)

struct piece {
    uint32_t param;
    uint64_t start, n;
};

struct transfer {
    struct work work;
    struct transfer_options options;
    int result;
    uint32_t n_pieces;
    struct piece pieces[];
};

static uint32_t nth_param(const struct transfer_options *options, uint32_t i)
{
    return options->params ? options->params[i] : i;
}

static uint64_t count_pieces(const struct transfer_options *options)
{
    uint64_t n = 0;

    assert(options->params || options->n_params <= options->state->layout->n_params);
    for (uint32_t i = 0; i < options->n_params; i++)
        n += div_round_up(options->state->layout->params[nth_param(options, i)].n_elems, PIECE_ELEMS);
    return n;
}

static void cut(struct transfer *transfer)
{
    for (uint32_t i = 0; i < transfer->options.n_params; i++) {
        uint32_t param = nth_param(&transfer->options, i);
        uint64_t n_elems = transfer->options.state->layout->params[param].n_elems;

        for (uint64_t start = 0; start < n_elems; start += PIECE_ELEMS)
            transfer->pieces[transfer->n_pieces++] =
                (struct piece){.param = param, .start = start, .n = MIN(PIECE_ELEMS, n_elems - start)};
    }
}

static int reserve_piece(const struct segment *segment, uint64_t offset, uint64_t n_bytes)
{
    uint64_t from = offset / page_size() * page_size();
    uint64_t to = round_up(offset + n_bytes, page_size());

    return segment_reserve(segment, from, to - from);
}

static void transfer_run(struct work *work, uint32_t item)
{
    struct transfer *transfer = container_of(work, struct transfer, work);
    const struct transfer_options *o = &transfer->options;
    const struct piece *piece = &transfer->pieces[item];
    const struct layout_param *param = &o->state->layout->params[piece->param];
    uint64_t offset =
        (o->range ? param->range_offset_bytes : param->weight_offset_bytes) + piece->start * dtype_size(param->dtype);
    int r;

    (void)failpoint("transfer");
    if (o->direction == TRANSFER_STORE) {
        assert(offset + piece->n * dtype_size(param->dtype) <= o->segment->n_bytes);
        weights_store(o->state, o->kernels, piece->param, piece->start, piece->n, o->segment->map + offset);
        return;
    }
    r = reserve_piece(o->segment, offset, piece->n * dtype_size(param->dtype));
    if (r < 0) {
        __atomic_store_n(&transfer->result, r, __ATOMIC_RELAXED);
        return;
    }
    weights_fetch(o->state, o->kernels, piece->param, piece->start, piece->n, o->segment->map + offset);
}

static void transfer_done(struct work *work)
{
    struct transfer *transfer = container_of(work, struct transfer, work);
    struct transfer_options options = transfer->options;
    int result = transfer->result;

    free(transfer);
    options.done(options.userdata, result);
}

int transfer_start(struct worker_pool *pool, const struct transfer_options *options)
{
    uint64_t n = count_pieces(options);
    struct transfer *transfer;

    if (n > UINT32_MAX)
        return -ENOMEM;
    transfer = calloc(1, sizeof(*transfer) + n * sizeof(transfer->pieces[0]));
    if (!transfer)
        return -ENOMEM;
    transfer->options = *options;
    cut(transfer);
    assert(transfer->n_pieces == n);
    transfer->options.params = NULL; /* the caller may free its list */
    transfer->work = (struct work){.run = transfer_run, .done = transfer_done, .n_items = transfer->n_pieces};
    worker_post(pool, &transfer->work);
    return 0;
}
