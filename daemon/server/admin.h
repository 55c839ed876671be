/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * zerodctl's commands. Most commands print a snapshot of the job as JSON. The others change the job and answer in JSON.
 */

#include <stdint.h>

struct session;
struct service;
struct request_admin;

/*
 * Queues the request's command as a question (questions.h). Refuses a command that changes the job if the user is no
 * administrator.
 */
void admin_request(struct session *session, const struct request_admin *request);
/* Answers a command that admin_request() has allowed. Return: JSON, which the caller frees, or NULL without memory. */
char *admin_answer(struct service *service, const char *command, uint32_t *exit_code);
