/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact sums of exact sums, for totals of the norm: a block for each, four groups of threads take every fourth sum,
 * a thread a limb. Carries need not run along the number: of each limb the lower half stays and the upper half goes
 * to the next, which leaves both small enough for 2^29 sums. A few hundred bytes a range: its time is that of
 * a launch.
 */

#include "kernels/cuda/block.h"

enum {
    LIMB_THREADS = 32,
    N_LIMB_GROUPS = BLOCK_THREADS / LIMB_THREADS,
};

/* The thread behind the limbs counts what is not finite. */
DEVICE_FN uint64_t member_part(const struct exact_sum *sum, unsigned limb)
{
    if (limb == EXACT_N_LIMBS)
        return sum->nonfinite;
    if (limb > EXACT_N_LIMBS)
        return 0;
    return static_cast<uint32_t>(sum->limb[limb]) + (limb > 0 ? sum->limb[limb - 1] >> 32 : 0);
}

static __global__ void __launch_bounds__(BLOCK_THREADS) exact_kernel(struct device_exact_list list)
{
    __shared__ uint64_t parts[N_LIMB_GROUPS][LIMB_THREADS];
    const struct device_exact_total total = list.totals[blockIdx.x];

    for (phase threads; threads.next();) {
        const unsigned limb = threadIdx.x % LIMB_THREADS, group = threadIdx.x / LIMB_THREADS;
        uint64_t part = 0;

        for (uint32_t i = group; i < total.n_members; i += N_LIMB_GROUPS)
            part += member_part(&list.sums[list.members[total.first_member + i]], limb);
        parts[group][limb] = part;
    }
    for (phase threads; threads.next();) {
        struct exact_sum *out = &list.out[blockIdx.x];
        uint64_t part = 0;

        if (threadIdx.x > EXACT_N_LIMBS)
            continue;
        for (unsigned group = 0; group < N_LIMB_GROUPS; group++)
            part += parts[group][threadIdx.x];
        if (threadIdx.x < EXACT_N_LIMBS) {
            out->limb[threadIdx.x] = part;
        } else {
            out->n_deferred = 2 * total.n_members;
            out->nonfinite = part != 0;
            out->zero[0] = out->zero[1] = out->zero[2] = 0;
        }
    }
}

int device_exact_sums(struct CUstream_st *stream, const struct device_exact_list *list)
{
    return device_launch(stream, exact_kernel, list->n_totals, *list);
}
