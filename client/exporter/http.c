/* SPDX-License-Identifier: Apache-2.0 */

/* The HTTP server, on libmicrohttpd. */

#include "client/exporter/http.h"

#include <microhttpd.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#include "client/control/control.h"
#include "client/ctl/metrics.h"
#include "client/exporter/scrape.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"

enum {
    /* All picked. */
    MAX_CLIENTS = 128,      /* includes clients that are being dropped */
    MANY_CLIENTS = 64,      /* with this many, a new client ends the oldest one without a request */
    CLIENT_MS = 5000,       /* from the connection to the end of the answer, not counting gather_print() */
    CLIENT_BYTES = 16384,   /* limit of a request's head */
    THREAD_BYTES = 1 << 19, /* stack of a client's thread */
};

struct client {
    int fd; /* owned by libmicrohttpd; -1: this place is free */
    uint64_t since_ms;
    bool has_asked, is_dropped;
};

struct http {
    struct http_content content;
    struct MHD_Daemon *daemon;
    pthread_mutex_t mutex; /* for clients[], because each client has a thread */
    struct client clients[MAX_CLIENTS];
};

/* ---- answers ------------------------------------------------------------------------------------------- */

/* Sends and frees response. If it is NULL, memory was short, and the connection ends. */
static enum MHD_Result send_response(struct MHD_Connection *connection, unsigned code, const char *type,
                                     struct MHD_Response *response)
{
    enum MHD_Result r = MHD_NO;

    if (!response)
        return MHD_NO;
    if (MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type) &&
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close") &&
        (code != MHD_HTTP_METHOD_NOT_ALLOWED || MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD")))
        r = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return r;
}

/* text: a string literal. */
static enum MHD_Result answer_plainly(struct MHD_Connection *connection, unsigned code, const char *text)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text, MHD_RESPMEM_PERSISTENT);

    return send_response(connection, code, "text/plain; charset=utf-8", response);
}

/* Sends text and takes over its memory. */
static enum MHD_Result answer_made(struct MHD_Connection *connection, const char *type, struct strbuf *text)
{
    struct MHD_Response *response = NULL;

    if (text->cut) {
        strbuf_deinit(text);
        return answer_plainly(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "out of memory\n");
    }
    response = MHD_create_response_from_buffer(text->n_bytes, text->data, MHD_RESPMEM_MUST_FREE);
    if (!response)
        strbuf_deinit(text);
    return send_response(connection, MHD_HTTP_OK, type, response);
}

static void add_escaped(struct strbuf *buf, const char *text)
{
    for (; *text; text++) {
        if (strchr("&<>\"'", *text))
            strbuf_add(buf, "&#%d;", *text);
        else
            strbuf_add_foreign(buf, (char[]){*text, '\0'});
    }
}

static enum MHD_Result answer_page(struct MHD_Connection *connection, const struct http *http)
{
    struct strbuf page = {0};

    strbuf_add(&page, "<!DOCTYPE html><title>zerod-exporter</title><p><a href=\"/metrics\">metrics</a> of ");
    add_escaped(&page, http->content.title);
    strbuf_add(&page, "</p>\n");
    return answer_made(connection, "text/html; charset=utf-8", &page);
}

static enum MHD_Result answer_metrics(struct MHD_Connection *connection, const struct http *http)
{
    const char *accept = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
    enum metrics_format format =
        accept && strstr(accept, "application/openmetrics-text") ? METRICS_OPENMETRICS : METRICS_PROMETHEUS;
    struct strbuf text = {0};

    gather_print(http->content.gather, format, &text);
    return answer_made(connection, metrics_content_type(format), &text);
}

/* ---- clients ------------------------------------------------------------------------------------------- */

static void drop_client(struct client *client)
{
    (void)shutdown(client->fd, SHUT_RDWR); /* this ends the client's thread, and libmicrohttpd closes fd */
    client->is_dropped = true;
}

/* Return: the oldest client that has sent no request, or NULL. */
static struct client *oldest_silent(struct http *http)
{
    struct client *oldest = NULL;

    for (size_t i = 0; i < MAX_CLIENTS; i++) {
        struct client *client = &http->clients[i];

        if (client->fd >= 0 && !client->has_asked && !client->is_dropped &&
            (!oldest || client->since_ms < oldest->since_ms))
            oldest = client;
    }
    return oldest;
}

/* Return: the client's place, or NULL if all places are taken. */
static struct client *add_client(struct http *http, int fd)
{
    struct client *place = NULL, *oldest;
    size_t n = 0;

    for (size_t i = 0; i < MAX_CLIENTS; i++) {
        n += http->clients[i].fd >= 0 && !http->clients[i].is_dropped;
        if (http->clients[i].fd < 0)
            place = &http->clients[i];
    }
    oldest = n >= MANY_CLIENTS ? oldest_silent(http) : NULL;
    if (oldest)
        drop_client(oldest);
    if (place)
        *place = (struct client){.fd = fd, .since_ms = control_clock_ms()};
    return place;
}

static void on_connection(void *userdata, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct http *http = userdata;

    pthread_mutex_lock(&http->mutex);
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        *context = add_client(http, MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
    else if (*context)
        ((struct client *)*context)->fd = -1;
    pthread_mutex_unlock(&http->mutex);
}

static void note_asked(struct http *http, struct MHD_Connection *connection)
{
    struct client *client = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;

    pthread_mutex_lock(&http->mutex);
    if (client)
        client->has_asked = true;
    pthread_mutex_unlock(&http->mutex);
}

void http_drop_slow(struct http *http)
{
    uint64_t now = control_clock_ms();

    pthread_mutex_lock(&http->mutex);
    for (size_t i = 0; i < MAX_CLIENTS; i++)
        if (http->clients[i].fd >= 0 && now - http->clients[i].since_ms > CLIENT_MS + 2 * http->content.timeout_ms)
            drop_client(&http->clients[i]);
    pthread_mutex_unlock(&http->mutex);
}

/* ---- the server ---------------------------------------------------------------------------------------- */

static enum MHD_Result on_request(void *userdata, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload, size_t *n_upload,
                                  void **context)
{
    struct http *http = userdata;

    note_asked(http, connection);
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return answer_plainly(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD\n");
    if (strcmp(url, "/metrics") == 0)
        return answer_metrics(connection, http);
    if (strcmp(url, "/") == 0)
        return answer_page(connection, http);
    return answer_plainly(connection, MHD_HTTP_NOT_FOUND, "there are / and /metrics\n");
}

struct http *http_new(int fd, const struct http_content *content)
{
    struct http *http = calloc(1, sizeof(*http));

    if (!http)
        return NULL;
    http->content = *content;
    pthread_mutex_init(&http->mutex, NULL);
    for (size_t i = 0; i < MAX_CLIENTS; i++)
        http->clients[i].fd = -1;
    http->daemon =
        MHD_start_daemon(MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, 0, NULL, NULL,
                         on_request, http, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_CONNECTION, on_connection,
                         http, MHD_OPTION_CONNECTION_LIMIT, (unsigned)MAX_CLIENTS, MHD_OPTION_CONNECTION_TIMEOUT,
                         (unsigned)CLIENT_MS / 1000, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CLIENT_BYTES,
                         MHD_OPTION_THREAD_STACK_SIZE, (size_t)THREAD_BYTES, MHD_OPTION_END);
    if (!http->daemon) { /* MHD_start_daemon() may have closed fd */
        http_free(http);
        return NULL;
    }
    return http;
}

void http_free(struct http *http)
{
    if (!http)
        return;
    if (http->daemon)
        MHD_stop_daemon(http->daemon); /* closes the listening socket */
    pthread_mutex_destroy(&http->mutex);
    free(http);
}
