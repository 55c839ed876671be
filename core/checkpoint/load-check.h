/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Would the job that wrote a checkpoint load it? What loading refuses (E1702) by the files alone: headers, tensors that
 * lack, are there twice, are of another type or shape than zerod.json says, or are of no job. Bytes are not compared
 * but those of headers: folder_verify().
 */

#include <stddef.h>

#include "core/checkpoint/description.h"

/* folder: an open checkpoint. Return: 0; or -errno and a sentence without a full stop. */
int checkpoint_check(int folder, const struct description *d, char *why, size_t why_size);
