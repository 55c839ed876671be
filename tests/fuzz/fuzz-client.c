/* SPDX-License-Identifier: Apache-2.0 */

/*
 * libzerod with a daemon that may answer anything: well-formed answers with false values, segments that are shorter
 * than announced, answers to other questions. A rank makes all kinds of calls. Each call must return. Memory that the
 * library hands out must be readable, and writable where the rank may write.
 *
 * An input is a series of answers. An answer's first byte has the number of its descriptors (3 bits), and whether the
 * next answer follows without a request (highest bit). For each descriptor follow two bytes: its size in pages, and
 * whether it can be cut (highest bit). Then come two bytes of length, and the packet.
 */

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/base/base.h"
#include "tests/client/false-daemon.h"
#include "zerod/client.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum {
    MAX_ANSWERS = 64,
    N_PARAMS = 3,
    N_ELEMS = 5000,
    PAGE_BYTES = 4096,
    MORE = 0x80,
    CAN_BE_CUT = 0x8000,
    PATIENCE_MS = 5000,
};

static const uint64_t shapes[N_PARAMS] = {300, N_ELEMS, 7}; /* the second is pushed in parts */
static float values[N_ELEMS];
static volatile uint8_t seen;

/* ---- the daemon's side --------------------------------------------------------------------------------- */

static unsigned get_u16(const uint8_t **data, size_t *size)
{
    unsigned value = 0;

    for (unsigned i = 0; i < 2 && *size > 0; i++, ++*data, --*size)
        value |= (unsigned)**data << 8 * i;
    return value;
}

static size_t read_answers(struct false_answer *answers, const uint8_t *data, size_t size)
{
    size_t n = 0;

    while (size > 0 && n < MAX_ANSWERS) {
        struct false_answer *answer = &answers[n++];

        *answer = (struct false_answer){.more = *data & MORE, .n_fds = *data & 7};
        data++;
        size--;
        for (size_t i = 0; i < answer->n_fds; i++) {
            unsigned memory = get_u16(&data, &size);

            answer->fds[i] = false_memory((size_t)(memory & ~CAN_BE_CUT) * PAGE_BYTES, !(memory & CAN_BE_CUT));
        }
        answer->n_bytes = get_u16(&data, &size);
        answer->n_bytes = MIN(answer->n_bytes, size);
        answer->data = data;
        data += answer->n_bytes;
        size -= answer->n_bytes;
        n -= answer->n_bytes == 0;
        for (size_t i = 0; answer->n_bytes == 0 && i < answer->n_fds; i++)
            close(answer->fds[i]);
    }
    return n;
}

/* ---- the rank's side ----------------------------------------------------------------------------------- */

static void read_memory(const void *memory, size_t n_bytes)
{
    const uint8_t *bytes = memory;

    for (size_t i = 0; memory && i < n_bytes; i += 64)
        seen ^= bytes[i];
    if (memory && n_bytes > 0)
        seen ^= bytes[n_bytes - 1];
}

static void read_weights(struct zerod *c)
{
    for (unsigned p = 0; p < N_PARAMS; p++)
        read_memory(zerod_weight(c, p), shapes[p] * sizeof(float));
}

static void push(struct zerod *c, unsigned param)
{
    float *slot = zerod_slot(c, param);

    if (slot)
        memcpy(slot, values, shapes[param] * sizeof(float));
    (void)zerod_push(c, &(struct zerod_push){.param = param, .data = slot ? NULL : values, .flags = ZEROD_PUSH_MORE});
}

static void take_step(struct zerod *c)
{
    struct zerod_step_result result;

    for (unsigned i = 0; i < 3; i++) {
        (void)zerod_begin_backward(c, NULL);
        for (unsigned p = 0; p < N_PARAMS; p++)
            push(c, p);
        if (i == 1)
            (void)zerod_abandon_backward(c, "a test");
        else
            (void)zerod_end_backward(c, "blob", 4);
    }
    (void)zerod_step(c, NULL, &result);
    (void)zerod_wait(c, (unsigned[]){0, 1}, 2);
    (void)zerod_wait(c, NULL, 0);
}

static void gather(struct zerod *c)
{
    static const unsigned all[] = {0, 1, 2, 1};

    (void)zerod_prefetch(c, all, N_PARAMS);
    if (zerod_gather(c, all, ARRAY_SIZE(all)) != 0)
        return;
    read_weights(c);
    (void)zerod_release(c, all, ARRAY_SIZE(all));
}

static void write_window(struct zerod *c)
{
    if (zerod_write_begin(c) != 0)
        return;
    for (unsigned p = 0; p < N_PARAMS; p++) {
        float *weights = zerod_window(c, p);

        if (weights)
            memcpy(weights, values, shapes[p] * sizeof(float));
    }
    (void)zerod_write_state(c, 1, ZEROD_EXP_AVG, values);
    (void)zerod_write_state(c, 1, ZEROD_STEP_COUNT, &(double){3});
    (void)zerod_write_end(c);
}

static void ask(struct zerod *c)
{
    static float state[N_ELEMS];
    const void *blob = NULL;
    const char *json = NULL;
    double number;
    size_t n = 0;

    (void)zerod_read_state(c, 1, ZEROD_MASTER, state);
    (void)zerod_read_state(c, 0, ZEROD_GRAD_NORM, &number);
    (void)zerod_grad_norm(c, &number);
    if (zerod_user_state(c, &blob, &n) == 0)
        read_memory(blob, n);
    if (zerod_status(c, PATIENCE_MS, &json) == 0)
        read_memory(json, strlen(json));
    read_memory(zerod_error(c)->text, strlen(zerod_error(c)->text));
}

static void be_rank(struct zerod *c)
{
    static const char *const names[N_PARAMS] = {"a", "b", "c"};

    for (unsigned p = 0; p < N_PARAMS; p++)
        (void)zerod_declare(
            c,
            &(struct zerod_param){.name = names[p], .ndim = 1, .shape = &shapes[p], .trainable = p < 2, .init = values},
            1);
    if (zerod_form(c) >= 0) {
        struct zerod_job job;

        (void)zerod_job(c, &job);
        if (job.stage != 3)
            read_weights(c);
        take_step(c);
        gather(c);
        ask(c);
        write_window(c);
        (void)zerod_abort_step(c, "a test");
        (void)zerod_clear_fault(c);
        take_step(c);
        (void)zerod_save_checkpoint(c, true);
    }
    (void)zerod_leave(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct false_daemon *daemon;
    struct false_answer answers[MAX_ANSWERS];
    char path[64];
    struct zerod *c = NULL;
    size_t n = read_answers(answers, data, size);

    snprintf(path, sizeof(path), "/tmp/zerod-fuzz-client-%d.sock", (int)getpid());
    if (!daemon)
        daemon = false_daemon_new(path);
    assert(daemon);
    false_daemon_serve(daemon, answers, n);
    if (zerod_connect(&c, &(struct zerod_options){.socket = path,
                                                  .timeout_ms = PATIENCE_MS,
                                                  .client = "fuzz",
                                                  .flags = ZEROD_NO_SIGSEGV_HANDLER | ZEROD_OVERLAP_UPDATE}) >= 0)
        be_rank(c);
    zerod_close(c);
    false_daemon_join(daemon);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < answers[i].n_fds; k++)
            close(answers[i].fds[k]);
    return 0;
}
