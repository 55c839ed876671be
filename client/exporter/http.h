/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The HTTP server: /metrics, and / with a link to it. Each connection has a thread and one request. A client that is
 * slow to ask or to read is dropped; if there are many, the one that has been silent for longest goes first, so that
 * they keep nobody else out.
 */

struct gather;
struct http;

/* The server's content. gather and title are borrowed, and must outlive the server. title: shown on the page at /. */
struct http_content {
    struct gather *gather;
    const char *title;
    unsigned timeout_ms; /* how long gathering may take */
};

/* fd: a listening socket, taken; after a failure it may be open still. Return: NULL if it could not be started. */
struct http *http_new(int fd, const struct http_content *content);
/* Drops clients that have had their time. To be called every HTTP_CHECK_MS. */
void http_drop_slow(struct http *http);
void http_free(struct http *http);

enum { HTTP_CHECK_MS = 500 };
