/* SPDX-License-Identifier: Apache-2.0 */

/* Moves the frames of a secure stream over one TCP socket of libuv. */

#include "daemon/link/connection.h"

#include <assert.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "core/base/base.h"
#include "core/base/open-files.h"

/* Limit of the bytes queued to a peer, without the bytes in the kernel. Picked: the size of the largest message. */
enum { MAX_WRITING_BYTES = 1 << 20 };

/* Sealed bytes that wait to be written. */
struct writing {
    uv_write_t request;
    uint8_t bytes[];
};

static void on_read(uv_stream_t *stream, ssize_t n_bytes, const uv_buf_t *buffer);

/* ---- life ---------------------------------------------------------------------------------------------- */

static void on_tcp_closed(uv_handle_t *handle)
{
    struct connection *connection = handle->data;

    connection->ops->closed(connection);
    secure_stream_deinit(&connection->stream);
    free(connection);
}

static void set_seal(struct connection *connection, const struct connection_options *options)
{
    struct secure_stream_options stream = {
        .role = connection->outgoing ? SECURE_STREAM_CONNECTS : SECURE_STREAM_LISTENS,
        .key = options->key,
        .job = options->job,
        .node = options->node,
        .max_frame_bytes = options->max_frame_bytes,
    };

    randombytes_buf(stream.nonce, sizeof(stream.nonce));
    secure_stream_init(&connection->stream, &stream);
}

static int make_connection(struct connection **out, const struct connection_options *options, bool outgoing)
{
    struct connection *connection = calloc(1, sizeof(*connection));
    int r;

    *out = NULL;
    if (!connection)
        return -ENOMEM;
    r = uv_tcp_init(options->loop, &connection->tcp);
    if (r < 0) {
        free(connection);
        return r;
    }
    connection->tcp.data = connection;
    connection->ops = options->ops;
    connection->owner = options->owner;
    connection->outgoing = outgoing;
    connection->since_ms = connection->heard_ms = connection->said_ms = uv_now(options->loop);
    set_seal(connection, options);
    *out = connection;
    return 0;
}

static void name_peer(struct connection *connection, const struct sockaddr *address, socklen_t n_bytes)
{
    char host[64] = "?", port[8] = "?";

    (void)getnameinfo(address, n_bytes, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(connection->peer, sizeof(connection->peer), strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    struct connection *connection = handle->data;

    (void)suggested;
    *buffer = uv_buf_init((char *)connection->input, sizeof(connection->input));
}

static int start_reading(struct connection *connection)
{
    int fd = -1, on = 1, r;

    assert(!connection->connected);
    connection->connected = true;
    (void)uv_tcp_nodelay(&connection->tcp, 1);
    /*
     * Sets linear time-outs, so that the kernel does not double its wait after a short outage. Few bytes are in flight.
     */
    r = uv_fileno((uv_handle_t *)&connection->tcp, &fd);
    if (r == 0)
        r = open_files_watch_stream((uv_stream_t *)&connection->tcp);
    if (r < 0)
        return r;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof(on));
    return uv_read_start((uv_stream_t *)&connection->tcp, on_alloc, on_read);
}

int connection_accept(struct connection **out, const struct connection_options *options, uv_stream_t *listener)
{
    struct sockaddr_storage address;
    struct connection *connection;
    int n_bytes = sizeof(address);
    int r = make_connection(&connection, options, false);

    if (r < 0)
        return r;
    *out = connection;
    r = uv_accept(listener, (uv_stream_t *)&connection->tcp);
    if (r == 0)
        r = uv_tcp_getpeername(&connection->tcp, (struct sockaddr *)&address, &n_bytes);
    if (r == 0) {
        name_peer(connection, (struct sockaddr *)&address, (socklen_t)n_bytes);
        r = start_reading(connection);
    }
    if (r < 0)
        connection_close(connection);
    return r;
}

static void fail_connection(struct connection *connection, enum connection_fault fault, const char *what)
{
    if (!connection->closing)
        connection->ops->failed(connection, fault, what);
}

static void on_connected(uv_connect_t *request, int status)
{
    struct connection *connection = request->data;

    if (status == 0 && !connection->closing)
        status = start_reading(connection);
    if (status < 0)
        fail_connection(connection, CONNECTION_LOST, uv_strerror(status));
    else if (!connection->closing)
        connection_say_hello(connection);
}

int connection_open(struct connection **out, const struct connection_options *options, const struct sockaddr *address)
{
    struct connection *connection;
    int r = make_connection(&connection, options, true);

    if (r < 0)
        return r;
    *out = connection;
    name_peer(connection, address,
              address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
    connection->connecting.data = connection;
    r = uv_tcp_connect(&connection->connecting, &connection->tcp, address, on_connected);
    if (r == 0)
        r = open_files_watch_stream((uv_stream_t *)&connection->tcp);
    if (r < 0)
        connection_close(connection);
    return r;
}

void connection_close(struct connection *connection)
{
    if (connection->closing)
        return;
    assert(!connection->link); /* else the owner's list would keep a freed connection */
    connection->closing = true;
    uv_close((uv_handle_t *)&connection->tcp, on_tcp_closed);
}

static void on_finished(uv_shutdown_t *request, int status)
{
    struct connection *connection = request->data;

    (void)status;
    fail_connection(connection, CONNECTION_LOST, "finished");
}

void connection_finish(struct connection *connection)
{
    if (connection->closing || connection->is_finishing)
        return;
    connection->is_finishing = true;
    (void)uv_read_stop((uv_stream_t *)&connection->tcp);
    connection->finishing.data = connection;
    connection->failure = uv_shutdown(&connection->finishing, (uv_stream_t *)&connection->tcp, on_finished);
}

void connection_check(struct connection *connection)
{
    if (connection->failure < 0)
        fail_connection(connection, connection->failure == -ENOMEM ? CONNECTION_NO_MEMORY : CONNECTION_LOST,
                        uv_strerror(connection->failure));
}

/* ---- in ------------------------------------------------------------------------------------------------ */

static void broken_seal(struct connection *connection, int r)
{
    char what[80];

    switch (r) {
    case SECURE_STREAM_E_STRANGER:
        fail_connection(connection, CONNECTION_STRANGER, "what it says is not what a daemon says");
        return;
    case SECURE_STREAM_E_VERSION:
        snprintf(what, sizeof(what), "it speaks version %u of the link's protocol, this daemon version %u",
                 connection->stream.peer_version, SECURE_STREAM_VERSION);
        fail_connection(connection, CONNECTION_STRANGER, what);
        return;
    case SECURE_STREAM_E_LENGTH:
        fail_connection(connection, CONNECTION_UNPROVED, "it announced a frame of an impossible length");
        return;
    case SECURE_STREAM_E_FORGED:
        fail_connection(connection, CONNECTION_UNPROVED, "a frame could not be opened with our key");
        return;
    default:
        fail_connection(connection, CONNECTION_NO_MEMORY, uv_strerror(r));
    }
}

static void take_frame(struct connection *connection, const struct secure_stream_frame *sealed)
{
    struct link_frame frame;

    connection->heard_ms = uv_now(connection->tcp.loop);
    if (link_frame_unpack(&frame, sealed->data, sealed->n_bytes) != 0)
        fail_connection(connection, CONNECTION_BABBLE, "a sealed frame makes no sense");
    else
        connection->ops->frame(connection, &frame);
}

static void take_input(struct connection *connection)
{
    struct secure_stream_frame sealed;
    int r = 0;

    while (!connection->closing && !connection->is_finishing) {
        r = secure_stream_next(&connection->stream, &sealed);
        if (r == SECURE_STREAM_MET)
            connection->ops->met(connection);
        else if (r == 0)
            take_frame(connection, &sealed);
        else
            break;
    }
    if (connection->closing || connection->is_finishing)
        return;
    connection->ops->drained(connection);
    if (r != SECURE_STREAM_AGAIN)
        broken_seal(connection, r);
}

static void on_read(uv_stream_t *stream, ssize_t n_bytes, const uv_buf_t *buffer)
{
    struct connection *connection = stream->data;
    int r;

    if (n_bytes == UV_EOF) {
        fail_connection(connection, CONNECTION_LOST, "it was closed there");
    } else if (n_bytes < 0) {
        fail_connection(connection, CONNECTION_LOST, uv_strerror((int)n_bytes));
    } else {
        r = secure_stream_feed(&connection->stream, buffer->base, (size_t)n_bytes);
        if (r < 0)
            fail_connection(connection, CONNECTION_NO_MEMORY, uv_strerror(r));
        else
            take_input(connection);
    }
}

/* ---- out ----------------------------------------------------------------------------------------------- */

static void on_written(uv_write_t *request, int status)
{
    struct writing *writing = container_of(request, struct writing, request);
    struct connection *connection = request->data;

    free(writing);
    if (connection->closing)
        return;
    if (status < 0)
        fail_connection(connection, CONNECTION_LOST, uv_strerror(status));
    else if (!connection->is_finishing && connection_has_room(connection))
        connection->ops->writable(connection);
}

/* Sends the bytes of `writing`, and takes ownership of it, even on failure. */
static void write_out(struct connection *connection, struct writing *writing, size_t n_bytes)
{
    uv_buf_t buffer = uv_buf_init((char *)writing->bytes, (unsigned)n_bytes);

    writing->request.data = connection;
    connection->said_ms = uv_now(connection->tcp.loop);
    connection->failure = uv_write(&writing->request, (uv_stream_t *)&connection->tcp, &buffer, 1, on_written);
    if (connection->failure < 0)
        free(writing);
}

static struct writing *writing_new(struct connection *connection, size_t n_bytes)
{
    struct writing *writing;

    if (connection->closing || connection->is_finishing || connection->failure < 0)
        return NULL;
    writing = malloc(sizeof(*writing) + n_bytes);
    if (!writing)
        connection->failure = -ENOMEM;
    return writing;
}

void connection_say_hello(struct connection *connection)
{
    struct writing *writing = writing_new(connection, SECURE_STREAM_HELLO_BYTES);

    if (!writing)
        return;
    memcpy(writing->bytes, connection->stream.hello, SECURE_STREAM_HELLO_BYTES);
    write_out(connection, writing, SECURE_STREAM_HELLO_BYTES);
}

void connection_send_packed(struct connection *connection, const uint8_t *bytes, size_t n_bytes)
{
    size_t n_sealed = secure_stream_pushed_bytes(&connection->stream, n_bytes);
    struct writing *writing = writing_new(connection, n_sealed);

    if (!writing)
        return;
    secure_stream_push(&connection->stream, bytes, n_bytes, writing->bytes);
    write_out(connection, writing, n_sealed);
}

void connection_send(struct connection *connection, const struct link_frame *frame)
{
    size_t n_bytes = link_frame_packed_bytes(frame);
    _cleanup_free_ uint8_t *bytes = malloc(n_bytes);

    if (!bytes) {
        connection->failure = -ENOMEM;
        return;
    }
    link_frame_pack(frame, bytes);
    connection_send_packed(connection, bytes, n_bytes);
}

bool connection_has_room(const struct connection *connection)
{
    return connection->failure == 0 &&
           uv_stream_get_write_queue_size((const uv_stream_t *)&connection->tcp) < MAX_WRITING_BYTES;
}
