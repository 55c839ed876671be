/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Makes the daemon's diagnostics without a daemon, for an observer of DDP. Only the names of the parameters are known,
 * so each parameter has one element in the layout. Only the diagnostic texts use this layout.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/layout.h"
#include "zerod/client.h"

struct explained {
    struct zerod_error public; /* must be the first member, because the caller has its address */
    struct diagnostic *diagnostic;
    char *text;
    struct zerod_field fields[DIAGNOSTIC_MAX_FIELDS];
};

static int names_layout(struct layout **out, const struct zerod_observation *o)
{
    _cleanup_free_ struct layout_decl *decls = calloc(o->n_names, sizeof(*decls));
    static const uint64_t one = 1;
    uint32_t bad;
    int r;

    if (!decls)
        return -ENOMEM;
    for (size_t i = 0; i < o->n_names; i++)
        decls[i] = (struct layout_decl){
            .name = o->names[i], .name_len = strlen(o->names[i]), .trainable = true, .n_dims = 1, .shape = &one};
    r = layout_new(out, decls, (uint32_t)o->n_names, MAX(o->world_size, 1u), LAYOUT_ALIGN_ELEMS, &bad);
    if (r != 0)
        return r < 0 ? r : -EINVAL;
    for (uint32_t p = 0; p < (*out)->n_params; p++)
        (*out)->params[p].bucket = LAYOUT_NO_BUCKET; /* so no text names a partition */
    return 0;
}

static struct diagnostic_push push_of(const struct zerod_push *push)
{
    return (struct diagnostic_push){
        .present = push->ordinal > 0,
        .record = {.ordinal = push->ordinal,
                   .task = push->task,
                   .depth = push->depth,
                   .call = push->call,
                   .flags = push->flags},
        .segment = (char *)(push->segment ? push->segment : ""),
        .site = (char *)(push->site ? push->site : ""),
    };
}

static struct diagnostic *explain_twice(const struct zerod_observation *o, const struct evidence_at *at)
{
    struct evidence_duplicate evidence = {
        .at = *at,
        .params = o->params,
        .n_params = o->n_params,
        .first = push_of(&o->first),
        .second = push_of(&o->second),
    };

    evidence.ddp_complained = evidence.first.present && !evidence.second.present;
    return cause_duplicate(&evidence);
}

static void mark_called(uint8_t *called, const struct zerod_observation *o, const unsigned *ids, size_t n, uint8_t mark)
{
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < o->n_params; k++)
            if (o->params[k] == ids[i])
                called[k] = mark;
}

static struct diagnostic *explain_missing(const struct zerod_observation *o, const struct evidence_at *at)
{
    static const struct zerod_evidence nothing;
    const struct zerod_evidence *e = o->evidence ? o->evidence : &nothing;
    _cleanup_free_ uint8_t *called = calloc(MAX(o->n_params, (size_t)1), sizeof(*called));

    if (called) {
        mark_called(called, o, e->not_called, e->n_not_called, EVIDENCE_NOT_CALLED);
        mark_called(called, o, e->called, e->n_called, EVIDENCE_CALLED);
    }
    return cause_missing(&(struct evidence_missing){
        .at = *at,
        .params = o->params,
        .n_params = o->n_params,
        .n_trainable = (uint32_t)o->n_names,
        .world_size = o->world_size,
        .same_on_all_ranks = o->same_on_all_ranks,
        .same_every_step = o->same_every_step,
        .n_steps_seen = o->n_steps_seen,
        .n_forwards = e->n_forwards,
        .n_backwards = e->n_backwards,
        .exception = {.text = e->exception,
                      .raised_at = e->raised_at,
                      .swallowed_by = e->swallowed_by,
                      .in_forward = e->in_forward},
        .requires_grad_changed = e->requires_grad_changed,
        .dead_segments = {.first = e->dead_segment, .n = e->n_dead_segments, .site = e->site},
        .called = e->n_not_called + e->n_called ? called : NULL,
        .ddp_silent = o->silent,
        .wrapper_bypassed = o->what == ZEROD_OBSERVED_BYPASSED,
    });
}

static int publish_explained(struct explained *explained)
{
    const struct diagnostic *d = explained->diagnostic;
    size_t n = strlen(d->text);

    while (n > 0 && d->text[n - 1] == '\n')
        n--;
    explained->text = strndup(d->text, n);
    if (!explained->text)
        return -ENOMEM;
    for (size_t i = 0; i < d->n_fields; i++)
        explained->fields[i] = (struct zerod_field){.label = d->fields[i].label, .text = d->fields[i].text};
    explained->public = (struct zerod_error){
        .code = d->code,
        .text = explained->text,
        .cause_class = d->cause_class,
        .rank = d->has_rank ? (long)d->rank : -1,
        .step = d->has_step ? (int64_t)d->step : -1,
        .micro_batch = d->has_micro_batch ? (long)d->micro_batch : -1,
        .params = (const char *const *)d->params,
        .n_params = d->n_params,
        .fields = explained->fields,
        .n_fields = (unsigned)d->n_fields,
    };
    return 0;
}

int zerod_explain(const struct zerod_observation *o, struct zerod_error **out)
{
    struct explained *explained;
    struct layout *layout = NULL;
    struct evidence_at at;
    int r;

    *out = NULL;
    if (o->n_names == 0 || o->n_names > UINT32_MAX || (unsigned)o->what > ZEROD_OBSERVED_BYPASSED)
        return -EINVAL;
    for (size_t i = 0; i < o->n_params; i++)
        if (o->params[i] >= o->n_names)
            return -EINVAL;
    r = names_layout(&layout, o);
    if (r < 0)
        return r;
    explained = calloc(1, sizeof(*explained));
    if (!explained) {
        layout_free(layout);
        return -ENOMEM;
    }
    at = (struct evidence_at){.layout = layout,
                              .rank = o->rank,
                              .step = o->step,
                              .micro_batch = -1,
                              .client = o->client ? o->client : "torch",
                              .observed = true};
    explained->diagnostic = o->what == ZEROD_OBSERVED_TWICE ? explain_twice(o, &at) : explain_missing(o, &at);
    layout_free(layout); /* the diagnostic has copies */
    r = publish_explained(explained);
    if (r < 0)
        zerod_explain_free(&explained->public);
    else
        *out = &explained->public;
    return r;
}

void zerod_explain_free(struct zerod_error *error)
{
    struct explained *explained = (struct explained *)error;

    if (!explained)
        return;
    diagnostic_unref(explained->diagnostic);
    free(explained->text);
    free(explained);
}
