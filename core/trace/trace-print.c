/* SPDX-License-Identifier: Apache-2.0 */

/* Prints a trace in the Trace Event Format: a line for each event. */

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/base/traffic.h"
#include "core/trace/trace.h"

/* Numbers of tracks. Tracks are shown in the order of their numbers. */
enum {
    PID = 4194305, /* of node 0; larger than the id of any process */
    TID_STEP = 1,
    TID_SAVE = 2,
    TID_COLLECTIVE = 3, /* plus the kind of traffic */
    TID_RANK = 100,
    TID_WORKER = 10000,
    TID_PARCEL = 100000,
};

_Static_assert(TID_COLLECTIVE + (int)N_TRAFFIC <= TID_RANK, "each kind of collective has a track of its own");

/* A parcel's updates by all workers, which are one event on the parcel's track. */
struct parcel_state {
    uint64_t begin_ns, end_ns; /* end_ns 0: no update yet */
    uint32_t step;
    uint8_t kind; /* RECORD_WORK_UPDATE or RECORD_WORK_EARLY */
    const struct record *pushed; /* the last push that completed the parcel for a rank */
};

struct printer {
    FILE *file;
    const struct trace *trace;
    uint64_t base_ns;
    unsigned pid;
    bool some; /* at least one event has been printed */
    uint64_t n_arrows;
    struct parcel_state *parcels; /* NULL if memory ran out: then updates and arrows are not printed */
};

/* ---- an event ------------------------------------------------------------------------------------------ */

static void print_string(FILE *file, const char *text)
{
    _cleanup_free_ char *clean = json_clean(text ? text : "");
    struct json_object *string = json_object_new_string(clean ? clean : "");

    fputs(string ? json_object_to_json_string_ext(string, JSON_C_TO_STRING_NOSLASHESCAPE) : "\"\"", file);
    json_object_put(string);
}

/* Opens an event. The caller adds fields, and closes the event. */
static void begin_event(struct printer *p, const char *name, const char *phase, unsigned tid)
{
    fputs(p->some ? ",\n{\"name\":" : "{\"name\":", p->file);
    p->some = true;
    print_string(p->file, name);
    fprintf(p->file, ",\"ph\":\"%s\",\"pid\":%u,\"tid\":%u", phase, p->pid, tid);
}

/* Prints a time in microseconds, as the format requires. */
static void print_us(FILE *file, const char *key, uint64_t ns)
{
    fprintf(file, ",\"%s\":%" PRIu64 ".%03u", key, ns / 1000, (unsigned)(ns % 1000));
}

static void print_span(struct printer *p, const char *name, unsigned tid, const struct record *record)
{
    bool is_moment = record->begin_ns >= record->end_ns;

    begin_event(p, name, is_moment ? "i" : "X", tid);
    print_us(p->file, "ts", record->begin_ns - p->base_ns);
    if (is_moment)
        fputs(",\"s\":\"t\"", p->file);
    else
        print_us(p->file, "dur", record->end_ns - record->begin_ns);
    fprintf(p->file, ",\"args\":{\"step\":%u,\"micro_batch\":%u}}", record->step, record->micro_batch);
}

static void print_arrow(struct printer *p, unsigned from_tid, uint64_t from_ns, unsigned to_tid, uint64_t to_ns)
{
    p->n_arrows++;
    begin_event(p, "completes", "s", from_tid);
    print_us(p->file, "ts", from_ns - p->base_ns);
    fprintf(p->file, ",\"cat\":\"push\",\"id\":%" PRIu64 "}", p->n_arrows);
    begin_event(p, "completes", "f", to_tid);
    print_us(p->file, "ts", to_ns - p->base_ns);
    fprintf(p->file, ",\"cat\":\"push\",\"bp\":\"e\",\"id\":%" PRIu64 "}", p->n_arrows);
}

/* ---- names of tracks ----------------------------------------------------------------------------------- */

static void name_thing(struct printer *p, const char *what, unsigned tid, const char *name)
{
    begin_event(p, what, "M", tid);
    fputs(",\"args\":{\"name\":", p->file);
    print_string(p->file, name);
    fputs("}}", p->file);
}

static void name_track(struct printer *p, unsigned tid, const char *name)
{
    name_thing(p, "thread_name", tid, name);
    begin_event(p, "thread_sort_index", "M", tid);
    fprintf(p->file, ",\"args\":{\"sort_index\":%u}}", tid);
}

/* Return: true if there is a record of this kind and item. Used to leave out empty tracks. */
static bool has_kind(const struct trace *trace, enum record_kind kind, uint32_t item)
{
    for (size_t i = 0; i < trace->n_records; i++)
        if (trace->records[i].kind == kind && (item == UINT32_MAX || trace->records[i].item == item))
            return true;
    return false;
}

static void name_tracks(struct printer *p)
{
    const struct trace *trace = p->trace;
    char name[512];

    snprintf(name, sizeof(name), "zerod, job %.400s, node %u", trace->job ? trace->job : "", trace->node);
    name_thing(p, "process_name", 0, name);
    name_track(p, TID_STEP, "step");
    if (has_kind(trace, RECORD_SAVE, UINT32_MAX))
        name_track(p, TID_SAVE, "checkpoint");
    for (unsigned kind = 0; kind < N_TRAFFIC; kind++)
        if (has_kind(trace, RECORD_COLLECTIVE, kind))
            name_track(p, TID_COLLECTIVE + kind, traffic_name(kind));
    for (unsigned i = 0; i < trace->n_ranks; i++) {
        snprintf(name, sizeof(name), "rank %u", trace->first_rank + i);
        name_track(p, TID_RANK + trace->first_rank + i, name);
    }
    for (unsigned i = 1; i <= trace->n_workers; i++) {
        snprintf(name, sizeof(name), "worker %u", i);
        name_track(p, TID_WORKER + i, name);
    }
    for (size_t i = 0; i < trace->n_parcels; i++)
        name_track(p, TID_PARCEL + (unsigned)i, trace->parcels[i]);
}

/* ---- records ------------------------------------------------------------------------------------------- */

static struct parcel_state *parcel_of(const struct printer *p, const struct record *record)
{
    return p->parcels && record->item < p->trace->n_parcels ? &p->parcels[record->item] : NULL;
}

/* until_ns: when the next event of the parcel begins; its track has one event at a time. */
static void print_update(struct printer *p, uint32_t parcel, uint64_t until_ns)
{
    struct parcel_state *state = &p->parcels[parcel];
    struct record record = {.begin_ns = state->begin_ns, .end_ns = MIN(state->end_ns, until_ns), .step = state->step};

    assert(parcel < p->trace->n_parcels);
    if (state->end_ns > 0)
        print_span(p, state->kind == RECORD_WORK_EARLY ? "update early" : "update", TID_PARCEL + parcel, &record);
    state->end_ns = 0;
}

static void add_update(struct printer *p, const struct record *record)
{
    struct parcel_state *state = parcel_of(p, record);

    if (!state)
        return;
    if (state->end_ns > 0 && (state->step != record->step || state->kind != record->kind))
        print_update(p, record->item, record->begin_ns);
    if (state->end_ns == 0)
        state->begin_ns = record->begin_ns;
    state->end_ns = MAX(state->end_ns, record->end_ns);
    state->step = record->step;
    state->kind = record->kind;
}

static void print_sum(struct printer *p, const struct record *record)
{
    struct parcel_state *state = parcel_of(p, record);
    unsigned tid = TID_PARCEL + record->item;

    if (state)
        print_update(p, record->item, record->begin_ns);
    print_span(p, record->kind == RECORD_COMBINE ? "combine" : "reduce", tid, record);
    if (state && state->pushed && record->kind == RECORD_REDUCE) {
        print_arrow(p, TID_RANK + state->pushed->rank, state->pushed->begin_ns, tid, record->begin_ns);
        state->pushed = NULL;
    }
}

static void print_pushed(struct printer *p, const struct record *record)
{
    struct parcel_state *state = parcel_of(p, record);
    char name[64];

    snprintf(name, sizeof(name), "pushed parcel %u", record->item);
    print_span(p, name, TID_RANK + record->rank, record);
    if (state)
        state->pushed = record;
}

static void print_wait(struct printer *p, const struct record *record)
{
    char name[160];

    snprintf(name, sizeof(name), "waits: %.120s",
             record->item < p->trace->n_waits ? p->trace->waits[record->item] : "?");
    print_span(p, name, TID_RANK + record->rank, record);
}

static void print_diagnostic(struct printer *p, const struct record *record)
{
    char name[32];

    snprintf(name, sizeof(name), "E%u", record->item);
    print_span(p, name, record->rank == RECORD_NO_RANK ? TID_STEP : TID_RANK + record->rank, record);
}

static void print_record(struct printer *p, const struct record *record)
{
    char name[64];

    switch (record->kind) {
    case RECORD_FORWARD:
        print_span(p, "forward", TID_RANK + record->rank, record);
        break;
    case RECORD_BACKWARD:
        print_span(p, "backward", TID_RANK + record->rank, record);
        break;
    case RECORD_WAIT:
        print_wait(p, record);
        break;
    case RECORD_PUSHED:
        print_pushed(p, record);
        break;
    case RECORD_REDUCE:
    case RECORD_COMBINE:
        print_sum(p, record);
        break;
    case RECORD_WORK_REDUCE:
        snprintf(name, sizeof(name), "reduce parcel %u", record->item);
        print_span(p, name, TID_WORKER + record->thread, record);
        break;
    case RECORD_WORK_UPDATE:
    case RECORD_WORK_EARLY:
        snprintf(name, sizeof(name), "update parcel %u%s", record->item,
                 record->kind == RECORD_WORK_EARLY ? " early" : "");
        print_span(p, name, TID_WORKER + record->thread, record);
        add_update(p, record);
        break;
    case RECORD_ASKED:
        print_span(p, "waits for the last rank", TID_STEP, record);
        break;
    case RECORD_UPDATE:
        print_span(p, "update and commit", TID_STEP, record);
        break;
    case RECORD_COLLECTIVE:
        if (record->item < N_TRAFFIC)
            print_span(p, traffic_name(record->item), TID_COLLECTIVE + record->item, record);
        break;
    case RECORD_SAVE:
        print_span(p, "writes a checkpoint", TID_SAVE, record);
        break;
    case RECORD_ABORTED:
        print_span(p, "step aborted", TID_STEP, record);
        for (size_t i = 0; p->parcels && i < p->trace->n_parcels; i++)
            p->parcels[i].pushed = NULL;
        break;
    case RECORD_DIAGNOSTIC:
        print_diagnostic(p, record);
        break;
    default: /* a kind of a newer daemon */
        break;
    }
}

/* Sorts records by their beginning. If two begin together, the longer record comes first, because it contains the
 * other. */
static int compare_records(const void *a, const void *b)
{
    const struct record *x = a, *y = b;

    if (x->begin_ns != y->begin_ns)
        return x->begin_ns < y->begin_ns ? -1 : 1;
    return x->end_ns == y->end_ns ? 0 : x->end_ns > y->end_ns ? -1 : 1;
}

/* Prints the time of each step's commit, in microseconds, so that traces of several nodes can be aligned. */
static void print_commits(struct printer *p)
{
    bool some = false;

    fputs("\"commits\":{", p->file);
    for (size_t i = 0; i < p->trace->n_records; i++) {
        const struct record *record = &p->trace->records[i];
        uint64_t ns = record->end_ns - p->base_ns;

        if (record->kind != RECORD_UPDATE)
            continue;
        fprintf(p->file, "%s\"%u\":%" PRIu64 ".%03u", some ? "," : "", record->step, ns / 1000, (unsigned)(ns % 1000));
        some = true;
    }
    fputc('}', p->file);
}

void trace_print(FILE *file, struct trace *trace)
{
    struct printer p = {.file = file, .trace = trace, .pid = PID + trace->node, .base_ns = trace->monotonic_ns};
    _cleanup_free_ struct parcel_state *parcels = calloc(trace->n_parcels + 1, sizeof(*parcels));

    p.parcels = parcels;
    if (trace->n_records > 0) {
        qsort(trace->records, trace->n_records, sizeof(*trace->records), compare_records);
        p.base_ns = trace->records[0].begin_ns;
    }
    fprintf(file, "{\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":%" PRIu64 ",\n",
            trace->realtime_ns - (trace->monotonic_ns - p.base_ns));
    fprintf(file, "\"zerod\":{\"node\":%u,\"n_nodes\":%u,\"version\":", trace->node, trace->n_nodes);
    print_string(file, trace->version);
    fprintf(file, ",\"oldest_step\":%" PRIu64 ",\"open_step\":%" PRIu64 ",", trace->oldest, trace->step);
    print_commits(&p);
    fputs("},\n\"traceEvents\":[\n", file);
    name_tracks(&p);
    for (size_t i = 0; i < trace->n_records; i++)
        print_record(&p, &trace->records[i]);
    for (uint32_t i = 0; parcels && i < trace->n_parcels; i++)
        print_update(&p, i, UINT64_MAX);
    fputs("\n]}\n", file);
}
