/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The server: the loop and what it owns. Sockets, signals, timers and the
 * completion of works come together here; everything runs on one thread but the kernels.
 */

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct config;
struct diagnostic;
struct frame_batch;
struct job;
struct job_rank;
struct listener_peer;
struct membership;
struct questions;
struct server;
struct session;
struct wire_arena;

/* config is not consumed, must outlive the server. Return: 0 or -errno with a sentence in why. */
int server_new(struct server **out, const struct config *config, char *why, size_t why_size);
void server_free(struct server *server);

/* Runs until SIGTERM, SIGINT, or a drained job is idle. Return: 0. */
int server_run(struct server *server);

const char *server_version(void);

/* For sessions and handlers. */
uv_loop_t *server_loop(struct server *server);
uint64_t server_now_ns(const struct server *server);
/* Logs why a connection is closed without a word to its peer: a few times, then their number. */
void server_note_closed(struct server *server, const struct session *session, const char *why);
struct job *server_job(struct server *server);
const struct config *server_config(const struct server *server);
const char *server_isa(const struct server *server);
const struct membership *server_membership(const struct server *server); /* NULL: one node */
uint64_t server_started_ns(const struct server *server);
struct wire_arena *server_arena(struct server *server);
struct frame_batch *server_batch(struct server *server);
struct questions *server_questions(struct server *server);
uint8_t *server_buffer(struct server *server); /* FRAME_MAX_BYTES, for one packet at a time */
bool server_allows(const struct server *server, const struct listener_peer *peer);
bool server_is_admin(const struct server *server, const struct listener_peer *peer);
int64_t server_rank_number(const struct session *session); /* -1: none */
/* What the session is told. Takes the reference. Return: the diagnostic, borrowed. */
struct diagnostic *server_keep(struct session *session, struct diagnostic *diagnostic);

struct session *server_sessions(struct server *server); /* the first of the list */
void server_link(struct server *server, struct session *session);
void server_unlink(struct server *server, struct session *session);
void server_detach(struct server *server, struct session *session, struct job_rank *rank);
void server_note_doomed(struct server *server);
/* Closes sessions that were doomed. At the end of each callback, never in the middle of a verb. */
void server_reap(struct server *server);
