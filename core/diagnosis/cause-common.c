/* SPDX-License-Identifier: Apache-2.0 */

/* Parts that the texts of several causes share. */

#include "core/diagnosis/cause-common.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/layout/layout.h"

/* ---- the caller ---------------------------------------------------------------------------------------- */

static bool mentions(const char *text, const char *word)
{
    return text && strcasestr(text, word);
}

enum caller caller_of(const struct evidence_at *at, const struct diagnostic_push *push)
{
    if (mentions(at->client, "swift"))
        return CALLER_SWIFT;
    if (mentions(at->client, "transformers"))
        return CALLER_TRAINER;
    if (mentions(at->client, "torch") || mentions(at->client, "python"))
        return CALLER_TORCH;
    /* Unknown Python programs get the Trainer's keywords, because most models have these keywords, too. */
    return push && mentions(push->site, ".py:") ? CALLER_TRAINER : CALLER_C;
}

const char *caller_abort(enum caller caller)
{
    return caller == CALLER_C ? "zerod_abort_step" : "opt.abort_step()";
}

const char *caller_clear(enum caller caller)
{
    return caller == CALLER_C ? "zerod_clear_fault" : "opt.clear_fault()";
}

const char *caller_not_reentrant(enum caller caller)
{
    switch (caller) {
    case CALLER_SWIFT:
        return "--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'";
    case CALLER_TRAINER:
        return "gradient_checkpointing_kwargs={\"use_reentrant\": False}";
    default:
        return "torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)";
    }
}

const char *caller_finding(enum caller caller)
{
    switch (caller) {
    case CALLER_SWIFT:
        return "--ddp_find_unused_parameters true";
    case CALLER_TRAINER:
        return "ddp_find_unused_parameters=True";
    default:
        return "DistributedDataParallel(model, find_unused_parameters=True)";
    }
}

const char *caller_not_finding(enum caller caller)
{
    switch (caller) {
    case CALLER_SWIFT:
        return "--ddp_find_unused_parameters false";
    case CALLER_TRAINER:
        return "ddp_find_unused_parameters=False";
    default:
        return "DistributedDataParallel(model, find_unused_parameters=False)";
    }
}

/* ---- fields -------------------------------------------------------------------------------------------- */

struct diagnostic *cause_new(const struct evidence_at *at, enum diagnostic_code code, const char *title)
{
    struct diagnostic *d = diagnostic_new(code, title);

    diagnostic_at(d, at->rank, at->step, at->micro_batch);
    return d;
}

/* Aligns the notes in a column after the longest advice that has a note. */
void cause_remedies(struct diagnostic *d, const struct remedy *remedies, size_t n)
{
    int width = 0;

    for (size_t i = 0; i < n; i++)
        if (remedies[i].what && remedies[i].note)
            width = MAX(width, (int)strlen(remedies[i].what));
    for (size_t i = 0; i < n; i++) {
        if (!remedies[i].what)
            continue;
        if (remedies[i].note)
            diagnostic_field(d, remedies[i].label, "%-*s   (%s)", width, remedies[i].what, remedies[i].note);
        else
            diagnostic_field(d, remedies[i].label, "%s", remedies[i].what);
    }
}

static bool is_nested(const struct push_record *record)
{
    return record->depth > 0 || (record->flags & PUSH_NESTED);
}

static void print_push(struct strbuf *buf, const struct diagnostic_push *push)
{
    const struct push_record *record = &push->record;
    const char *separator = "";

    if (is_nested(record) && record->task)
        strbuf_add(buf, "nested backward %" PRIu64, record->task);
    else if (is_nested(record))
        strbuf_add(buf, "nested backward");
    else if (record->ordinal)
        strbuf_add(buf, "backward %" PRIu32, record->ordinal);
    else if (record->task)
        strbuf_add(buf, "graph task %" PRIu64, record->task);
    if (buf->n_bytes)
        separator = ", ";
    if (push->segment && *push->segment) {
        strbuf_add(buf, "%s", separator);
        strbuf_add_foreign(buf, push->segment);
        if (record->call)
            strbuf_add(buf, " call %" PRIu32, record->call);
        separator = ", ";
    }
    if (push->site && *push->site) {
        if (record->flags & PUSH_SITE_IS_BACKWARD)
            strbuf_add(buf, "%s%scalled at ", separator,
                       is_nested(record) || (push->segment && *push->segment) ? "backward " : "");
        else
            strbuf_add(buf, "%sforward at ", separator);
        strbuf_add_foreign(buf, push->site);
    }
    if (buf->n_bytes == 0)
        strbuf_add(buf, "sequence %" PRIu64 "; the client sent nothing more about it", record->sequence);
}

static void print_number(struct strbuf *buf, const char *what, uint64_t value)
{
    if (value)
        strbuf_add(buf, ", %s %" PRIu64, what, value);
    else
        strbuf_add(buf, ", %s not known", what);
}

static void print_push_in_full(struct strbuf *buf, const struct diagnostic_push *push)
{
    const struct push_record *record = &push->record;

    strbuf_add(buf, "sequence %" PRIu64 ", step %" PRIu64 ", micro-batch %" PRIu32, record->sequence, record->step,
               record->micro_batch);
    print_number(buf, "backward", record->ordinal);
    print_number(buf, "graph task", record->task);
    strbuf_add(buf, ", depth %" PRIu32 "%s%s%s\nsegment ", record->depth, record->flags & PUSH_NESTED ? ", nested" : "",
               record->flags & PUSH_HOOK_TWICE ? ", hook fired twice" : "",
               record->flags & PUSH_NEW_FORWARD ? ", a forward since the last backward" : "");
    if (push->segment && *push->segment)
        strbuf_add_foreign(buf, push->segment);
    else
        strbuf_add(buf, "not known");
    print_number(buf, "call", record->call);
    strbuf_add(buf, record->flags & PUSH_SITE_IS_BACKWARD ? ", backward called at " : ", forward at ");
    if (push->site && *push->site)
        strbuf_add_foreign(buf, push->site);
    else
        strbuf_add(buf, "not known");
}

void cause_push_field(struct diagnostic *d, const char *label, const struct diagnostic_push *push, bool full)
{
    struct strbuf buf = {0};

    if (!push->present && !full)
        return;
    if (!push->present)
        strbuf_add(&buf, "not recorded");
    else if (full)
        print_push_in_full(&buf, push);
    else
        print_push(&buf, push);
    diagnostic_field_take(d, label, &buf);
}

void cause_foreign_field(struct diagnostic *d, const char *label, const char *text)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, text);
    diagnostic_field_take(d, label, &buf);
}

void cause_print_ranks(struct strbuf *buf, const bool *set, unsigned world_size)
{
    const char *separator = "";

    for (unsigned r = 0; r < world_size; r++) {
        unsigned last = r;

        if (!set[r])
            continue;
        while (last + 1 < world_size && set[last + 1])
            last++;
        strbuf_add(buf, "%s%u", separator, r);
        if (last > r)
            strbuf_add(buf, "%s%u", last > r + 1 ? " to " : ", ", last);
        separator = ", ";
        r = last;
    }
}

void cause_partition(struct diagnostic *d, const struct layout *layout, uint32_t param)
{
    const struct layout_param *p;
    _cleanup_free_ bool *owners = NULL;
    struct strbuf buf = {0};
    unsigned n_owners = 0;

    if (!layout || param >= layout->n_params || layout->params[param].bucket == LAYOUT_NO_BUCKET)
        return;
    p = &layout->params[param];
    assert(p->first_chunk + p->n_chunks <= layout->n_chunks);
    strbuf_add(&buf, "bucket %" PRIu32 " of %" PRIu32, p->bucket, layout->n_buckets);
    owners = calloc(layout->world_size, sizeof(*owners));
    for (uint32_t c = p->first_chunk; owners && c < p->first_chunk + p->n_chunks; c++) {
        assert(layout->chunks[c].rank < layout->world_size);
        n_owners += !owners[layout->chunks[c].rank];
        owners[layout->chunks[c].rank] = true;
    }
    if (n_owners) {
        strbuf_add(&buf, n_owners == 1 ? ", owned by rank " : ", owned by ranks ");
        cause_print_ranks(&buf, owners, layout->world_size);
    }
    diagnostic_field_take(d, "partition", &buf);
}

void cause_print_double(struct strbuf *buf, double value)
{
    char text[40];

    for (int precision = 6; precision <= 17; precision++) {
        snprintf(text, sizeof(text), "%.*g", precision, value);
        if (!isfinite(value) || strtod(text, NULL) == value)
            break;
    }
    strbuf_add(buf, "%s", text);
}
