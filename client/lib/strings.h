/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Strings of pushes. Each string is sent to the daemon once, and later messages contain only its id. */

#include <stdint.h>

struct call;

struct interned {
    char *text;
    uint32_t id;
};

/* A hash table with open addressing. All zero is the empty value. */
struct strings {
    struct interned *table;
    uint32_t n, capacity; /* capacity: a power of two */
};

void strings_deinit(struct strings *strings);

/*
 * Return: the string's id; or 0, which means unknown, if text is NULL, empty or too long, or memory is short. This is
 * no error, because strings are only evidence for diagnostics.
 */
uint32_t strings_intern(struct strings *strings, struct call *call, const char *text);

/* Sends all strings to a new daemon. Return: as call_say(). */
int strings_say_all(const struct strings *strings, struct call *call);
