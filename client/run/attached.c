/* SPDX-License-Identifier: Apache-2.0 */

/* Asks a daemon whether its job was ever formed. */

#include "client/run/attached.h"

#include <json-c/json.h>

#include "client/control/control.h"

enum { PATIENCE_MS = 500 };

bool attached_nobody(const char *socket)
{
    struct answer answer = ANSWER_NULL;
    struct json_object *status, *formed;
    struct control control;
    bool nobody = false;

    if (control_init_within(&control, socket, PATIENCE_MS) == 0 && control_ask(&control, "status", &answer) == 0) {
        status = json_tokener_parse(answer.json);
        nobody = json_object_object_get_ex(status, "formed", &formed) && !json_object_get_boolean(formed);
        json_object_put(status);
    }
    answer_deinit(&answer);
    control_deinit(&control);
    return nobody;
}
