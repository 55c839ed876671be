/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodctl's commands: a table of name, who may, and function. What the job holds becomes a snapshot, then JSON. */

#include <stdint.h>

struct session;
struct service;
struct request_admin;

/* Asks the question, or refuses it. */
void admin_request(struct session *session, const struct request_admin *request);
/* Answers a command that admin_request() has let through. Return: JSON, owned by the caller; NULL: no memory. */
char *admin_answer(struct service *service, const char *command, uint32_t *exit_code);
