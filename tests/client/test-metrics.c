/* SPDX-License-Identifier: Apache-2.0 */

/* Metrics as text: values, units, labels with any bytes, and answers that are not valid. */

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json-c/json.h>

#include "client/ctl/metrics.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"

/* Return: the text of one source, which the caller frees. status is NULL if the daemon has not answered. */
static char *printed(enum metrics_format format, const char *status, const char *ranks)
{
    struct metrics_source source = {.socket = "/s",
                                    .status = status ? json_tokener_parse(status) : NULL,
                                    .ranks = ranks ? json_tokener_parse(ranks) : NULL};
    struct strbuf buf = {0};

    assert_true(!status || source.status);
    assert_true(!ranks || source.ranks);
    metrics_print(&buf, format, &source, 1);
    assert_false(buf.cut);
    json_object_put(source.status);
    json_object_put(source.ranks);
    return buf.data;
}

/* Asserts that the text has the line, and no other sample with this name. */
static void assert_only_line(const char *text, const char *line)
{
    size_t n_name = strcspn(line, "{"), n_lines = 0;

    for (const char *at = text; *at; at += strcspn(at, "\n") + 1)
        n_lines += strncmp(at, line, n_name + 1) == 0;
    if (n_lines != 1 || !strstr(text, line))
        fail_msg("\"%s\" is not the only such line of\n%s", line, text);
}

static void assert_line(const char *status, const char *ranks, const char *line)
{
    _cleanup_free_ char *text = printed(METRICS_OPENMETRICS, status, ranks);

    assert_only_line(text, line);
}

/* Asserts that the text has the line, among other samples with this name. */
static void assert_has_line(const char *status, const char *ranks, const char *line)
{
    _cleanup_free_ char *text = printed(METRICS_OPENMETRICS, status, ranks);

    if (!strstr(text, line))
        fail_msg("\"%s\" is not in\n%s", line, text);
}

static void assert_no_sample(const char *status, const char *ranks, const char *name)
{
    _cleanup_free_ char *text = printed(METRICS_OPENMETRICS, status, ranks);

    if (strstr(text, name))
        fail_msg("%s has a sample in\n%s", name, text);
}

static void test_formats(void **state)
{
    static const char status[] = "{\"job\":\"j\",\"step\":7,\"time\":{\"wait\":{\"total_ns\":1500000000}}}";
    _cleanup_free_ char *openmetrics = printed(METRICS_OPENMETRICS, status, NULL);
    _cleanup_free_ char *prometheus = printed(METRICS_PROMETHEUS, status, NULL);

    assert_string_equal(openmetrics,
                        "# HELP zerod_up 1: the daemon has answered.\n"
                        "# TYPE zerod_up gauge\n"
                        "zerod_up{socket=\"/s\"} 1\n"
                        "# HELP zerod_info The daemon's version, instruction set and ZeRO stage; always 1.\n"
                        "# TYPE zerod_info gauge\n"
                        "zerod_info{socket=\"/s\",job_name=\"j\"} 1\n"
                        "# HELP zerod_step The number of the next step; as many are committed.\n"
                        "# TYPE zerod_step gauge\n"
                        "zerod_step{socket=\"/s\",job_name=\"j\"} 7\n"
                        "# HELP zerod_step_seconds Time of committed steps by phase; reduce runs beside the backward.\n"
                        "# TYPE zerod_step_seconds counter\n"
                        "# UNIT zerod_step_seconds seconds\n"
                        "zerod_step_seconds_total{socket=\"/s\",job_name=\"j\",phase=\"wait\"} 1.500000000\n"
                        "# EOF\n");
    assert_non_null(strstr(prometheus, "# TYPE zerod_step_seconds_total counter\nzerod_step_seconds_total{"));
    assert_null(strstr(prometheus, "# UNIT"));
    assert_null(strstr(prometheus, "# EOF"));
    assert_string_equal(metrics_content_type(METRICS_OPENMETRICS),
                        "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert_string_equal(metrics_content_type(METRICS_PROMETHEUS), "text/plain; version=0.0.4; charset=utf-8");
}

static void test_down(void **state)
{
    _cleanup_free_ char *text = printed(METRICS_OPENMETRICS, NULL, NULL);

    assert_string_equal(text, "# HELP zerod_up 1: the daemon has answered.\n# TYPE zerod_up gauge\n"
                              "zerod_up{socket=\"/s\"} 0\n# EOF\n");
}

static void test_no_sources(void **state)
{
    struct strbuf buf = {0};

    metrics_print(&buf, METRICS_OPENMETRICS, NULL, 0);
    assert_string_equal(strbuf_text(&buf), "# EOF\n");
    strbuf_deinit(&buf);
}

/* Bytes that could end a value, a label or a line are escaped. */
static void test_labels_hold_anything(void **state)
{
    static const char *const rows[][2] = {
        {"a\\\"} 1 # x", "a\\\"} 1 # x"},     {"a\\\\", "a\\\\"},
        {"a\\\\\\\"", "a\\\\\\\""},           {"a\\nzerod_up 0", "a\\nzerod_up 0"},
        {"a\\r\\u0007b", "a\\\\x0d\\\\x07b"}, {"\\u00e9\\u20ac{},=", "\xc3\xa9\xe2\x82\xac{},="},
        {"\xff\xfe", "\\\\xff\\\\xfe"},       {"", ""},
    };

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        char status[128], line[128];

        snprintf(status, sizeof(status), "{\"job\":\"%s\",\"run_id\":\"%s\"}", rows[i][0], rows[i][0]);
        snprintf(line, sizeof(line), "\nzerod_run_info{socket=\"/s\",job_name=\"%s\",run_id=\"%s\"} 1\n", rows[i][1],
                 rows[i][1]);
        assert_line(status, NULL, line + 1);
    }
}

static void test_values(void **state)
{
    static const char *const rows[][3] = {
        {"{\"step\":18446744073709551615}", "zerod_step", "18446744073709551615"},
        {"{\"uptime_ns\":1}", "zerod_uptime_seconds", "0.000000001"},
        {"{\"uptime_ns\":18446744073709551615}", "zerod_uptime_seconds", "18446744073.709551615"},
        {"{\"n_missing_steps\":3}", "zerod_missing_steps_total", "3"},
        {"{\"n_missing_params\":2}", "zerod_missing_parameters", "2"},
        {"{\"formed\":true}", "zerod_formed", "1"},
        {"{\"formed\":false}", "zerod_formed", "0"},
        {"{\"loss_scale\":65536.0}", "zerod_loss_scale", "65536"},
        {"{\"grad_norm\":0.1}", "zerod_grad_norm", "0.1"},
        {"{\"grad_norm\":0.30000000000000004}", "zerod_grad_norm", "0.30000000000000004"},
        {"{\"grad_norm\":5e-324}", "zerod_grad_norm", "4.94065645841247e-324"},
        {"{\"limit_bytes\":5}", "zerod_memory_limit_bytes", "5"},
        {"{\"held\":\"because\"}", "zerod_held", "1"},
        {"{\"held\":null}", "zerod_held", "0"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        char line[128];

        snprintf(line, sizeof(line), "%s{socket=\"/s\"} %s\n", rows[i][1], rows[i][2]);
        assert_line(rows[i][0], NULL, line);
    }
}

/* An answer of another version, or of another program. Values that cannot be read have no sample. */
static void test_unreadable(void **state)
{
    static const char *const rows[][2] = {
        {"{\"step\":\"7 8\\n9\"}", "zerod_step"},
        {"{\"step\":[1]}", "zerod_step"},
        {"{\"step\":null}", "zerod_step"},
        {"{\"grad_norm\":null}", "zerod_grad_norm"},
        {"{\"grad_norm\":1e999}", "zerod_grad_norm"},
        {"{\"limit_bytes\":0}", "zerod_memory_limit_bytes"},
        {"{\"time\":7}", "zerod_step_seconds"},
        {"{\"memory\":[]}", "zerod_memory"},
        {"{\"memory\":{\"state\":null}}", "zerod_memory"},
        {"{\"refused\":{\"code\":\"E1001\"}}", "zerod_refused"},
        {"{\"nodes\":{\"list\":[7,null,{\"node\":\"x\",\"reached\":true}],\"waits_for\":[\"x\"]}}", "zerod_node_"},
        {"{\"run_id\":7}", "zerod_run_info"},
        {"[]", "zerod_step"},
        {"7", "zerod_step"},
        {"{}", "zerod_held"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        assert_no_sample(rows[i][0], NULL, rows[i][1]);
    assert_no_sample("{}", "[{\"rank\":\"0\",\"attached\":true}, 7, null, {\"attached\":true}]", "zerod_rank_");
    assert_no_sample("{}", "{\"rank\":0}", "zerod_rank_");
}

static void test_memory(void **state)
{
    static const char status[] =
        "{\"memory\":{\"ring\":{\"held_bytes\":3,\"on_device\":true},\"total\":{\"held_bytes\":9},"
        "\"device_total\":{\"held_bytes\":3}}}";

    assert_line(status, NULL, "zerod_memory_bytes{socket=\"/s\",class=\"ring\",place=\"gpu\"} 3\n");
}

static void test_findings(void **state)
{
    static const char status[] = "{\"findings\":[{\"kind\":\"zero-gradient\"},{\"kind\":\"zero-gradient\"},7,"
                                 "{\"kind\":\"slow-rank\"},{\"kind\":\"of another version\"}]}";

    assert_has_line(status, NULL, "zerod_findings{socket=\"/s\",kind=\"zero-gradient\"} 2\n");
    assert_has_line(status, NULL, "zerod_findings{socket=\"/s\",kind=\"slow-rank\"} 1\n");
    assert_has_line("{\"findings\":[]}", NULL, "zerod_findings{socket=\"/s\",kind=\"zero-lr\"} 0\n");
    assert_no_sample("{}", NULL, "zerod_findings");
}

static void test_ranks(void **state)
{
    static const char absent[] = "[{\"rank\":3,\"attached\":false,\"waiting_ns\":null}]";
    static const char busy[] = "[{\"rank\":3,\"attached\":true,\"waiting_ns\":null,\"behind_total_ns\":2500000000}]";
    static const char phases[] =
        "[{\"rank\":3,\"phases\":{\"forward_ns\":1500000000,\"backward_ns\":0,\"room_ns\":2,\"rest_ns\":null}}]";
    static const char waited[] =
        "[{\"rank\":3,\"waits\":[{\"state\":\"boundary\",\"for\":\"ranks\",\"total_ns\":2500000000},7]}]";
    static const char waits[] =
        "[{\"rank\":3,\"attached\":true,\"waiting_ns\":2000000000,\"fault\":{\"code\":\"E1001\"}}]";

    assert_line("{}", absent, "zerod_rank_attached{socket=\"/s\",rank=\"3\"} 0\n");
    assert_no_sample("{}", absent, "zerod_rank_waiting_seconds");
    assert_line("{}", busy, "zerod_rank_waiting_seconds{socket=\"/s\",rank=\"3\"} 0\n");
    assert_line("{}", busy, "zerod_rank_behind_seconds_total{socket=\"/s\",rank=\"3\"} 2.500000000\n");
    assert_no_sample("{}", busy, "zerod_rank_fault");
    assert_no_sample("{}", busy, "zerod_rank_phase_seconds");
    assert_has_line("{}", phases,
                    "zerod_rank_phase_seconds_total{socket=\"/s\",rank=\"3\",phase=\"forward\"} 1.500000000\n");
    assert_has_line("{}", phases,
                    "zerod_rank_phase_seconds_total{socket=\"/s\",rank=\"3\",phase=\"room\"} 0.000000002\n");
    assert_has_line(
        "{}", waited,
        "zerod_rank_wait_seconds_total{socket=\"/s\",rank=\"3\",state=\"boundary\",for=\"ranks\"} 2.500000000\n");
    assert_line("{}", waits, "zerod_rank_waiting_seconds{socket=\"/s\",rank=\"3\"} 2.000000000\n");
    assert_line("{}", waits, "zerod_rank_fault{socket=\"/s\",rank=\"3\",code=\"E1001\"} 1\n");
}

static void test_nodes(void **state)
{
    static const char status[] = "{\"nodes\":{\"connected\":true,\"generation\":2,\"waits_for\":[1],\"list\":["
                                 "{\"node\":0,\"address\":\"a:1\",\"reached\":true,\"silent_ns\":null},"
                                 "{\"node\":1,\"address\":\"b\\\"\",\"reached\":null,\"silent_ns\":1000000000}],"
                                 "\"collectives\":[{\"name\":\"broadcast\",\"n_orders\":4,\"busy_ns\":1}]}}";

    assert_line(status, NULL, "zerod_node_reached{socket=\"/s\",node=\"0\",address=\"a:1\"} 1\n");
    assert_line(status, NULL, "zerod_node_silent_seconds{socket=\"/s\",node=\"1\",address=\"b\\\"\"} 1.000000000\n");
    assert_line(status, NULL, "zerod_node_awaited{socket=\"/s\",node=\"1\"} 1\n");
    assert_line(status, NULL, "zerod_engine_ready{socket=\"/s\",engine=\"gloo\"} 1\n");
    assert_line(status, NULL, "zerod_engine_orders_total{socket=\"/s\",engine=\"gloo\",collective=\"broadcast\"} 4\n");
}

/* All samples of a metric are printed together, with those of several daemons. */
static void test_several_daemons(void **state)
{
    struct metrics_source sources[] = {{.socket = "/a", .status = json_tokener_parse("{\"job\":\"j\",\"step\":1}")},
                                       {.socket = "/b"},
                                       {.socket = "/c", .status = json_tokener_parse("{\"job\":\"j\",\"step\":2}")}};
    struct strbuf buf = {0};

    metrics_print(&buf, METRICS_OPENMETRICS, sources, ARRAY_SIZE(sources));
    assert_non_null(
        strstr(buf.data, "gauge\nzerod_up{socket=\"/a\"} 1\nzerod_up{socket=\"/b\"} 0\nzerod_up{socket=\"/c\"} 1\n#"));
    assert_non_null(strstr(buf.data, "gauge\nzerod_step{socket=\"/a\",job_name=\"j\"} 1\n"
                                     "zerod_step{socket=\"/c\",job_name=\"j\"} 2\n#"));
    for (size_t i = 0; i < ARRAY_SIZE(sources); i++)
        json_object_put(sources[i].status);
    strbuf_deinit(&buf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),    cmocka_unit_test(test_down),
        cmocka_unit_test(test_no_sources), cmocka_unit_test(test_labels_hold_anything),
        cmocka_unit_test(test_values),     cmocka_unit_test(test_unreadable),
        cmocka_unit_test(test_memory),     cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_nodes),      cmocka_unit_test(test_several_daemons),
        cmocka_unit_test(test_findings),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
