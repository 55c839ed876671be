/* SPDX-License-Identifier: Apache-2.0 */

/* Turns answers of daemons into metrics for Prometheus. */

#include "client/ctl/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/base/strbuf.h"

enum {
    NUMBER_SIZE = 40,    /* a double with 17 digits, or seconds and nanoseconds */
    PATH_MAX_BYTES = 64, /* of this file's own paths */
    MAX_LABELS = 4,
};

struct writer;

/* A metric. OpenMetrics calls it a family. */
struct family {
    const char *name; /* without the _total of a counter */
    bool is_counter;  /* else a gauge */
    const char *unit; /* also the end of the name; NULL: none */
    const char *help;
    void (*put)(struct writer *w);
    const char *key; /* put() looks the value up under this key */
};

struct writer {
    struct strbuf *text;
    enum metrics_format format;
    const struct family *family;
    const struct metrics_source *source;
    bool has_head; /* the family's # HELP and # TYPE are printed */
};

struct label {
    const char *name, *value;
};

/* ---- reading ------------------------------------------------------------------------------------------- */

/* path: like "checkpoint.last.step". Return: the member; or NULL if it does not exist or is null. */
static struct json_object *find_member(struct json_object *o, const char *path)
{
    char key[PATH_MAX_BYTES];
    size_t n;

    for (; o && *path; path += n + (path[n] == '.')) {
        n = strcspn(path, ".");
        snprintf(key, sizeof(key), "%.*s", (int)n, path);
        o = json_object_is_type(o, json_type_object) ? json_object_object_get(o, key) : NULL;
    }
    return o;
}

static size_t array_length(struct json_object *array)
{
    return json_object_is_type(array, json_type_array) ? json_object_array_length(array) : 0;
}

/* Return: the text, or NULL if the member is not a string. */
static const char *find_string(struct json_object *o, const char *path)
{
    struct json_object *value = find_member(o, path);

    return json_object_is_type(value, json_type_string) ? json_object_get_string(value) : NULL;
}

/* Prints a whole number as text for a label. Return: false if the member is not a number. */
static bool find_number(struct json_object *o, const char *path, char text[NUMBER_SIZE])
{
    struct json_object *value = find_member(o, path);

    if (!json_object_is_type(value, json_type_int))
        return false;
    snprintf(text, NUMBER_SIZE, "%" PRIu64, json_object_get_uint64(value));
    return true;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);

    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* Prints the shortest decimal number that reads back as value. */
static void print_double(char text[NUMBER_SIZE], double value)
{
    int n_digits = 15;

    do
        snprintf(text, NUMBER_SIZE, "%.*g", n_digits, value);
    while (strtod(text, NULL) != value && n_digits++ < 17);
}

/* Prints the value of a sample. If its path ends in _ns, the value is converted to seconds. Return: false if there is
 * no value. */
static bool print_value(char text[NUMBER_SIZE], struct json_object *value, const char *path)
{
    uint64_t number = json_object_get_uint64(value);
    double real = json_object_get_double(value);

    if (json_object_is_type(value, json_type_boolean))
        snprintf(text, NUMBER_SIZE, "%d", (bool)json_object_get_boolean(value));
    else if (json_object_is_type(value, json_type_int) && ends_with(path, "_ns"))
        snprintf(text, NUMBER_SIZE, "%" PRIu64 ".%09" PRIu64, number / 1000000000, number % 1000000000);
    else if (json_object_is_type(value, json_type_int))
        snprintf(text, NUMBER_SIZE, "%" PRIu64, number);
    else if (json_object_is_type(value, json_type_double) && isfinite(real))
        print_double(text, real);
    else
        return false;
    return true;
}

/* ---- writing ------------------------------------------------------------------------------------------- */

static const char *total_of(const struct family *family)
{
    return family->is_counter ? "_total" : "";
}

static void put_head(struct writer *w)
{
    const struct family *family = w->family;
    const char *total = w->format == METRICS_PROMETHEUS ? total_of(family) : "";

    strbuf_add(w->text, "# HELP %s%s %s\n", family->name, total, family->help);
    strbuf_add(w->text, "# TYPE %s%s %s\n", family->name, total, family->is_counter ? "counter" : "gauge");
    if (family->unit && w->format == METRICS_OPENMETRICS)
        strbuf_add(w->text, "# UNIT %s %s\n", family->name, family->unit);
    w->has_head = true;
}

/* Prints a label. Its value may hold any bytes. */
static void put_label(struct writer *w, char before, const char *name, const char *value)
{
    _cleanup_free_ char *clean = json_clean(value);

    if (!clean) {
        w->text->cut = true;
        return;
    }
    strbuf_add(w->text, "%c%s=\"", before, name);
    for (const char *c = clean; *c; c++) {
        if (*c == '\n')
            strbuf_add_bytes(w->text, "\\n", 2);
        else if (*c == '\\' || *c == '"')
            strbuf_add(w->text, "\\%c", *c);
        else
            strbuf_add_bytes(w->text, c, 1);
    }
    strbuf_add_bytes(w->text, "\"", 1);
}

/* Prints the beginning of a line, equal for all lines. */
static void begin_line(struct writer *w)
{
    if (!w->has_head)
        put_head(w);
    strbuf_add(w->text, "%s%s", w->family->name, total_of(w->family));
    put_label(w, '{', "socket", w->source->socket);
}

/* labels: up to MAX_LABELS; a label without name ends them, and a label without value is left out. */
static void put_line(struct writer *w, const char *number, const struct label *labels)
{
    const char *job = find_string(w->source->status, "job");

    begin_line(w);
    if (job)
        put_label(w, ',', "job_name", job);
    for (size_t i = 0; i < MAX_LABELS && labels && labels[i].name; i++)
        if (labels[i].value)
            put_label(w, ',', labels[i].name, labels[i].value);
    strbuf_add(w->text, "} %s\n", number);
}

static void put_sample(struct writer *w, struct json_object *o, const char *path, const struct label *labels)
{
    char number[NUMBER_SIZE];

    if (print_value(number, find_member(o, path), path))
        put_line(w, number, labels);
}

/* ---- kinds of metrics ---------------------------------------------------------------------------------- */

/* This metric has no job_name, because the series must be the same whether the daemon has answered or not. */
static void put_up(struct writer *w)
{
    begin_line(w);
    strbuf_add(w->text, "} %d\n", w->source->status != NULL);
}

/* Prints a value of the status. */
static void put_value(struct writer *w)
{
    put_sample(w, w->source->status, w->family->key, NULL);
}

/* Prints a value of the status, unless it is 0, which means no value. */
static void put_if_any(struct writer *w)
{
    if (json_object_get_uint64(find_member(w->source->status, w->family->key)) > 0)
        put_value(w);
}

/* Prints 1 if the member is not null, else 0. */
static void put_is_there(struct writer *w)
{
    struct json_object *o = w->source->status;

    if (o && json_object_object_get_ex(o, w->family->key, NULL))
        put_line(w, find_member(o, w->family->key) ? "1" : "0", NULL);
}

static void put_info(struct writer *w)
{
    struct json_object *o = w->source->status;
    char stage[NUMBER_SIZE];
    const struct label labels[MAX_LABELS] = {{"version", find_string(o, "version")},
                                             {"isa", find_string(o, "isa")},
                                             {"stage", find_number(o, "stage", stage) ? stage : NULL}};

    if (o)
        put_line(w, "1", labels);
}

/* Prints 1, with the text as a label that is named after the key, without the key's object. */
static void put_text(struct writer *w)
{
    const char *text = find_string(w->source->status, w->family->key), *dot = strrchr(w->family->key, '.');

    if (text)
        put_line(w, "1", (struct label[MAX_LABELS]){{dot ? dot + 1 : w->family->key, text}});
}

struct kind {
    const char *path, *word;
};

static void put_kinds(struct writer *w, const char *label, const struct kind *kinds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        put_sample(w, w->source->status, kinds[i].path, (struct label[MAX_LABELS]){{label, kinds[i].word}});
}

static void put_steps(struct writer *w)
{
    static const struct kind kinds[] = {
        {"n_applied", "applied"}, {"n_skipped", "skipped"}, {"counters.n_aborts", "aborted"}};

    put_kinds(w, "result", kinds, ARRAY_SIZE(kinds));
}

static void put_phases(struct writer *w)
{
    static const struct kind kinds[] = {
        {"time.wait.total_ns", "wait"}, {"time.reduce.total_ns", "reduce"}, {"time.update.total_ns", "update"}};

    put_kinds(w, "phase", kinds, ARRAY_SIZE(kinds));
}

static void put_elems(struct writer *w)
{
    static const struct kind kinds[] = {{"trainable_elems", "trainable"}, {"frozen_elems", "frozen"}};

    put_kinds(w, "kind", kinds, ARRAY_SIZE(kinds));
}

static void put_pushes(struct writer *w)
{
    static const struct kind kinds[] = {{"counters.n_pushes_admitted", "admitted"},
                                        {"counters.n_pushes_retried", "retried"},
                                        {"counters.n_pushes_dropped", "dropped"},
                                        {"counters.n_pushes_accumulated", "accumulated"},
                                        {"counters.n_pushes_redone", "redone"}};

    put_kinds(w, "result", kinds, ARRAY_SIZE(kinds));
}

static void put_early_updates(struct writer *w)
{
    static const struct kind kinds[] = {{"counters.n_early_updates", "accepted"},
                                        {"counters.n_early_updates_dropped", "dropped"}};

    put_kinds(w, "result", kinds, ARRAY_SIZE(kinds));
}

/* Prints a value of each parameter group. */
static void put_groups(struct writer *w)
{
    struct json_object *list = find_member(w->source->status, "groups");
    char group[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(list); i++) {
        snprintf(group, sizeof(group), "%zu", i);
        put_sample(w, json_object_array_get_idx(list, i), w->family->key, (struct label[MAX_LABELS]){{"group", group}});
    }
}

static void put_memory(struct writer *w)
{
    struct json_object *memory = find_member(w->source->status, "memory");

    if (!json_object_is_type(memory, json_type_object))
        return;
    json_object_object_foreach(memory, class, bytes)
    {
        const char *place = json_object_get_boolean(find_member(bytes, "on_device")) ? "gpu" : "host";

        if (!ends_with(class, "total")) /* the reader can sum the classes */
            put_sample(w, bytes, w->family->key, (struct label[MAX_LABELS]){{"class", class}, {"place", place}});
    }
}

static void put_refused(struct writer *w)
{
    struct json_object *list = find_member(w->source->status, "refused");

    for (size_t i = 0; i < array_length(list); i++) {
        struct json_object *o = json_object_array_get_idx(list, i);

        put_sample(w, o, w->family->key, (struct label[MAX_LABELS]){{"code", find_string(o, "code")}});
    }
}

static void put_diagnostic(struct writer *w)
{
    struct json_object *last = find_member(w->source->status, "last_diagnostic");
    const struct label labels[MAX_LABELS] = {{"code", find_string(last, "code")}};

    put_sample(w, last, w->family->key, labels);
}

static void put_slowest(struct writer *w)
{
    struct json_object *slowest = find_member(w->source->status, "slowest_rank");
    char rank[NUMBER_SIZE];

    if (find_number(slowest, "rank", rank))
        put_sample(w, slowest, w->family->key, (struct label[MAX_LABELS]){{"rank", rank}});
}

static void put_findings(struct writer *w)
{
    static const char *const kinds[] = {"rank-norm", "zero-gradient", "zero-lr", "slow-rank"};
    struct json_object *list = find_member(w->source->status, "findings");
    char number[NUMBER_SIZE];

    for (size_t k = 0; list && k < ARRAY_SIZE(kinds); k++) {
        size_t n = 0;

        for (size_t i = 0; i < array_length(list); i++) {
            const char *kind = find_string(json_object_array_get_idx(list, i), "kind");

            n += kind && strcmp(kind, kinds[k]) == 0;
        }
        snprintf(number, sizeof(number), "%zu", n);
        put_line(w, number, (struct label[MAX_LABELS]){{"kind", kinds[k]}});
    }
}

/* ---- lists --------------------------------------------------------------------------------------------- */

static void put_ranks(struct writer *w)
{
    char rank[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(w->source->ranks); i++) {
        struct json_object *o = json_object_array_get_idx(w->source->ranks, i);

        if (find_number(o, "rank", rank))
            put_sample(w, o, w->family->key, (struct label[MAX_LABELS]){{"rank", rank}});
    }
}

static void put_rank_phases(struct writer *w)
{
    static const struct kind kinds[] = {{"phases.forward_ns", "forward"},
                                        {"phases.backward_ns", "backward"},
                                        {"phases.room_ns", "room"},
                                        {"phases.rest_ns", "rest"}};
    char rank[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(w->source->ranks); i++) {
        struct json_object *o = json_object_array_get_idx(w->source->ranks, i);

        for (size_t k = 0; find_number(o, "rank", rank) && k < ARRAY_SIZE(kinds); k++)
            put_sample(w, o, kinds[k].path, (struct label[MAX_LABELS]){{"rank", rank}, {"phase", kinds[k].word}});
    }
}

static void put_rank_waits(struct writer *w)
{
    char rank[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(w->source->ranks); i++) {
        struct json_object *o = json_object_array_get_idx(w->source->ranks, i), *waits = find_member(o, "waits");

        for (size_t k = 0; find_number(o, "rank", rank) && k < array_length(waits); k++) {
            struct json_object *wait = json_object_array_get_idx(waits, k);

            put_sample(w, wait, w->family->key,
                       (struct label[MAX_LABELS]){
                           {"rank", rank}, {"state", find_string(wait, "state")}, {"for", find_string(wait, "for")}});
        }
    }
}

/* Prints 0 for a rank that does not wait. */
static void put_waiting(struct writer *w)
{
    char rank[NUMBER_SIZE], number[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(w->source->ranks); i++) {
        struct json_object *o = json_object_array_get_idx(w->source->ranks, i);

        if (!find_number(o, "rank", rank) || !json_object_get_boolean(find_member(o, "attached")))
            continue;
        if (!print_value(number, find_member(o, w->family->key), w->family->key))
            snprintf(number, sizeof(number), "0");
        put_line(w, number, (struct label[MAX_LABELS]){{"rank", rank}});
    }
}

static void put_faults(struct writer *w)
{
    char rank[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(w->source->ranks); i++) {
        struct json_object *o = json_object_array_get_idx(w->source->ranks, i);
        const char *code = find_string(o, w->family->key);

        if (code && find_number(o, "rank", rank))
            put_line(w, "1", (struct label[MAX_LABELS]){{"rank", rank}, {"code", code}});
    }
}

static void put_nodes(struct writer *w)
{
    struct json_object *list = find_member(w->source->status, "nodes.list");
    char node[NUMBER_SIZE];

    for (size_t i = 0; i < array_length(list); i++) {
        struct json_object *o = json_object_array_get_idx(list, i);
        const char *address = find_string(o, "address");

        if (find_number(o, "node", node))
            put_sample(w, o, w->family->key, (struct label[MAX_LABELS]){{"node", node}, {"address", address}});
    }
}

static void put_awaited(struct writer *w)
{
    struct json_object *list = find_member(w->source->status, w->family->key), *o;

    for (size_t i = 0; i < array_length(list); i++) {
        o = json_object_array_get_idx(list, i);
        if (json_object_is_type(o, json_type_int))
            put_line(w, "1", (struct label[MAX_LABELS]){{"node", json_object_get_string(o)}});
    }
}

/* The engine between nodes (gloo), and the engine on GPUs (nccl). */
static const struct {
    const char *key, *ready, *name;
} engines[] = {{"nodes", "connected", "gloo"}, {"device", "ready", "nccl"}};

static void put_engines(struct writer *w)
{
    bool is_ready = strcmp(w->family->key, "ready") == 0;

    for (size_t i = 0; i < ARRAY_SIZE(engines); i++)
        put_sample(w, find_member(w->source->status, engines[i].key), is_ready ? engines[i].ready : w->family->key,
                   (struct label[MAX_LABELS]){{"engine", engines[i].name}});
}

static void put_collectives_of(struct writer *w, struct json_object *list, const char *engine)
{
    for (size_t i = 0; i < array_length(list); i++) {
        struct json_object *o = json_object_array_get_idx(list, i);
        const char *name = find_string(o, "name");

        put_sample(w, o, w->family->key, (struct label[MAX_LABELS]){{"engine", engine}, {"collective", name}});
    }
}

static void put_collectives(struct writer *w)
{
    for (size_t i = 0; i < ARRAY_SIZE(engines); i++)
        put_collectives_of(w, find_member(find_member(w->source->status, engines[i].key), "collectives"),
                           engines[i].name);
}

/* ---- all metrics --------------------------------------------------------------------------------------- */

static const struct family families[] = {
    {"zerod_up", false, NULL, "1: the daemon has answered.", put_up},
    {"zerod_info", false, NULL, "The daemon's version, instruction set and ZeRO stage; always 1.", put_info},
    {"zerod_run_info", false, NULL, "The id of the run whose state is held; always 1.", put_text, "run_id"},
    {"zerod_state_info", false, NULL, "The state of the job in one word; always 1.", put_text, "state"},
    {"zerod_uptime_seconds", false, "seconds", "Time since the daemon started.", put_value, "uptime_ns"},
    {"zerod_daemons", false, NULL, "Daemons that have served the run so far; 0: the state ends with this one.",
     put_value, "n_daemons"},
    {"zerod_replaced_seconds", false, "seconds", "Time since this daemon took the run over from another.", put_value,
     "replaced_ns"},
    {"zerod_away_seconds", false, "seconds", "How long no daemon served the run before this one took it over.",
     put_value, "away_ns"},
    {"zerod_held", false, NULL, "1: the state that was kept cannot be taken over (E1304).", put_is_there, "held"},

    {"zerod_ranks", false, NULL, "Ranks of the job, on all nodes.", put_value, "world_size"},
    {"zerod_ranks_attached", false, NULL, "Ranks of this node with a connection.", put_value, "n_attached"},
    {"zerod_formed", false, NULL, "1: all ranks have declared the same model.", put_value, "formed"},
    {"zerod_parameters", false, NULL, "Parameters of the model.", put_value, "n_params"},
    {"zerod_parameter_elements", false, NULL, "Elements of the model's parameters.", put_elems},

    {"zerod_step", false, NULL, "The number of the next step; as many are committed.", put_value, "step"},
    {"zerod_steps", true, NULL, "Steps since the daemon started, by what became of them.", put_steps},
    {"zerod_step_seconds", true, "seconds", "Time of committed steps by phase; reduce runs beside the backward.",
     put_phases},
    {"zerod_missing_steps", true, NULL,
     "Committed steps in which some rank had no gradient of a parameter that is not declared unused.", put_value,
     "n_missing_steps"},
    {"zerod_missing_parameters", false, NULL, "Trainable parameters of which no rank had a gradient in the last step.",
     put_value, "n_missing_params"},
    {"zerod_last_step_seconds", false, "seconds", "Time between the last two commits.", put_value, "last_step_ns"},
    {"zerod_overlap_ratio", false, "ratio", "Share of the last micro-batch that was reduced before its backward ended.",
     put_value, "overlap.ratio"},
    {"zerod_early_update_ratio", false, "ratio", "Share of the last update that was made before the step was decided.",
     put_value, "early_updates.ratio"},
    {"zerod_early_update_info", false, NULL, "What prevents updates before the decision, or a part of them; always 1.",
     put_text, "early_updates.prevented_by"},
    {"zerod_loss_scale", false, NULL, "The scale of the next loss.", put_value, "loss_scale"},
    {"zerod_grad_norm", false, NULL, "Unscaled norm of the last decided step's gradient, before clipping.", put_value,
     "grad_norm"},
    {"zerod_learning_rate", false, NULL, "Learning rate of the last step.", put_groups, "lr"},

    {"zerod_memory_bytes", false, "bytes", "Memory that is held, by class.", put_memory, "held_bytes"},
    {"zerod_memory_planned_bytes", false, "bytes", "Memory that the plan counts on, by class.", put_memory,
     "planned_bytes"},
    {"zerod_memory_limit_bytes", false, "bytes", "limits.memory of the configuration.", put_if_any, "limit_bytes"},

    {"zerod_pushes", true, NULL, "Gradients that ranks have pushed, by what became of them.", put_pushes},
    {"zerod_early_updates", true, NULL, "Chunks that were updated before the step was decided.", put_early_updates},
    {"zerod_overflow_slots", true, NULL, "Slots granted beyond a rank's ring.", put_value, "counters.n_overflow_slots"},
    {"zerod_reattaches", true, NULL, "Ranks that attached again.", put_value, "counters.n_reattaches"},
    {"zerod_refused", true, NULL, "Refusals by code.", put_refused, "n"},
    {"zerod_warnings", true, NULL, "Diagnostics that refused nothing.", put_value, "counters.n_warnings"},
    {"zerod_last_diagnostic_age_seconds", false, "seconds", "Time since the last refusal or warning.", put_diagnostic,
     "age_ns"},

    {"zerod_findings", false, NULL, "What is odd in gradients and times after the last step, by kind.", put_findings},
    {"zerod_slowest_rank_behind_seconds", false, "seconds",
     "How long others waited in the last step for the rank that they waited longest for.", put_slowest, "behind_ns"},
    {"zerod_rank_attached", false, NULL, "1: the rank has a connection.", put_ranks, "attached"},
    {"zerod_rank_step", false, NULL, "The step at which the rank stands.", put_ranks, "step"},
    {"zerod_rank_pushes", true, NULL, "Gradients taken from the rank's process.", put_ranks, "n_pushes"},
    {"zerod_rank_behind_seconds", true, "seconds",
     "How long others have waited for the rank, at the end of micro-batches, for room and in the step.", put_ranks,
     "behind_total_ns"},
    {"zerod_rank_wait_seconds", true, "seconds", "How long the rank has waited, by its state and for what.",
     put_rank_waits, "total_ns"},
    {"zerod_rank_phase_seconds", true, "seconds", "The rank's own time in steps, by phase.", put_rank_phases},
    {"zerod_rank_silent_seconds", false, "seconds", "Time since the rank's last message.", put_ranks,
     "last_message_ns"},
    {"zerod_rank_waiting_seconds", false, "seconds",
     "How long the attached rank has waited for others; 0: it does not wait.", put_waiting, "waiting_ns"},
    {"zerod_rank_fault", false, NULL, "1: the rank was refused, and has not cleared that.", put_faults, "fault.code"},

    {"zerod_checkpoints_saved", true, NULL, "Checkpoints that this daemon has written.", put_value,
     "checkpoint.n_saved"},
    {"zerod_checkpoints_failed", true, NULL, "Checkpoints that this daemon could not write.", put_value,
     "checkpoint.n_failed"},
    {"zerod_checkpoint_step", false, NULL, "The step of the last checkpoint.", put_value, "checkpoint.last.step"},
    {"zerod_checkpoint_age_seconds", false, "seconds", "Time since the last checkpoint was on the disk.", put_value,
     "checkpoint.last.ago_ns"},
    {"zerod_checkpoint_duration_seconds", false, "seconds", "How long the last checkpoint was being written.",
     put_value, "checkpoint.last.ns"},
    {"zerod_checkpoint_waited_seconds", false, "seconds", "How long updates waited for the last checkpoint.", put_value,
     "checkpoint.last.waited_ns"},
    {"zerod_checkpoint_size_bytes", false, "bytes", "Size of the last checkpoint.", put_value, "checkpoint.last.bytes"},
    {"zerod_checkpoint_saving_seconds", false, "seconds", "How long a checkpoint has been being written now.",
     put_value, "checkpoint.saving.since_ns"},

    {"zerod_node_reached", false, NULL, "1: the node's daemon is reached; node 0 knows all nodes.", put_nodes,
     "reached"},
    {"zerod_node_silent_seconds", false, "seconds", "Time since the node's daemon was last heard.", put_nodes,
     "silent_ns"},
    {"zerod_node_awaited", false, NULL, "1: node 0 waits for the node.", put_awaited, "nodes.waits_for"},
    {"zerod_engine_ready", false, NULL, "1: the engine of this node is connected, or takes orders.", put_engines,
     "ready"},
    {"zerod_engine_generation", false, NULL, "Counts engines: it rises when one fails.", put_engines, "generation"},
    {"zerod_engine_failures", true, NULL, "Engines on GPUs that have failed.", put_engines, "n_failures"},
    {"zerod_engine_orders", true, NULL, "Collectives that this node's engines have carried out.", put_collectives,
     "n_orders"},
    {"zerod_engine_sent_bytes", true, "bytes", "Bytes that this node's engines have sent.", put_collectives,
     "sent_bytes"},
    {"zerod_engine_received_bytes", true, "bytes", "Bytes that this node's engines have received.", put_collectives,
     "received_bytes"},
    {"zerod_engine_busy_seconds", true, "seconds", "Time in which a collective was under way.", put_collectives,
     "busy_ns"},
};

const char *metrics_content_type(enum metrics_format format)
{
    return format == METRICS_OPENMETRICS ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                         : "text/plain; version=0.0.4; charset=utf-8";
}

void metrics_print(struct strbuf *buf, enum metrics_format format, const struct metrics_source *sources, size_t n)
{
    for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
        struct writer w = {.text = buf, .format = format, .family = &families[f]};

        for (size_t i = 0; i < n; i++) {
            w.source = &sources[i];
            families[f].put(&w);
        }
    }
    if (format == METRICS_OPENMETRICS)
        strbuf_add(buf, "# EOF\n");
}
