/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * `zerodctl explain`: reads a log, and explains what an error of DDP or DeepSpeed proves, what it can mean, and what to
 * check. The explanations are diagnostics like zerod's own. The log may contain any bytes.
 *
 *   explain-read.c   finds known messages, the names in them, and clues around them
 *   explain-say.c    turns a message into its diagnostic
 *   explain.c        the command
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct diagnostic;

enum {
    EXPLAIN_MAX_BYTES = (1 << 20) - 4096, /* the size of a strbuf; of a longer text only the end is read */
    EXPLAIN_MAX_FOUND = 16,
    EXPLAIN_MAX_RANKS = 1024,
    EXPLAIN_NAME_BYTES = 256,
    EXPLAIN_LIST_BYTES = 4096,
};

enum explain_kind {
    EXPLAIN_READY_ONCE,      /* DDP: "Expected to mark a variable ready only once" */
    EXPLAIN_PRIOR,           /* DDP: "Expected to have finished reduction in the prior iteration" */
    EXPLAIN_PRIOR_FIND,      /* EXPLAIN_PRIOR with find_unused_parameters=True */
    EXPLAIN_PRIOR_STATIC,    /* EXPLAIN_PRIOR with static_graph=True: a parameter was used first, then unused */
    EXPLAIN_GRAPH_CHANGED,   /* DDP: "Your training graph has changed": a parameter was unused first, then used */
    EXPLAIN_DEEPSPEED_TWICE, /* DeepSpeed, stages 1 and 2: "has already been reduced" */
    EXPLAIN_DEEPSPEED_BARE,  /* DeepSpeed, stage 3: an assertion without text */
    EXPLAIN_OURS,            /* a code of zerod */
};

enum explain_clue {
    CLUE_CHECKPOINT = 1 << 0, /* the traceback goes through the backward of a reentrant checkpoint */
    CLUE_FIND = 1 << 1,       /* the log has find_unused_parameters=True */
    CLUE_NOT_FIND = 1 << 2,   /* the log has find_unused_parameters=False */
    CLUE_TRAINER = 1 << 3,    /* frames of transformers */
    CLUE_SWIFT = 1 << 4,      /* frames of ms-swift */
    CLUE_DEEPSPEED = 1 << 5,  /* frames of DeepSpeed */
    CLUE_DEAD = 1 << 6,       /* torch warned that no input of a checkpoint requires grad */
    CLUE_TRACEBACK = 1 << 7,  /* the log has the frames of the message */
};

struct explain_message {
    enum explain_kind kind;
    int code;                           /* only for EXPLAIN_OURS */
    bool *ranks;                        /* EXPLAIN_MAX_RANKS, owned: the ranks that printed it */
    unsigned n_ranks;                   /* 0: not known */
    int64_t index;                      /* of the named parameter, in the library's own numbering; -1: not known */
    char name[EXPLAIN_NAME_BYTES];      /* "": not known */
    char list[EXPLAIN_LIST_BYTES];      /* the parameters without gradient, as printed */
    bool names;                         /* list has names, not indices */
    bool list_cut;                      /* the printed list is incomplete */
    unsigned n_listed;                  /* 0: not known */
    bool from_start;                    /* the indices are 0, 1, 2, ... without a gap */
    unsigned clues;                     /* enum explain_clue */
    char exception[EXPLAIN_NAME_BYTES]; /* a line about an error after which the program continued, or "" */
};

struct explain_messages {
    struct explain_message items[EXPLAIN_MAX_FOUND];
    size_t n;
};

/* Return: 0 or -ENOMEM. */
int explain_read(struct explain_messages *messages, const char *text, size_t n_bytes);
void explain_messages_deinit(struct explain_messages *messages);

/*
 * Return: the message's diagnostic. messages: all messages of the text, because explain_say() may compare the lists of
 * two ranks.
 */
struct diagnostic *explain_say(const struct explain_message *message, const struct explain_messages *messages);

/* argv[0] is "explain". Return: a code of sysexits.h. */
int explain_command(int argc, char **argv, bool json);
