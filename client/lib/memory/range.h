/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on a GPU: the addresses of gathered weights. Each parameter has its own address that never changes, at a
 * multiple of the allocation granularity. Memory is mapped there while the parameter is shown, and afterwards while
 * work of the caller may still read it.
 *
 *   shown    memory lies at its place, with the weights
 *   hidden   the caller needs it no more, but its stream may: memory lies there until the stream has passed the event
 *            that was recorded when it was hidden
 *   free     memory without an address, which the next parameter of the same size gets
 *
 * Hiding a parameter does not wait. When memory is needed, hidden parameters whose event is past lose theirs. The sum
 * of all memory stays below a bound, unless the shown parameters exceed it: before the driver allocates more, free
 * memory of other sizes is destroyed, and then the longest hidden parameters are waited for.
 *
 * One thread. Outcomes are 0 or -errno: -ENOMEM if the GPU has no memory left, and the range has not changed; -EIO if
 * the driver has failed, and cuda_why() says how.
 */

#include <stdint.h>

struct cuda;
struct layout;
struct range;

/* cuda and layout are not owned, and must outlive the range. bound_bytes: bound of all memory. */
int range_new(struct range **out, struct cuda *cuda, const struct layout *layout, uint64_t bound_bytes);

/* NULL is fine. No work may read weights any more, except those of hidden parameters. */
void range_free(struct range *range);

/* range_free() for a forked child, where the driver must not be called. */
void range_forget(struct range *range);

uint8_t *range_place(const struct range *range, uint32_t param);

/* Return: the size of all memory that the range holds. */
uint64_t range_held_bytes(const struct range *range);

/*
 * Copies the weights from device memory to the parameter's place. If the parameter is already shown, no work may read
 * it. The copy is complete when range_finish() has returned; until then `from` must not change.
 */
int range_show(struct range *range, uint32_t param, const uint8_t *from);
int range_finish(struct range *range);

/* Hides the parameter. Work that is on the stream now may still read it. */
int range_hide(struct range *range, uint32_t param, void *stream);
