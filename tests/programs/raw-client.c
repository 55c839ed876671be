/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/programs/raw-client.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "core/base/base.h"
#include "tests/programs/puppet-model.h"

void raw_fail(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

int raw_patience(void)
{
    const char *text = getenv("HOSTILE_PATIENCE_MS");

    return text ? atoi(text) : 10000;
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

void raw_open(struct raw *c)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    const char *path = getenv("ZEROD_SOCKET");

    *c = (struct raw){.ring_fd = -1, .overflow_fd = -1, .credit_fd = -1, .weights_fd = -1, .in = FRAME_BUFFER_NULL};
    EXPECT(path && strlen(path) < sizeof(sa.sun_path), "ZEROD_SOCKET names no socket");
    strcpy(sa.sun_path, path);
    c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(c->fd >= 0 && connect(c->fd, (struct sockaddr *)&sa, sizeof(sa)) == 0, "connect: %s", strerror(errno));
    EXPECT(wire_arena_init(&c->arena) == 0 && frame_buffer_init(&c->in) == 0, "out of memory");
    EXPECT(getrandom(&c->incarnation, sizeof(c->incarnation), 0) == sizeof(c->incarnation), "getrandom");
    c->incarnation |= 1;
}

void raw_close(struct raw *c)
{
    int *fds[] = {&c->fd, &c->ring_fd, &c->overflow_fd, &c->credit_fd, &c->weights_fd};

    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        if (*fds[i] >= 0)
            close(*fds[i]);
    if (c->ring)
        munmap(c->ring, c->ring_bytes);
    layout_free(c->layout);
    frame_buffer_deinit(&c->in);
    wire_arena_deinit(&c->arena);
}

int raw_send(struct raw *c, const void *data, size_t n_bytes, const int *fds, size_t n_fds)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {0};
    struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = n_bytes};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

    if (n_fds > 0) {
        struct cmsghdr *header = (struct cmsghdr *)control;

        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        *header = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(n_fds * sizeof(int))};
        memcpy(CMSG_DATA(header), fds, n_fds * sizeof(int));
    }
    return sendmsg(c->fd, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

size_t raw_pack(const struct request *request, uint8_t *buffer)
{
    struct wire_arena arena;
    int n;

    EXPECT(wire_arena_init(&arena) == 0, "out of memory");
    n = wire_pack_request(&arena, request, buffer, FRAME_MAX_BYTES);
    wire_arena_deinit(&arena);
    EXPECT(n > 0, "%s cannot be packed: %s", request_type_name(request->type), strerror(-n));
    return (size_t)n;
}

int raw_say(struct raw *c, const struct request *request)
{
    static uint8_t buffer[FRAME_MAX_BYTES];

    return raw_send(c, buffer, raw_pack(request, buffer), NULL, 0);
}

int raw_hear(struct raw *c, int timeout_ms)
{
    struct pollfd pollfd = {.fd = c->fd, .events = POLLIN};
    char why[WIRE_WHY_BYTES];
    int r;

    while ((r = frame_receive_fds(c->fd, &c->in)) == FRAME_AGAIN)
        if (poll(&pollfd, 1, timeout_ms) == 0)
            return RAW_SILENCE;
    if (r == FRAME_EOF || r == -ECONNRESET)
        return RAW_CLOSED;
    EXPECT(r == 0, "receiving: %d", r);
    r = wire_unpack_reply(&c->arena, c->in.data, c->in.n_bytes, &c->reply, why, sizeof(why));
    EXPECT(r == 0, "the daemon sent an invalid message: %s", why);
    return (int)c->reply.type;
}

/* ---- what is expected ---------------------------------------------------------------------------------- */

void raw_expect(struct raw *c, enum reply_type type)
{
    int got = raw_hear(c, raw_patience());

    EXPECT(got == (int)type, "expected %s, got %s\n%s", reply_type_name(type),
           got == RAW_CLOSED    ? "the end"
           : got == RAW_SILENCE ? "nothing"
                                : reply_type_name((enum reply_type)got),
           got == REPLY_REFUSED ? c->reply.refused.diagnostic.text : "");
}

void raw_expect_refused(struct raw *c, unsigned code, const char *part)
{
    const struct wire_diagnostic *d = &c->reply.refused.diagnostic;

    raw_expect(c, REPLY_REFUSED);
    EXPECT(d->code == code && strstr(d->text, part), "expected E%u with \"%s\", got:\n%s", code, part, d->text);
    printf("%s\n", d->text);
}

void raw_expect_closed(struct raw *c)
{
    int got = raw_hear(c, raw_patience());

    EXPECT(got == RAW_CLOSED, "expected the end, got %s",
           got == RAW_SILENCE ? "nothing" : reply_type_name((enum reply_type)got));
}

void raw_expect_dropped(struct raw *c, unsigned code, const char *part)
{
    raw_expect_refused(c, code, part);
    EXPECT(c->reply.refused.closing, "the refusal does not say that the connection is closed");
    raw_expect_closed(c);
}

/* ---- the right way ------------------------------------------------------------------------------------- */

void raw_hello(struct raw *c, enum wire_role role, unsigned rank)
{
    c->rank = rank;
    raw_say(c, &(struct request){
                   .type = REQUEST_HELLO,
                   .hello = {.version_min = WIRE_VERSION,
                             .version_max = WIRE_VERSION,
                             .role = role,
                             .rank = rank,
                             .incarnation = c->incarnation,
                             .client = "hostile"},
               });
    raw_expect(c, REPLY_WELCOME);
    c->welcome = c->reply.welcome;
    c->welcome.run_id = c->welcome.server = NULL;
}

static void make_decls(struct layout_decl *decls)
{
    for (uint32_t i = 0; i < PUPPET_PARAMS; i++) {
        const struct puppet_param *m = &puppet_model[i];

        decls[i] = (struct layout_decl){
            .name = m->name,
            .name_len = strlen(m->name),
            .dtype = (enum dtype)m->dtype,
            .grad_dtype = (enum dtype)m->grad_dtype,
            .group = m->group,
            .trainable = !m->frozen,
            .n_dims = m->n_dims,
            .shape = m->shape,
        };
    }
}

void raw_declare(struct raw *c)
{
    struct layout_decl decls[PUPPET_PARAMS];

    make_decls(decls);
    raw_say(c, &(struct request){.type = REQUEST_DECLARE, .declare = {.params = decls, .n_params = PUPPET_PARAMS}});
}

static void *map(int fd, size_t n_bytes, int protection)
{
    void *p = mmap(NULL, n_bytes, protection, MAP_SHARED, fd, 0);

    EXPECT(p != MAP_FAILED, "mmap: %s", strerror(errno));
    return p;
}

static void take_segments(struct raw *c, const struct reply_formed *formed)
{
    EXPECT(c->in.n_fds == formed->n_segments, "%zu descriptors for %zu segments", c->in.n_fds, formed->n_segments);
    for (size_t i = 0; i < formed->n_segments; i++) {
        int fd = steal_fd(&c->in.fds[i]);
        size_t n = formed->segments[i].n_bytes;

        switch (formed->segments[i].kind) {
        case WIRE_SEGMENT_RING:
            c->ring = map(fd, n, PROT_READ | PROT_WRITE);
            c->ring_fd = fd;
            break;
        case WIRE_SEGMENT_OVERFLOW:
            c->overflow = map(fd, n, PROT_READ | PROT_WRITE);
            c->overflow_fd = fd;
            break;
        case WIRE_SEGMENT_CREDIT:
            c->credit = map(fd, n, PROT_READ);
            c->credit_fd = fd;
            break;
        default:
            c->weights_fd = fd;
            c->on_gpu = formed->segments[i].cuda;
        }
    }
}

static void take_formed(struct raw *c)
{
    struct layout_decl decls[PUPPET_PARAMS];
    uint32_t bad;

    make_decls(decls);
    EXPECT(layout_new(&c->layout, decls, PUPPET_PARAMS, c->welcome.world_size, c->welcome.bucket_elems, &bad) == 0,
           "the layout cannot be computed");
    EXPECT(c->layout->n_parcels <= ARRAY_SIZE(c->slots), "more parcels than slots");
    c->ring_bytes = c->reply.formed.ring_bytes;
    c->n_tickets = c->reply.formed.n_tickets;
    c->at = c->reply.formed.position;
    c->resumed = c->reply.formed.resumed;
    take_segments(c, &c->reply.formed);
}

void raw_form(struct raw *c)
{
    raw_say(c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = PUPPET_PARAMS}});
    raw_expect(c, REPLY_FORMED);
    take_formed(c);
    raw_say(c, &(struct request){.type = REQUEST_READY});
    raw_expect(c, REPLY_DONE);
}

bool raw_try_form(struct raw *c)
{
    raw_say(c, &(struct request){.type = REQUEST_FORM, .form = {.n_params = PUPPET_PARAMS}});
    if (raw_hear(c, 100) != REPLY_FORMED)
        return false;
    take_formed(c);
    raw_say(c, &(struct request){.type = REQUEST_READY});
    return raw_hear(c, 100) == REPLY_DONE;
}

void raw_attach(struct raw *c, unsigned rank)
{
    raw_open(c);
    raw_hello(c, WIRE_ROLE_TRAINER, rank);
    raw_declare(c);
    raw_form(c);
}

void raw_begin(struct raw *c)
{
    raw_say(c, &(struct request){
                   .type = REQUEST_BEGIN_BACKWARD,
                   .begin_backward = {.step = c->at.step, .micro_batch = c->at.micro_batch, .attempt = c->at.attempt},
               });
    memset(c->slots, 0, sizeof(c->slots));
}

static struct raw_slot *get_slot(struct raw *c, uint32_t parcel)
{
    struct raw_slot *slot = &c->slots[parcel];
    uint64_t n_bytes = round_up(layout_parcel_bytes(c->layout, parcel), 64);

    if (slot->open)
        return slot;
    EXPECT(c->end_bytes + n_bytes <= c->ring_bytes && c->next_ticket < c->n_tickets, "the ring is too small");
    *slot = (struct raw_slot){.open = true, .ticket = c->next_ticket++, .offset_bytes = c->end_bytes};
    c->end_bytes += n_bytes;
    return slot;
}

static struct request push_part(struct raw *c, uint32_t part)
{
    const struct layout_part *p = &c->layout->parts[part];
    const struct layout_param *param = &c->layout->params[p->param];
    const struct raw_slot *slot = get_slot(c, p->parcel);
    uint8_t *data = c->ring + slot->offset_bytes + layout_part_offset_bytes(c->layout, part);

    for (uint64_t i = 0; i < p->n_elems; i++)
        puppet_store(data, (int)param->grad_dtype, i,
                     puppet_gradient(c->at.step, c->at.micro_batch, c->rank, p->param, p->start_elem + i));
    return (struct request){
        .type = REQUEST_PUSH,
        .push = {.sequence = ++c->sequence,
                 .attempt = c->at.attempt,
                 .step = c->at.step,
                 .micro_batch = c->at.micro_batch,
                 .param = p->param,
                 .part = part - param->first_part,
                 .ticket = slot->ticket,
                 .use = atomic_load(&c->credit->credits[slot->ticket]),
                 .offset_bytes = slot->offset_bytes},
    };
}

struct request raw_push(struct raw *c, uint32_t param)
{
    uint32_t part = c->layout->params[param].first_part;

    for (; !layout_is_last_part(c->layout, part); part++) {
        struct request push = push_part(c, part);

        raw_say(c, &push);
    }
    return push_part(c, part);
}

void raw_push_all(struct raw *c)
{
    for (uint32_t i = PUPPET_PARAMS; i-- > 0;) {
        struct request push;

        if (!c->layout->params[i].trainable)
            continue;
        push = raw_push(c, i);
        raw_say(c, &push);
    }
}

struct request raw_end(const struct raw *c)
{
    return (struct request){
        .type = REQUEST_END_BACKWARD,
        .end_backward = {.step = c->at.step, .micro_batch = c->at.micro_batch, .attempt = c->at.attempt},
    };
}

struct request raw_step(const struct raw *c)
{
    return (struct request){.type = REQUEST_STEP, .step = {.step = c->at.step, .attempt = c->at.attempt}};
}
