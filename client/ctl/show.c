/* SPDX-License-Identifier: Apache-2.0 */

/* Prints answers of the daemon for people. */

#include "client/ctl/show.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "client/ctl/get.h"
#include "client/ctl/table.h"
#include "core/base/base.h"

/* Return: "0, 2, 3", or `none` if the array is empty; to be freed. */
static char *join(struct json_object *array, const char *separator, const char *none)
{
    char *text = NULL;
    size_t n_bytes, i;
    FILE *file = open_memstream(&text, &n_bytes);

    if (!file)
        return NULL;
    if (array_length(array) == 0)
        fputs(none, file);
    for (i = 0; i < array_length(array); i++)
        fprintf(file, "%s%s", i ? separator : "", json_object_get_string(array_get(array, i)));
    if (fclose(file) != 0)
        free(steal_ptr(text));
    return text;
}

/* ---- status -------------------------------------------------------------------------------------------- */

static void show_daemon(FILE *file, struct json_object *o)
{
    char up[PRINT_SIZE], since[PRINT_SIZE], away[PRINT_SIZE];

    fprintf(file, "%s: %s, stage %" PRIu64 ", %" PRIu64 " of %" PRIu64 " ranks ", get_string(o, "job"),
            get_string(o, "state"), get_u64(o, "stage"), get_u64(o, "n_attached"), n_local(o));
    if (get(o, "nodes"))
        fprintf(file, "of this node attached, %" PRIu64 " ranks in all\n", get_u64(o, "world_size"));
    else
        fputs("attached\n", file);
    fprintf(file, "daemon    zerod %s (%s), pid %" PRIu64 ", up %s\n", get_string(o, "version"), get_string(o, "isa"),
            get_u64(o, "pid"), print_duration(up, get_u64(o, "uptime_ns")));
    if (get(o, "replaced_ns"))
        fprintf(file,
                "replaced  took the run over %s ago, after nobody had served it for %s; %" PRIu64 " daemons so far\n",
                print_duration(since, get_u64(o, "replaced_ns")), print_duration(away, get_u64(o, "away_ns")),
                get_u64(o, "n_daemons"));
    if (get(o, "held"))
        fprintf(file, "held      %s; zerodctl drop discards it\n", get_string(o, "held"));
}

static void show_model(FILE *file, struct json_object *o)
{
    char elems[PRINT_SIZE], frozen[PRINT_SIZE], bucket[PRINT_SIZE];

    fprintf(file, "run       %s", get(o, "run_id") ? get_string(o, "run_id") : "none yet");
    if (json_object_get_boolean(get(o, "formed")))
        fprintf(file, ": %" PRIu64 " parameters, %s elements trainable, %s frozen, %" PRIu64 " buckets of up to %s\n",
                get_u64(o, "n_params"), print_count(elems, get_u64(o, "trainable_elems")),
                print_count(frozen, get_u64(o, "frozen_elems")), get_u64(o, "n_buckets"),
                print_count(bucket, get_u64(o, "bucket_elems")));
    else
        fputs(": no model declared by all ranks yet\n", file);
}

static void show_step(FILE *file, struct json_object *o)
{
    char last[PRINT_SIZE], norm[PRINT_SIZE] = "-";

    if (get(o, "grad_norm"))
        snprintf(norm, sizeof(norm), "%.6g", get_double(o, "grad_norm"));
    fprintf(file,
            "step      %" PRIu64 ": %" PRIu64 " applied, %" PRIu64 " skipped, %" PRIu64
            " aborted; %.3g steps/s, last %s\n",
            get_u64(o, "step"), get_u64(o, "n_applied"), get_u64(o, "n_skipped"), get_u64(o, "attempt"),
            get_double(o, "steps_per_s"), print_duration(last, get_u64(o, "last_step_ns")));
    if (get_u64(o, "n_missing_steps") > 0)
        fprintf(file, "missing   gradients in %" PRIu64 " steps; in the last one %" PRIu64 " parameters had none\n",
                get_u64(o, "n_missing_steps"), get_u64(o, "n_missing_params"));
    fprintf(file, "values    grad norm %s, loss scale %.6g, lr %.6g\n", norm, get_double(o, "loss_scale"),
            get_double(o, "lr"));
}

static void show_time(FILE *file, struct json_object *o)
{
    static const struct {
        const char *key, *label;
    } phases[] = {{"wait", "waiting for ranks"}, {"reduce", "reduce"}, {"update", "update"}};
    struct json_object *time = get(o, "time"), *phase;
    uint64_t step_ns = get_u64(o, "last_step_ns"), ns;
    char text[PRINT_SIZE];
    size_t i;

    fputs("time      ", file);
    for (i = 0; i < ARRAY_SIZE(phases); i++) {
        phase = get(time, phases[i].key);
        ns = get_u64(phase, "last_ns");
        fprintf(file, "%s%s %s", i ? ", " : "", phases[i].label, print_duration(text, ns));
        if (step_ns > 0)
            fprintf(file, " (%.0f %%)", 100.0 * ns / step_ns);
    }
    fputs(" of the last step\n", file);
}

static void show_overlap(FILE *file, struct json_object *o)
{
    struct json_object *overlap = get(o, "overlap");
    char done[PRINT_SIZE], all[PRINT_SIZE];

    if (!get(overlap, "ratio"))
        return;
    fprintf(file, "overlap   %.0f %% (%s of %s) reduced before the last rank ended its backward\n",
            100 * get_double(overlap, "ratio"), print_bytes(done, get_u64(overlap, "reduced_bytes")),
            print_bytes(all, get_u64(overlap, "micro_batch_bytes")));
}

static void show_early(FILE *file, struct json_object *o)
{
    struct json_object *early = get(o, "early_updates"), *counters = get(o, "counters");
    char done[PRINT_SIZE], all[PRINT_SIZE];

    if (!get(early, "ratio") && !get(early, "why"))
        return;
    if (get(early, "ratio"))
        fprintf(file, "early     %.0f %% of the last step's update was made in the backward (%s of %s elements)",
                100 * get_double(early, "ratio"), print_count(done, get_u64(early, "early_elems")),
                print_count(all, get_u64(early, "elems")));
    else
        fputs("early     no update is made in the backward", file);
    if (get_u64(counters, "n_early_updates") > 0 || get_u64(counters, "n_early_updates_dropped") > 0)
        fprintf(file, "; %" PRIu64 " chunks accepted, %" PRIu64 " dropped", get_u64(counters, "n_early_updates"),
                get_u64(counters, "n_early_updates_dropped"));
    if (get(early, "why"))
        fprintf(file, "; %s", get_string(early, "why"));
    fputc('\n', file);
}

/* Prints the classes of memory in host memory or, with on_device, on GPUs. */
static void show_classes(FILE *file, struct json_object *memory, bool on_device)
{
    const char *separator = ": ";
    char text[PRINT_SIZE];

    if (!json_object_is_type(memory, json_type_object))
        return;
    json_object_object_foreach(memory, key, value)
    {
        uint64_t held = get_u64(value, "held_bytes");

        if (held == 0 || strstr(key, "total") || json_object_get_boolean(get(value, "on_device")) != on_device)
            continue;
        fprintf(file, "%s%s %s", separator, key, print_bytes(text, held));
        separator = ", ";
    }
}

static void show_memory(FILE *file, struct json_object *o)
{
    struct json_object *memory = get(o, "memory");
    char text[PRINT_SIZE];

    fprintf(file, "memory    %s", print_bytes(text, get_u64(get(memory, "total"), "held_bytes")));
    if (get_u64(o, "limit_bytes") > 0)
        fprintf(file, " of at most %s", print_bytes(text, get_u64(o, "limit_bytes")));
    show_classes(file, memory, false);
    fputc('\n', file);
    if (get_u64(get(memory, "device_total"), "held_bytes") == 0)
        return;
    fprintf(file, "on GPUs   %s", print_bytes(text, get_u64(get(memory, "device_total"), "held_bytes")));
    show_classes(file, memory, true);
    fputc('\n', file);
}

static void show_counters(FILE *file, struct json_object *o)
{
    static const struct {
        const char *key, *label;
    } rare[] = {
        {"n_pushes_accumulated", "accumulated"},
        {"n_pushes_retried", "retried"},
        {"n_pushes_dropped", "dropped"},
        {"n_pushes_redone", "redone"},
        {"n_overflow_slots", "overflow slots"},
        {"n_reattaches", "reattached"},
        {"n_warnings", "warnings"},
    };
    struct json_object *counters = get(o, "counters"), *refused = get(o, "refused"), *code;
    size_t i;

    fprintf(file, "pushes    %" PRIu64 " admitted", get_u64(counters, "n_pushes_admitted"));
    for (i = 0; i < ARRAY_SIZE(rare); i++)
        if (get_u64(counters, rare[i].key) > 0)
            fprintf(file, ", %" PRIu64 " %s", get_u64(counters, rare[i].key), rare[i].label);
    for (i = 0; i < array_length(refused); i++) {
        code = array_get(refused, i);
        fprintf(file, "%s %" PRIu64 " %s", i ? "," : "; refused:", get_u64(code, "n"), get_string(code, "code"));
    }
    fputc('\n', file);
}

static void show_last(FILE *file, struct json_object *last)
{
    char size[PRINT_SIZE], took[PRINT_SIZE], ago[PRINT_SIZE], waited[PRINT_SIZE];

    if (!last) {
        fputs("none by this daemon", file);
        return;
    }
    fprintf(file, "step %s saved %s ago, %s in %s", get_string(last, "step"), get_duration(last, "ago_ns", ago),
            print_bytes(size, get_u64(last, "bytes")), get_duration(last, "ns", took));
    if (get_u64(last, "waited_ns") > 0)
        fprintf(file, " (updates waited %s)", get_duration(last, "waited_ns", waited));
}

static void show_saving(FILE *file, struct json_object *saving)
{
    uint64_t n_bytes = get_u64(saving, "bytes");
    char size[PRINT_SIZE], since[PRINT_SIZE], waited[PRINT_SIZE];

    fprintf(file, "; saving step %s for %s", get_string(saving, "step"), get_duration(saving, "since_ns", since));
    if (n_bytes > 0)
        fprintf(file, ", %.0f %% of %s", 100.0 * (double)get_u64(saving, "bytes_done") / (double)n_bytes,
                print_bytes(size, n_bytes));
    if (get_u64(saving, "waited_ns") > 0)
        fprintf(file, " (updates have waited %s)", get_duration(saving, "waited_ns", waited));
}

static void show_checkpoint(FILE *file, struct json_object *o)
{
    struct json_object *checkpoint = get(o, "checkpoint");

    if (!checkpoint)
        return;
    fprintf(file, "checkpoint in %s: ", get_string(checkpoint, "dir"));
    show_last(file, get(checkpoint, "last"));
    if (get(checkpoint, "saving"))
        show_saving(file, get(checkpoint, "saving"));
    if (json_object_get_boolean(get(checkpoint, "wanted")))
        fputs("; one more is asked for", file);
    if (get(checkpoint, "why"))
        fprintf(file, "; the last one failed: %s", get_string(checkpoint, "why"));
    fputc('\n', file);
}

static void show_findings(FILE *file, struct json_object *list)
{
    for (size_t i = 0; i < array_length(list); i++)
        fprintf(file, "finding   %s\n", get_string(json_object_array_get_idx(list, i), "text"));
}

static void show_trouble(FILE *file, struct json_object *o)
{
    struct json_object *slowest = get(o, "slowest_rank"), *last = get(o, "last_diagnostic");
    char text[PRINT_SIZE];

    if (slowest)
        fprintf(file, "slowest   rank %" PRIu64 ", %s behind the first\n", get_u64(slowest, "rank"),
                print_duration(text, get_u64(slowest, "behind_ns")));
    else
        fputs("slowest   -\n", file);
    show_findings(file, get(o, "findings"));
    if (last)
        fprintf(file, "last      %s (%s ago; zerodctl diagnostics)\n", get_string(last, "first_line"),
                print_duration(text, get_u64(last, "age_ns")));
    else
        fputs("last      no diagnostic\n", file);
}

static void show_node(FILE *file, struct json_object *node, bool self)
{
    uint64_t first = get_u64(node, "first_rank"), n = get_u64(node, "n_ranks");
    char text[PRINT_SIZE];

    fprintf(file, "%10snode %s at %s, rank", "", get_string(node, "node"), get_string(node, "address"));
    if (n > 1)
        fprintf(file, "s %" PRIu64 " to %" PRIu64 ": ", first, first + n - 1);
    else
        fprintf(file, " %" PRIu64 ": ", first);
    if (self)
        fputs("this one\n", file);
    else if (!get(node, "reached"))
        fputs("known to node 0\n", file);
    else if (json_object_get_boolean(get(node, "reached")))
        fputs("reached\n", file);
    else if (get(node, "silent_ns"))
        fprintf(file, "not reached, last heard %s ago: %s\n", get_duration(node, "silent_ns", text),
                get_string(node, "why"));
    else
        fprintf(file, "not reached yet: %s\n", get_string(node, "why"));
}

/* Prints one line for each collective that has moved bytes. */
static void show_collectives(FILE *file, struct json_object *engine)
{
    struct json_object *list = get(engine, "collectives");
    char sent[PRINT_SIZE], received[PRINT_SIZE], rate[PRINT_SIZE];

    for (size_t i = 0; i < array_length(list); i++) {
        struct json_object *o = array_get(list, i);

        if (get_u64(o, "sent_bytes") == 0 && get_u64(o, "received_bytes") == 0)
            continue;
        fprintf(file, "%10s%s: %s sent, %s received in %s orders", "", get_string(o, "name"),
                print_bytes(sent, get_u64(o, "sent_bytes")), print_bytes(received, get_u64(o, "received_bytes")),
                get_string(o, "n_orders"));
        if (get(o, "bytes_per_s"))
            fprintf(file, ", %s/s", print_bytes(rate, get_u64(o, "bytes_per_s")));
        fputc('\n', file);
    }
}

static void show_nodes(FILE *file, struct json_object *o)
{
    struct json_object *nodes = get(o, "nodes"), *list = get(nodes, "list");
    _cleanup_free_ char *waits = join(get(nodes, "waits_for"), ", ", "");
    char sent[PRINT_SIZE], received[PRINT_SIZE];

    if (!nodes)
        return;
    fprintf(file, "nodes     %s engines of generation %s %s: %s sent, %s received\n", get_string(nodes, "engine"),
            get_string(nodes, "generation"),
            json_object_get_boolean(get(nodes, "connected")) ? "connected" : "not connected",
            print_bytes(sent, get_u64(nodes, "sent_bytes")), print_bytes(received, get_u64(nodes, "received_bytes")));
    show_collectives(file, nodes);
    for (size_t i = 0; i < array_length(list); i++)
        show_node(file, array_get(list, i), i == get_u64(nodes, "node"));
    if (waits && *waits)
        fprintf(file, "%10snode 0 waits for node%s %s %s\n", "", strchr(waits, ',') ? "s" : "", waits,
                get_string(nodes, "waits_to"));
}

static void show_device(FILE *file, struct json_object *o)
{
    struct json_object *device = get(o, "device");

    if (!device)
        return;
    fprintf(file, "engine    nccl, generation %s, %s", get_string(device, "generation"),
            json_object_get_boolean(get(device, "ready")) ? "ready" : "not ready");
    if (get_u64(device, "pid") > 0)
        fprintf(file, ", pid %s", get_string(device, "pid"));
    if (get(device, "versions"))
        fprintf(file, ": %s", get_string(device, "versions"));
    if (get_u64(device, "n_failures") > 0)
        fprintf(file, "; %s failed", get_string(device, "n_failures"));
    fputc('\n', file);
    show_collectives(file, device);
}

int show_status(FILE *file, struct json_object *answer)
{
    show_daemon(file, answer);
    show_model(file, answer);
    show_step(file, answer);
    show_time(file, answer);
    show_overlap(file, answer);
    show_early(file, answer);
    show_memory(file, answer);
    show_counters(file, answer);
    show_checkpoint(file, answer);
    show_nodes(file, answer);
    show_device(file, answer);
    show_trouble(file, answer);
    return 0;
}

/* ---- tables -------------------------------------------------------------------------------------------- */

int show_ranks(FILE *file, struct json_object *answer)
{
    static const char *const heads[] = {"RANK",   "STATE",     "PID",          "UID",     "STEP",       "MICRO-BATCH",
                                        "PUSHES", "CONNECTED", "LAST-MESSAGE", "WAITING", "FOR / FAULT"};
    struct json_object *o, *fault;
    char connected[PRINT_SIZE], last[PRINT_SIZE], waiting[PRINT_SIZE];
    struct table table;
    size_t i;
    int r;

    table_init(&table, heads, ARRAY_SIZE(heads));
    for (i = 0; i < array_length(answer); i++) {
        o = array_get(answer, i);
        fault = get(o, "fault");
        table_cell(&table, "%s", get_string(o, "rank"));
        table_cell(&table, "%s", get_string(o, "state"));
        table_cell(&table, "%s", get_string(o, "pid"));
        table_cell(&table, "%s", get_string(o, "uid"));
        table_cell(&table, "%s", get_string(o, "step"));
        table_cell(&table, "%s", get_string(o, "micro_batch"));
        table_cell(&table, "%s", get_string(o, "n_pushes"));
        table_cell(&table, "%s", get_duration(o, "connected_ns", connected));
        table_cell(&table, "%s", get_duration(o, "last_message_ns", last));
        table_cell(&table, "%s", get_duration(o, "waiting_ns", waiting));
        table_cell(&table, "%s", fault ? get_string(fault, "first_line") : get_string(o, "waiting_for"));
    }
    r = table_print(&table, file);
    table_deinit(&table);
    return r;
}

static void add_param_row(struct table *table, struct json_object *o)
{
    _cleanup_free_ char *shape = join(get(o, "shape"), "x", "scalar");
    _cleanup_free_ char *owners = join(get(o, "owners"), ",", "-");
    _cleanup_free_ char *pushed = join(get(o, "pushed_by"), ",", "-");

    if (!shape || !owners || !pushed) {
        table->failed = true;
        return;
    }
    table_cell(table, "%s", get_string(o, "id"));
    table_cell(table, "%s", json_object_get_boolean(get(o, "trainable")) ? pushed : "frozen");
    table_cell(table, "%s", get_string(o, "n_steps"));
    if (get(o, "grad_norm"))
        table_cell(table, "%.4g", get_double(o, "grad_norm"));
    else
        table_cell(table, "-");
    table_cell(table, "%s", get_string(o, "dtype"));
    table_cell(table, "%s", shape);
    table_cell(table, "%s", get_string(o, "group"));
    table_cell(table, "%s", get_string(o, "bucket"));
    table_cell(table, "%s", owners);
    table_cell(table, "%s", get_string(o, "name"));
}

int show_params(FILE *file, struct json_object *answer)
{
    static const char *const heads[] = {"ID",    "PUSHED-BY", "STEPS",  "GRAD-NORM", "DTYPE",
                                        "SHAPE", "GROUP",     "BUCKET", "OWNERS",    "NAME"};
    struct table table;
    size_t i;
    int r;

    table_init(&table, heads, ARRAY_SIZE(heads));
    for (i = 0; i < array_length(answer); i++)
        add_param_row(&table, array_get(answer, i));
    r = table_print(&table, file);
    table_deinit(&table);
    return r;
}

/* ---- texts --------------------------------------------------------------------------------------------- */

int show_diagnostics(FILE *file, struct json_object *answer)
{
    struct json_object *o;
    char age[PRINT_SIZE];
    const char *text;
    size_t i;

    if (array_length(answer) == 0)
        fputs("no diagnostic\n", file);
    for (i = 0; i < array_length(answer); i++) {
        o = array_get(answer, i);
        text = get_string(o, "text");
        fprintf(file, "%s%s %s, %s ago\n%s%s", i ? "\n" : "",
                json_object_get_boolean(get(o, "warning")) ? "warning" : "refusal", get_string(o, "id"),
                print_duration(age, get_u64(o, "age_ns")), text, *text && text[strlen(text) - 1] == '\n' ? "" : "\n");
    }
    return 0;
}

/* Prints "step 12, micro-batch 0, computing". */
static void show_place(FILE *file, struct json_object *o)
{
    _cleanup_free_ char *awaited = join(get(o, "awaited"), ", ", "");
    uint64_t n = get_u64(o, "n_awaited");

    if (!json_object_get_boolean(get(o, "attached"))) {
        fprintf(file, ": %s\n", get_string(o, "state"));
        return;
    }
    fprintf(file, " (pid %s): step %s, micro-batch %s, %s", get_string(o, "pid"), get_string(o, "step"),
            get_string(o, "micro_batch"), get_string(o, "state"));
    if (n > 0)
        fprintf(file, "; has not pushed %s%s", awaited ? awaited : "",
                n > array_length(get(o, "awaited")) ? ", ..." : "");
    fputc('\n', file);
}

int show_stacks(FILE *file, struct json_object *answer)
{
    for (size_t i = 0; i < array_length(answer); i++) {
        struct json_object *o = array_get(answer, i);

        fprintf(file, "%srank %s", i ? "\n" : "", get_string(o, "rank"));
        show_place(file, o);
        if (get(o, "process"))
            fprintf(file, "%s\n", get_string(o, "process"));
        if (get(o, "stack"))
            fprintf(file, "%s\n", get_string(o, "stack"));
        else if (json_object_get_boolean(get(o, "attached")) && !get(o, "process"))
            fprintf(file, "%s\n",
                    json_object_get_boolean(get(o, "pending")) ? "it has not answered yet"
                                                               : "it does not tell where it is");
    }
    return 0;
}

int show_message(FILE *file, struct json_object *answer)
{
    fprintf(file, "%s\n", get_string(answer, "message"));
    return 0;
}
