/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The server owns the event loop, which serves sockets, signals, timers and finished work. Everything except the
 * kernels runs on the loop's thread.
 */

#include <stdbool.h>
#include <stddef.h>

struct config;
struct server;
struct service;

/*
 * Makes a server. Call keep_init() before. config: borrowed, must outlive the server. Return: 0, or -errno with a
 * message in why.
 */
int server_new(struct server **out, const struct config *config, char *why, size_t why_size);
void server_free(struct server *server);

/*
 * Runs until SIGTERM or SIGINT, or until a drained job is idle. Return: 0, or 1 if the last checkpoint before the end
 * was not written.
 */
int server_run(struct server *server);

/*
 * Return: whether the next daemon may need the kept state of the run. This is so if trainers are attached or the last
 * step is not saved, unless SIGINT ended this daemon. Then this daemon exits without cleanup, as if it were killed,
 * because the next daemon uses its memory, socket and journal.
 */
bool server_may_be_replaced(const struct server *server);

/* Return: the service that all connections share, borrowed. */
struct service *server_service(struct server *server);
