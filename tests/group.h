/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Begins the main function of a group, that is a test file that shares a program with others. groups.c calls it. */
#define TEST_GROUP(name)                                                                                               \
    int test_group_##name(void);                                                                                       \
    int test_group_##name(void)
