/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves a request with the handler of its type, if the session's state allows it. Most handlers only call the job. */

struct session;
struct request;

void dispatch_request(struct session *session, const struct request *request);
