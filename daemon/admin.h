/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* zerodctl's commands: a table of name, who may, and function. What the job holds becomes a snapshot, then JSON. */

struct session;
struct request_admin;

void admin_request(struct session *session, const struct request_admin *request);
