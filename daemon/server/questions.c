/* SPDX-License-Identifier: Apache-2.0 */

/* Answers questions in rounds, so that questions do not delay the trainers. */

#include "daemon/server/questions.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/wire/frame.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"

/* Room in a packet for everything but the JSON. Some 20 bytes are needed. */
enum { PART_EXTRA_BYTES = 64 };

/* The packets of an answer, ready to be sent to all connections that asked. */
struct answer {
    struct answer *next;
    unsigned n_refs;
    size_t n_parts, n_bytes;
    struct answer_part {
        size_t offset, n_bytes;
    } * parts;
    uint8_t *bytes;
};

/* ---- lists --------------------------------------------------------------------------------------------- */

static void list_init(struct question_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static void list_append(struct question_list *list, struct question *question)
{
    assert(!question->list);
    question->next = NULL;
    question->list = list;
    *list->end = question;
    list->end = &question->next;
}

static void list_remove(struct question *question)
{
    struct question_list *list = question->list;
    struct question **link = &list->first;

    while (*link != question)
        link = &(*link)->next;
    *link = question->next;
    if (!question->next)
        list->end = link;
    question->next = NULL;
    question->list = NULL;
}

/* ---- answers ------------------------------------------------------------------------------------------- */

static void answer_free(struct answer *answer)
{
    if (!answer)
        return;
    free(answer->parts);
    free(answer->bytes);
    free(answer);
}

DEFINE_CLEANUP(struct answer *, answer_free);

static void answer_unref(struct questions *questions, struct answer *answer)
{
    struct answer **link = &questions->oldest, *before = NULL;

    assert(!answer || answer->n_refs > 0);
    if (!answer || --answer->n_refs > 0)
        return;
    while (*link != answer) {
        before = *link;
        link = &before->next;
    }
    *link = answer->next;
    if (questions->newest == answer)
        questions->newest = before;
    assert(questions->kept_bytes >= answer->n_bytes);
    questions->kept_bytes -= answer->n_bytes;
    answer_free(answer);
}

/* Packs the JSON into the answer's packets. Return: 0 or -ENOMEM. */
static int pack_answer(struct wire_arena *arena, struct answer *answer, const char *json, uint32_t exit_code)
{
    size_t left = strlen(json);

    answer->n_parts = MAX(div_round_up(left, WIRE_PART_BYTES), (size_t)1);
    answer->parts = calloc(answer->n_parts, sizeof(*answer->parts));
    answer->bytes = malloc(left + answer->n_parts * PART_EXTRA_BYTES);
    for (size_t i = 0; i < answer->n_parts; i++) {
        size_t n = MIN(left, (size_t)WIRE_PART_BYTES);
        int n_packed;

        if (!answer->parts || !answer->bytes)
            return -ENOMEM;
        left -= n;
        n_packed = wire_pack_reply(arena,
                                   &(struct reply){
                                       .type = REPLY_ADMIN_PART,
                                       .admin_part = {.json = (const uint8_t *)json,
                                                      .n_json_bytes = n,
                                                      .last = left == 0,
                                                      .exit_code = exit_code},
                                   },
                                   answer->bytes + answer->n_bytes, n + PART_EXTRA_BYTES);
        if (n_packed < 0)
            return n_packed;
        answer->parts[i] = (struct answer_part){answer->n_bytes, (size_t)n_packed};
        answer->n_bytes += (size_t)n_packed;
        json += n;
    }
    assert(left == 0);
    return 0;
}

/* Builds the answer to a command. Return: the answer with n_refs 0, or NULL without memory. */
static struct answer *answer_build(struct questions *questions, const char *command)
{
    _cleanup_(answer_freep) struct answer *answer = calloc(1, sizeof(*answer));
    _cleanup_free_ char *json = NULL;
    uint32_t exit_code = 0;

    questions->n_built++;
    json = questions->ops.answer(questions->ops.userdata, command, &exit_code);
    if (!json || !answer || pack_answer(&questions->arena, answer, json, exit_code) < 0)
        return NULL;
    if (questions->newest)
        questions->newest->next = answer;
    else
        questions->oldest = answer;
    questions->newest = answer;
    questions->kept_bytes += answer->n_bytes;
    return steal_ptr(answer);
}

/* ---- questions ----------------------------------------------------------------------------------------- */

static void set_state(struct questions *questions, struct question *question, enum question_state state)
{
    if (question->list)
        list_remove(question);
    question->state = state;
    if (state == QUESTION_BLOCKED)
        list_append(&questions->blocked, question);
    else if (state != QUESTION_NONE)
        list_append(&questions->lanes[!question->is_admin].waiting, question);
}

void questions_cancel(struct questions *questions, struct question *question)
{
    set_state(questions, question, QUESTION_NONE);
    answer_unref(questions, steal_ptr(question->answer));
}

static void fail_question(struct questions *questions, struct question *question)
{
    questions_cancel(questions, question);
    questions->ops.failed(question);
}

static void finish_question(struct questions *questions, struct question *question)
{
    questions_cancel(questions, question);
    questions->ops.moved(question);
}

/* Sends the next part of the question's answer. */
static void send_on(struct questions *questions, struct question *question)
{
    const struct answer_part *part = &question->answer->parts[question->next_part];
    int r = frame_send(question->fd, question->answer->bytes + part->offset, part->n_bytes, NULL, 0);

    if (r == FRAME_AGAIN || frame_is_short(r)) {
        question->blocked_ns = uv_hrtime();
        set_state(questions, question, QUESTION_BLOCKED);
        questions->ops.moved(question);
    } else if (r != 0) {
        fail_question(questions, question);
    } else if (++question->next_part == question->answer->n_parts) {
        finish_question(questions, question);
    }
}

static void fail_readers(struct questions *questions, const struct answer *answer)
{
    struct question_list *lists[] = {&questions->blocked, &questions->lanes[0].waiting, &questions->lanes[1].waiting};

    for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
        for (struct question *q = lists[i]->first, *next; q; q = next) {
            next = q->next;
            if (q->answer == answer)
                fail_question(questions, q);
        }
}

/* While unread answers use too much memory, drops the oldest answer and fails its questions. */
static void bound_memory(struct questions *questions)
{
    while (questions->oldest != questions->newest &&
           questions->kept_bytes - questions->newest->n_bytes > QUESTIONS_MAX_KEPT_BYTES)
        fail_readers(questions, questions->oldest);
}

/* Builds one answer for this question and all waiting questions with the same command. */
static void give_answer(struct questions *questions, struct question *question)
{
    char command[QUESTION_COMMAND_BYTES];
    struct answer *answer;

    memcpy(command, question->command, sizeof(command));
    answer = answer_build(questions, command);
    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        for (struct question *q = questions->lanes[i].waiting.first, *next; q; q = next) {
            next = q->next;
            if (q->state != QUESTION_ASKED || strcmp(q->command, command) != 0)
                continue;
            if (!answer) { /* no memory */
                fail_question(questions, q);
                continue;
            }
            assert(!q->answer);
            q->answer = answer;
            answer->n_refs++;
            q->state = QUESTION_SENDING; /* the question keeps its place in the lane */
        }
    if (answer)
        bound_memory(questions);
}

/* ---- rounds -------------------------------------------------------------------------------------------- */

static uint64_t processor_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t questions_pause_ns(uint64_t spent_ns)
{
    return MIN(spent_ns * (QUESTIONS_SHARE - 1), QUESTIONS_MAX_PAUSE_NS);
}

static void work(struct questions *questions, struct questions_lane *lane)
{
    uint64_t began_ns = processor_ns(), spent_ns = 0;

    questions->n_rounds++;
    while (lane->waiting.first && spent_ns < QUESTIONS_ROUND_NS) {
        struct question *question = lane->waiting.first;

        assert(question->state == QUESTION_ASKED || question->state == QUESTION_SENDING);
        assert(question->state == QUESTION_ASKED || question->next_part < question->answer->n_parts);
        if (question->state == QUESTION_ASKED)
            give_answer(questions, question);
        else
            send_on(questions, question);
        spent_ns = processor_ns() - began_ns;
    }
    lane->until_ns = uv_hrtime() + questions_pause_ns(spent_ns);
}

static void on_timer(uv_timer_t *handle);
static void on_check(uv_check_t *handle);

/* Does nothing. While an idle handle is active, the loop does not sleep, so on_check() is called at once. */
static void on_idle(uv_idle_t *handle)
{
    (void)handle;
}

static void make_due(struct questions *questions, uint64_t now)
{
    if (questions->due_ns)
        return;
    questions->due_ns = now;
    questions->trainers_first = false;
    (void)uv_idle_start(&questions->idle, on_idle);
    (void)uv_check_start(&questions->check, on_check);
}

static void plan(struct questions *questions)
{
    uint64_t now = uv_hrtime(), next_ns = UINT64_MAX;

    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        if (questions->lanes[i].waiting.first)
            next_ns = MIN(next_ns, questions->lanes[i].until_ns);
    if (next_ns <= now) {
        make_due(questions, now);
        return;
    }
    questions->due_ns = 0;
    (void)uv_idle_stop(&questions->idle);
    (void)uv_check_stop(&questions->check);
    if (next_ns < UINT64_MAX) /* rounded up, because a timer that fires too early starts no round */
        (void)uv_timer_start(&questions->timer, on_timer, (next_ns - now) / 1000000 + 1, 0);
}

static void on_timer(uv_timer_t *handle)
{
    plan(handle->data);
}

/* Runs the due rounds, after the loop has served its events. */
static void on_check(uv_check_t *handle)
{
    struct questions *questions = handle->data;
    bool give_way = questions->trainers_first;
    uint64_t now = uv_hrtime();

    questions->trainers_first = false;
    if (give_way && now - questions->due_ns < QUESTIONS_PATIENCE_NS)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        if (questions->lanes[i].waiting.first && questions->lanes[i].until_ns <= now)
            work(questions, &questions->lanes[i]);
    questions->due_ns = 0;
    plan(questions);
    questions->ops.after(questions->ops.userdata);
}

void questions_give_way(struct questions *questions)
{
    questions->trainers_first = true;
}

void questions_ask(struct questions *questions, struct question *question, int fd, const char *command, bool is_admin)
{
    assert(question->state == QUESTION_NONE);
    assert(!question->answer);
    question->fd = fd;
    question->is_admin = is_admin;
    question->next_part = 0;
    snprintf(question->command, sizeof(question->command), "%s", command);
    set_state(questions, question, QUESTION_ASKED);
    questions->ops.moved(question);
    plan(questions);
}

void questions_unblock(struct questions *questions, struct question *question)
{
    assert(question->state == QUESTION_BLOCKED);
    assert(question->answer);
    set_state(questions, question, QUESTION_SENDING);
    questions->ops.moved(question);
    plan(questions);
}

/* ---- life ---------------------------------------------------------------------------------------------- */

int questions_init(struct questions *questions, uv_loop_t *loop, const struct questions_ops *ops)
{
    *questions = (struct questions){.ops = *ops, .arena = WIRE_ARENA_NULL};
    for (size_t i = 0; i < ARRAY_SIZE(questions->lanes); i++)
        list_init(&questions->lanes[i].waiting);
    list_init(&questions->blocked);
    uv_timer_init(loop, &questions->timer);
    uv_idle_init(loop, &questions->idle);
    uv_check_init(loop, &questions->check);
    questions->timer.data = questions->idle.data = questions->check.data = questions;
    return wire_arena_init(&questions->arena);
}

void questions_deinit(struct questions *questions)
{
    assert(!questions->oldest && questions->kept_bytes == 0);
    assert(!questions->blocked.first);
    assert(!questions->lanes[0].waiting.first && !questions->lanes[1].waiting.first);
    wire_arena_deinit(&questions->arena);
}
