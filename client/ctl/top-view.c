/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The screens of `zerodctl top`. Each section is written on its own pad, which is as long as the section. Then the
 * terminal's rows are divided among the sections, and the beginning of each pad is copied.
 */

#include "client/ctl/top-view.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <json-c/json.h>

#include "client/control/control.h"
#include "client/ctl/get.h"
#include "client/ctl/table.h"
#include "client/ctl/top-feed.h"
#include "client/ctl/top-pen.h"
#include "core/base/base.h"

enum {
    WIDE_COLUMNS = 120, /* at this width or more, the table of ranks has more columns */
    BAR_CELLS = 20,
    LARGE_LINES = 40,    /* at this height or more, the job's screen has older diagnostics */
    MAX_DIAGNOSTICS = 8, /* the most older diagnostics on the job's screen */
    DIAGNOSTIC_TEXT_COLUMN = 13,
};

/* The sections of the job's screen, from the top to the bottom. */
enum section_kind {
    SECTION_HEAD,
    SECTION_VALUES,
    SECTION_EARLY,
    SECTION_MEMORY,
    SECTION_NODES,
    SECTION_FINDINGS,
    SECTION_DIAGNOSTICS,
    SECTION_RANKS_HEAD,
    SECTION_RANKS,
    N_SECTIONS,
};

struct section {
    struct pen pen;
    int n_min;  /* rows for this section before any section gets more than its n_min */
    int n_rows; /* rows for this section */
};

/* Prints a time in at most 7 characters, such as "3.2 s" or "59 min". */
static char *print_short(char *dst, uint64_t ns)
{
    static const struct {
        uint64_t ns;
        const char *unit;
    } units[] = {{86400000000000, "d"}, {3600000000000, "h"}, {60000000000, "min"}};

    for (size_t i = 0; i < ARRAY_SIZE(units); i++)
        if (ns >= units[i].ns) {
            snprintf(dst, PRINT_SIZE, "%" PRIu64 " %s", ns / units[i].ns, units[i].unit);
            return dst;
        }
    snprintf(dst, PRINT_SIZE, ns < 10000000000 ? "%.1f s" : "%.0f s", (double)ns / 1e9);
    return dst;
}

static bool is_true(struct json_object *o, const char *key)
{
    return json_object_get_boolean(get(o, key));
}

/* ---- head: the job and its daemon ---------------------------------------------------------------------- */

static bool is_at_work(struct json_object *o)
{
    const char *state = get_string(o, "state");

    return strcmp(state, "training") == 0 || strcmp(state, "updating") == 0;
}

static void write_title(struct pen *pen, struct json_object *o)
{
    char up[PRINT_SIZE];

    pen_put(pen, PEN_TITLE, "%s", get_string(o, "job"));
    pen_put(pen, PEN_PLAIN, ": ");
    pen_put(pen, is_at_work(o) ? PEN_GOOD : PEN_WARNING, "%s", get_string(o, "state"));
    pen_put(pen, PEN_PLAIN, ", stage %s, ", get_string(o, "stage"));
    pen_put(pen, get_u64(o, "n_attached") < n_local(o) ? PEN_WARNING : PEN_PLAIN, "%s of %" PRIu64 " ranks attached",
            get_string(o, "n_attached"), n_local(o));
    if (get(o, "nodes"))
        pen_put(pen, PEN_PLAIN, " on this node, %s in all", get_string(o, "world_size"));
    pen_put(pen, PEN_PLAIN, ", up %s", print_duration(up, get_u64(o, "uptime_ns")));
    pen_end_line(pen);
}

/* Writes why the last poll failed. */
static void write_outage(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    char age[PRINT_SIZE];

    if (feed->code == 0)
        return;
    pen_put(pen, PEN_TROUBLE, "%s. Asking again; what follows is %s old.", feed->error,
            print_short(age, (now_ms - feed->answered_ms) * 1000000));
    pen_end_line(pen);
}

static void write_replaced(struct pen *pen, struct json_object *o)
{
    char since[PRINT_SIZE], away[PRINT_SIZE];

    if (get(o, "replaced_ns")) {
        pen_label(pen, "replaced");
        pen_put(pen, PEN_PLAIN, "daemon %s took the run over %s ago, after nobody had served it for %s",
                get_string(o, "n_daemons"), get_duration(o, "replaced_ns", since), get_duration(o, "away_ns", away));
    }
    if (get(o, "held")) {
        pen_label(pen, "held");
        pen_put(pen, PEN_TROUBLE, "%s; zerodctl drop discards it", get_string(o, "held"));
    }
    pen_end_line(pen);
}

static void write_head(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    write_title(pen, feed->status);
    write_outage(pen, feed, now_ms);
    write_replaced(pen, feed->status);
}

/* ---- values: steps, time, checkpoints ------------------------------------------------------------------ */

static void write_step(struct pen *pen, struct json_object *o)
{
    char last[PRINT_SIZE];

    pen_label(pen, "step");
    pen_put(pen, PEN_PLAIN, "%s   %.3g steps/s, last %s   %s applied, %s skipped, %s aborted", get_string(o, "step"),
            get_double(o, "steps_per_s"), print_duration(last, get_u64(o, "last_step_ns")), get_string(o, "n_applied"),
            get_string(o, "n_skipped"), get_string(o, "attempt"));
    if (get_u64(o, "n_missing_steps") > 0) {
        pen_label(pen, "missing");
        pen_put(pen, PEN_WARNING, "gradients in %s steps; in the last one %s parameters had none",
                get_string(o, "n_missing_steps"), get_string(o, "n_missing_params"));
    }
}

/* Writes one phase with its share of the step. */
static void write_phase(struct pen *pen, const char *name, uint64_t ns, uint64_t step_ns)
{
    char text[PRINT_SIZE];

    pen_put(pen, PEN_PLAIN, "%s %s", name, print_duration(text, ns));
    if (step_ns > 0)
        pen_put(pen, PEN_PLAIN, " (%.0f %%)", 100.0 * (double)ns / (double)step_ns);
}

/*
 * Writes the last step's phases. compute is the step without wait and update; reduce runs at the same time as compute.
 */
static void write_time(struct pen *pen, struct json_object *o)
{
    struct json_object *time = get(o, "time"), *slowest = get(o, "slowest_rank");
    char behind[PRINT_SIZE];
    uint64_t step_ns = get_u64(o, "last_step_ns"), wait_ns = get_u64(get(time, "wait"), "last_ns");
    uint64_t reduce_ns = get_u64(get(time, "reduce"), "last_ns"), update_ns = get_u64(get(time, "update"), "last_ns");

    pen_label(pen, "time");
    write_phase(pen, "compute", step_ns - MIN(wait_ns + update_ns, step_ns), step_ns);
    pen_put(pen, PEN_PLAIN, ", ");
    write_phase(pen, "wait", wait_ns, step_ns);
    pen_put(pen, PEN_PLAIN, ", ");
    write_phase(pen, "update", update_ns, step_ns);
    pen_label(pen, "");
    write_phase(pen, "reduce", reduce_ns, step_ns);
    if (get(get(o, "overlap"), "ratio"))
        pen_put(pen, PEN_PLAIN, ", %.0f %% of the bytes before the backward ended",
                100 * get_double(get(o, "overlap"), "ratio"));
    if (slowest) {
        pen_label(pen, "slowest");
        pen_put(pen, PEN_PLAIN, "rank %s, %s behind the first", get_string(slowest, "rank"),
                get_duration(slowest, "behind_ns", behind));
    }
}

/* Prints the learning rates; equal neighbours are printed as one. */
static void write_rates(struct pen *pen, struct json_object *o)
{
    struct json_object *groups = get(o, "groups");
    double before = get_double(o, "lr");

    pen_put(pen, PEN_PLAIN, "   lr %.6g", before);
    for (size_t i = 0; i < array_length(groups); i++) {
        double rate = get_double(array_get(groups, i), "lr");

        if (rate != before)
            pen_put(pen, PEN_PLAIN, ", %.6g", rate);
        before = rate;
    }
}

static void write_numbers(struct pen *pen, struct json_object *o)
{
    pen_label(pen, "values");
    if (get(o, "grad_norm"))
        pen_put(pen, PEN_PLAIN, "grad norm %.6g", get_double(o, "grad_norm"));
    else
        pen_put(pen, PEN_PLAIN, "grad norm -");
    pen_put(pen, PEN_PLAIN, "   loss scale %.6g", get_double(o, "loss_scale"));
    write_rates(pen, o);
}

static void write_saved(struct pen *pen, struct json_object *last)
{
    char size[PRINT_SIZE], ago[PRINT_SIZE], took[PRINT_SIZE];

    if (last)
        pen_put(pen, PEN_PLAIN, "step %s %s ago, %s in %s", get_string(last, "step"), get_duration(last, "ago_ns", ago),
                print_bytes(size, get_u64(last, "bytes")), get_duration(last, "ns", took));
    else
        pen_put(pen, PEN_PLAIN, "no checkpoint by this daemon");
}

static void write_checkpoint(struct pen *pen, struct json_object *o)
{
    struct json_object *checkpoint = get(o, "checkpoint"), *saving = get(checkpoint, "saving");
    uint64_t n_bytes = get_u64(saving, "bytes");

    if (!checkpoint)
        return;
    pen_label(pen, "saved");
    write_saved(pen, get(checkpoint, "last"));
    if (saving)
        pen_put(pen, PEN_GOOD, "; saving step %s", get_string(saving, "step"));
    if (n_bytes > 0)
        pen_put(pen, PEN_GOOD, ", %.0f %%", 100.0 * (double)get_u64(saving, "bytes_done") / (double)n_bytes);
    if (is_true(checkpoint, "wanted"))
        pen_put(pen, PEN_PLAIN, "; one more is asked for");
    if (get(checkpoint, "why"))
        pen_put(pen, PEN_TROUBLE, "; the last one failed: %s", get_string(checkpoint, "why"));
}

static void write_values(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    write_step(pen, feed->status);
    write_time(pen, feed->status);
    write_numbers(pen, feed->status);
    write_checkpoint(pen, feed->status);
    pen_end_line(pen);
}

/* ---- early updates ------------------------------------------------------------------------------------- */

static void write_early(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    struct json_object *early = get(feed->status, "early_updates"), *counters = get(feed->status, "counters");

    if (!get(early, "ratio") && !get(early, "why"))
        return;
    pen_label(pen, "early");
    if (get(early, "ratio"))
        pen_put(pen, PEN_PLAIN, "%.0f %% of the update, %s chunks accepted, %s dropped",
                100 * get_double(early, "ratio"), get_string(counters, "n_early_updates"),
                get_string(counters, "n_early_updates_dropped"));
    else
        pen_put(pen, PEN_PLAIN, "no update");
    if (get(early, "why"))
        pen_put(pen, PEN_PLAIN, "; %s", get_string(early, "why"));
    pen_end_line(pen);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

/* Writes a bar such as "[#### ] 41 %". */
static void write_bar(struct pen *pen, uint64_t part, uint64_t all)
{
    double share = all > 0 ? (double)part / (double)all : 0;
    int n = (int)MIN(share * BAR_CELLS + 0.5, (double)BAR_CELLS);

    pen_put(pen, share > 0.95 ? PEN_TROUBLE : PEN_GOOD, "[%.*s%*s]", n, "####################", BAR_CELLS - n, "");
    pen_put(pen, PEN_PLAIN, " %.0f %%", 100 * share);
}

/* Prints the held bytes, and the planned bytes if they differ. */
static void write_class(struct pen *pen, const char *name, struct json_object *bytes)
{
    uint64_t held = get_u64(bytes, "held_bytes"), planned = get_u64(bytes, "planned_bytes");
    char text[PRINT_SIZE];

    pen_put(pen, PEN_PLAIN, "%s %s", name, print_bytes(text, held));
    if (planned > 0 && planned != held)
        pen_put(pen, PEN_PLAIN, " of %s planned", print_bytes(text, planned));
}

static void write_classes(struct pen *pen, struct json_object *memory, bool on_device)
{
    const char *separator = ": ";

    json_object_object_foreach(memory, class, bytes)
    {
        bool is_empty = get_u64(bytes, "held_bytes") == 0 && get_u64(bytes, "planned_bytes") == 0;

        if (is_empty || strstr(class, "total") || is_true(bytes, "on_device") != on_device)
            continue;
        pen_put(pen, PEN_PLAIN, "%s", separator);
        write_class(pen, class, bytes);
        separator = ", ";
    }
}

static void write_memory(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    struct json_object *memory = get(feed->status, "memory");
    uint64_t limit = get_u64(feed->status, "limit_bytes"), held = get_u64(get(memory, "total"), "held_bytes");
    char text[PRINT_SIZE];

    if (!json_object_is_type(memory, json_type_object))
        return;
    pen_label(pen, "memory");
    if (limit > 0) {
        write_bar(pen, held, limit);
        pen_put(pen, PEN_PLAIN, " of at most %s; ", print_bytes(text, limit));
    }
    write_class(pen, "held", get(memory, "total"));
    write_classes(pen, memory, false);
    if (get_u64(get(memory, "device_total"), "held_bytes") > 0) {
        pen_label(pen, "on GPUs");
        write_class(pen, "held", get(memory, "device_total"));
        write_classes(pen, memory, true);
    }
    pen_end_line(pen);
}

/* ---- nodes, findings, diagnostics ---------------------------------------------------------------------- */

static void write_node(struct pen *pen, struct json_object *node, bool is_self)
{
    uint64_t first = get_u64(node, "first_rank"), n = get_u64(node, "n_ranks");
    char silent[PRINT_SIZE];

    pen_go(pen, PEN_TEXT_COLUMN);
    pen_put(pen, PEN_PLAIN, "node %s at %s, rank", get_string(node, "node"), get_string(node, "address"));
    if (n > 1)
        pen_put(pen, PEN_PLAIN, "s %" PRIu64 " to %" PRIu64 ": ", first, first + n - 1);
    else
        pen_put(pen, PEN_PLAIN, " %" PRIu64 ": ", first);
    if (is_self)
        pen_put(pen, PEN_PLAIN, "this one");
    else if (!get(node, "reached"))
        pen_put(pen, PEN_PLAIN, "known to node 0");
    else if (is_true(node, "reached"))
        pen_put(pen, PEN_GOOD, "reached");
    else if (get(node, "silent_ns"))
        pen_put(pen, PEN_TROUBLE, "not reached, last heard %s ago: %s", get_duration(node, "silent_ns", silent),
                get_string(node, "why"));
    else
        pen_put(pen, PEN_TROUBLE, "not reached yet: %s", get_string(node, "why"));
}

static void write_awaited(struct pen *pen, struct json_object *nodes)
{
    struct json_object *awaited = get(nodes, "waits_for");
    size_t n = array_length(awaited);

    if (n == 0)
        return;
    pen_put(pen, PEN_WARNING, "; node 0 waits for node%s ", n > 1 ? "s" : "");
    for (size_t i = 0; i < n; i++)
        pen_put(pen, PEN_WARNING, "%s%s", i ? ", " : "", json_object_get_string(array_get(awaited, i)));
    pen_put(pen, PEN_WARNING, " %s", get_string(nodes, "waits_to"));
}

static bool is_lost(struct json_object *node)
{
    return get(node, "reached") && !is_true(node, "reached");
}

/* Unreachable nodes come first, so they are visible in a job of many nodes. */
static void write_nodes(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    struct json_object *nodes = get(feed->status, "nodes"), *list = get(nodes, "list");

    if (!nodes)
        return;
    pen_label(pen, "nodes");
    pen_put(pen, is_true(nodes, "connected") ? PEN_PLAIN : PEN_WARNING, "%zu, engines %s", array_length(list),
            is_true(nodes, "connected") ? "connected" : "not connected");
    write_awaited(pen, nodes);
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < array_length(list); i++)
            if (is_lost(array_get(list, i)) == (pass == 0))
                write_node(pen, array_get(list, i), i == get_u64(nodes, "node"));
    pen_end_line(pen);
}

static void write_findings(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    struct json_object *findings = get(feed->status, "findings");

    for (size_t i = 0; i < array_length(findings); i++) {
        pen_label(pen, i ? "" : "found");
        pen_put(pen, PEN_WARNING, "%s", get_string(array_get(findings, i), "text"));
    }
    pen_end_line(pen);
}

/* Return: the diagnostic `older` places before the newest, or NULL. */
static struct json_object *diagnostic_of(const struct feed *feed, size_t older)
{
    size_t n = array_length(feed->diagnostics);

    return older < n ? array_get(feed->diagnostics, n - 1 - older) : NULL;
}

static char *print_age(char *dst, const struct feed *feed, struct json_object *diagnostic, uint64_t now_ms)
{
    return print_duration(dst, get_u64(diagnostic, "age_ns") + (now_ms - feed->diagnostics_ms) * 1000000);
}

static void write_diagnostics(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    size_t n = LINES < LARGE_LINES ? 1 : MAX_DIAGNOSTICS;
    struct json_object *diagnostic;
    char age[PRINT_SIZE];

    for (size_t i = 0; i < n && (diagnostic = diagnostic_of(feed, i)); i++) {
        const char *text = get_string(diagnostic, "text");

        pen_label(pen, i ? "" : "last");
        pen_put(pen, is_true(diagnostic, "warning") ? PEN_WARNING : PEN_TROUBLE, "%.*s", (int)strcspn(text, "\n"),
                text);
        pen_put(pen, PEN_PLAIN, " (%s ago)", print_age(age, feed, diagnostic, now_ms));
    }
    pen_end_line(pen);
}

/* ---- ranks --------------------------------------------------------------------------------------------- */

struct column {
    const char *head;
    int width;
    bool is_wide; /* only shown if the terminal has WIDE_COLUMNS */
    void (*write)(struct pen *pen, const struct feed *feed, struct json_object *rank);
    const char *key;
};

static void write_state(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    const char *state = get_string(rank, "state");
    bool is_lost = !is_true(rank, "attached") && strcmp(state, "left") != 0;

    pen_put(pen, get(rank, "fault") ? PEN_TROUBLE : is_lost ? PEN_WARNING : PEN_PLAIN, "%s", state);
}

/* Writes a share of time; a negative one is unknown. A share of `most` or more is highlighted. */
static void write_share(struct pen *pen, double share, double most)
{
    if (share >= 0)
        pen_put(pen, share >= most ? PEN_WARNING : PEN_PLAIN, "%.0f %%", 100 * share);
    else
        pen_put(pen, PEN_PLAIN, "-");
}

static void write_behind(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    write_share(pen, feed_behind_share(feed, rank), 0.2);
}

static void write_waited(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    write_share(pen, feed_waited_share(feed, rank), 2); /* never highlighted: another rank is slow */
}

static void write_since(struct pen *pen, struct json_object *rank, const char *key)
{
    char text[PRINT_SIZE];

    pen_put(pen, PEN_PLAIN, "%s", get(rank, key) ? print_short(text, get_u64(rank, key)) : "-");
}

static void write_silent(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    write_since(pen, rank, "last_message_ns");
}

static void write_waiting(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    write_since(pen, rank, "waiting_ns");
}

static const struct column columns[] = {
    {"RANK", 5, false, NULL, "rank"},
    {"STATE", 13, false, write_state},
    {"PID", 9, true, NULL, "pid"},
    {"STEP", 9, false, NULL, "step"},
    {"MICRO-BATCH", 12, true, NULL, "micro_batch"},
    {"PUSHES", 12, true, NULL, "n_pushes"},
    {"BEHIND", 7, false, write_behind},
    {"WAITED", 7, true, write_waited},
    {"SILENT", 7, false, write_silent},
    {"WAITS", 7, false, write_waiting},
};

static void write_rank(struct pen *pen, const struct feed *feed, struct json_object *rank)
{
    struct json_object *fault = get(rank, "fault"), *text = fault ? get(fault, "first_line") : get(rank, "waiting_for");
    int at = 0;

    for (size_t i = 0; i < ARRAY_SIZE(columns); i++) {
        const struct column *column = &columns[i];

        if (column->is_wide && pen->width < WIDE_COLUMNS)
            continue;
        pen_go(pen, at);
        if (column->write)
            column->write(pen, feed, rank);
        else
            pen_put(pen, PEN_PLAIN, "%s", get_string(rank, column->key));
        at += column->width;
    }
    pen->indent = at;
    pen_go(pen, at);
    if (text)
        pen_put(pen, fault ? PEN_TROUBLE : PEN_PLAIN, "%s", json_object_get_string(text));
    pen_end_line(pen);
}

static void write_ranks_head(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    int at = 0;

    for (size_t i = 0; i < ARRAY_SIZE(columns); i++) {
        if (columns[i].is_wide && pen->width < WIDE_COLUMNS)
            continue;
        pen_go(pen, at);
        pen_put(pen, PEN_LABEL, "%s", columns[i].head);
        at += columns[i].width;
    }
    pen_go(pen, at);
    pen_put(pen, PEN_LABEL, "FOR / FAULT");
    pen_end_line(pen);
}

static bool needs_help(struct json_object *rank)
{
    return get(rank, "fault") || (!is_true(rank, "attached") && strcmp(get_string(rank, "state"), "left") != 0);
}

/* Refused and unattached ranks come first, so they are visible in a job of many ranks. */
static void write_ranks(struct pen *pen, const struct feed *feed, uint64_t now_ms)
{
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < array_length(feed->ranks); i++) {
            struct json_object *rank = array_get(feed->ranks, i);

            if (needs_help(rank) == (pass == 0))
                write_rank(pen, feed, rank);
        }
}

/* ---- the job's screen ---------------------------------------------------------------------------------- */

static const struct {
    void (*write)(struct pen *pen, const struct feed *feed, uint64_t now_ms);
    int n_min;
} sections[N_SECTIONS] = {
    [SECTION_HEAD] = {write_head, 100},
    [SECTION_VALUES] = {write_values, 100},
    [SECTION_EARLY] = {write_early, 1},
    [SECTION_MEMORY] = {write_memory, 1},
    [SECTION_NODES] = {write_nodes, 2},
    [SECTION_FINDINGS] = {write_findings, 2},
    [SECTION_DIAGNOSTICS] = {write_diagnostics, 3},
    [SECTION_RANKS_HEAD] = {write_ranks_head, 1},
    [SECTION_RANKS] = {write_ranks, 4},
};

/* Rows that remain after n_min go to the sections in this order. */
static const enum section_kind greedy[] = {SECTION_FINDINGS, SECTION_NODES, SECTION_EARLY,
                                           SECTION_MEMORY,   SECTION_RANKS, SECTION_DIAGNOSTICS};

static int grant(struct section *section, int n_wanted, int n_left)
{
    int n = MAX(MIN(n_wanted, n_left), 0);

    section->n_rows += n;
    return n_left - n;
}

static void share_out(struct section *list, int n_left)
{
    for (int i = 0; i < N_SECTIONS; i++)
        n_left = grant(&list[i], MIN(pen_n_rows(&list[i].pen), sections[i].n_min), n_left);
    for (size_t i = 0; i < ARRAY_SIZE(greedy); i++)
        n_left = grant(&list[greedy[i]], pen_n_rows(&list[greedy[i]].pen) - list[greedy[i]].n_rows, n_left);
}

/* Copies rows of a pad to the screen. Return: the screen's row after the copied ones. */
static int copy_rows(const struct pen *pen, int from, int row, int n_rows)
{
    if (pen->pad && n_rows > 0)
        (void)copywin(pen->pad, stdscr, from, 0, row, 0, row + n_rows - 1, MIN(pen->width, COLS) - 1, FALSE);
    return row + n_rows;
}

static void correct_scroll(struct view *view, int n_rows, int n_shown)
{
    view->scroll = MAX(MIN(view->scroll, n_rows - n_shown), 0);
    view->n_page = MAX(n_shown, 1);
}

/* Draws the last row, which lists the keys and the numbers of the shown rows. */
static void draw_footer(const struct view *view, const char *keys, int n_rows, int n_shown)
{
    char place[64] = "";

    if (n_rows > n_shown)
        snprintf(place, sizeof(place), "   rows %d to %d of %d", view->scroll + 1, view->scroll + n_shown, n_rows);
    (void)attrset((int)pen_attributes(PEN_TITLE));
    (void)mvhline(LINES - 1, 0, ' ', COLS);
    (void)mvaddnstr(LINES - 1, 0, keys, COLS);
    (void)addnstr(place, MAX(COLS - (int)strlen(keys), 0));
    (void)attrset(A_NORMAL);
}

static void draw_job(struct view *view, const struct feed *feed, uint64_t now_ms)
{
    struct section list[N_SECTIONS] = {};
    const struct section *ranks = &list[SECTION_RANKS];
    int row = 0;

    for (int i = 0; i < N_SECTIONS; i++) {
        pen_init(&list[i].pen, COLS);
        sections[i].write(&list[i].pen, feed, now_ms);
    }
    share_out(list, LINES - 1);
    correct_scroll(view, pen_n_rows(&ranks->pen), ranks->n_rows);
    for (int i = 0; i < N_SECTIONS; i++)
        row = copy_rows(&list[i].pen, i == SECTION_RANKS ? view->scroll : 0, row, list[i].n_rows);
    draw_footer(view, " q quit   d last diagnostic   ? help   arrows scroll", pen_n_rows(&ranks->pen), ranks->n_rows);
    for (int i = 0; i < N_SECTIONS; i++)
        pen_deinit(&list[i].pen);
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/* Draws a scrolling text above the footer. Frees the pen's pad. */
static void draw_text(struct view *view, struct pen *pen, const char *keys)
{
    int n_rows = pen_n_rows(pen), n_shown = MAX(MIN(n_rows, LINES - 1), 0);

    correct_scroll(view, n_rows, n_shown);
    (void)copy_rows(pen, view->scroll, 0, n_shown);
    draw_footer(view, keys, n_rows, n_shown);
    pen_deinit(pen);
}

/* Writes a diagnostic. A line that starts with a space has a label and a text, and wraps to the text's column. */
static void write_lines(struct pen *pen, const char *text)
{
    for (size_t n; *text; text += n + (text[n] == '\n')) {
        n = strcspn(text, "\n");
        pen->indent = *text == ' ' ? MIN(DIAGNOSTIC_TEXT_COLUMN, pen->width / 2) : 0;
        pen_put(pen, PEN_PLAIN, "%.*s", (int)n, text);
        pen->indent = 0;
        pen_put(pen, PEN_PLAIN, "\n");
    }
}

static void draw_diagnostic(struct view *view, const struct feed *feed, uint64_t now_ms)
{
    size_t n = array_length(feed->diagnostics);
    struct json_object *diagnostic;
    char age[PRINT_SIZE];
    struct pen pen;

    view->older = (unsigned)MIN((size_t)view->older, n > 0 ? n - 1 : 0);
    diagnostic = diagnostic_of(feed, view->older);
    pen_init(&pen, COLS);
    if (diagnostic) {
        pen_put(&pen, is_true(diagnostic, "warning") ? PEN_WARNING : PEN_TROUBLE, "%s %zu of %zu, %s ago",
                is_true(diagnostic, "warning") ? "warning" : "refusal", n - view->older, n,
                print_age(age, feed, diagnostic, now_ms));
        pen_put(&pen, PEN_PLAIN, "\n\n");
        write_lines(&pen, get_string(diagnostic, "text"));
    } else {
        pen_put(&pen, PEN_PLAIN, "The daemon has refused nothing and warned of nothing.");
    }
    draw_text(view, &pen, " q quit   d back   left, right: older, newer   arrows scroll");
}

static const char help_text[] =
    "zerodctl top shows the job of one daemon, twice a second.\n"
    "\n"
    "q                quit\n"
    "up, down         scroll by a row, also k and j\n"
    "PgUp, PgDn       scroll by a page; Home and End go to the ends\n"
    "d                the last diagnostic in full, and back\n"
    "left, right      there: an older or a newer one\n"
    "?                this text, and back\n"
    "\n"
    "time             the last step: compute is what the trainers do by themselves, in wait a rank waits for others, "
    "update is from the decision to the commit. reduce runs beside the backward\n"
    "early            the share of the last update that was made before the step was decided, and why it was not more\n"
    "found            ranks and gradients that differ from the others\n"
    "last             the last refusals and warnings, the newest first\n"
    "\n"
    "STATE            what the rank does: computing, backward, step (it waits for the step), lost, absent, ...\n"
    "BEHIND           share of the last 10 to 20 seconds in which others waited for it\n"
    "WAITED           share of that time in which it waited for others, where the terminal has 120 columns\n"
    "SILENT           since its last message; a rank that waits is silent, too\n"
    "WAITS            how long it has waited for others, and for whom\n"
    "\n"
    "Ranks that were refused or are not attached come first.\n";

static void draw_help(struct view *view)
{
    struct pen pen;

    pen_init(&pen, COLS);
    for (size_t at = 0, n; help_text[at]; at += n + 1) {
        n = strcspn(&help_text[at], "\n");
        pen.indent = MIN(17, COLS / 2);
        pen_put(&pen, PEN_PLAIN, "%.*s", (int)n, &help_text[at]);
        pen.indent = 0;
        pen_put(&pen, PEN_PLAIN, "\n");
    }
    draw_text(view, &pen, " q quit   ? back   arrows scroll");
}

void view_draw(struct view *view, const struct feed *feed, uint64_t now_ms)
{
    (void)erase();
    if (view->screen == VIEW_JOB)
        draw_job(view, feed, now_ms);
    else if (view->screen == VIEW_DIAGNOSTIC)
        draw_diagnostic(view, feed, now_ms);
    else
        draw_help(view);
}
