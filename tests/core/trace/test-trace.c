/* SPDX-License-Identifier: Apache-2.0 */

/* The path of a trace: records are packed, unpacked, printed as JSON on their tracks, and merged with other traces. */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>
#include <json-c/json.h>

#include "client/ctl/trace-command.h"
#include "core/base/base.h"
#include "core/base/traffic.h"
#include "core/trace/trace.h"

/* A name that tries to end its JSON string early, and to control a terminal. */
#define HOSTILE "a\"}],\"x\":[{\n\x1b[2J\xff</script>"

static const struct record records[] = {
    {.kind = RECORD_UPDATE, .rank = RECORD_NO_RANK, .step = 3, .begin_ns = 9000, .end_ns = 9500},
    {.kind = RECORD_ASKED, .rank = RECORD_NO_RANK, .step = 3, .begin_ns = 8000, .end_ns = 9000},
    {.kind = RECORD_FORWARD, .rank = 4, .step = 3, .begin_ns = 1000, .end_ns = 2000},
    {.kind = RECORD_BACKWARD, .rank = 4, .step = 3, .begin_ns = 2000, .end_ns = 5000},
    {.kind = RECORD_PUSHED, .rank = 5, .step = 3, .item = 1, .begin_ns = 2400, .end_ns = 2400},
    {.kind = RECORD_PUSHED, .rank = 4, .step = 3, .item = 1, .begin_ns = 2500, .end_ns = 2500},
    {.kind = RECORD_WAIT, .rank = 4, .step = 3, .item = 1, .begin_ns = 5000, .end_ns = 6000},
    {.kind = RECORD_WAIT, .rank = 4, .step = 3, .item = 77, .begin_ns = 6000, .end_ns = 6001},
    {.kind = RECORD_REDUCE, .rank = RECORD_NO_RANK, .step = 3, .item = 1, .begin_ns = 2501, .end_ns = 2901},
    {.kind = RECORD_WORK_REDUCE,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 1,
     .thread = 2,
     .begin_ns = 2550,
     .end_ns = 2900},
    {.kind = RECORD_COMBINE, .rank = RECORD_NO_RANK, .step = 3, .item = 0, .begin_ns = 3000, .end_ns = 3100},
    {.kind = RECORD_COLLECTIVE,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = TRAFFIC_ALL_GATHER,
     .begin_ns = 9100,
     .end_ns = 9300},
    {.kind = RECORD_WORK_UPDATE,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 0,
     .thread = 1,
     .begin_ns = 9010,
     .end_ns = 9100},
    {.kind = RECORD_WORK_UPDATE,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 0,
     .thread = 2,
     .begin_ns = 9005,
     .end_ns = 9080},
    {.kind = RECORD_WORK_UPDATE,
     .rank = RECORD_NO_RANK,
     .step = 4,
     .item = 0,
     .thread = 2,
     .begin_ns = 9600,
     .end_ns = 9700},
    {.kind = RECORD_WORK_EARLY,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 1,
     .thread = 2,
     .begin_ns = 2910,
     .end_ns = 2960},
    {.kind = RECORD_REDUCE, .rank = RECORD_NO_RANK, .step = 3, .item = 1, .begin_ns = 2950, .end_ns = 2990},
    {.kind = RECORD_WORK_EARLY,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 1,
     .thread = 1,
     .begin_ns = 2995,
     .end_ns = 9020},
    {.kind = RECORD_WORK_UPDATE,
     .rank = RECORD_NO_RANK,
     .step = 3,
     .item = 1,
     .thread = 2,
     .begin_ns = 9015,
     .end_ns = 9025},
    {.kind = RECORD_SAVE, .rank = RECORD_NO_RANK, .step = 3, .begin_ns = 1500, .end_ns = 9800},
    {.kind = RECORD_ABORTED, .rank = RECORD_NO_RANK, .step = 4, .begin_ns = 9900, .end_ns = 9900},
    {.kind = RECORD_DIAGNOSTIC, .rank = 5, .step = 4, .item = 1001, .begin_ns = 9901, .end_ns = 9901},
    {.kind = N_RECORD_KINDS + 9, .step = 4, .begin_ns = 9902, .end_ns = 9903}, /* a newer daemon's kind */
    {.kind = RECORD_REDUCE,
     .rank = RECORD_NO_RANK,
     .step = 4,
     .item = 99,
     .begin_ns = 9950,
     .end_ns = 9960}, /* no parcel 99 exists */
};

static char **make_list(const char *const *texts, size_t n)
{
    char **list = calloc(n, sizeof(*list));

    assert_non_null(list);
    for (size_t i = 0; i < n; i++)
        list[i] = strdup(texts[i]);
    return list;
}

static struct trace make_trace(void)
{
    struct trace trace = {
        .job = strdup(HOSTILE),
        .version = strdup("1"),
        .node = 1,
        .n_nodes = 2,
        .first_rank = 4,
        .n_ranks = 2,
        .n_workers = 2,
        .step = 4,
        .oldest = 3,
        .monotonic_ns = 20000,
        .realtime_ns = UINT64_C(1700000000000020000),
        .parcels = make_list((const char *const[]){"bucket 0: a", "bucket 1: " HOSTILE}, 2),
        .n_parcels = 2,
        .waits = make_list((const char *const[]){"nothing", HOSTILE}, 2),
        .n_waits = 2,
        .records = malloc(sizeof(records)),
        .n_records = ARRAY_SIZE(records),
    };

    memcpy(trace.records, records, sizeof(records));
    return trace;
}

static struct json_object *print(struct trace *trace)
{
    char *text;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    struct json_object *root;

    trace_print(file, trace);
    assert_int_equal(fclose(file), 0);
    root = json_tokener_parse(text);
    assert_non_null(root);
    assert_null(memchr(text, 0x1b, size));
    free(text);
    return root;
}

static const char *string_of(struct json_object *event, const char *key)
{
    const char *text = json_object_get_string(json_object_object_get(event, key));

    return text ? text : "";
}

/* Returns the event with this name, phase and track. Fails unless there is exactly one. */
static struct json_object *find(struct json_object *root, const char *name, const char *phase, int tid)
{
    struct json_object *events = json_object_object_get(root, "traceEvents"), *found = NULL;

    for (size_t i = 0; i < json_object_array_length(events); i++) {
        struct json_object *event = json_object_array_get_idx(events, i);

        if (strcmp(string_of(event, "name"), name) != 0 || strcmp(string_of(event, "ph"), phase) != 0 ||
            json_object_get_int(json_object_object_get(event, "tid")) != tid)
            continue;
        assert_null(found);
        found = event;
    }
    if (!found)
        fail_msg("no event %s on track %d", name, tid);
    return found;
}

static double number_of(struct json_object *event, const char *key)
{
    return json_object_get_double(json_object_object_get(event, key));
}

static void assert_near(double a, double b, double epsilon)
{
    if (!(fabs(a - b) <= epsilon))
        fail_msg("%.9g is not %.9g", a, b);
}

static void expect_span(struct json_object *root, const char *name, int tid, double ts, double dur)
{
    struct json_object *event = find(root, name, dur > 0 ? "X" : "i", tid);

    assert_near(number_of(event, "ts"), ts, 1e-9);
    assert_near(number_of(event, "dur"), dur, 1e-9);
}

static void test_printing(void **state)
{
    struct trace trace = make_trace();
    struct json_object *root = print(&trace), *arrow;

    (void)state;
    expect_span(root, "forward", 104, 0, 1);
    expect_span(root, "backward", 104, 1, 3);
    expect_span(root, "pushed parcel 1", 104, 1.5, 0);
    expect_span(root, "waits: ?", 104, 5, 0.001);
    expect_span(root, "combine", 100000, 2, 0.1);
    expect_span(root, "reduce parcel 1", 10002, 1.55, 0.35);
    expect_span(root, "all-gather", 3 + TRAFFIC_ALL_GATHER, 8.1, 0.2);
    expect_span(root, "waits for the last rank", 1, 7, 1);
    expect_span(root, "update and commit", 1, 8, 0.5);
    expect_span(root, "writes a checkpoint", 2, 0.5, 8.3);
    expect_span(root, "step aborted", 1, 8.9, 0);
    expect_span(root, "E1001", 105, 8.901, 0);
    find(root, "thread_name", "M", 105);
    /* The arrow begins at the push of the last rank. */
    arrow = find(root, "completes", "s", 104);
    assert_near(number_of(arrow, "ts"), 1.5, 1e-9);
    arrow = find(root, "completes", "f", 100001);
    assert_near(number_of(arrow, "ts"), 1.501, 1e-9);
    assert_int_equal(json_object_get_int64(json_object_object_get(root, "baseTimeNanoseconds")),
                     1700000000000001000); /* the first record's */
    json_object_put(root);
    trace_deinit(&trace);
}

/* Expects these spans of the track with this name, and no others. */
static void expect_spans(struct json_object *root, const char *name, int tid, const double (*spans)[2], unsigned n)
{
    struct json_object *events = json_object_object_get(root, "traceEvents");
    unsigned found = 0;

    for (size_t i = 0; i < json_object_array_length(events); i++) {
        struct json_object *event = json_object_array_get_idx(events, i);

        if (strcmp(string_of(event, "name"), name) != 0 || strcmp(string_of(event, "ph"), "X") != 0 ||
            json_object_get_int(json_object_object_get(event, "tid")) != tid)
            continue;
        assert_in_range(found, 0, n - 1);
        assert_near(number_of(event, "ts"), spans[found][0], 1e-9);
        assert_near(number_of(event, "dur"), spans[found++][1], 1e-9);
    }
    assert_int_equal(found, n);
}

/*
 * The updates of one parcel by all workers in a step are printed as one event of that parcel. Early updates are events
 * of their own, which end when the next event of the parcel begins.
 */
static void test_updates(void **state)
{
    static const double updates[][2] = {{8.005, 0.095}, {8.6, 0.1}}, sums[][2] = {{1.501, 0.4}, {1.95, 0.04}},
                        early[][2] = {{1.91, 0.04}, {1.995, 6.02}};
    struct trace trace = make_trace();
    struct json_object *root = print(&trace);

    (void)state;
    expect_spans(root, "update", 100000, updates, 2);
    expect_spans(root, "reduce", 100001, sums, 2);
    expect_spans(root, "update early", 100001, early, 2);
    expect_span(root, "update", 100001, 8.015, 0.01);
    expect_span(root, "update parcel 1 early", 10001, 1.995, 6.025);
    expect_span(root, "update parcel 1", 10002, 8.015, 0.01);
    json_object_put(root);
    trace_deinit(&trace);
}

static void test_nothing(void **state)
{
    struct trace trace = {.job = strdup("x"), .version = strdup("1"), .monotonic_ns = 5, .realtime_ns = 10};
    struct json_object *root = print(&trace);

    (void)state;
    assert_int_equal(json_object_get_int64(json_object_object_get(root, "baseTimeNanoseconds")), 10);
    json_object_put(root);
    trace_deinit(&trace);
}

/* ---- packing ------------------------------------------------------------------------------------------- */

static void test_packing(void **state)
{
    struct trace trace = make_trace(), back;
    char *text = trace_pack(&trace);
    struct json_object *packed = json_tokener_parse(text), *ours = print(&trace), *theirs;

    (void)state;
    assert_null(trace_unpack(&back, packed));
    assert_int_equal(back.n_records, trace.n_records);
    theirs = print(&back);
    assert_string_equal(json_object_to_json_string(ours), json_object_to_json_string(theirs));
    json_object_put(ours);
    json_object_put(theirs);
    json_object_put(packed);
    free(text);
    trace_deinit(&trace);
    trace_deinit(&back);
}

static void test_bad_packs(void **state)
{
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"[]", "it is no trace"},
        {"{}", "it is no trace"},
        {"null", "it is no trace"},
        {"{\"format\":2}", "it is of another version: use the zerodctl of the daemon's version"},
        {"{\"format\":1}", "its records are not base64, or not whole"},
        {"{\"format\":1,\"records\":3}", "its records are not base64, or not whole"},
        {"{\"format\":1,\"records\":\"?\"}", "its records are not base64, or not whole"},
        {"{\"format\":1,\"records\":\"QUJD\"}", "its records are not base64, or not whole"},
        {"{\"format\":1,\"records\":\"\"}", "it has no list of parcels, or of what ranks wait for"},
        {"{\"format\":1,\"records\":\"\",\"parcels\":[],\"waits\":{}}",
         "it has no list of parcels, or of what ranks wait for"},
    };
    struct trace trace;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        struct json_object *object = json_tokener_parse(bad[i].text);
        const char *why = trace_unpack(&trace, object);

        assert_non_null(why);
        assert_string_equal(why, bad[i].why);
        assert_null(trace.records);
        json_object_put(object);
    }
}

/* ---- merging ------------------------------------------------------------------------------------------- */

static const char *merge(struct json_object *root, const char *other)
{
    struct json_object *object = json_tokener_parse(other);
    const char *why = trace_merge(root, object);

    json_object_put(object);
    return why;
}

static void test_merging(void **state)
{
    struct trace trace = make_trace();
    struct json_object *root = print(&trace);

    (void)state;
    /* A trace of torch.profiler that began 4 us later by the same clock. */
    assert_null(merge(root, "{\"baseTimeNanoseconds\":1700000000000005000,"
                            "\"traceEvents\":[{\"name\":\"torch\",\"ph\":\"X\",\"tid\":1,\"ts\":1.5,\"dur\":2}]}"));
    assert_near(number_of(find(root, "torch", "X", 1), "ts"), 5.5, 0.3);
    /* A trace of another node with another clock. Step 3 was committed at 8.5 in this trace, at 100 in that one. */
    assert_null(merge(root, "{\"baseTimeNanoseconds\":5,\"zerod\":{\"commits\":{\"2\":50,\"3\":100}},"
                            "\"traceEvents\":[{\"name\":\"node\",\"ph\":\"X\",\"tid\":1,\"ts\":101}]}"));
    assert_near(number_of(find(root, "node", "X", 1), "ts"), 9.5, 1e-9);
    assert_string_equal(merge(root, "{\"zerod\":{\"commits\":{\"9\":1}},\"traceEvents\":[]}"),
                        "it has no step in common with this trace: take both within some steps");
    assert_string_equal(merge(root, "{\"traceEvents\":[]}"), "it does not say when it began (baseTimeNanoseconds)");
    assert_string_equal(merge(root, "{}"), "it has no traceEvents");
    assert_string_equal(merge(root, "3"), "it has no traceEvents");
    json_object_put(root);
    trace_deinit(&trace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_printing), cmocka_unit_test(test_updates),   cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_packing),  cmocka_unit_test(test_bad_packs), cmocka_unit_test(test_merging),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
