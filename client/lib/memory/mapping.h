/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A segment of memory that is mapped into this process. */

#include <stddef.h>
#include <stdint.h>

struct mapping {
    uint8_t *base; /* NULL: nothing is mapped */
    size_t n_bytes;
    int fd; /* owned, so that parts can be mapped again; -1: none */
};

#define MAPPING_NULL ((struct mapping){.fd = -1})

/*
 * Checks that the file has these bytes and is sealed against shrinking, because a read beyond its end would kill this
 * process. Return: 0; -EPROTO if the file is too short or not sealed; or a negative errno.
 */
int mapping_check(int fd, uint64_t offset_bytes, uint64_t n_bytes);

/* Maps shared memory after mapping_check(). Takes over the fd, also on failure. Return: 0 or a negative errno. */
int mapping_init(struct mapping *mapping, int fd, size_t n_bytes, int protection);

/*
 * Reserves addresses, at which nothing is readable until the caller maps parts of fd. Takes over the fd, which
 * mapping_deinit() closes, also after a failure. Return: 0 or a negative errno.
 */
int mapping_reserve(struct mapping *mapping, int fd, size_t n_bytes);

void mapping_deinit(struct mapping *mapping); /* MAPPING_NULL is fine */
