/* SPDX-License-Identifier: Apache-2.0 */

/* Turns snapshots of the daemon into JSON. */

#include "core/wire/status.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"

enum {
    SCHEMA_VERSION = 1,              /* raised when a key changes its meaning or is removed */
    PRINTED_NAME_MAX = 4 * 1024 + 1, /* room for the longest possible name, with every byte as \xNN */
};

static const char *const memory_words[N_STATUS_MEMORY] = {
    [STATUS_MEMORY_STATE] = "state",       [STATUS_MEMORY_GRADIENT] = "gradient", [STATUS_MEMORY_RING] = "ring",
    [STATUS_MEMORY_OVERFLOW] = "overflow", [STATUS_MEMORY_STAGING] = "staging",   [STATUS_MEMORY_WEIGHTS] = "weights",
    [STATUS_MEMORY_POOL] = "pool",         [STATUS_MEMORY_FIXED] = "fixed",
};

static const char *const phase_words[N_STATUS_PHASES] = {
    [STATUS_PHASE_WAIT] = "wait",
    [STATUS_PHASE_REDUCE] = "reduce",
    [STATUS_PHASE_UPDATE] = "update",
};

static const char *const dtype_words[N_DTYPES] = {
    [DTYPE_F32] = "fp32",
    [DTYPE_BF16] = "bf16",
    [DTYPE_F16] = "fp16",
};

/* Return: now_ns - then_ns, or 0 if now_ns is earlier, because the clock may have been read a little before then_ns. */
static uint64_t age_ns(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

/* ---- diagnostics --------------------------------------------------------------------------------------- */

static void put_code(struct json *j, struct json_object *o, unsigned code)
{
    char text[16];

    snprintf(text, sizeof(text), "E%u", code);
    json_put_string(j, o, "code", text);
}

/* Adds the fields that diagnostics have in every answer. */
static void put_place(struct json *j, struct json_object *o, const struct diagnostic *d, uint64_t now_ns)
{
    json_put_u64(j, o, "id", d->id);
    json_put_u64(j, o, "age_ns", age_ns(now_ns, d->time_ns));
    put_code(j, o, d->code);
    json_put_string(j, o, "cause_class", d->cause_class[0] ? d->cause_class : NULL);
    json_put_bool(j, o, "warning", d->warning);
    json_put_string(j, o, "title", d->title);
    if (d->has_rank)
        json_put_u64(j, o, "rank", d->rank);
    else
        json_put_null(j, o, "rank");
    if (d->has_step)
        json_put_u64(j, o, "step", d->step);
    else
        json_put_null(j, o, "step");
    if (d->has_micro_batch)
        json_put_u64(j, o, "micro_batch", d->micro_batch);
    else
        json_put_null(j, o, "micro_batch");
}

static struct json_object *summary_new(struct json *j, const struct diagnostic *d, uint64_t now_ns)
{
    struct json_object *o = json_new_object(j);
    const char *text = d->text ? d->text : "";
    _cleanup_free_ char *line = strndup(text, strcspn(text, "\n"));

    put_place(j, o, d, now_ns);
    if (line)
        json_put_string(j, o, "first_line", line);
    else
        j->failed = true;
    return o;
}

static void put_summary(struct json *j, struct json_object *o, const char *key, const struct diagnostic *d,
                        uint64_t now_ns)
{
    if (d)
        json_put(j, o, key, summary_new(j, d, now_ns));
    else
        json_put_null(j, o, key);
}

static void put_hex(struct json *j, struct json_object *o, const char *key, uint64_t value)
{
    char text[17];

    snprintf(text, sizeof(text), "%016" PRIx64, value);
    json_put_string(j, o, key, value ? text : NULL);
}

/* Adds a string, or null if it is "", which means unknown. */
static void put_known(struct json *j, struct json_object *o, const char *key, const char *value)
{
    json_put_string(j, o, key, value && value[0] ? value : NULL);
}

static void put_push(struct json *j, struct json_object *parent, const char *key, const struct diagnostic_push *push,
                     uint64_t now_ns)
{
    const struct push_record *record = &push->record;
    struct json_object *o;

    if (!push->present) {
        json_put_null(j, parent, key);
        return;
    }
    o = json_new_object(j);
    put_hex(j, o, "incarnation", record->incarnation);
    json_put_u64(j, o, "sequence", record->sequence);
    json_put_u64(j, o, "attempt", record->attempt);
    json_put_u64(j, o, "step", record->step);
    json_put_u64(j, o, "micro_batch", record->micro_batch);
    json_put_u64(j, o, "param", record->param);
    json_put_u64(j, o, "ordinal", record->ordinal);
    json_put_u64(j, o, "task", record->task);
    json_put_u64(j, o, "depth", record->depth);
    put_known(j, o, "segment", push->segment);
    json_put_u64(j, o, "call", record->call);
    put_known(j, o, "site", push->site);
    json_put_bool(j, o, "nested", record->flags & PUSH_NESTED);
    json_put_bool(j, o, "hook_twice", record->flags & PUSH_HOOK_TWICE);
    json_put_bool(j, o, "new_forward", record->flags & PUSH_NEW_FORWARD);
    json_put_u64(j, o, "age_ns", age_ns(now_ns, record->time_ns));
    json_put(j, parent, key, o);
}

static void push_param_name(struct json *j, struct json_object *names, const struct layout_param *param)
{
    char printed[PRINTED_NAME_MAX];

    layout_print_name(printed, sizeof(printed), param->name, param->name_len);
    json_push_string(j, names, printed);
}

/* Return: the names of all parameters if there is a layout; else the names that the text has. */
static struct json_object *diagnostic_names(struct json *j, const struct diagnostic *d, const struct layout *layout)
{
    struct json_object *names = json_new_array(j);
    uint32_t i;

    if (!layout || !d->param_ids) {
        for (i = 0; i < d->n_params_named; i++)
            json_push_string(j, names, d->params[i]);
        return names;
    }
    for (i = 0; i < d->n_params; i++)
        if (d->param_ids[i] < layout->n_params)
            push_param_name(j, names, &layout->params[d->param_ids[i]]);
    return names;
}

static struct json_object *diagnostic_object(struct json *j, const struct diagnostic *d, const struct layout *layout,
                                             uint64_t now_ns)
{
    struct json_object *o = json_new_object(j), *fields = json_new_array(j), *field;
    size_t i;

    put_place(j, o, d, now_ns);
    json_put(j, o, "params", diagnostic_names(j, d, layout));
    json_put_u64(j, o, "n_params", d->n_params);
    put_push(j, o, "first", &d->first, now_ns);
    put_push(j, o, "second", &d->second, now_ns);
    for (i = 0; i < d->n_fields; i++) {
        field = json_new_object(j);
        json_put_string(j, field, "label", d->fields[i].label);
        json_put_string(j, field, "text", d->fields[i].text);
        json_push(j, fields, field);
    }
    json_put(j, o, "fields", fields);
    json_put_string(j, o, "text", d->text);
    return o;
}

static struct json_object *diagnostics_array(struct json *j, const struct diagnostic *const *list, size_t n,
                                             const struct layout *layout, uint64_t now_ns)
{
    struct json_object *array = json_new_array(j);
    size_t i;

    for (i = 0; i < n; i++)
        json_push(j, array, diagnostic_object(j, list[i], layout, now_ns));
    return array;
}

char *diagnostics_json(const struct diagnostic *const *list, size_t n, const struct layout *layout, uint64_t now_ns)
{
    struct json j = {};

    return json_text(&j, diagnostics_array(&j, list, n, layout, now_ns));
}

/* ---- status -------------------------------------------------------------------------------------------- */

static void put_daemon(struct json *j, struct json_object *o, const struct status *s)
{
    json_put_u64(j, o, "schema_version", SCHEMA_VERSION);
    json_put_string(j, o, "job", s->job);
    json_put_string(j, o, "run_id", s->run_id);
    json_put_string(j, o, "state", s->state);
    json_put_i64(j, o, "pid", s->pid);
    json_put_string(j, o, "version", s->version);
    json_put_string(j, o, "isa", s->isa);
    json_put_u64(j, o, "uptime_ns", age_ns(s->now_ns, s->started_ns));
    json_put_u64(j, o, "n_daemons", s->n_daemons);
    if (s->found_ns) {
        json_put_u64(j, o, "replaced_ns", age_ns(s->now_ns, s->found_ns));
        json_put_u64(j, o, "away_ns", s->away_ns);
    } else {
        json_put_null(j, o, "replaced_ns");
        json_put_null(j, o, "away_ns");
    }
    json_put_string(j, o, "held", s->held);
    json_put_string(j, o, "config_path", s->config_path);
    json_put_string(j, o, "socket_path", s->socket_path);
}

static void put_world(struct json *j, struct json_object *o, const struct status *s)
{
    const struct layout *layout = s->layout;

    json_put_u64(j, o, "stage", s->stage);
    json_put_u64(j, o, "world_size", s->world_size);
    json_put_u64(j, o, "n_attached", s->n_attached);
    json_put_bool(j, o, "formed", layout);
    json_put_u64(j, o, "n_params", layout ? layout->n_params : 0);
    json_put_u64(j, o, "n_buckets", layout ? layout->n_buckets : 0);
    json_put_u64(j, o, "bucket_elems", s->bucket_elems);
    json_put_u64(j, o, "trainable_elems", layout ? layout->trainable_elems : 0);
    json_put_u64(j, o, "frozen_elems", layout ? layout->frozen_elems : 0);
}

static struct json_object *group_object(struct json *j, const struct hyper *group)
{
    struct json_object *o = json_new_object(j);

    json_put_double(j, o, "lr", group->lr);
    json_put_double(j, o, "beta1", group->beta1);
    json_put_double(j, o, "beta2", group->beta2);
    json_put_double(j, o, "eps", group->eps);
    json_put_double(j, o, "weight_decay", group->weight_decay);
    json_put_double(j, o, "momentum", group->momentum);
    json_put_double(j, o, "dampening", group->dampening);
    json_put_double(j, o, "lr_decay", group->lr_decay);
    json_put_bool(j, o, "nesterov", group->nesterov);
    json_put_u64(j, o, "ns_steps", group->ns_steps);
    json_put_string(j, o, "adjust_lr_fn", group->adjust_lr_fn == MUON_MATCH_RMS_ADAMW ? "match_rms_adamw" : "original");
    return o;
}

static struct json_object *groups_array(struct json *j, const struct status *s)
{
    struct json_object *array = json_new_array(j);

    for (uint32_t g = 0; s->groups && g < s->layout->n_groups; g++)
        json_push(j, array, group_object(j, &s->groups[g]));
    return array;
}

static void put_step(struct json *j, struct json_object *o, const struct status *s)
{
    json_put_u64(j, o, "step", s->step);
    json_put_u64(j, o, "attempt", s->attempt);
    json_put_u64(j, o, "n_applied", s->n_applied);
    json_put_u64(j, o, "n_skipped", s->n_skipped);
    json_put_u64(j, o, "n_missing_steps", s->n_missing_steps);
    json_put_u64(j, o, "n_missing_params", s->n_missing_params);
    json_put_double(j, o, "loss_scale", s->loss_scale);
    if (s->has_grad_norm)
        json_put_double(j, o, "grad_norm", s->grad_norm);
    else
        json_put_null(j, o, "grad_norm");
    json_put_double(j, o, "lr", s->lr);
    json_put(j, o, "groups", groups_array(j, s));
    json_put_double(j, o, "steps_per_s", s->steps_per_s);
    json_put_u64(j, o, "last_step_ns", s->last_step_ns);
}

static struct json_object *time_object(struct json *j, const struct status *s)
{
    struct json_object *o = json_new_object(j), *phase;
    size_t i;

    for (i = 0; i < N_STATUS_PHASES; i++) {
        phase = json_new_object(j);
        json_put_u64(j, phase, "total_ns", s->phases[i].total_ns);
        json_put_u64(j, phase, "last_ns", s->phases[i].last_ns);
        json_put(j, o, phase_words[i], phase);
    }
    return o;
}

static struct json_object *overlap_object(struct json *j, const struct status *s)
{
    struct json_object *o = json_new_object(j);

    assert(s->overlap_reduced_bytes <= s->overlap_bytes);
    json_put_u64(j, o, "reduced_bytes", s->overlap_reduced_bytes);
    json_put_u64(j, o, "micro_batch_bytes", s->overlap_bytes);
    if (s->overlap_bytes > 0)
        json_put_double(j, o, "ratio", (double)s->overlap_reduced_bytes / (double)s->overlap_bytes);
    else
        json_put_null(j, o, "ratio");
    return o;
}

static struct json_object *early_object(struct json *j, const struct status_early *early)
{
    struct json_object *o = json_new_object(j);

    assert(early->n_elems <= early->n_elems_last);
    json_put_u64(j, o, "early_elems", early->n_elems);
    json_put_u64(j, o, "elems", early->n_elems_last);
    if (early->n_elems_last > 0)
        json_put_double(j, o, "ratio", (double)early->n_elems / (double)early->n_elems_last);
    else
        json_put_null(j, o, "ratio");
    json_put_string(j, o, "prevented_by", early->prevented_by);
    put_known(j, o, "why", early->why);
    return o;
}

static struct json_object *bytes_object(struct json *j, struct status_bytes bytes)
{
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "held_bytes", bytes.held_bytes);
    json_put_u64(j, o, "planned_bytes", bytes.planned_bytes);
    json_put_bool(j, o, "on_device", bytes.on_device);
    return o;
}

static struct json_object *memory_object(struct json *j, const struct status *s)
{
    struct json_object *o = json_new_object(j);
    struct status_bytes total = {}, device = {.on_device = true};
    size_t i;

    for (i = 0; i < N_STATUS_MEMORY; i++) {
        struct status_bytes *sum = s->memory[i].on_device ? &device : &total;

        json_put(j, o, memory_words[i], bytes_object(j, s->memory[i]));
        sum->held_bytes += s->memory[i].held_bytes;
        sum->planned_bytes += s->memory[i].planned_bytes;
    }
    json_put(j, o, "total", bytes_object(j, total));
    json_put(j, o, "device_total", bytes_object(j, device));
    return o;
}

static struct json_object *counters_object(struct json *j, const struct status_counters *c)
{
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "n_pushes_admitted", c->n_pushes_admitted);
    json_put_u64(j, o, "n_pushes_retried", c->n_pushes_retried);
    json_put_u64(j, o, "n_pushes_dropped", c->n_pushes_dropped);
    json_put_u64(j, o, "n_pushes_accumulated", c->n_pushes_accumulated);
    json_put_u64(j, o, "n_pushes_redone", c->n_pushes_redone);
    json_put_u64(j, o, "n_aborts", c->n_aborts);
    json_put_u64(j, o, "n_reattaches", c->n_reattaches);
    json_put_u64(j, o, "n_overflow_slots", c->n_overflow_slots);
    json_put_u64(j, o, "n_warnings", c->n_warnings);
    json_put_u64(j, o, "n_early_updates", c->n_early_updates);
    json_put_u64(j, o, "n_early_updates_dropped", c->n_early_updates_dropped);
    return o;
}

static struct json_object *refused_array(struct json *j, const struct status *s)
{
    struct json_object *array = json_new_array(j), *o;
    size_t i;

    for (i = 0; i < s->n_refused; i++) {
        if (s->refused[i].n == 0)
            continue;
        o = json_new_object(j);
        put_code(j, o, s->refused[i].code);
        json_put_u64(j, o, "n", s->refused[i].n);
        json_push(j, array, o);
    }
    return array;
}

static void put_slowest(struct json *j, struct json_object *parent, const struct status *s)
{
    struct json_object *o;

    if (s->slowest_rank < 0) {
        json_put_null(j, parent, "slowest_rank");
        return;
    }
    o = json_new_object(j);
    json_put_i64(j, o, "rank", s->slowest_rank);
    json_put_u64(j, o, "behind_ns", s->slowest_behind_ns);
    json_put(j, parent, "slowest_rank", o);
}

static struct json_object *finding_object(struct json *j, const struct status *s, const struct status_finding *finding)
{
    struct json_object *o = json_new_object(j);
    char printed[PRINTED_NAME_MAX];

    assert(finding->param < 0 || (uint64_t)finding->param < s->layout->n_params);
    json_put_string(j, o, "kind", finding->kind);
    if (finding->rank >= 0)
        json_put_i64(j, o, "rank", finding->rank);
    else
        json_put_null(j, o, "rank");
    if (finding->param >= 0)
        layout_print_name(printed, sizeof(printed), s->layout->params[finding->param].name,
                          s->layout->params[finding->param].name_len);
    json_put_string(j, o, "param", finding->param >= 0 ? printed : NULL);
    json_put_string(j, o, "text", finding->text);
    return o;
}

static struct json_object *findings_array(struct json *j, const struct status *s)
{
    struct json_object *array = json_new_array(j);

    for (size_t i = 0; i < s->n_findings; i++)
        json_push(j, array, finding_object(j, s, &s->findings[i]));
    return array;
}

static struct json_object *node_object(struct json *j, const struct status_nodes *nodes, size_t i)
{
    const struct status_node *node = &nodes->list[i];
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "node", i);
    json_put_string(j, o, "address", node->address);
    json_put_u64(j, o, "first_rank", node->first_rank);
    json_put_u64(j, o, "n_ranks", node->n_ranks);
    if (node->known)
        json_put_bool(j, o, "reached", node->reached);
    else
        json_put_null(j, o, "reached");
    if (node->known && node->silent_ns != UINT64_MAX)
        json_put_u64(j, o, "silent_ns", node->silent_ns);
    else
        json_put_null(j, o, "silent_ns");
    json_put_string(j, o, "why", node->known && !node->reached ? node->why : NULL);
    return o;
}

static struct json_object *collective_object(struct json *j, enum traffic_kind kind, const struct traffic *traffic)
{
    uint64_t n_bytes = traffic->n_bytes_sent + traffic->n_bytes_received;
    struct json_object *o = json_new_object(j);

    json_put_string(j, o, "name", traffic_name(kind));
    json_put_u64(j, o, "n_orders", traffic->n_orders);
    json_put_u64(j, o, "sent_bytes", traffic->n_bytes_sent);
    json_put_u64(j, o, "received_bytes", traffic->n_bytes_received);
    json_put_u64(j, o, "busy_ns", traffic->busy_ns);
    if (traffic->busy_ns > 0)
        json_put_double(j, o, "bytes_per_s", (double)n_bytes * 1e9 / (double)traffic->busy_ns);
    else
        json_put_null(j, o, "bytes_per_s");
    return o;
}

/* Adds the traffic of each kind, and the sums. traffic: NULL if there is none yet. */
static void put_collectives(struct json *j, struct json_object *o, const struct traffic *traffic)
{
    struct json_object *list = json_new_array(j);
    uint64_t n_bytes_sent = 0, n_bytes_received = 0;

    for (unsigned kind = 0; traffic && kind < N_TRAFFIC; kind++) {
        n_bytes_sent += traffic[kind].n_bytes_sent;
        n_bytes_received += traffic[kind].n_bytes_received;
        json_push(j, list, collective_object(j, kind, &traffic[kind]));
    }
    json_put_u64(j, o, "sent_bytes", n_bytes_sent);
    json_put_u64(j, o, "received_bytes", n_bytes_received);
    json_put(j, o, "collectives", list);
}

static void put_nodes(struct json *j, struct json_object *parent, const struct status_nodes *nodes)
{
    struct json_object *o, *list, *waits;
    size_t i;

    if (!nodes) {
        json_put_null(j, parent, "nodes");
        return;
    }
    assert(nodes->n <= 64); /* waits_for has 64 bits */
    assert(nodes->node < nodes->n);
    o = json_new_object(j);
    list = json_new_array(j);
    waits = json_new_array(j);
    json_put_u64(j, o, "node", nodes->node);
    json_put_string(j, o, "engine", nodes->engine);
    json_put_u64(j, o, "generation", nodes->generation);
    json_put_bool(j, o, "connected", nodes->connected);
    put_collectives(j, o, nodes->traffic);
    for (i = 0; i < nodes->n; i++) {
        json_push(j, list, node_object(j, nodes, i));
        if (nodes->waits_for >> i & 1)
            json_push_u64(j, waits, i);
    }
    json_put(j, o, "waits_for", waits);
    json_put_string(j, o, "waits_to", nodes->waits_for ? nodes->waits_to : NULL);
    json_put(j, o, "list", list);
    json_put(j, parent, "nodes", o);
}

static void put_device(struct json *j, struct json_object *parent, const struct status_device *device)
{
    struct json_object *o;

    if (!device) {
        json_put_null(j, parent, "device");
        return;
    }
    o = json_new_object(j);
    json_put_bool(j, o, "ready", device->ready);
    json_put_u64(j, o, "pid", (uint64_t)device->pid);
    json_put_u64(j, o, "generation", device->generation);
    json_put_u64(j, o, "n_failures", device->n_failures);
    json_put_string(j, o, "versions", device->versions);
    put_collectives(j, o, device->traffic);
    json_put(j, parent, "device", o);
}

static void put_saving(struct json *j, struct json_object *parent, const struct status *s)
{
    const struct status_saving *saving = &s->checkpoint.saving;
    struct json_object *o;

    if (!s->checkpoint.is_saving) {
        json_put_null(j, parent, "saving");
        return;
    }
    o = json_new_object(j);
    json_put_u64(j, o, "step", saving->step);
    json_put_u64(j, o, "bytes_done", saving->n_bytes_done);
    json_put_u64(j, o, "bytes", saving->n_bytes);
    json_put_u64(j, o, "since_ns", age_ns(s->now_ns, saving->began_ns));
    json_put_u64(j, o, "waited_ns", saving->waited_ns);
    json_put(j, parent, "saving", o);
}

static void put_saved(struct json *j, struct json_object *parent, const struct status *s)
{
    const struct status_saved *last = &s->checkpoint.last;
    struct json_object *o;

    if (!s->checkpoint.has_last) {
        json_put_null(j, parent, "last");
        return;
    }
    o = json_new_object(j);
    json_put_u64(j, o, "step", last->step);
    json_put_u64(j, o, "bytes", last->n_bytes);
    json_put_u64(j, o, "ns", last->took_ns);
    json_put_u64(j, o, "waited_ns", last->waited_ns);
    json_put_u64(j, o, "ago_ns", age_ns(s->now_ns, last->ended_ns));
    json_put(j, parent, "last", o);
}

static void put_checkpoint(struct json *j, struct json_object *parent, const struct status *s)
{
    const struct status_checkpoint *checkpoint = &s->checkpoint;
    struct json_object *o;

    if (!checkpoint->dir) {
        json_put_null(j, parent, "checkpoint");
        return;
    }
    o = json_new_object(j);
    json_put_string(j, o, "dir", checkpoint->dir);
    json_put_bool(j, o, "wanted", checkpoint->wanted);
    put_saving(j, o, s);
    put_saved(j, o, s);
    json_put_u64(j, o, "n_saved", checkpoint->n_saved);
    json_put_u64(j, o, "n_failed", checkpoint->n_failed);
    json_put_string(j, o, "why", checkpoint->why);
    json_put(j, parent, "checkpoint", o);
}

static struct json_object *status_object(struct json *j, const struct status *s)
{
    struct json_object *o = json_new_object(j);

    put_daemon(j, o, s);
    put_world(j, o, s);
    put_step(j, o, s);
    json_put(j, o, "time", time_object(j, s));
    json_put(j, o, "overlap", overlap_object(j, s));
    json_put(j, o, "early_updates", early_object(j, &s->early));
    json_put(j, o, "memory", memory_object(j, s));
    json_put_u64(j, o, "limit_bytes", s->limit_bytes);
    json_put(j, o, "counters", counters_object(j, &s->counters));
    json_put(j, o, "refused", refused_array(j, s));
    put_slowest(j, o, s);
    put_summary(j, o, "last_diagnostic", s->last_diagnostic, s->now_ns);
    json_put(j, o, "findings", findings_array(j, s));
    put_nodes(j, o, s->nodes);
    put_device(j, o, s->has_device ? &s->device : NULL);
    put_checkpoint(j, o, s);
    return o;
}

char *status_json(const struct status *status)
{
    struct json j = {};

    return json_text(&j, status_object(&j, status));
}

/* ---- ranks --------------------------------------------------------------------------------------------- */

static void put_process(struct json *j, struct json_object *o, const struct status_rank *rank)
{
    if (rank->pid > 0) {
        json_put_i64(j, o, "pid", rank->pid);
        json_put_i64(j, o, "uid", rank->uid);
    } else {
        json_put_null(j, o, "pid");
        json_put_null(j, o, "uid");
    }
    json_put_string(j, o, "client", rank->client);
    put_hex(j, o, "incarnation", rank->incarnation);
}

static void put_since(struct json *j, struct json_object *o, const char *key, uint64_t since_ns, uint64_t now_ns)
{
    if (since_ns > 0)
        json_put_u64(j, o, key, age_ns(now_ns, since_ns));
    else
        json_put_null(j, o, key);
}

static struct json_object *phases_object(struct json *j, const struct status_rank *rank)
{
    static const char *const words[N_STATUS_RANK_PHASES] = {
        [STATUS_RANK_FORWARD] = "forward_ns",
        [STATUS_RANK_BACKWARD] = "backward_ns",
        [STATUS_RANK_ROOM] = "room_ns",
        [STATUS_RANK_REST] = "rest_ns",
    };
    struct json_object *o = json_new_object(j);

    for (size_t i = 0; i < N_STATUS_RANK_PHASES; i++)
        json_put_u64(j, o, words[i], rank->phases_ns[i]);
    return o;
}

static struct json_object *waits_array(struct json *j, const struct status_rank *rank)
{
    struct json_object *array = json_new_array(j);

    assert(rank->n_waits <= STATUS_MAX_WAITS);
    for (size_t i = 0; i < rank->n_waits; i++) {
        struct json_object *o = json_new_object(j);

        json_put_string(j, o, "state", rank->waits[i].state);
        json_put_string(j, o, "for", rank->waits[i].what);
        json_put_u64(j, o, "total_ns", rank->waits[i].ns);
        json_push(j, array, o);
    }
    return array;
}

static struct json_object *rank_object(struct json *j, const struct status_rank *rank, uint64_t now_ns)
{
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "rank", rank->rank);
    json_put_bool(j, o, "attached", rank->attached);
    json_put_string(j, o, "state", rank->state);
    put_process(j, o, rank);
    put_since(j, o, "connected_ns", rank->connected_since_ns, now_ns);
    put_since(j, o, "last_message_ns", rank->last_message_ns, now_ns);
    json_put_u64(j, o, "step", rank->step);
    json_put_u64(j, o, "micro_batch", rank->micro_batch);
    json_put_u64(j, o, "n_pushes", rank->n_pushes);
    json_put_u64(j, o, "behind_total_ns", rank->behind_total_ns);
    json_put(j, o, "phases", phases_object(j, rank));
    json_put(j, o, "waits", waits_array(j, rank));
    json_put_string(j, o, "waiting_for", rank->waiting_for);
    put_since(j, o, "waiting_ns", rank->waiting_for ? rank->waiting_since_ns : 0, now_ns);
    put_summary(j, o, "fault", rank->fault, now_ns);
    return o;
}

static struct json_object *ranks_array(struct json *j, const struct status_rank *ranks, size_t n, uint64_t now_ns)
{
    struct json_object *array = json_new_array(j);
    size_t i;

    for (i = 0; i < n; i++)
        json_push(j, array, rank_object(j, &ranks[i], now_ns));
    return array;
}

char *ranks_json(const struct status_rank *ranks, size_t n, uint64_t now_ns)
{
    struct json j = {};

    return json_text(&j, ranks_array(&j, ranks, n, now_ns));
}

/* ---- stacks -------------------------------------------------------------------------------------------- */

static struct json_object *stack_object(struct json *j, const struct status_stack *stack, const struct layout *layout,
                                        uint64_t now_ns)
{
    struct json_object *o = json_new_object(j), *awaited = json_new_array(j);
    char printed[PRINTED_NAME_MAX];

    json_put_u64(j, o, "rank", stack->rank->rank);
    json_put_bool(j, o, "attached", stack->rank->attached);
    put_process(j, o, stack->rank);
    json_put_string(j, o, "state", stack->rank->state);
    json_put_string(j, o, "waiting_for", stack->rank->waiting_for);
    json_put_u64(j, o, "step", stack->rank->step);
    json_put_u64(j, o, "micro_batch", stack->rank->micro_batch);
    json_put_u64(j, o, "n_awaited", stack->n_awaited);
    for (size_t i = 0; layout && i < MIN(stack->n_awaited, (size_t)STATUS_MAX_AWAITED); i++) {
        const struct layout_param *param = &layout->params[stack->awaited[i]];

        assert(stack->awaited[i] < layout->n_params);
        layout_print_name(printed, sizeof(printed), param->name, param->name_len);
        json_push_string(j, awaited, printed);
    }
    json_put(j, o, "awaited", awaited);
    json_put_string(j, o, "process", stack->process);
    json_put_bool(j, o, "pending", stack->is_pending);
    put_since(j, o, "age_ns", stack->seen_ns, now_ns);
    json_put_string(j, o, "stack", stack->text);
    return o;
}

static struct json_object *stacks_array(struct json *j, const struct status_stack *stacks, size_t n,
                                        const struct layout *layout, uint64_t now_ns)
{
    struct json_object *array = json_new_array(j);

    for (size_t i = 0; i < n; i++)
        json_push(j, array, stack_object(j, &stacks[i], layout, now_ns));
    return array;
}

char *stacks_json(const struct status_stack *stacks, size_t n, const struct layout *layout, uint64_t now_ns)
{
    struct json j = {};

    return json_text(&j, stacks_array(&j, stacks, n, layout, now_ns));
}

/* ---- parameters ---------------------------------------------------------------------------------------- */

/* Return: the ranks that own elements of the parameter. */
static struct json_object *owners_array(struct json *j, const struct layout *layout, const struct layout_param *param)
{
    struct json_object *array = json_new_array(j);
    uint64_t at = param->offset_elems;

    while (param->trainable && at < param->offset_elems + param->n_elems)
        json_push_u64(j, array, layout_owner(layout, param->bucket, at, &at));
    return array;
}

/* Return: the ranks that have pushed the parameter in the open step. */
static struct json_object *pushed_array(struct json *j, const struct status_pushes *pushes, const struct layout *layout,
                                        uint32_t param)
{
    struct json_object *array = json_new_array(j);
    unsigned rank;

    assert(!pushes || pushes->first_rank <= pushes->end_rank);
    for (rank = pushes ? pushes->first_rank : 0; pushes && layout->params[param].trainable && rank < pushes->end_rank;
         rank++)
        if (pushes->has_pushed(pushes->userdata, rank, layout_last_part(layout, param)))
            json_push_u64(j, array, rank);
    return array;
}

static void put_declared(struct json *j, struct json_object *o, const struct layout_param *param)
{
    char printed[PRINTED_NAME_MAX];
    struct json_object *shape = json_new_array(j);
    uint32_t i;

    assert(param->dtype < N_DTYPES);
    assert(param->grad_dtype < N_DTYPES);
    layout_print_name(printed, sizeof(printed), param->name, param->name_len);
    json_put_string(j, o, "name", printed);
    json_put_string(j, o, "dtype", dtype_words[param->dtype]);
    json_put_string(j, o, "grad_dtype", dtype_words[param->grad_dtype]);
    for (i = 0; i < param->n_dims; i++)
        json_push_u64(j, shape, param->shape[i]);
    json_put(j, o, "shape", shape);
    json_put_u64(j, o, "n_elems", param->n_elems);
    json_put_u64(j, o, "group", param->group);
    json_put_bool(j, o, "trainable", param->trainable);
    if (param->bucket == LAYOUT_NO_BUCKET)
        json_put_null(j, o, "bucket");
    else
        json_put_u64(j, o, "bucket", param->bucket);
}

static struct json_object *param_object(struct json *j, const struct layout *layout, const struct status_pushes *pushes,
                                        const struct status_param *dynamic, uint32_t id)
{
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "id", id);
    put_declared(j, o, &layout->params[id]);
    json_put(j, o, "owners", owners_array(j, layout, &layout->params[id]));
    json_put(j, o, "pushed_by", pushed_array(j, pushes, layout, id));
    json_put_u64(j, o, "n_steps", dynamic ? dynamic->n_steps : 0);
    if (dynamic && dynamic->has_grad_norm)
        json_put_double(j, o, "grad_norm", dynamic->grad_norm);
    else
        json_put_null(j, o, "grad_norm");
    return o;
}

static struct json_object *params_array(struct json *j, const struct layout *layout, const struct status_pushes *pushes,
                                        const struct status_param *params)
{
    struct json_object *array = json_new_array(j);
    uint32_t id;

    for (id = 0; layout && id < layout->n_params; id++)
        json_push(j, array, param_object(j, layout, pushes, params ? &params[id] : NULL, id));
    return array;
}

char *params_json(const struct layout *layout, const struct status_pushes *pushes, const struct status_param *params)
{
    struct json j = {};

    return json_text(&j, params_array(&j, layout, pushes, params));
}

/* ---- the rest ------------------------------------------------------------------------------------------ */

char *report_json(const struct report *report)
{
    const struct status *s = report->status;
    struct json j = {};
    struct json_object *o = json_new_object(&j);

    json_put_string(&j, o, "config", report->config);
    json_put(&j, o, "status", status_object(&j, s));
    json_put(&j, o, "ranks", ranks_array(&j, report->ranks, report->n_ranks, s->now_ns));
    json_put(&j, o, "stacks",
             stacks_array(&j, report->stacks, report->stacks ? report->n_ranks : 0, s->layout, s->now_ns));
    json_put(&j, o, "params", params_array(&j, s->layout, report->pushes, report->params));
    json_put(&j, o, "diagnostics",
             diagnostics_array(&j, report->diagnostics, report->n_diagnostics, s->layout, s->now_ns));
    return json_text(&j, o);
}

char *save_json(const struct status_save *save)
{
    struct json j = {};
    struct json_object *o = json_new_object(&j);

    json_put_string(&j, o, "message", save->message);
    json_put_string(&j, o, "dir", save->dir);
    json_put_bool(&j, o, "saved", save->is_saved);
    json_put_u64(&j, o, "step", save->step);
    json_put_u64(&j, o, "n_ended", save->n_ended);
    return json_text(&j, o);
}

static char *one_string_json(const char *key, const char *text)
{
    struct json j = {};
    struct json_object *o = json_new_object(&j);

    json_put_string(&j, o, key, text);
    return json_text(&j, o);
}

char *message_json(const char *message)
{
    return one_string_json("message", message);
}

char *error_json(const char *error)
{
    return one_string_json("error", error);
}
