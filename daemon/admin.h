/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodctl's commands: a table of name, who may, and function. What the job holds becomes a snapshot, then JSON. */

#include <stdint.h>

struct session;
struct server;
struct request_admin;

/* Asks the question, or refuses it. */
void admin_request(struct session *session, const struct request_admin *request);
/* Of a command that its asker may give. Return: JSON, owned by the caller, or NULL when memory is out. */
char *admin_answer(struct server *server, const char *command, uint32_t *exit_code);
