/* SPDX-License-Identifier: Apache-2.0 */

/* The nodes of a Slurm step. Invalid numbers and hosts are refused. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include <cmocka.h>

#include "client/run/node-list.h"
#include "client/run/options.h"
#include "client/run/slurm.h"
#include "core/base/base.h"

static void set_step(const char *n_nodes, const char *hosts)
{
    setenv("SLURM_STEP_NUM_NODES", n_nodes, 1);
    setenv("SLURM_STEP_NUM_TASKS", n_nodes, 1);
    setenv("SLURM_NODEID", "0", 1);
    setenv("SLURM_STEP_NODELIST", hosts, 1);
    setenv("SLURM_JOB_ID", "77", 1);
    setenv("SLURM_STEP_ID", "3", 1);
}

static void test_numbers(void **state)
{
    static const char *const wrong[] = {"", "-2", "+2", "2x", " 2", "4294967298", "18446744073709551618"};
    struct slurm_step step;

    (void)state;
    set_step("2", "a,b");
    assert_true(slurm_find_step(&step));
    assert_int_equal(step.n_nodes, 2);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        set_step(wrong[i], "a,b");
        assert_false(slurm_find_step(&step));
    }
}

static void check_hosts(const char *hosts, int r)
{
    struct run_options options = {.n_jobs = 1, .node_rank = -1};
    struct nodes nodes;

    set_step("2", hosts);
    assert_int_equal(nodes_init(&nodes, &options), r);
    if (r == 0)
        assert_int_equal(nodes.n, 2);
    nodes_deinit(&nodes);
}

/* Invalid hosts are refused, because hosts are printed in a configuration, in MASTER_ADDR, and on the terminal. */
static void test_hosts(void **state)
{
    static const char *const wrong[] = {"a,",   ",b",     "a,b\n",     "a, b",     "a,b\t",  "a,\033b",
                                        "a,'b", "a,b\"c", "a,b: c\nd", "a,b/../c", "a,\xff", "a,{b}"};
    char longest[2 + 256 + 1] = "a,";

    (void)state;
    check_hosts("node-1.a_b,10.0.0.2", 0);
    check_hosts("fe80::1%eth0,::1", 0);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
        check_hosts(wrong[i], -EX_USAGE);
    memset(longest + 2, 'b', 255);
    check_hosts(longest, 0);
    memset(longest + 2, 'b', 256);
    check_hosts(longest, -EX_USAGE);
}

/* Return: the hosts in scontrol's output, which the caller frees; or NULL. */
static char *read_output(const char *text, size_t n_bytes)
{
    FILE *file = fmemopen((void *)text, n_bytes, "r");
    char *hosts = NULL;
    int r;

    assert_non_null(file);
    r = slurm_read_hosts(file, &hosts);
    assert_int_equal(r, hosts ? 0 : -1);
    assert_int_equal(feof(file), 1); /* reads all, else scontrol may wait for room in the pipe */
    fclose(file);
    return hosts;
}

static void check_output(const char *text, size_t n_bytes, const char *expected)
{
    _cleanup_free_ char *hosts = read_output(text, n_bytes);

    if (expected)
        assert_string_equal(hosts, expected);
    else
        assert_null(hosts);
}

static void test_scontrol(void **state)
{
    enum { N_BYTES = 2 << 20 };
    _cleanup_free_ char *large = malloc(N_BYTES);

    (void)state;
    check_output("a\nb\n", 4, "a,b");
    check_output("a\nb", 3, "a,b");
    check_output("a", 1, "a");
    check_output("\n", 1, NULL);
    check_output("a\0b\n", 4, NULL);
    memset(large, 'a', N_BYTES);
    check_output(large, N_BYTES, NULL);
    large[10] = '\0';
    check_output(large, N_BYTES, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_scontrol),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
