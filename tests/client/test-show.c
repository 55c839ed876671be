/* SPDX-License-Identifier: Apache-2.0 */

/* zerodctl prints a daemon's answer whatever types its values have. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <json-c/json.h>

#include "client/ctl/show.h"
#include "core/base/base.h"

/* Return: what is printed, which the caller frees. */
static char *print(show_fn *show, const char *json)
{
    struct json_object *answer = json_tokener_parse(json);
    char *text = NULL;
    size_t n_bytes;
    FILE *file = open_memstream(&text, &n_bytes);

    assert_non_null(answer);
    assert_int_equal(show(file, answer), 0);
    fclose(file);
    json_object_put(answer);
    return text;
}

static void test_other_types(void **state)
{
    static const char *const answers[] = {"7",
                                          "\"text\"",
                                          "[]",
                                          "[null, 7, [], {}]",
                                          "{\"memory\": 7, \"time\": [], \"nodes\": \"a\", \"device\": 1.5}",
                                          "{\"memory\": [1], \"counters\": false, \"refused\": {}, \"held\": {}}",
                                          "{\"memory\": {\"a\": 7, \"b\": null}, \"nodes\": {\"list\": [null, 3]}}",
                                          "{\"nodes\": {\"waits_for\": [null, {}]}, \"findings\": [null, 1]}",
                                          "{\"checkpoint\": {\"last\": 3, \"saving\": []}, \"slowest_rank\": 1}"};
    static show_fn *const shows[] = {show_status, show_ranks, show_params, show_diagnostics, show_message};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(answers); i++)
        for (size_t k = 0; k < ARRAY_SIZE(shows); k++)
            free(print(shows[k], answers[i]));
}

/* A rate that is larger than the largest unit allows. */
static void test_large_rate(void **state)
{
    _cleanup_free_ char *text =
        print(show_status, "{\"device\": {\"collectives\": [{\"name\": \"a\", \"sent_bytes\": 1, "
                           "\"bytes_per_s\": 1e300}]}}");

    (void)state;
    assert_non_null(strstr(text, ", 16.0 EiB/s\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_types),
        cmocka_unit_test(test_large_rate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
