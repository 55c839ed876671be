/* SPDX-License-Identifier: Apache-2.0 */

/* Questions for the norm of one parameter, and the sums of exact squares that answer them. */

#include "daemon/nodes/param-norm.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "core/base/base.h"
#include "core/wire/node-wire.h"
#include "core/wire/wire-reply.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/nodes/nodes-inside.h"
#include "daemon/nodes/nodes.h"

struct param_norm {
    struct param_norm *next;
    uint64_t number; /* unique on this node */
    unsigned rank;
    uint64_t incarnation; /* of the process that asked */
    uint32_t param;
    uint64_t heard; /* the nodes that have answered, as a mask */
    struct exact_sum squares;
};

_Static_assert(NODE_MAX_NODES == 64, "a mask of 64 bits is full when all nodes have answered");

/* Return: a number that differs from those of all other questions of all nodes. */
static uint64_t digest_of(const struct job *job, const struct param_norm *question)
{
    return question->number * NODE_MAX_NODES + job->config->world.node;
}

bool param_norm_is_here(const struct job *job, uint32_t param)
{
    const struct layout_param *p = &job->layout->params[param];

    assert(param < job->layout->n_params);
    for (uint32_t c = p->first_chunk; c < p->first_chunk + p->n_chunks; c++)
        if (!state_owns(job->state, job->layout->chunks[c].rank))
            return false;
    return true;
}

static void ask_for_squares(struct nodes *nodes, const struct param_norm *question)
{
    uint64_t number = question->param;

    nodes_report(nodes, (struct node_message){.kind = NODE_WANT_SQUARES,
                                              .digest = digest_of(nodes->job, question),
                                              .numbers = &number,
                                              .n_numbers = 1});
}

void param_norm_ask_again(struct nodes *nodes)
{
    for (const struct param_norm *question = nodes->param_norms; question; question = question->next)
        ask_for_squares(nodes, question);
}

int param_norm_ask(struct nodes *nodes, struct job_rank *rank, uint32_t param)
{
    struct job *job = nodes->job;
    struct param_norm *question = calloc(1, sizeof(*question));

    assert(job_is_own(job, rank->rank)); /* the answer to another node's rank would be lost */
    if (!question)
        return -ENOMEM;
    question->next = nodes->param_norms;
    question->number = nodes->n_param_norms++;
    question->rank = rank->rank;
    question->incarnation = rank->kept.incarnation;
    question->param = param;
    nodes->param_norms = question;
    job_wait(job, rank, WAIT_READ);
    ask_for_squares(nodes, question);
    return 0;
}

const char *param_norm_hear_question(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;
    const struct exact_sum *squares;

    if (!job->layout)
        return NULL; /* the question is about a run that this daemon has dropped */
    if (message->n_numbers != 1 || message->numbers[0] >= job->layout->n_params)
        return "WANT_SQUARES.numbers: no such parameter";
    squares = step_squares(job->step, (uint32_t)message->numbers[0]);
    nodes_report(nodes, (struct node_message){.kind = NODE_SQUARES,
                                              .digest = message->digest,
                                              .bytes = (const uint8_t *)squares,
                                              .n_bytes = sizeof(*squares)});
    return NULL;
}

static void answer_with_norm(struct job *job, const struct param_norm *question)
{
    struct job_rank *rank = &job->ranks[question->rank];

    assert(question->param < job->layout->n_params); /* param_norm_forget() frees the questions of a dropped layout */
    if (rank->wait != WAIT_READ || rank->kept.incarnation != question->incarnation)
        return; /* the process that asked has ended */
    job_answer(job, rank,
               &(struct reply){
                   .type = REPLY_STATE_IS,
                   .state_is = {.norm = step_param_norm(job->step, &question->squares),
                                .count = job->state->progress.counts[question->param]},
               },
               NULL, 0);
}

const char *param_norm_hear_answer(struct nodes *nodes, const struct node_message *message)
{
    struct job *job = nodes->job;
    size_t n_nodes = job->config->world.nodes.n_items;
    struct param_norm **link = &nodes->param_norms, *question;
    struct exact_sum squares;

    while (*link && digest_of(job, *link) != message->digest)
        link = &(*link)->next;
    question = *link;
    if (!question)
        return NULL; /* another node's question */
    if (!node_exact_sum(message, &squares))
        return "SQUARES.bytes: not an exact sum";
    if (message->node >= n_nodes)
        return "SQUARES.node: no such node";
    if (question->heard >> message->node & 1)
        return NULL; /* the question was repeated, and this is its second answer */
    exact_sum_merge(&question->squares, &squares);
    question->heard |= UINT64_C(1) << message->node;
    if (question->heard != UINT64_MAX >> (NODE_MAX_NODES - n_nodes))
        return NULL;
    *link = question->next;
    answer_with_norm(job, question);
    free(question);
    return NULL;
}

void param_norm_forget(struct nodes *nodes)
{
    while (nodes->param_norms) {
        struct param_norm *question = nodes->param_norms;

        nodes->param_norms = question->next;
        free(question);
    }
}
