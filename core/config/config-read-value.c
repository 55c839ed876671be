/* SPDX-License-Identifier: Apache-2.0 */

/* Reads the values of a configuration: scalars, lists, "auto" and 0. Reports wrong ones. */

#include "core/config/config-reader.h"

#include "core/base/base.h"
#include "core/base/utf8.h"
#include "core/config/config-value.h"
#include "core/config/config.h"

#include <assert.h>
#include <string.h>

/* Writes a text of the file for use in a message: shortened, and with '?' for control characters. */
void reader_quote(char *shown, size_t n_shown, const char *text)
{
    size_t n = text ? strnlen(text, READER_SHOWN_BYTES + 1) : 0;
    bool cut = n > READER_SHOWN_BYTES;

    if (!text) {
        snprintf(shown, n_shown, "this value");
        return;
    }
    for (n = MIN(n, (size_t)READER_SHOWN_BYTES); cut && n > 0 && !utf8_begins(text[n]);)
        n--;
    snprintf(shown, n_shown, "\"%.*s%s\"", (int)n, text, cut ? "..." : "");
    for (char *c = shown; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    }
}

static char *allowed_text(struct reader *reader, const struct config_key *key)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *file = open_memstream(&text, &n_bytes);

    if (file) {
        config_value_allowed(file, key);
        fclose(file);
    }
    if (!text)
        reader->r = -ENOMEM;
    return text;
}

/* Return: the nearest allowed choice; NULL if no choice is near, or if the text is a refused choice. */
static const char *nearest_choice(const struct config_key *key, const char *text)
{
    const char *nearest = NULL;
    unsigned least = 0;

    for (const struct config_choice *choice = key->choices; key->type == CONFIG_CHOICE && choice->name; choice++) {
        unsigned distance = config_distance(text, choice->name);

        if (choice->refused && distance == 0)
            return NULL;
        if (choice->refused || choice->spelling || !config_is_near(text, choice->name))
            continue;
        if (!nearest || distance < least) {
            nearest = choice->name;
            least = distance;
        }
    }
    return nearest;
}

/* Reports "VALUE is not ...; allowed: ...; nearest: ..." at the value, or at the key if the value has no place. */
static void refuse_value(struct reader *reader, const struct pair *pair, struct fy_node *at, const char *why)
{
    _cleanup_free_ char *allowed = allowed_text(reader, pair->key);
    const char *text = at ? yaml_text(at) : NULL;
    const char *nearest = text ? nearest_choice(pair->key, text) : NULL;
    struct config_spot spot = at ? yaml_spot(reader->yaml, at) : (struct config_spot){0};
    char shown[READER_SHOWN_BYTES + 8];

    pair->row->bad = true;
    reader_quote(shown, sizeof(shown), text);
    if (at && !fy_node_is_scalar(at))
        spot = pair->row->spot;
    config_problems_add(reader->problems, reader->text, spot.line > 0 ? &spot : &pair->row->spot, pair->key->path,
                        "%s %s; allowed: %s%s%s", shown, why, allowed ? allowed : "", nearest ? "; nearest: " : "",
                        nearest ? nearest : "");
}

/* Refuses aliases and tags. An alias is not needed, and the table has the type of each value. */
static bool is_plain_yaml(struct reader *reader, struct fy_node *node, const char *path)
{
    struct config_spot spot;
    const char *what = NULL;

    if (node && fy_node_is_alias(node))
        what = "an alias (*name)";
    else if (node && fy_node_get_tag_token(node))
        what = "a tag (!name)";
    if (!what)
        return true;
    spot = yaml_spot(reader->yaml, node);
    config_problems_add(reader->problems, reader->text, &spot, path, "%s is not supported; allowed: the value itself",
                        what);
    return false;
}

static void read_scalar(struct reader *reader, const struct pair *pair, struct fy_node *node)
{
    struct config_value value = {.text = yaml_text(node), .quoted = yaml_is_quoted(node)};
    const char *why;
    int r;

    if (!is_plain_yaml(reader, node, pair->key->path)) {
        pair->row->bad = true;
        return;
    }
    if (!value.text) {
        refuse_value(reader, pair, node, fy_node_is_scalar(node) ? "holds a NUL" : "is not a single value");
        return;
    }
    r = config_value_store(pair->key, &value, pair->base, &why);
    if (r < 0)
        reader->r = r;
    else if (r > 0)
        refuse_value(reader, pair, node, why);
}

/*
 * Reads the items of a list into an array, as values of this type. A problem of one item marks the whole list as bad.
 */
static void read_items(struct reader *reader, const struct pair *list, enum config_type type, size_t item_bytes,
                       void *items)
{
    struct config_key key = *list->key;
    struct pair item = {.key = &key, .row = list->row, .base = items};
    struct fy_node *node;
    void *iter = NULL;

    key.type = type;
    key.offset = 0;
    key.size = item_bytes;
    while (reader->problems->n_dropped == 0 && (node = fy_node_sequence_iterate(list->value, &iter))) {
        read_scalar(reader, &item, node);
        key.offset += item_bytes;
    }
}

static void read_names(struct reader *reader, const struct pair *pair, size_t n_items)
{
    struct config_names *names = (void *)((char *)pair->base + pair->key->offset);

    names->items = calloc(n_items + 1, sizeof(*names->items));
    if (!names->items) {
        reader->r = -ENOMEM;
        return;
    }
    names->n_items = n_items;
    read_items(reader, pair, pair->key->type == CONFIG_NAMES ? CONFIG_NAME : CONFIG_PATTERN, sizeof(*names->items),
               names->items);
}

/* Reads a list of numbers. A single number needs no brackets; its node is then no sequence. */
static void read_numbers(struct reader *reader, const struct pair *pair, size_t n_items)
{
    struct schedule_numbers *numbers = (void *)((char *)pair->base + pair->key->offset);
    struct config_key key = *pair->key;
    struct pair single = *pair;

    numbers->items = calloc(n_items, sizeof(*numbers->items));
    if (!numbers->items) {
        reader->r = -ENOMEM;
        return;
    }
    numbers->n_items = n_items;
    if (fy_node_is_sequence(pair->value)) {
        read_items(reader, pair, CONFIG_REAL, sizeof(double), numbers->items);
        return;
    }
    key.type = CONFIG_REAL;
    key.offset = 0;
    single.key = &key;
    single.base = numbers->items;
    read_scalar(reader, &single, pair->value);
}

/* Reports the missing required keys of a section. */
void reader_refuse_missing(struct reader *reader, const char *prefix, const struct config_spot *spot)
{
    for (size_t i = 0; i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];
        _cleanup_free_ char *allowed = NULL;

        if (!(key->flags & CONFIG_REQUIRED) || reader->rows[i].seen || !config_key_applies(key, reader->active) ||
            strncmp(key->path, prefix, strlen(prefix)) != 0)
            continue;
        allowed = allowed_text(reader, key);
        reader->rows[i].bad = true;
        config_problems_add(reader->problems, reader->text, spot, key->path, "is missing; needed: %s",
                            allowed ? allowed : "");
    }
}

static bool lacks_keys(const struct reader *reader, const char *prefix)
{
    for (size_t i = 0; i < reader->n_keys; i++) {
        if ((reader->keys[i].flags & CONFIG_REQUIRED) && !reader->rows[i].seen &&
            strncmp(reader->keys[i].path, prefix, strlen(prefix)) == 0)
            return true;
    }
    return false;
}

static void read_node(struct reader *reader, const struct pair *list, struct fy_node *item, struct config_node *node)
{
    static const char prefix[] = "world.nodes[].";
    struct config_spot spot;

    if (!fy_node_is_mapping(item)) {
        refuse_value(reader, list, item, "is not a node");
        return;
    }
    /* Resets the rows, because the keys of all nodes use the same rows, one node after another. */
    for (size_t i = 0; i < reader->n_keys; i++) {
        if (strncmp(reader->keys[i].path, prefix, strlen(prefix)) == 0)
            reader->rows[i] = (struct config_row){0};
    }
    reader_read_mapping(reader, item, "world.nodes[]", node);
    if (!lacks_keys(reader, prefix))
        return;
    spot = yaml_spot(reader->yaml, item);
    reader_refuse_missing(reader, prefix, spot.line > 0 ? &spot : &list->row->spot);
}

static void read_nodes(struct reader *reader, const struct pair *pair, size_t n_items)
{
    struct config_nodes *nodes = (void *)((char *)pair->base + pair->key->offset);
    size_t n_problems = reader->problems->n_errors;
    struct fy_node *item;
    void *iter = NULL;

    nodes->items = calloc(n_items, sizeof(*nodes->items));
    if (!nodes->items) {
        reader->r = -ENOMEM;
        return;
    }
    while (reader->problems->n_dropped == 0 && (item = fy_node_sequence_iterate(pair->value, &iter))) {
        assert(nodes->n_items < n_items);
        read_node(reader, pair, item, &nodes->items[nodes->n_items++]);
    }
    if (reader->problems->n_errors > n_problems)
        pair->row->bad = true;
}

static void read_list(struct reader *reader, const struct pair *pair)
{
    bool is_list = fy_node_is_sequence(pair->value);
    int n_items = is_list ? fy_node_sequence_item_count(pair->value) : 1;

    if (!is_list && (pair->key->type != CONFIG_NUMBERS || !fy_node_is_scalar(pair->value)))
        refuse_value(reader, pair, pair->value, "is not a list");
    else if (pair->key->type == CONFIG_PAIR && n_items != 2)
        refuse_value(reader, pair, pair->value, "must have two items");
    else if (pair->key->type == CONFIG_TRIPLE && n_items != 3)
        refuse_value(reader, pair, pair->value, "must have three items");
    else if (pair->key->type == CONFIG_PAIR || pair->key->type == CONFIG_TRIPLE)
        read_items(reader, pair, CONFIG_REAL, sizeof(double), (char *)pair->base + pair->key->offset);
    else if ((size_t)n_items > pair->key->max_items)
        refuse_value(reader, pair, pair->value, "has too many items");
    else if (pair->key->type == CONFIG_NAMES || pair->key->type == CONFIG_PATTERNS)
        read_names(reader, pair, (size_t)n_items);
    else if (n_items == 0)
        refuse_value(reader, pair, pair->value, "is empty");
    else if (pair->key->type == CONFIG_NUMBERS)
        read_numbers(reader, pair, (size_t)n_items);
    else
        read_nodes(reader, pair, (size_t)n_items);
}

/* Is "auto" usual for the key? Then the program's own setting is used, or else the default. */
static bool is_auto_by_nature(const struct config_key *key)
{
    return strncmp(key->path, "optimizer.", 10) == 0 || strncmp(key->path, "zero_optimization.", 18) == 0;
}

/* Does the program's own value, if it has one, replace the key's? The program clips, or sends lr with its step. */
static bool is_overruled(const struct config_key *key)
{
    return strcmp(key->path, "gradient_clipping") == 0 || strncmp(key->path, "scheduler.", 10) == 0;
}

/*
 * Leaves the schedule to the program. Only Hugging Face's Trainer and accelerate know the length of a run, and both
 * have a schedule of their own.
 */
static void leave_schedule(struct reader *reader, const struct pair *pair)
{
    reader->has_no_schedule = true;
    config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                         "nothing fills in \"auto\" here, so the file has no schedule: the program's own counts, as a "
                         "Trainer's does; without one the learning rate stays as it is");
}

/* Reads an "auto" that Hugging Face's integration has not replaced. It means the default, as for DeepSpeed. */
static void read_auto(struct reader *reader, const struct pair *pair)
{
    if (strcmp(pair->key->path, "scheduler.params.total_num_steps") == 0) {
        leave_schedule(reader, pair);
        return;
    }
    if (pair->key->flags & CONFIG_REQUIRED) {
        refuse_value(reader, pair, pair->value, "is not filled in here, and there is no default");
        return;
    }
    if (is_auto_by_nature(pair->key))
        return;
    config_problems_note(
        reader->problems, reader->text, &pair->row->spot, pair->key->path, "nothing fills in \"auto\" here; %s%s%s",
        is_overruled(pair->key) ? "the program's value counts if it sets one, else the default" : "the default is used",
        pair->key->def ? ", " : "", pair->key->def ? pair->key->def : "");
}

/* Reads a size that may be 0. For DeepSpeed 0 means "at once": no element waits for others. */
static void read_at_once(struct reader *reader, const struct pair *pair)
{
    const uint64_t *elems = (const void *)((char *)pair->base + pair->key->offset);

    read_scalar(reader, pair, pair->value);
    if (pair->row->bad || *elems > 0)
        return;
    pair->row->given = false;
    config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                         "0 is \"at once\" for DeepSpeed; no result depends on it, and the default is used, %s",
                         pair->key->def);
}

/*
 * Reads a section. Also reads DeepSpeed's old form of zero_optimization: true is stage 1, and so is false (stage 0 has
 * the same numbers).
 */
static void read_section(struct reader *reader, const struct pair *pair)
{
    const struct config_key *stage = config_table_lookup("zero_optimization.stage", reader->active);
    const char *text = yaml_text(pair->value);

    if (fy_node_is_mapping(pair->value)) {
        reader_read_mapping(reader, pair->value, pair->key->path, pair->base);
    } else if (strcmp(pair->key->path, "zero_optimization") == 0 && text &&
               (strcasecmp(text, "true") == 0 || strcasecmp(text, "false") == 0)) {
        assert(stage);
        reader->config->zero.stage = 1;
        reader->rows[stage - reader->keys] = *pair->row;
        config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                             "is of DeepSpeed's old form, and runs as {stage: 1}");
    } else {
        refuse_value(reader, pair, pair->value, "is not a section");
    }
}

void reader_read_value(struct reader *reader, const struct pair *pair)
{
    const struct config_key *key = pair->key;
    const char *text = yaml_text(pair->value);

    if (yaml_is_null(pair->value)) {
        /* A section may be empty, for example because all its keys are commented out. */
        if (!(key->flags & CONFIG_NULLABLE) && key->type != CONFIG_SECTION)
            refuse_value(reader, pair, NULL, "is empty");
        return;
    }
    if ((key->flags & CONFIG_DEEPSPEED) && text && strcmp(text, "auto") == 0) {
        read_auto(reader, pair);
        return;
    }
    pair->row->given = true;
    switch (key->type) {
    case CONFIG_SECTION:
        if (is_plain_yaml(reader, pair->value, key->path))
            read_section(reader, pair);
        else
            pair->row->bad = true;
        break;
    case CONFIG_NAMES:
    case CONFIG_PATTERNS:
    case CONFIG_NUMBERS:
    case CONFIG_PAIR:
    case CONFIG_TRIPLE:
    case CONFIG_NODES:
        if (is_plain_yaml(reader, pair->value, key->path))
            read_list(reader, pair);
        else
            pair->row->bad = true;
        break;
    default:
        if (key->flags & CONFIG_AT_ONCE)
            read_at_once(reader, pair);
        else
            read_scalar(reader, pair, pair->value);
    }
}
