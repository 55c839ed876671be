/* SPDX-License-Identifier: Apache-2.0 */

/* `zerodctl checkpoint save`: asks for a checkpoint, and polls the daemon's status until the save ends. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>

#include <json-c/json.h>

#include "client/ctl/ask.h"
#include "client/ctl/checkpoint-inside.h"
#include "core/base/base.h"
#include "core/base/json.h"

enum {
    FIRST_PAUSE_MS = 20,
    LAST_PAUSE_MS = 500,
};

static struct json_object *get_member(struct json_object *o, const char *key)
{
    return json_object_object_get(o, key);
}

static uint64_t get_member_u64(struct json_object *o, const char *key)
{
    return json_object_get_uint64(get_member(o, key));
}

/* path: NULL if the checkpoint is not on the disk yet. */
static int print_answer(const struct checkpoint_options *options, struct json_object *answer, bool is_new,
                        uint64_t step, const char *path)
{
    struct json j = {0};
    struct json_object *o;

    if (options->json) {
        o = json_new_object(&j);
        json_put_u64(&j, o, "schema_version", 1);
        json_put_bool(&j, o, "saved", path);
        json_put_bool(&j, o, "new", is_new);
        json_put_u64(&j, o, "step", step);
        json_put_string(&j, o, "path", path);
        return checkpoint_print_json(&j, o);
    }
    if (is_new && path)
        printf("%s\n", path);
    else
        printf("%s%s%s\n", json_object_get_string(get_member(answer, "message")), path ? ": " : "", path ? path : "");
    return ctl_flush();
}

static int print_saved(const struct checkpoint_options *options, struct json_object *answer, bool is_new, uint64_t step)
{
    _cleanup_free_ char *path = checkpoint_path(json_object_get_string(get_member(answer, "dir")), step);

    return path ? print_answer(options, answer, is_new, step, path) : ctl_fail(strerror(ENOMEM), EX_OSERR);
}

/*
 * *status: the value of "checkpoint", which the caller frees. Return: 0, or a code of sysexits.h after an error
 * message.
 */
static int ask_status(const struct checkpoint_options *options, struct json_object **status)
{
    struct json_object *all;
    int r = ctl_ask(options->socket, "status", false, &all);

    if (r != 0)
        return r;
    *status = json_object_get(get_member(all, "checkpoint"));
    json_object_put(all);
    return 0;
}

/* Return: true if the requested save has ended, or the daemon no longer has the request. */
static bool has_save_ended(struct json_object *status, struct json_object *answer)
{
    return get_member_u64(status, "n_saved") + get_member_u64(status, "n_failed") >=
               get_member_u64(answer, "n_ended") ||
           (!get_member(status, "saving") && !json_object_get_boolean(get_member(status, "wanted")));
}

static int judge_save(const struct checkpoint_options *options, struct json_object *answer, struct json_object *status)
{
    uint64_t n_ended = get_member_u64(status, "n_saved") + get_member_u64(status, "n_failed"),
             step = get_member_u64(answer, "step");
    struct json_object *last = get_member(status, "last"), *why = get_member(status, "why");

    if (n_ended < get_member_u64(answer, "n_ended"))
        return ctl_fail(
            "the checkpoint was given up, because the run was dropped or another daemon took it over; ask again",
            EX_UNAVAILABLE);
    /* Later saves may have ended too since the last poll, so `last` may be of a later step. */
    if (last && get_member_u64(last, "step") >= step && !(why && n_ended == get_member_u64(answer, "n_ended")))
        return print_saved(options, answer, true, get_member_u64(last, "step"));
    checkpoint_say(
        stderr, "zerodctl: the checkpoint of step %" PRIu64 " was not written: %s; remove the cause, and ask again\n",
        step, why ? json_object_get_string(why) : "the daemon does not say why");
    return EX_CANTCREAT;
}

static int wait_for_it(const struct checkpoint_options *options, struct json_object *answer)
{
    struct checkpoint_progress progress;
    struct json_object *status = NULL;
    long pause_ms = FIRST_PAUSE_MS;
    int r;

    checkpoint_progress_init(&progress, "saving");
    while ((r = ask_status(options, &status)) == 0 && !has_save_ended(status, answer)) {
        struct json_object *saving = get_member(status, "saving");

        checkpoint_progress_show(&progress, get_member_u64(saving, "bytes_done"), get_member_u64(saving, "bytes"));
        json_object_put(status);
        nanosleep(&(struct timespec){.tv_nsec = pause_ms * 1000000}, NULL);
        pause_ms = MIN(pause_ms * 3 / 2, (long)LAST_PAUSE_MS);
    }
    checkpoint_progress_clear(&progress);
    if (r != 0)
        return r;
    r = judge_save(options, answer, status);
    json_object_put(status);
    return r;
}

int checkpoint_save(const struct checkpoint_options *options)
{
    struct json_object *answer;
    int r = ctl_ask(options->socket, "save", false, &answer);

    if (r != 0)
        return r;
    if (json_object_get_boolean(get_member(answer, "saved")))
        r = print_saved(options, answer, false, get_member_u64(answer, "step"));
    else if (options->no_wait)
        r = print_answer(options, answer, true, get_member_u64(answer, "step"), NULL);
    else
        r = wait_for_it(options, answer);
    json_object_put(answer);
    return r;
}
