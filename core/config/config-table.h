/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The table of configuration keys has for each key: path, type, unit, default, range, sentence, and its field in struct
 * config. Reading, checking, printing, help, and the test that compares manual and sample files use it. Defaults are
 * written only in this table.
 *
 * Rows of one section are adjacent, the section before its keys, because printing goes from top to bottom. A path may
 * have several rows, if its default or meaning depends on the optimizer or scheduler; `only` selects the row. The table
 * is constant; any thread may read it.
 */

#include <stdbool.h>
#include <stddef.h>

enum config_kind {
    CONFIG_OURS,
    CONFIG_INERT,   /* a key of DeepSpeed or accelerate, accepted without effect: the sentence says why */
    CONFIG_REFUSED, /* known, but refused unless switched off: the sentence says why, or which key to use */
    CONFIG_ALIAS,   /* another name of the key `same`; if `same` is NULL, a section of such names */
};

enum config_type {
    CONFIG_SECTION, /* a mapping; its keys have their own rows */
    CONFIG_NAME,    /* letters, digits, '.', '_', '-' */
    CONFIG_PATTERN, /* a shell pattern: *, ?, [...] */
    CONFIG_PATH,    /* an absolute path */
    CONFIG_FOLDER,  /* an absolute path */
    CONFIG_LOAD,    /* a folder, or CONFIG_LOAD_LATEST, or CONFIG_LOAD_NEVER */
    CONFIG_SOCKET,  /* an absolute path that fits into sun_path */
    CONFIG_ADDRESS, /* host:port */
    CONFIG_BOOL,
    CONFIG_WHOLE,    /* an int, unsigned or uint64_t */
    CONFIG_REAL,     /* double */
    CONFIG_SIZE,     /* uint64_t bytes */
    CONFIG_DURATION, /* uint64_t milliseconds */
    CONFIG_CHOICE,   /* an enum or int */
    CONFIG_MODE,     /* mode_t, octal */
    CONFIG_NAMES,    /* struct config_names */
    CONFIG_PATTERNS, /* struct config_names, of patterns */
    CONFIG_NUMBERS,  /* struct schedule_numbers */
    CONFIG_PAIR,     /* two doubles */
    CONFIG_TRIPLE,   /* three doubles */
    CONFIG_NODES,    /* struct config_nodes, items are rows under "path[]" */
};

enum {
    CONFIG_REQUIRED = 1 << 0,
    CONFIG_NULLABLE = 1 << 1,  /* null is the same as leaving the key out */
    CONFIG_DEEPSPEED = 1 << 2, /* "auto" (Hugging Face's integration replaces it) is the same as leaving the key out */
    CONFIG_AUTO = 1 << 3,      /* whole or size: "auto" is stored as 0 */
    CONFIG_ABOVE_MIN = 1 << 4, /* min itself is not allowed */
    CONFIG_BELOW_MAX = 1 << 5, /* max itself is not allowed */
    CONFIG_OWN = 1 << 6,       /* may differ between nodes */
    CONFIG_AT_ONCE = 1 << 7,   /* 0, which is "at once" for DeepSpeed, is the same as leaving the key out */
};

/* Bits of `only`: 1 << enum optimizer, and 1 << (8 + enum schedule_type). 0: the row always applies. */
#define CONFIG_ONLY_OPTIMIZER(type) (1u << (type))
#define CONFIG_ONLY_SCHEDULE(type) (1u << (8 + (type)))

struct config_choice {
    const char *name; /* NULL ends the list; case does not matter */
    int value;
    bool spelling;       /* another name of an earlier choice */
    const char *refused; /* NULL if allowed; else why it is refused */
};

struct config_key {
    const char *path; /* names with dots between them; "[]" for the items of a list */
    const char *sentence;
    enum config_kind kind;
    enum config_type type;
    unsigned flags;
    unsigned only;
    const char *unit; /* NULL: none */
    const char *def;  /* as written in YAML; NULL: absent */
    double min, max;  /* numbers: range; lists: range of each item */
    size_t max_items; /* lists: the most items */
    const struct config_choice *choices;
    const char *accepted;  /* inert: the values that change nothing, separated by ", "; NULL: all values */
    const char *usual;     /* inert: values that zerod follows anyway, so they cause no note; separated by ", " */
    const char *same;      /* alias: the path of the key that it names */
    const char *elsewhere; /* DeepSpeed's default, if it differs from zerod's and changes what is trained */
    size_t offset, size;   /* place and size of the field in struct config; for rows under "[]", in the item's struct */
};

const struct config_key *config_table(size_t *n_keys);

/* The last part of a path: "stage" of "zero_optimization.stage". */
const char *config_key_leaf(const struct config_key *key);

/* Does this row apply to a set of only-bits? Without bits of optimizers, no row of an optimizer applies; likewise
 * schedulers. */
bool config_key_applies(const struct config_key *key, unsigned active);

/* Return: the row of this path that applies, or NULL. */
const struct config_key *config_table_lookup(const char *path, unsigned active);

/* Return: the row of section + "." + name (section "" at the top) that applies, or NULL. */
const struct config_key *config_table_find(const char *section, const char *name, unsigned active);

/*
 * Return: the key that was probably meant: the nearest key of the section, if it is near; else the only key of this
 * name in another section. NULL if there is none.
 */
const struct config_key *config_table_nearest(const char *section, const char *name, unsigned active);

/* Is name near other? A quarter of its letters may differ, but always at least one. */
bool config_is_near(const char *name, const char *other);

/*
 * Return: the number of letters to insert, drop, change or swap to turn a into b. Only the first 64 bytes of each text
 * count.
 */
unsigned config_distance(const char *a, const char *b);
