/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The progress of trainers' GPUs. Each local rank of a job on GPUs has a page of host memory, which its trainer and the
 * engine map. After each push the trainer's stream writes a *point* into a word of the page. Each push names its point.
 * The engine reads the push's gradient when the word has reached this point.
 *
 * A point is the trainer's incarnation in the high bits, and a count from 1 in the low bits. So points of one trainer
 * grow, and all points of its successor are larger. Each trainer has its own word, because a dead trainer's GPU may
 * still work and must not lower its successor's word. Trainers that share a word are so many incarnations apart that
 * they do not live at the same time.
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

/* Has the GPU reached the point? Then the caller can read everything that the GPU wrote before. */
static inline bool progress_is_reached(const struct progress_page *page, uint64_t point)
{
    return __atomic_load_n(&page->words[progress_word(point)], __ATOMIC_ACQUIRE) >= point;
}
