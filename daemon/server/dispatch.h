/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Request x state -> handler. A handler is a few lines: it calls the job's verb. */

struct session;
struct request;

void dispatch_request(struct session *session, const struct request *request);
