/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodctl's commands: a table with the name, permission and function of each. A function takes a snapshot of the job
 * and prints it as JSON. */

#include <stdint.h>

struct session;
struct service;
struct request_admin;

/* Queues the command as a question, or refuses it if the user may not change the job. */
void admin_request(struct session *session, const struct request_admin *request);
/* Answers a command that admin_request() has allowed. Return: JSON, which the caller frees, or NULL without memory. */
char *admin_answer(struct service *service, const char *command, uint32_t *exit_code);
