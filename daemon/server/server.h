/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The server: the loop and what it owns. Sockets, signals, timers and the
 * completion of works come together here; everything runs on one thread but the kernels.
 */

#include <stdbool.h>
#include <stddef.h>

struct config;
struct server;
struct service;

/* keep_init() was called. config is not consumed, must outlive the server. Return: 0 or -errno with a sentence in why. */
int server_new(struct server **out, const struct config *config, char *why, size_t why_size);
void server_free(struct server *server);

/* Runs until SIGTERM, SIGINT, or a drained job is idle. Return: 0, or 1 when the checkpoint that was to be written
 * before the end is not there. */
int server_run(struct server *server);

/*
 * The state of the run is kept, and the next daemon may need it: trainers are attached, or the last step is not saved,
 * and it was not SIGINT that ended this one. A daemon that ends then has nothing to tidy up, as little as one that is
 * killed: its memory, its socket and its journal are as they should be.
 */
bool server_may_be_replaced(const struct server *server);

/* Return: the service that all connections share, borrowed. */
struct service *server_service(struct server *server);
