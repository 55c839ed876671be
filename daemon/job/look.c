/* SPDX-License-Identifier: Apache-2.0 */

/* Stacks of ranks: asks the ranks, and prints their answers. */

#include "daemon/job/look.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/wire/wire-reply.h"
#include "daemon/job/model/answer.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"

enum {
    PATIENCE_MS = 2500, /* picked: a client waits one second for Python's lock, then looks without it */
    FRESH_MS = 500,     /* picked: so that questions do not keep a rank busy */
    MAX_FRAMES = 12,    /* picked: in a diagnostic; zerodctl stacks shows all frames */
};

/* ---- the kernel's view --------------------------------------------------------------------------------- */

/* Return: the state of the process, a letter from proc(5); 0 if it is not known. */
static char read_state(int64_t pid)
{
    char path[64], text[512], *end;
    FILE *file;
    size_t n;

    snprintf(path, sizeof(path), "/proc/%" PRId64 "/stat", pid);
    file = pid > 0 ? fopen(path, "re") : NULL;
    n = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    if (file)
        fclose(file);
    text[n] = '\0';
    end = strrchr(text, ')'); /* the end of the program's name, which may contain ')' */
    return end && end[1] == ' ' ? end[2] : 0;
}

static char state_of(const struct job *job, const struct job_rank *rank)
{
    return job_is_own(job, rank->rank) && rank->peer ? read_state(rank->kept.pid) : 0;
}

/* Is the process stopped? Then it cannot answer. */
static bool is_stopped(const struct job *job, const struct job_rank *rank)
{
    char state = state_of(job, rank);

    return state == 'T' || state == 't';
}

const char *look_process(const struct job *job, const struct job_rank *rank)
{
    switch (state_of(job, rank)) {
    case 'T':
        return "its process is stopped by a signal; kill -CONT lets it go on";
    case 't':
        return "its process is stopped by a debugger";
    case 'D': /* if another thread has answered, this state is momentary */
        return rank->process.look.text
                   ? NULL
                   : "its process waits inside the kernel, where nothing interrupts it: for a disk, or a driver";
    default:
        return NULL;
    }
}

/* ---- asking -------------------------------------------------------------------------------------------- */

struct job_rank *look_attach(struct job *job, unsigned number, uint64_t secret, uint32_t uid, void *peer)
{
    struct job_rank *rank = job_is_own(job, number) ? &job->ranks[number] : NULL;

    if (!rank || !rank->peer || rank->kept.secret != secret || rank->kept.uid != uid)
        return NULL;
    rank->process.look.watch = peer;
    rank->process.look.owes = false;
    rank->process.look.asked_ns = 0;
    return rank;
}

void look_detach(struct job_rank *rank, const void *peer)
{
    if (rank->process.look.watch != peer)
        return;
    rank->process.look.watch = NULL;
    rank->process.look.owes = false;
    rank->process.look.asked_ns = 0;
}

bool look_is_awaited(const struct job *job, const struct job_rank *rank)
{
    return rank->process.look.asked_ns > 0 &&
           job_now(job) - rank->process.look.asked_ns < PATIENCE_MS * UINT64_C(1000000);
}

bool look_ask(struct job *job, struct job_rank *rank)
{
    static const struct reply look = {.type = REPLY_LOOK};

    if (look_is_awaited(job, rank))
        return true;
    if (rank->process.look.seen_ns > 0 && job_now(job) - rank->process.look.seen_ns < FRESH_MS * UINT64_C(1000000))
        return false;
    free(steal_ptr(rank->process.look.text)); /* the last answer is out of date */
    if (job_is_own(job, rank->rank) && (!rank->process.look.watch || is_stopped(job, rank)))
        return false;
    rank->process.look.asked_ns = job_now(job);
    if (!job_is_own(job, rank->rank))
        report_progress(job, (struct report){REPORT_LOOK, .place = {.rank = rank->rank}});
    else if (!rank->process.look.owes)
        job->ops.answer(job->ops.userdata, rank->process.look.watch, &look, NULL, 0);
    rank->process.look.owes = true;
    return true;
}

void look_ask_for_others(struct job *job, struct job_rank *rank)
{
    const char *process, *text;

    rank->process.look.for_others = look_ask(job, rank);
    if (rank->process.look.for_others)
        return;
    process = look_process(job, rank);
    text = rank->process.look.text ? rank->process.look.text : "";
    report_progress(job,
                    (struct report){REPORT_WHERE, .place = {.rank = rank->rank, .text = process ? process : text}});
}

bool look_answered(struct job *job, struct job_rank *rank, const char *text)
{
    if (!rank->process.look.owes)
        return false;
    rank->process.look.owes = false;
    free(rank->process.look.text);
    rank->process.look.text = *text ? strdup(text) : NULL;
    rank->process.look.seen_ns = job_now(job);
    rank->process.look.asked_ns = 0;
    if (rank->process.look.for_others)
        report_progress(job, (struct report){REPORT_WHERE, .place = {.rank = rank->rank, .text = text}});
    rank->process.look.for_others = false;
    return true;
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/* Adds the first line of a foreign text, with its indentation. Return: the rest of the text. */
static const char *add_line(struct strbuf *buf, const char *text)
{
    size_t n = strcspn(text, "\n");
    char line[512];

    snprintf(line, sizeof(line), "%.*s", (int)MIN(n, sizeof(line) - 1), text);
    strbuf_add_foreign(buf, line);
    return text + n + (text[n] == '\n');
}

/* Adds the first thread of the text, with at most MAX_FRAMES frames. */
static void add_thread(struct strbuf *buf, const char *text)
{
    unsigned n = 0;

    text = add_line(buf, text);
    for (; *text == ' ' && n < MAX_FRAMES; n++) {
        strbuf_add(buf, "\n");
        text = add_line(buf, text);
    }
    if (*text == ' ')
        strbuf_add(buf, "\n  ...");
}

bool look_describe(const struct job *job, const struct job_rank *rank, struct strbuf *buf)
{
    const char *process = look_process(job, rank);

    if (process)
        strbuf_add(buf, "rank %u: %s", rank->rank, process);
    else if (rank->process.look.text)
        strbuf_add(buf, "rank %u, ", rank->rank);
    else if (job_is_own(job, rank->rank) && rank->process.look.watch)
        strbuf_add(buf, "rank %u: its process does not say", rank->rank);
    else
        return false;
    if (!process && rank->process.look.text)
        add_thread(buf, rank->process.look.text);
    return true;
}
