/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves a request with the handler of its type. Refuses the request if the session's state does not allow it. */

struct session;
struct request;

void dispatch_request(struct session *session, const struct request *request);
