/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The example's training text: the text files of one folder, as one run of characters, and batches cut out of it.
 *
 * A batch is a function of (seed, step, micro-batch, rank) and the text, and of nothing that happened before, so a rank
 * that was restarted, or whose step was aborted, computes the same gradients again.
 */

#include <stddef.h>
#include <stdint.h>

#define TEXT_DEFAULT_FOLDER "/usr/share/common-licenses"
#define TEXT_FOREIGN 127 /* stands for every byte that is not ASCII */

struct text {
    uint8_t *chars; /* each below 128 */
    size_t n_chars;
};

struct text_batch {
    uint64_t seed, step;
    unsigned micro_batch, rank;
    unsigned n_seqs, seq_len;
};

/*
 * Reads every regular file of the folder (links are other names of the same licences), by name in byte order.
 * On failure a sentence goes to stderr. Return: 0, -errno, -ENODATA when there is no text at all.
 */
int text_load(struct text *t, const char *folder);
void text_deinit(struct text *t);

/*
 * Fills n_seqs x seq_len tokens, and for each the character that follows it.
 * Return: 0, -ENODATA (and a sentence on stderr) when the text is shorter than one sequence.
 */
int text_fill(const struct text *t, const struct text_batch *b, uint8_t *tokens, uint8_t *targets);
