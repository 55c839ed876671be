/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The example's training text: the text files of one folder as one run of characters, and batches cut out of it.
 *
 * A batch is a function of (seed, step, micro-batch, rank) and the text alone. So a rank that was restarted, or whose
 * step was aborted, computes the same gradients again.
 */

#include <stddef.h>
#include <stdint.h>

#define TEXT_DEFAULT_FOLDER "/usr/share/common-licenses"
#define TEXT_FOREIGN 127 /* replaces every byte that is not ASCII */

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
 * Reads every regular file of the folder, by name in byte order. Skips links, because they are other names of the same
 * licences. Return: 0, or -errno after a sentence on stderr (-ENODATA if there is no text).
 */
int text_load(struct text *t, const char *folder);
void text_deinit(struct text *t);

/*
 * Fills n_seqs x seq_len tokens, and as many targets: the character after each token. Return: 0, or -ENODATA after a
 * sentence on stderr if the text is shorter than one sequence.
 */
int text_fill(const struct text *t, const struct text_batch *b, uint8_t *tokens, uint8_t *targets);
