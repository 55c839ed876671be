/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The main function of a file of tests in a program of several: groups.c. */
#define TEST_GROUP(name)                                                                                               \
    int test_group_##name(void);                                                                                       \
    int test_group_##name(void)
