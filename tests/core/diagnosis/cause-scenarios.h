/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Evidence for every function of core/diagnosis/cause.h, under the name of the golden text that it makes (see
 * test-cause.c).
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/layout/layout.h"

/*
 * vision is the model of the manual's example: a vision tower of 27 layers with 16 parameters each, 576 parameters in
 * 96 buckets on two ranks. net is a small encoder with a pooler and a head that no forward uses, on four ranks.
 */
struct fixture {
    struct layout *vision, *net;
    uint32_t tower[27 * 16]; /* in the order of its second backward's pushes, the last layer first */
    uint32_t unused[4];      /* pooler and head */
    uint32_t encoder[12];
    uint32_t used, frozen;
};

struct scenario {
    const char *name; /* name of the golden file; begins with the error code */
    struct diagnostic *(*make)(const struct fixture *f);
    const char *cause_class;
    bool warning;
};

struct scenario_list {
    const struct scenario *items;
    size_t n;
};

struct scenario_list scenarios_pushes(void);  /* E1001 to E1004, E1102, E1103 */
struct scenario_list scenarios_missing(void); /* E1005 to E1007 */
struct scenario_list scenarios_others(void);

/* Client names, as in Hello. */
#define TRAINER "zerod 0.1.0, transformers 4.57.3, torch 2.13.0"
#define SWIFT "zerod 0.1.0, ms-swift 4.5.0, transformers 5.9.0, torch 2.13.0"
#define TORCH "zerod 0.1.0, torch 2.13.0"

static inline struct evidence_at at(const struct layout *layout, const char *client, int64_t rank, int64_t step,
                                    int64_t micro_batch)
{
    return (struct evidence_at){
        .layout = layout, .rank = rank, .step = step, .micro_batch = micro_batch, .client = client};
}

static inline struct diagnostic_push push(struct push_record record, const char *segment, const char *site)
{
    if (!record.sequence)
        record.sequence = 1;
    return (struct diagnostic_push){
        .present = true, .record = record, .segment = (char *)segment, .site = (char *)site};
}

/*
 * The encoder gets a gradient from two backwards of one micro-batch. With torch, the evidence says where they were
 * called.
 */
static inline struct evidence_duplicate two_backwards(const struct fixture *f, const char *client, unsigned flags)
{
    flags |= strstr(client, "torch") ? PUSH_SITE_IS_BACKWARD : 0;
    return (struct evidence_duplicate){
        .at = at(f->net, client, 2, 7, 0),
        .params = f->encoder,
        .n_params = ARRAY_SIZE(f->encoder),
        .first =
            push((struct push_record){.sequence = 3, .ordinal = 1, .task = 1, .flags = flags & PUSH_SITE_IS_BACKWARD},
                 NULL, "gan.py:77"),
        .second =
            push((struct push_record){.sequence = 15, .ordinal = 2, .task = 1, .flags = flags}, NULL, "gan.py:78"),
        .sums_known = true,
    };
}
