/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on a GPU: the addresses of gathered weights. Each parameter has its own address that never changes, at a
 * multiple of the allocation granularity. Memory is mapped at the address while the parameter is shown, and then for as
 * long as work of the caller may still read the parameter.
 *
 *   shown    memory with the weights is mapped at the parameter's address
 *   hidden   the caller no longer uses the parameter, but work on the stream may. The memory stays mapped until the
 *            stream has passed the event that was recorded when the parameter was hidden
 *   free     memory without an address, for the next parameter of the same size
 *
 * Hiding a parameter does not wait. When memory is needed, the memory of hidden parameters whose event is past becomes
 * free. All memory together stays below a bound, unless the shown parameters exceed it. To stay below the bound, free
 * memory of other sizes is destroyed first. Then the range waits for the longest hidden parameters.
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

/* NULL is fine. Call it when running work reads no weights except those of hidden parameters. */
void range_free(struct range *range);

/* As range_free(), for a forked child, which must not call the driver. */
void range_forget(struct range *range);

uint8_t *range_place(const struct range *range, uint32_t param);

/* Return: the size of all memory that the range holds. */
uint64_t range_held_bytes(const struct range *range);

/*
 * Copies the weights from device memory to the parameter's place. If the parameter is already shown, no running work
 * may read it. The copy is complete when range_finish() has returned; `from` must not change before.
 */
int range_show(struct range *range, uint32_t param, const uint8_t *from);
int range_finish(struct range *range);

/* Hides the parameter. Work that is on the stream now may still read it. */
int range_hide(struct range *range, uint32_t param, void *stream);
