/* SPDX-License-Identifier: Apache-2.0 */

/* Asks the daemon to change the number of ranks (resize-command.h). */

#include "client/ctl/resize-command.h"

#include <stdbool.h>
#include <stdio.h>
#include <sysexits.h>
#include <time.h>

#include <json-c/json.h>

#include "client/control/control.h"

enum { PAUSE_MS = 100 };

/* Return: a sentence that says why the daemon refuses. */
static const char *reason(struct json_object *answer)
{
    struct json_object *error = json_object_object_get(answer, "error");

    return error ? json_object_get_string(error) : "the daemon refused without a reason";
}

int resize_ask(const char *prefix, const char *socket, unsigned n_ranks, struct json_object **answer)
{
    bool has_said = false;
    char command[32];
    int r;

    snprintf(command, sizeof(command), "resize %u", n_ranks);
    do {
        struct answer text = ANSWER_NULL;

        *answer = NULL;
        r = control_ask_once(prefix, socket, command, &text);
        if (r < 0)
            return -r;
        r = (int)text.exit_code;
        *answer = json_tokener_parse(text.json);
        answer_deinit(&text);
        if (r == EX_TEMPFAIL) {
            if (!has_said)
                fprintf(stderr, "%s: waiting: %s\n", prefix, reason(*answer));
            has_said = true;
            json_object_put(*answer);
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * 1000000L}, NULL);
        }
    } while (r == EX_TEMPFAIL);
    if (r == 0 && *answer)
        return 0;
    fprintf(stderr, "%s: %s\n", prefix, reason(*answer));
    return r ? r : EX_PROTOCOL;
}
