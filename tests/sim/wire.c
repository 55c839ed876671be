/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The connections of a communicator. Each rank binds a socket, named by its number, in the directory of the id. It
 * connects to all lower ranks and accepts connections of all higher ranks; both sides send hello. Then the rank removes
 * its socket's name, and the last rank removes the directory.
 */

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "nccl-inside.h"

enum { RETRY_NS = SIM_NS_PER_MS, BACKLOG = 64 };

struct buffer {
    struct buffer *next;
    size_t n_bytes, at;
    uint8_t bytes[];
};

/* ---- messages ------------------------------------------------------------------------------------------- */

static void inbox_add(struct peer *peer, struct message *message)
{
    *peer->inbox_tail = message;
    peer->inbox_tail = &message->next;
}

struct message *wire_find(struct peer *peer, enum message_kind kind, uint64_t number)
{
    for (struct message *m = peer->inbox; m; m = m->next)
        if (m->header.kind == kind && m->header.number == number)
            return m;
    return NULL;
}

void wire_take(struct peer *peer, struct message *message)
{
    struct message **at = &peer->inbox;

    while (*at != message)
        at = &(*at)->next;
    *at = message->next;
    if (!*at)
        peer->inbox_tail = at;
    free(message->payload);
    free(message);
}

/* Delivers a message of this rank to itself, without a socket. */
static void send_home(struct ncclComm *comm, const struct header *header, const void *payload)
{
    struct peer *self = &comm->peers[comm->rank];
    struct message *message;

    if (header->kind == MESSAGE_ACK) {
        self->n_acked++;
        return;
    }
    message = sim_calloc(1, sizeof(*message));
    message->header = *header;
    message->payload = sim_calloc(1, header->n_bytes + 1);
    memcpy(message->payload, payload, header->n_bytes);
    inbox_add(self, message);
}

void wire_send(struct ncclComm *comm, int rank, const struct header *partial, const void *payload)
{
    struct peer *peer = &comm->peers[rank];
    struct header header = *partial;
    struct buffer *buffer;

    header.rank = comm->rank;
    header.pid = sim.pid;
    header.n_ranks = comm->n_ranks;
    if (rank == comm->rank) {
        send_home(comm, &header, payload);
        return;
    }
    if (peer->fd < 0)
        return;
    buffer = sim_calloc(1, sizeof(*buffer) + sizeof(header) + header.n_bytes);
    buffer->n_bytes = sizeof(header) + header.n_bytes;
    memcpy(buffer->bytes, &header, sizeof(header));
    if (header.n_bytes > 0)
        memcpy(buffer->bytes + sizeof(header), payload, header.n_bytes);
    *peer->out_tail = buffer;
    peer->out_tail = &buffer->next;
}

/* ---- connecting ----------------------------------------------------------------------------------------- */

static struct sockaddr_un address_of(const struct ncclComm *comm, int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%d", comm->id, rank);

    if (n < 0 || (size_t)n >= sizeof(address.sun_path))
        sim_die("ncclCommInitRankConfig", "the path of the unique id is too long");
    return address;
}

static void listen_for_higher(struct ncclComm *comm)
{
    struct sockaddr_un address = address_of(comm, comm->rank);

    comm->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (comm->listener < 0)
        sim_die("ncclCommInitRankConfig", "socket: %m");
    if (bind(comm->listener, (struct sockaddr *)&address, sizeof(address)) < 0) {
        if (errno == EADDRINUSE)
            sim_die("ncclCommInitRankConfig", "rank %d is there already", comm->rank);
        comm_fail(comm, ncclSystemError, "bind: %m");
    } else if (listen(comm->listener, BACKLOG) < 0) {
        comm_fail(comm, ncclSystemError, "listen: %m");
    }
}

static void hello(struct ncclComm *comm, int rank)
{
    struct header header = {.kind = MESSAGE_HELLO};

    wire_send(comm, rank, &header, NULL);
}

/* Connects to a lower rank. If that rank has no socket yet, a later call tries again. */
static void connect_lower(struct ncclComm *comm, int rank)
{
    struct sockaddr_un address = address_of(comm, rank);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        sim_die("ncclCommInitRankConfig", "socket: %m");
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        close(fd);
        return;
    }
    comm->peers[rank].fd = fd;
    hello(comm, rank);
}

static void accept_strangers(struct ncclComm *comm)
{
    int fd;

    while ((fd = accept4(comm->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        comm->strangers = reallocarray(comm->strangers, comm->n_strangers + 1, sizeof(fd));
        if (!comm->strangers)
            sim_die("ncclCommInitRankConfig", "the process has no memory left");
        comm->strangers[comm->n_strangers++] = fd;
    }
}

static void know(struct ncclComm *comm, const struct header *header)
{
    struct peer *peer = &comm->peers[header->rank];

    if ((int)header->n_ranks != comm->n_ranks)
        sim_die("ncclCommInitRankConfig", "rank %d says %d ranks, rank %d says %u", comm->rank, comm->n_ranks,
                header->rank, header->n_ranks);
    peer->known = true;
    peer->local = header->pid == sim.pid;
}

/* Reads the hello of each stranger. It is so short that it always arrives complete. */
static void meet_strangers(struct ncclComm *comm)
{
    for (size_t i = 0; i < comm->n_strangers;) {
        struct header header;
        int fd = comm->strangers[i];
        ssize_t n = recv(fd, &header, sizeof(header), 0);

        if (n < 0 && errno == EAGAIN) {
            i++;
            continue;
        }
        comm->strangers[i] = comm->strangers[--comm->n_strangers];
        if (n != sizeof(header) || header.kind != MESSAGE_HELLO) {
            close(fd); /* the stranger died before its hello */
            continue;
        }
        if (header.rank <= comm->rank || header.rank >= comm->n_ranks || comm->peers[header.rank].fd >= 0)
            sim_die("ncclCommInitRankConfig", "rank %d of %u comes to rank %d of %d", header.rank, header.n_ranks,
                    comm->rank, comm->n_ranks);
        comm->peers[header.rank].fd = fd;
        hello(comm, header.rank);
        know(comm, &header);
    }
}

static void forget_name(struct ncclComm *comm)
{
    struct sockaddr_un address = address_of(comm, comm->rank);

    if (comm->listener < 0)
        return;
    close(comm->listener);
    comm->listener = -1;
    (void)unlink(address.sun_path);
    (void)rmdir(comm->id); /* succeeds for the last rank */
}

bool wire_connect(struct ncclComm *comm, int64_t now, int64_t *wake_ns)
{
    bool all = true;

    if (comm->listener < 0)
        listen_for_higher(comm);
    if (comm->result != ncclInProgress)
        return false;
    for (int rank = 0; rank < comm->rank; rank++)
        if (comm->peers[rank].fd < 0 && !comm->peers[rank].gone)
            connect_lower(comm, rank);
    accept_strangers(comm);
    meet_strangers(comm);
    (void)wire_move(comm);
    for (int rank = 0; rank < comm->n_ranks; rank++)
        all = all && (rank == comm->rank || comm->peers[rank].known);
    if (all && wire_is_flushed(comm)) {
        forget_name(comm);
        return true;
    }
    *wake_ns = MIN(*wake_ns, now + RETRY_NS);
    return false;
}

/* ---- moving --------------------------------------------------------------------------------------------- */

static void drop_out(struct peer *peer)
{
    while (peer->out) {
        struct buffer *buffer = peer->out;

        peer->out = buffer->next;
        free(buffer);
    }
    peer->out_tail = &peer->out;
}

static void lose_peer(struct ncclComm *comm, int rank)
{
    struct peer *peer = &comm->peers[rank];

    close(peer->fd);
    peer->fd = -1;
    peer->gone = true;
    drop_out(peer);
    if (!peer->fin && !peer->local && !sim.silent)
        comm_fail(comm, ncclRemoteError, "rank %d: connection closed by remote peer", rank);
}

static void take_in(struct ncclComm *comm, int rank)
{
    struct peer *peer = &comm->peers[rank];
    struct message *message = steal_ptr(peer->incoming);

    switch (message->header.kind) {
    case MESSAGE_HELLO:
        know(comm, &message->header);
        break;
    case MESSAGE_ACK:
        peer->n_acked++;
        break;
    case MESSAGE_FIN:
        peer->fin = true;
        break;
    default:
        inbox_add(peer, message);
        return;
    }
    free(message->payload);
    free(message);
}

/* Return: the result of recv(). */
static ssize_t read_some(struct peer *peer)
{
    ssize_t n;

    if (!peer->incoming) {
        n = recv(peer->fd, (uint8_t *)&peer->in + peer->n_in, sizeof(peer->in) - peer->n_in, 0);
        if (n <= 0 || (peer->n_in += n) < sizeof(peer->in))
            return n;
        peer->incoming = sim_calloc(1, sizeof(*peer->incoming));
        peer->incoming->header = peer->in;
        peer->incoming->payload = sim_calloc(1, peer->in.n_bytes + 1);
        peer->n_in = 0;
        return n;
    }
    n = recv(peer->fd, peer->incoming->payload + peer->n_in, peer->in.n_bytes - peer->n_in, 0);
    if (n > 0)
        peer->n_in += n;
    return n;
}

static bool read_peer(struct ncclComm *comm, int rank)
{
    struct peer *peer = &comm->peers[rank];
    bool moved = false;

    while (peer->fd >= 0) {
        ssize_t n = read_some(peer);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        moved = true;
        if (n <= 0) {
            lose_peer(comm, rank);
        } else if (peer->incoming && peer->n_in == peer->in.n_bytes) {
            take_in(comm, rank);
            peer->n_in = 0;
        }
    }
    return moved;
}

static bool write_peer(struct ncclComm *comm, int rank)
{
    struct peer *peer = &comm->peers[rank];
    bool moved = false;

    while (peer->fd >= 0 && peer->out) {
        struct buffer *buffer = peer->out;
        ssize_t n = send(peer->fd, buffer->bytes + buffer->at, buffer->n_bytes - buffer->at, MSG_NOSIGNAL);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        moved = true;
        if (n < 0) {
            lose_peer(comm, rank);
        } else if ((buffer->at += n) == buffer->n_bytes) {
            peer->out = buffer->next;
            if (!peer->out)
                peer->out_tail = &peer->out;
            free(buffer);
        }
    }
    return moved;
}

bool wire_move(struct ncclComm *comm)
{
    bool moved = false;

    for (int rank = 0; rank < comm->n_ranks; rank++) {
        /* Writes first, because a failed write must not hide the last messages of a dead peer. */
        moved |= write_peer(comm, rank);
        moved |= read_peer(comm, rank);
    }
    return moved;
}

bool wire_is_flushed(const struct ncclComm *comm)
{
    for (int rank = 0; rank < comm->n_ranks; rank++)
        if (comm->peers[rank].out)
            return false;
    return true;
}

void wire_close(struct ncclComm *comm)
{
    forget_name(comm);
    for (size_t i = 0; i < comm->n_strangers; i++)
        close(comm->strangers[i]);
    free(comm->strangers);
    comm->strangers = NULL;
    comm->n_strangers = 0;
    for (int rank = 0; rank < comm->n_ranks; rank++) {
        struct peer *peer = &comm->peers[rank];

        if (peer->fd >= 0)
            close(peer->fd);
        peer->fd = -1;
        drop_out(peer);
        while (peer->inbox)
            wire_take(peer, peer->inbox);
        if (peer->incoming) {
            inbox_add(peer, steal_ptr(peer->incoming));
            wire_take(peer, peer->inbox);
        }
    }
}

/* ---- sleeping ------------------------------------------------------------------------------------------- */

static void add_fd(struct pollfd **fds, size_t *n, size_t *n_alloc, int fd, short events)
{
    if (fd < 0)
        return;
    if (*n == *n_alloc) {
        *n_alloc = *n_alloc * 2 + 16;
        *fds = reallocarray(*fds, *n_alloc, sizeof(**fds));
        if (!*fds)
            sim_die("device", "the process has no memory left");
    }
    (*fds)[(*n)++] = (struct pollfd){.fd = fd, .events = events};
}

void comms_poll_fds(int device, struct pollfd **fds, size_t *n, size_t *n_alloc)
{
    add_fd(fds, n, n_alloc, sim.devices[device].wake_fd, POLLIN);
    for (size_t i = 0; i < sim_comms.n; i++) {
        struct ncclComm *comm = sim_comms.comms[i];

        /* Data of a communicator that failed while connecting is not read, so polling for it would wake forever. */
        if (comm->device != device || comm->torn_down || comm->phase == COMM_NEW ||
            (comm->phase == COMM_CONNECTING && (comm->injected.hang || comm->result != ncclInProgress)))
            continue;
        add_fd(fds, n, n_alloc, comm->listener, POLLIN);
        for (size_t k = 0; k < comm->n_strangers; k++)
            add_fd(fds, n, n_alloc, comm->strangers[k], POLLIN);
        for (int rank = 0; rank < comm->n_ranks; rank++)
            add_fd(fds, n, n_alloc, comm->peers[rank].fd, POLLIN | (comm->peers[rank].out ? POLLOUT : 0));
    }
}
