/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The HTTP server. It serves /metrics, and / with a link to /metrics. Each connection has a thread and one request. The
 * server drops clients that are slow to ask or to read. When there are many clients, it drops the oldest one that has
 * sent no request, so that silent clients do not keep others out.
 */

struct gather;
struct http;

/* The server's content. gather and title are not owned, and must outlive the server. title: text of the page at /. */
struct http_content {
    struct gather *gather;
    const char *title;
    unsigned timeout_ms; /* how long a daemon may take to answer */
};

/* Starts the server, which then owns the listening socket fd. Return: NULL on failure; then fd may still be open. */
struct http *http_new(int fd, const struct http_content *content);
/* Drops clients that have been connected for too long. Call it every HTTP_CHECK_MS. */
void http_drop_slow(struct http *http);
void http_free(struct http *http);

enum { HTTP_CHECK_MS = 500 };
