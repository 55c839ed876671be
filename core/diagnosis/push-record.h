/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The record of a push: the client's facts about the origin of a gradient. */

#include <stdint.h>

enum {
    PUSH_NESTED = 1 << 0,           /* the push came from a nested graph task (reentrant checkpointing) */
    PUSH_HOOK_TWICE = 1 << 1,       /* the client saw its hook fire twice in one graph task */
    PUSH_NEW_FORWARD = 1 << 2,      /* a forward ran since the rank's previous backward */
    PUSH_SITE_IS_BACKWARD = 1 << 3, /* site is where the backward was called, not the forward */
};

/* Facts that a push carries for diagnosis. The size is constant; zero means unknown. */
struct push_record {
    uint64_t incarnation;
    uint64_t sequence;
    uint64_t step;
    uint64_t task;    /* graph task of the framework, unique within its ordinal */
    uint64_t time_ns; /* when the daemon received it, CLOCK_MONOTONIC */
    uint32_t attempt;
    uint32_t micro_batch;
    uint32_t param; /* used in texts */
    uint32_t part;
    uint32_t ordinal; /* outer backward of the micro-batch, from 1 */
    uint32_t depth;   /* nesting of graph tasks, 0 = outermost */
    uint32_t segment; /* string id of the checkpointed segment or module */
    uint32_t call;    /* which call of that segment, from 1 */
    uint32_t site;    /* string id of the forward's (PUSH_SITE_IS_BACKWARD: backward's) call site in the user's code */
    uint32_t flags;   /* PUSH_* */
};
