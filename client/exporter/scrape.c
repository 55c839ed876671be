/* SPDX-License-Identifier: Apache-2.0 */

/* Asks all daemons of this machine at once. */

#include "client/exporter/scrape.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "client/control/control.h"
#include "client/exporter/sockets.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"

enum {
    FRESH_MS = 100,  /* picked: younger answers are used again */
    WHY_SIZE = 1024, /* the size of control.error */
};

/* A socket in one round of questions. */
struct target {
    struct metrics_source source; /* answers are owned */
    unsigned timeout_ms;
    bool is_asked;
    char why[WHY_SIZE]; /* why it has not answered; "": it has */
};

struct round {
    struct sockets sockets;
    struct target *targets; /* sockets.n */
    size_t n;
};

struct gather {
    struct gather_options options;
    pthread_mutex_t mutex; /* for the fields below; held while daemons are asked */
    struct round last;
    uint64_t ended_ms; /* end of the last round; 0: none yet */
};

/* ---- one daemon ---------------------------------------------------------------------------------------- */

static struct json_object *ask_target(struct control *control, const char *command, char *why)
{
    struct answer answer;
    struct json_object *o = NULL;

    if (control_ask(control, command, &answer) < 0) {
        snprintf(why, WHY_SIZE, "%s", control->error);
        return NULL;
    }
    if (answer.exit_code == 0)
        o = json_tokener_parse(answer.json);
    if (!o)
        snprintf(why, WHY_SIZE, "the daemon's answer to %s is not what was asked for", command);
    answer_deinit(&answer);
    return o;
}

/* The thread of one daemon. */
static void *ask_daemon(void *userdata)
{
    struct target *target = userdata;
    struct control control;

    if (control_init_within(&control, target->source.socket, target->timeout_ms) < 0) {
        snprintf(target->why, WHY_SIZE, "%s", control.error);
    } else {
        target->source.status = ask_target(&control, "status", target->why);
        if (target->source.status)
            target->source.ranks = ask_target(&control, "ranks", target->why);
    }
    control_deinit(&control);
    return NULL;
}

/* ---- a round ------------------------------------------------------------------------------------------- */

static void round_deinit(struct round *round)
{
    for (size_t i = 0; i < round->n; i++) {
        json_object_put(round->targets[i].source.status);
        json_object_put(round->targets[i].source.ranks);
    }
    free(round->targets);
    sockets_deinit(&round->sockets);
    *round = (struct round){0};
}

static void ask_all(struct round *round)
{
    pthread_t threads[SOCKETS_MAX];
    bool runs[SOCKETS_MAX] = {false};

    for (size_t i = 0; i < round->n; i++)
        if (round->targets[i].is_asked)
            runs[i] = pthread_create(&threads[i], NULL, ask_daemon, &round->targets[i]) == 0;
    for (size_t i = 0; i < round->n; i++) {
        if (runs[i])
            (void)pthread_join(threads[i], NULL);
        else if (round->targets[i].is_asked)
            snprintf(round->targets[i].why, WHY_SIZE, "no thread could be made to ask it");
    }
}

/* Return: a round without answers if memory is short. */
static struct round round_make(const struct gather_options *options)
{
    struct round round = {0};

    if (sockets_find(&round.sockets, options->pattern) == 0)
        round.targets = calloc(round.sockets.n + 1, sizeof(*round.targets));
    if (!round.targets)
        return round;
    for (; round.n < round.sockets.n; round.n++) {
        struct target *target = &round.targets[round.n];

        target->source.socket = round.sockets.paths[round.n];
        target->timeout_ms = options->timeout_ms;
        target->is_asked = sockets_trust(target->source.socket, options->zerod, target->why, WHY_SIZE);
    }
    ask_all(&round);
    return round;
}

/* ---- messages on stderr -------------------------------------------------------------------------------- */

static bool was_in_trouble(const struct round *round, const char *socket)
{
    for (size_t i = 0; i < round->n; i++)
        if (strcmp(round->targets[i].source.socket, socket) == 0)
            return round->targets[i].why[0];
    return false;
}

/* Prints only the first line, because a refusal has several. */
static void say_trouble(const struct target *target)
{
    struct strbuf line = {0};

    strbuf_add(&line, "zerod-exporter: ");
    strbuf_add_foreign(&line, target->source.socket);
    strbuf_add(&line, target->is_asked ? ": no answer: " : ": not asked: ");
    strbuf_add_foreign(&line, target->why);
    fprintf(stderr, "%.*s\n", (int)strcspn(strbuf_text(&line), "\n"), strbuf_text(&line));
    strbuf_deinit(&line);
}

static void say_new_trouble(const struct round *before, const struct round *now)
{
    for (size_t i = 0; i < now->n; i++)
        if (now->targets[i].why[0] && !was_in_trouble(before, now->targets[i].source.socket))
            say_trouble(&now->targets[i]);
    if (now->sockets.n_left_out > 0 && before->sockets.n_left_out == 0)
        fprintf(stderr, "zerod-exporter: more than %d sockets match; the others are not asked\n", SOCKETS_MAX);
}

/* ---- all ----------------------------------------------------------------------------------------------- */

struct gather *gather_new(const struct gather_options *options)
{
    struct gather *gather = calloc(1, sizeof(*gather));

    if (!gather)
        return NULL;
    gather->options = *options;
    pthread_mutex_init(&gather->mutex, NULL);
    return gather;
}

void gather_free(struct gather *gather)
{
    if (!gather)
        return;
    round_deinit(&gather->last);
    pthread_mutex_destroy(&gather->mutex);
    free(gather);
}

static void refresh_round(struct gather *gather)
{
    struct round round;

    if (gather->ended_ms != 0 && control_clock_ms() - gather->ended_ms < FRESH_MS)
        return;
    round = round_make(&gather->options);
    say_new_trouble(&gather->last, &round);
    round_deinit(&gather->last);
    gather->last = round;
    gather->ended_ms = control_clock_ms();
}

void gather_print(struct gather *gather, enum metrics_format format, struct strbuf *buf)
{
    struct metrics_source sources[SOCKETS_MAX];
    size_t n = 0;

    pthread_mutex_lock(&gather->mutex);
    refresh_round(gather);
    for (size_t i = 0; i < gather->last.n; i++)
        if (gather->last.targets[i].is_asked)
            sources[n++] = gather->last.targets[i].source;
    metrics_print(buf, format, sources, n);
    pthread_mutex_unlock(&gather->mutex);
}
