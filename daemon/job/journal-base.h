/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The base of the journal: the configuration as far as the layout and the numbers of a run follow from it, and the
 * manifest. The next daemon compares its own configuration with it.
 */

#include <stddef.h>

struct job;
struct manifest;

/* The job has been formed. */
void base_write(struct job *job);

/*
 * Return: 0, and the manifest, which the caller frees; -EINVAL and a sentence on what differs, or is damaged; -ENOMEM.
 */
int base_read(struct job *job, struct manifest *manifest, char *why, size_t why_size);
