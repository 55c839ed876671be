/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on a GPU: where a program finds gathered weights. Each parameter has an address of its own that never
 * changes, at a multiple of the allocation granularity; memory lies there while it is shown, and for as long afterwards
 * as work of the caller's may still read it.
 *
 *   shown    memory lies at its place, with the weights
 *   hidden   the caller needs it no more, but its stream may: memory lies there until the stream has passed the event
 *            that was recorded when it was hidden
 *   free     memory without an address, which the next parameter of the same size gets
 *
 * Hiding a parameter waits for nothing. When memory is needed, hidden parameters whose event is past lose theirs. All
 * memory together stays under a bound, unless what is shown at a time exceeds it: before the driver is asked for more,
 * free memory of other sizes is destroyed, and then the longest hidden parameters are waited for.
 *
 * One thread. Outcomes are 0 or -errno: -ENOMEM, the GPU has no memory left, and the range is as it was; -EIO, the
 * driver has failed, and cuda_why() says how.
 */

#include <stdint.h>

struct cuda;
struct layout;
struct range;

/* cuda and layout are not owned, and must outlive it. bound_bytes: of memory, however many parameters that is. */
int range_new(struct range **out, struct cuda *cuda, const struct layout *layout, uint64_t bound_bytes);

/* NULL is fine. No work may read weights any more, except hidden ones. */
void range_free(struct range *range);

/* As range_free(), in a forked child, where the driver must not be called. */
void range_forget(struct range *range);

uint8_t *range_place(const struct range *range, uint32_t param);

/* Memory that it holds. */
uint64_t range_held_bytes(const struct range *range);

/*
 * Copies the weights from device memory to the parameter's place. If it is shown already, no work may read it. The copy
 * is complete when range_finish() has returned; until then from must not change.
 */
int range_show(struct range *range, uint32_t param, const uint8_t *from);
int range_finish(struct range *range);

/* Work that is on the stream now may still read the parameter. */
int range_hide(struct range *range, uint32_t param, void *stream);
