/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The state of reading one text, for three files: config-read.c walks sections and finds the rows of their keys,
 * config-read-value.c reads the values, and config-deepspeed.c reads keys that only DeepSpeed has. Internal to these
 * files.
 */

#include "core/config/config-check.h"
#include "core/config/config-table.h"
#include "core/config/config-yaml.h"

#include <stdbool.h>
#include <stddef.h>

struct config;
struct config_given;

enum {
    READER_SHOWN_BYTES = 60, /* bytes of a value or key that a message shows */
};

/* The state of reading one text. */
struct reader {
    struct config *config;
    const struct config_text *text;
    struct config_problems *problems;
    struct yaml *yaml;
    const struct config_key *keys;
    size_t n_keys;
    struct config_row *rows; /* one per key */
    unsigned active;         /* see config_key_applies */
    bool optimizer_unknown;  /* the optimizer's type is unknown: all keys of optimizers apply */
    bool scheduler_unknown;  /* the scheduler's type is unknown: all keys of schedulers apply */
    bool is_foreign;         /* the file is DeepSpeed's or accelerate's */
    bool has_no_schedule;    /* the scheduler is left to the program */
    const struct config_given *given;
    int r; /* sticky: -ENOMEM */
};

/* A pair of the file that has a row in the table. */
struct pair {
    const struct config_key *key;
    struct config_row *row;
    struct fy_node *value;
    void *base; /* the struct that contains the field */
};

/* Writes a text of the file for use in a message: shortened, and with '?' for control characters. */
void reader_quote(char *shown, size_t n_shown, const char *text);

/* Reports the missing required keys of a section. */
void reader_refuse_missing(struct reader *reader, const char *prefix, const struct config_spot *spot);

/* Reads the value of a key that has an effect into its field. A section is read by reader_read_mapping(). */
void reader_read_value(struct reader *reader, const struct pair *pair);
void reader_read_mapping(struct reader *reader, struct fy_node *mapping, const char *section, void *base);

/* Reads the keys below a key without effect, if the table has them. Return: the number of these keys. */
size_t reader_read_known(struct reader *reader, const struct pair *parent);

/* Return: the innermost section of a path that the file has, or NULL. */
const struct config_row *reader_find_section(const struct reader *reader, const char *path);

/*
 * Does the path belong to an optimizer or scheduler of unknown type? Then its keys are unknown too. path: of the
 * section, or of a key in the section.
 */
bool reader_is_of_unknown_type(const struct reader *reader, const char *path);

/* ---- config-deepspeed.c -------------------------------------------------------------------------------- */

/* Reads a key that has no effect in zerod. Notes its value, or refuses a value that would change what is trained. */
void reader_read_inert(struct reader *reader, const struct pair *pair);

/* Refuses a key, unless its value switches the feature off. */
void reader_read_refused(struct reader *reader, const struct pair *pair);

/* Notes keys that a DeepSpeed file does not have, if DeepSpeed's default would train something else. */
void reader_note_defaults(struct reader *reader);
