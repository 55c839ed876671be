/* SPDX-License-Identifier: Apache-2.0 */

/* Asks the daemon one question and reports errors. */

#include "client/ctl/ask.h"

#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include <json-c/json.h>

#include "client/control/control.h"
#include "core/base/base.h"

int ctl_fail(const char *sentence, int code)
{
    fprintf(stderr, "zerodctl: %s%s", sentence, *sentence && sentence[strlen(sentence) - 1] == '\n' ? "" : "\n");
    return code;
}

int ctl_flush(void)
{
    int r = flush_file(stdout);

    return r < 0 ? ctl_fail(strerror(-r), EX_IOERR) : 0;
}

static int ask_json(struct control *control, const char *command, bool print, struct json_object **answer)
{
    struct answer text;
    struct json_object *error;
    int r = control_ask(control, command, &text);

    if (r < 0)
        return ctl_fail(control->error, -r);
    *answer = json_tokener_parse(text.json);
    if (print && (*answer || text.exit_code))
        puts(text.json);
    r = text.exit_code;
    if (!*answer && r == 0) {
        r = ctl_fail("the daemon's answer is not JSON", EX_PROTOCOL);
    } else if (r != 0) {
        error = json_object_object_get(*answer, "error");
        ctl_fail(error ? json_object_get_string(error) : "the daemon refused without a reason", r);
    }
    answer_deinit(&text);
    if (r != 0) {
        json_object_put(*answer);
        *answer = NULL;
    }
    return r;
}

int ctl_ask(const char *socket, const char *command, bool print, struct json_object **answer)
{
    struct control control;
    int r = control_init(&control, socket);

    *answer = NULL;
    r = r < 0 ? ctl_fail(control.error, -r) : ask_json(&control, command, print, answer);
    control_deinit(&control);
    return r;
}
