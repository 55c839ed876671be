/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A client that speaks the protocol by hand, for programs that break the protocol. It sends requests unchecked. If an
 * answer is not the expected one, it ends the program with exit status 1 and a sentence.
 *
 * A raw client is one connection to $ZEROD_SOCKET. It declares the model of puppet-model.h and pushes that model's
 * gradients. It places slots one behind the other, because the ring is larger than all that one connection pushes.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"
#include "proto/credit.h"

enum { RAW_MAX_TICKETS = 256, RAW_SILENCE = 0, RAW_CLOSED = -1 };

struct raw {
    int fd;
    struct wire_arena arena; /* memory for the last reply */
    struct frame_buffer in;
    struct reply reply;
    unsigned rank;
    uint64_t incarnation, sequence;
    struct reply_welcome welcome; /* without its strings */
    struct layout *layout;
    struct wire_position at;
    bool resumed;
    uint8_t *ring, *overflow;
    const struct credit_page *credit;
    int ring_fd, overflow_fd, credit_fd, weights_fd; /* -1: none */
    bool on_gpu;                                     /* the weights are on a GPU */
    uint64_t ring_bytes, end_bytes;
    uint32_t n_tickets, next_ticket;
    struct raw_slot {
        bool open;
        uint32_t ticket;
        uint64_t offset_bytes;
    } slots[64]; /* of the open micro-batch, one per parcel */
};

/* Prints a sentence and ends the program. */
void raw_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            raw_fail(__VA_ARGS__);                                                                                     \
    } while (0)

/* Return: the milliseconds to wait for an answer. */
int raw_patience(void);

void raw_open(struct raw *c);
void raw_close(struct raw *c);

/* Waits for room in the socket. Return: 0 or -errno (-EPIPE if the daemon has closed the connection). */
int raw_send(struct raw *c, const void *data, size_t n_bytes, const int *fds, size_t n_fds);
int raw_say(struct raw *c, const struct request *request);
size_t raw_pack(const struct request *request, uint8_t *buffer); /* the buffer has FRAME_MAX_BYTES */

/* Return: the type of the next reply, RAW_SILENCE or RAW_CLOSED. */
int raw_hear(struct raw *c, int timeout_ms);
void raw_expect(struct raw *c, enum reply_type type);
/* Expects a refusal with this code whose text contains part. Prints the text. */
void raw_expect_refused(struct raw *c, unsigned code, const char *part);
/* raw_expect_refused(), and expects that the daemon then closes the connection. */
void raw_expect_dropped(struct raw *c, unsigned code, const char *part);
void raw_expect_closed(struct raw *c);

void raw_hello(struct raw *c, enum wire_role role, unsigned rank);
void raw_declare(struct raw *c);
/* Sends Form, maps the segments and sends Ready. */
void raw_form(struct raw *c);
/* raw_form(). Return: false if Ready is not answered at once. */
bool raw_try_form(struct raw *c);
/* Makes the connection a formed rank: Hello, Declare and raw_form(). */
void raw_attach(struct raw *c, unsigned rank);

void raw_begin(struct raw *c);
/*
 * Return: a push of the parameter, not sent yet, with its gradient in the slot of its parcel. If the parameter is
 * pushed in parts, sends all parts except the last.
 */
struct request raw_push(struct raw *c, uint32_t param);
void raw_push_all(struct raw *c);
struct request raw_end(const struct raw *c);
struct request raw_step(const struct raw *c);
