/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The server owns the event loop, with its sockets, signals, timers and finished work. All runs on one thread, except
 * the kernels.
 */

#include <stdbool.h>
#include <stddef.h>

struct config;
struct server;
struct service;

/* Makes a server. The caller has called keep_init(). config: borrowed, outlives the server. Return: 0, or -errno with a
 * message in why. */
int server_new(struct server **out, const struct config *config, char *why, size_t why_size);
void server_free(struct server *server);

/* Runs until SIGTERM, SIGINT, or a drained job is idle. Return: 0, or 1 if the checkpoint before the end was not
 * written. */
int server_run(struct server *server);

/*
 * Return: true if the next daemon may need the kept state of the run: trainers are attached or the last step is not
 * saved, and SIGINT did not end this daemon. This daemon then exits without cleanup, as if it were killed, because its
 * memory, socket and journal are ready for the next daemon.
 */
bool server_may_be_replaced(const struct server *server);

/* Return: the service that all connections share, borrowed. */
struct service *server_service(struct server *server);
