/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The record of a push: facts from the client about the origin of a gradient. */

#include <stdint.h>

enum {
    PUSH_NESTED = 1 << 0,           /* the push came from a nested graph task (reentrant checkpointing) */
    PUSH_HOOK_TWICE = 1 << 1,       /* the client's hook ran twice in one graph task */
    PUSH_NEW_FORWARD = 1 << 2,      /* a forward ran since the rank's previous backward */
    PUSH_SITE_IS_BACKWARD = 1 << 3, /* site is the place where the backward was called, not the forward */
};

/* Facts for diagnosis that each push carries. The size is constant; zero means unknown. */
struct push_record {
    uint64_t incarnation;
    uint64_t sequence;
    uint64_t step;
    uint64_t task;    /* number of the framework's graph task, unique within ordinal */
    uint64_t time_ns; /* when the daemon received the push, CLOCK_MONOTONIC */
    uint32_t attempt;
    uint32_t micro_batch;
    uint32_t param; /* number of the parameter; used in texts */
    uint32_t part;
    uint32_t ordinal; /* number of the outer backward in the micro-batch, from 1 */
    uint32_t depth;   /* nesting of graph tasks; 0: the outermost */
    uint32_t segment; /* string id of the checkpointed segment or module */
    uint32_t call;    /* number of the call of that segment, from 1 */
    uint32_t site;    /* string id of the forward's (PUSH_SITE_IS_BACKWARD: backward's) call site in the user's code */
    uint32_t flags;   /* PUSH_* */
};
