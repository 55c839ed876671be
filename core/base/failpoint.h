/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Failpoints: places in the daemon and in libzerod where a test makes something fail. They exist only in builds with
 * -Dfailpoints=true; other builds have neither the calls nor their names.
 *
 * The environment variable sets which action happens at which failpoint:
 *
 *     ZEROD_FAILPOINT=name:action[@pass][,name:action[@pass]...]
 *
 *     kill        the process kills itself (SIGKILL)
 *     stop        the process stops itself (SIGSTOP)
 *     sleep[:ms]  sleeps, 100 ms by default
 *     error       failpoint() returns -ENOMEM
 *     fuse:ns     the process is killed ns nanoseconds later, in the middle of what it does then
 *
 * pass is a number n: the action happens only the nth time that this process passes the place, counted over all
 * threads; the default is 1. With @* it happens every time. An entry that is not valid ends the process with a message,
 * because a test that tests nothing must not pass.
 *
 * Names. In libzerod every request has four failpoints, with the request's name on the wire:
 *     Push.send      before the request is sent
 *     Push.sent      after the request was sent
 *     Step.wait      after the request was sent, if it has an answer
 *     Step.answered  the answer has arrived and is not read yet
 * Further failpoints of libzerod are connected, formed, slot, copy, window-mapped, state-mapped. The daemon has
 * forming, reserve, reduce, verify, transfer, mirror, staging (GPUs: memory for a copy of the state is reserved),
 * writing, rewrite, decided, speculate, speculated, update, accept, turn, updated, answer, watch, others (an error:
 * other nodes' GPUs get no more time than this node's), stored (a window), early and copied (GPUs: sums are copied to
 * the host before the decision), and four for each message between nodes, with the message's name:
 *     STORE.said         node 0 has sent the message to all nodes
 *     STORE.heard        a node is about to obey the message
 *     STORE.obeyed       the node has obeyed the message
 *     STORED.reported    a node has sent a report to node 0
 * Search the sources for failpoint( to find the places.
 *
 * Any thread.
 */

#ifdef ZEROD_FAILPOINTS

/* Return: 0, or -ENOMEM when the action is "error". */
int failpoint(const char *name);

/* failpoint() of the name "request.where". */
int failpoint_at(const char *request, const char *where);

#else

static inline int failpoint_none(void)
{
    return 0;
}

#define failpoint(name) failpoint_none()
#define failpoint_at(request, where) failpoint_none()

#endif
