/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes to published weights outside of a window. The first write makes the weights private to this process: the
 * kernel copies the written pages, and all other pages still show what the daemon publishes. The next micro-batch, step
 * or window reports the change as E1106, because no other rank has it. After its last step a program may write freely.
 * In stage 3 such a write ends the process, because a release would drop the written weight.
 */

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "client/lib/handle.h"
#include "client/lib/api-weights.h"
#include "client/lib/written.h"
#include "core/base/base.h"

/* Values of zerod.written. */
enum { NOTHING_WRITTEN, BECOMES_PRIVATE, IS_PRIVATE, IS_REPORTED };

static bool make_private(struct zerod *c)
{
    if (c->private_weights)
        return mprotect(c->private_weights, c->weights.n_bytes, PROT_READ | PROT_WRITE) == 0;
    return mmap(c->weights.base, c->weights.n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                c->weights.fd, 0) != MAP_FAILED;
}

/*
 * Several threads may write at the same time. Only the first maps the memory, so that no other one maps over its
 * writes.
 */
bool written_begin(struct zerod *c)
{
    int seen = NOTHING_WRITTEN;

    if (weights_is_stage3(c))
        return false;
    if (atomic_compare_exchange_strong(&c->written, &seen, BECOMES_PRIVATE))
        atomic_store(&c->written, make_private(c) ? IS_PRIVATE : NOTHING_WRITTEN);
    while ((seen = atomic_load(&c->written)) == BECOMES_PRIVATE)
        ;
    return seen != NOTHING_WRITTEN;
}

static void forget(struct zerod *c)
{
    if (atomic_load(&c->written) == NOTHING_WRITTEN)
        return;
    if (c->private_weights) {
        memcpy(c->private_weights, c->weights.base, c->weights.n_bytes);
        (void)mprotect(c->private_weights, c->weights.n_bytes, PROT_READ);
    } else {
        (void)mmap(c->weights.base, c->weights.n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, c->weights.fd, 0);
    }
    atomic_store(&c->written, NOTHING_WRITTEN);
}

void written_refreshed(struct zerod *c)
{
    atomic_store(&c->written, NOTHING_WRITTEN);
}

void written_forget_reported(struct zerod *c)
{
    if (atomic_load(&c->written) == IS_REPORTED)
        forget(c);
}

/*
 * Finds the parameters that differ from the published weights, and sets *byte to the first different byte of the first
 * one. Return: the number of these parameters.
 */
static size_t find_changed(const struct zerod *c, const uint8_t *published, unsigned *changed, uint64_t *byte)
{
    const uint8_t *ours = weights_visible(c);
    size_t n = 0;

    for (uint32_t p = 0; p < c->layout->n_params; p++) {
        const uint8_t *a = ours + weights_offset(c, p), *b = published + weights_offset(c, p);
        size_t n_bytes = weights_param_bytes(c, p);

        if (n_bytes == 0 || memcmp(a, b, n_bytes) == 0)
            continue;
        for (*byte = n > 0 ? *byte : 0; n == 0 && a[*byte] == b[*byte];)
            ++*byte;
        changed[n++] = p;
    }
    return n;
}

static int report_changed(struct zerod *c, const uint8_t *published, const char *where)
{
    _cleanup_free_ unsigned *changed = calloc(c->layout->n_params, sizeof(*changed));
    char detail[512];
    uint64_t byte = 0;
    size_t n;

    if (!changed)
        return call_fatal(&c->call, -ENOMEM, "out of memory");
    n = find_changed(c, published, changed, &byte);
    if (n == 0) { /* the program wrote equal values, as a broadcast does */
        forget(c);
        return 0;
    }
    atomic_store(&c->written, IS_REPORTED);
    (void)snprintf(detail, sizeof(detail), "write to its byte %llu%s%s", (unsigned long long)byte, where ? ", " : "",
                   where ? where : "");
    return zerod_report(c, E_WEIGHT_WRITTEN, changed, n, detail);
}

static int compare_weights(struct zerod *c, const char *where)
{
    size_t n_bytes = c->weights.n_bytes;
    void *published;
    int r;

    if (c->private_weights)
        return report_changed(c, c->weights.base, where);
    published = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, c->weights.fd, 0);
    if (published == MAP_FAILED)
        return call_fatal(&c->call, -errno, "mapping the published weights: %s", strerror(errno));
    r = report_changed(c, published, where);
    munmap(published, n_bytes);
    return r;
}

/* Asks the daemon for any value, because the daemon's answer is the refusal until the fault is cleared. */
static int ask_for_refusal(struct zerod *c)
{
    uint32_t trained = 0;
    double norm;

    while (trained + 1 < c->layout->n_params && !c->layout->params[trained].trainable)
        trained++;
    return zerod_read_state(c, trained, ZEROD_GRAD_NORM, &norm);
}

bool zerod_has_written(const struct zerod *c)
{
    return c && atomic_load(&c->written) != NOTHING_WRITTEN;
}

int zerod_check_weights(struct zerod *c, const char *where)
{
    int r = handle_check_formed(c);

    if (r == 0 && atomic_load(&c->written) == IS_REPORTED)
        r = ask_for_refusal(c);
    if (r != 0 || atomic_load(&c->written) == NOTHING_WRITTEN)
        return r;
    r = compare_weights(c, where);
    return r == 0 && atomic_load(&c->written) != NOTHING_WRITTEN ? ask_for_refusal(c) : r;
}
