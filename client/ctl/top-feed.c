/* SPDX-License-Identifier: Apache-2.0 */

/* The daemon's answers for `zerodctl top`. */

#include "client/ctl/top-feed.h"

#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include <json-c/json.h>

#include "client/ctl/get.h"
#include "core/base/base.h"

static void replace(struct json_object **place, struct json_object *value)
{
    json_object_put(*place);
    *place = value;
}

void feed_deinit(struct feed *feed)
{
    replace(&feed->status, NULL);
    replace(&feed->ranks, NULL);
    replace(&feed->diagnostics, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(feed->bases); i++)
        replace(&feed->bases[i].ranks, NULL);
}

/* ---- asking -------------------------------------------------------------------------------------------- */

static int set_error(struct feed *feed, int code, const char *sentence)
{
    snprintf(feed->error, sizeof(feed->error), "%s", sentence);
    return code;
}

static int refused(struct feed *feed, struct json_object *answer, int code)
{
    struct json_object *error = get(answer, "error");

    return set_error(feed, code, error ? json_object_get_string(error) : "the daemon refused without a reason");
}

/* Return: 0, and the caller frees *out; or a code of sysexits.h. */
static int ask_for_type(struct feed *feed, struct control *control, const char *command, enum json_type type,
                        struct json_object **out)
{
    struct json_object *answer;
    struct answer text;
    int r = control_ask(control, command, &text);

    if (r < 0)
        return set_error(feed, -r, control->error);
    answer = json_tokener_parse(text.json);
    r = (int)text.exit_code;
    answer_deinit(&text);
    if (r != 0)
        r = refused(feed, answer, r);
    else if (!json_object_is_type(answer, type))
        r = set_error(feed, EX_PROTOCOL, "the daemon's answer is not what it should be");
    if (r == 0)
        *out = steal_ptr(answer);
    json_object_put(answer);
    return r;
}

static bool is_same(struct json_object *a, struct json_object *b, const char *key)
{
    return get_u64(a, key) == get_u64(b, key);
}

/*
 * Return: true if feed->diagnostics lacks the daemon's last diagnostic. All diagnostics of a new daemon count as new.
 */
static bool has_news(const struct feed *feed, struct json_object *status)
{
    struct json_object *last = get(status, "last_diagnostic"), *known = get(feed->status, "last_diagnostic");

    return last &&
           (!feed->diagnostics || !known || !is_same(last, known, "id") || !is_same(status, feed->status, "pid"));
}

/*
 * Keeps feed->ranks for later comparisons. Drops the answers of a replaced daemon, because the new daemon counts from
 * 0.
 */
static void keep_base(struct feed *feed, bool is_replaced)
{
    struct feed_base *bases = feed->bases;

    for (size_t i = 0; is_replaced && i < ARRAY_SIZE(feed->bases); i++)
        replace(&bases[i].ranks, NULL);
    if (bases[1].ranks && feed->answered_ms - bases[1].at_ms < FEED_BASE_MS)
        return;
    replace(&bases[0].ranks, bases[1].ranks);
    bases[0].at_ms = bases[1].at_ms;
    bases[1] = (struct feed_base){json_object_get(feed->ranks), feed->answered_ms};
}

static int ask_all(struct feed *feed, struct control *control)
{
    struct json_object *status = NULL, *ranks = NULL, *diagnostics = NULL;
    bool is_replaced;
    int r = ask_for_type(feed, control, "status", json_type_object, &status);

    if (r == 0)
        r = ask_for_type(feed, control, "ranks", json_type_array, &ranks);
    if (r == 0 && has_news(feed, status))
        r = ask_for_type(feed, control, "diagnostics", json_type_array, &diagnostics);
    if (r != 0) {
        json_object_put(status);
        json_object_put(ranks);
        json_object_put(diagnostics);
        return r;
    }
    is_replaced = !is_same(status, feed->status, "pid");
    feed->answered_ms = control_clock_ms();
    if (diagnostics || !get(status, "last_diagnostic")) {
        replace(&feed->diagnostics, diagnostics);
        feed->diagnostics_ms = feed->answered_ms;
    }
    replace(&feed->status, status);
    replace(&feed->ranks, ranks);
    keep_base(feed, is_replaced);
    return 0;
}

int feed_look(struct feed *feed)
{
    struct control control;
    int r = control_init_idle(&control, feed->socket, FEED_PATIENCE_MS, feed->idle);

    feed->code = r < 0 ? set_error(feed, -r, control.error) : ask_all(feed, &control);
    control_deinit(&control);
    return feed->code;
}

/* ---- comparing ----------------------------------------------------------------------------------------- */

static struct json_object *find_rank(struct json_object *ranks, uint64_t number)
{
    for (size_t i = 0; i < array_length(ranks); i++) {
        struct json_object *rank = array_get(ranks, i);

        if (get_u64(rank, "rank") == number)
            return rank;
    }
    return NULL;
}

/* Return: the share of the time since the base by which count() has grown; negative if it is not known yet. */
static double share_of(const struct feed *feed, struct json_object *rank, uint64_t (*count)(struct json_object *rank))
{
    const struct feed_base *base = &feed->bases[feed->bases[0].ranks ? 0 : 1];
    struct json_object *before = find_rank(base->ranks, get_u64(rank, "rank"));
    uint64_t ns = count(rank), before_ns = count(before);

    if (!before || feed->answered_ms <= base->at_ms || ns < before_ns)
        return -1;
    return MIN((double)(ns - before_ns) / ((double)(feed->answered_ms - base->at_ms) * 1e6), 1.0);
}

static uint64_t behind_ns(struct json_object *rank)
{
    return get_u64(rank, "behind_total_ns");
}

static uint64_t waited_ns(struct json_object *rank)
{
    struct json_object *waits = get(rank, "waits");
    uint64_t ns = 0;

    for (size_t i = 0; i < array_length(waits); i++)
        if (strcmp(get_string(array_get(waits, i), "for"), "daemon") != 0)
            ns += get_u64(array_get(waits, i), "total_ns");
    return ns;
}

double feed_behind_share(const struct feed *feed, struct json_object *rank)
{
    return share_of(feed, rank, behind_ns);
}

double feed_waited_share(const struct feed *feed, struct json_object *rank)
{
    return share_of(feed, rank, waited_ns);
}
