/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The base of the journal: the manifest, and the settings that determine the layout and the numerical results of a run.
 * The next daemon compares its own configuration with these settings.
 */

#include <stddef.h>

struct job;
struct manifest;

/* Writes the base. Call it when the job has been formed. */
void base_write(struct job *job);

/*
 * Compares the base's settings with the configuration, and reads the manifest. Return: 0, and the manifest, which the
 * caller frees; -EINVAL, and a sentence, if a setting differs or the base is damaged; or -ENOMEM.
 */
int base_read(struct job *job, struct manifest *manifest, char *why, size_t why_size);
