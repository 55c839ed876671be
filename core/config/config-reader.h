/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The state of reading one text, for two files: config-read.c walks sections and finds the rows of their keys,
 * config-read-value.c reads the values. Internal to both.
 */

#include "core/config/config-check.h"
#include "core/config/config-table.h"
#include "core/config/config-yaml.h"

#include <stdbool.h>
#include <stddef.h>

struct config;
struct config_given;

enum {
    READER_SHOWN_BYTES = 60, /* shown of a value or key in a message */
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
    bool optimizer_unknown;  /* the file has an optimizer of unknown type: all keys of optimizers apply */
    bool scheduler_unknown;  /* the same for the scheduler */
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
    void *base; /* the struct whose field it fills */
};

/* Writes a text of the file for use in a message: shortened, and with '?' for control characters. */
void reader_quote(char *shown, size_t n_shown, const char *text);

/* Reports the required keys below one section that are missing. */
void reader_refuse_missing(struct reader *reader, const char *prefix, const struct config_spot *spot);

/* Reads the value of a key that has an effect into its field. A section is read by reader_read_mapping(). */
void reader_read_value(struct reader *reader, const struct pair *pair);
void reader_read_mapping(struct reader *reader, struct fy_node *mapping, const char *section, void *base);
