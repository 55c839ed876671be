/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checks whether the job that wrote a checkpoint could load it, by its files alone. Loading refuses (E1702) bad
 * headers. It also refuses tensors that are missing, occur twice, have another type or shape than zerod.json says, or
 * do not belong to the job. Only the headers' bytes are compared with their hashes; folder_verify() compares the rest.
 */

#include <stddef.h>

#include "core/checkpoint/description.h"

/* folder: an open checkpoint. Return: 0, or -errno with a message in why, without a full stop. */
int checkpoint_check(int folder, const struct description *d, char *why, size_t why_size);
