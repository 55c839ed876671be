/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The HTTP server: /metrics, and / with a link to it. Each connection has a thread and one request. The server drops a
 * client that is slow to ask or to read. If there are many clients, it drops the longest silent one first, so that
 * silent clients keep no other client out.
 */

struct gather;
struct http;

/* The server's content. gather and title are not owned, and must outlive the server. title: shown on the page at /. */
struct http_content {
    struct gather *gather;
    const char *title;
    unsigned timeout_ms; /* limit of gathering */
};

/*
 * Starts the server. fd: a listening socket, which the server takes over; after a failure it may still be open. Return:
 * NULL on failure.
 */
struct http *http_new(int fd, const struct http_content *content);
/* Drops clients whose time is over. The caller calls it every HTTP_CHECK_MS. */
void http_drop_slow(struct http *http);
void http_free(struct http *http);

enum { HTTP_CHECK_MS = 500 };
