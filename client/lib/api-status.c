/* SPDX-License-Identifier: Apache-2.0 */

/* Asks the daemon for its status over a second connection, not the rank's. */

#include <errno.h>
#include <stdlib.h>
#include <sysexits.h>

#include "client/control/control.h"
#include "client/lib/handle.h"
#include "core/base/base.h"

enum { DEFAULT_TIMEOUT_MS = 10000 };

static int errno_of(int exit_code)
{
    switch (exit_code) {
    case EX_UNAVAILABLE:
        return -ECONNREFUSED;
    case EX_TEMPFAIL:
        return -ETIMEDOUT;
    case EX_NOPERM:
        return -EACCES;
    case EX_PROTOCOL:
        return -EPROTO;
    default:
        return -EIO;
    }
}

static int ask_for_status(struct zerod *c, struct control *control, const char **json)
{
    struct answer answer;
    int r = control_ask(control, "status", &answer);

    if (r < 0)
        return call_fail(&c->call, errno_of(-r), "zerod_status: %s", control->error);
    if (answer.exit_code != 0) {
        r = call_fail(&c->call, errno_of((int)answer.exit_code), "zerod_status: the daemon refused: %s", answer.json);
    } else {
        free(c->status);
        *json = c->status = steal_ptr(answer.json);
    }
    answer_deinit(&answer);
    return r;
}

int zerod_status(struct zerod *c, int timeout_ms, const char **json)
{
    unsigned timeout = (unsigned)(timeout_ms > 0 ? timeout_ms : DEFAULT_TIMEOUT_MS);
    struct control control;
    int r = call_check(&c->call);

    if (r != 0)
        return r;
    r = control_init_within(&control, c->call.address.sun_path, timeout);
    r = r < 0 ? call_fail(&c->call, errno_of(-r), "zerod_status: %s", control.error)
              : ask_for_status(c, &control, json);
    control_deinit(&control);
    return r;
}
