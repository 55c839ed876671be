/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How far the work of trainers' GPUs has come. Each local rank of a job on GPUs has a page of host memory, which its
 * trainer and the engine map. Behind each push the trainer's stream writes a *point* into a word of the page; the
 * engine reads a gradient when the word has reached the point that the push names.
 *
 * A point is the trainer's incarnation and, in the low bits, a count from 1. So points of one trainer grow, and all
 * points of its successor are larger. Each trainer has a word of its own, because work that a dead trainer's GPU still
 * does must not take its successor's word back. Trainers so far apart that they share a word do not live at one time.
 */

#include <stdbool.h>
#include <stdint.h>

enum { PROGRESS_COUNT_BITS = 40, PROGRESS_WORDS = 512 };

struct progress_page {
    uint64_t words[PROGRESS_WORDS];
};

/* Return: a value below all points of this incarnation, and above all points of earlier ones. */
static inline uint64_t progress_first(uint64_t incarnation)
{
    return incarnation << PROGRESS_COUNT_BITS;
}

static inline uint64_t progress_incarnation(uint64_t point)
{
    return point >> PROGRESS_COUNT_BITS;
}

static inline uint64_t progress_last(uint64_t point)
{
    return point | ((UINT64_C(1) << PROGRESS_COUNT_BITS) - 1);
}

static inline unsigned progress_word(uint64_t point)
{
    return (unsigned)(progress_incarnation(point) % PROGRESS_WORDS);
}

/* Return: whether the GPU has reached the point; if so, the caller can read everything that it wrote before. */
static inline bool progress_is_reached(const struct progress_page *page, uint64_t point)
{
    return __atomic_load_n(&page->words[progress_word(point)], __ATOMIC_ACQUIRE) >= point;
}
