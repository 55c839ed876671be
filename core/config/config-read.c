/* SPDX-License-Identifier: Apache-2.0 */

/* The reader walks a YAML document by the table of keys, stores its values, and reports what is wrong with it. */

#include "core/config/config-read.h"

#include "core/base/base.h"
#include "core/base/utf8.h"
#include "core/config/config-check.h"
#include "core/config/config-foreign.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"
#include "core/config/config-yaml.h"
#include "core/config/config.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

enum {
    ONLY_OPTIMIZERS = 0x00ff,
    ONLY_SCHEDULES = 0xff00,
    SHOWN_BYTES = 60, /* of a value or key in a message */
};

/* One reading of one text. */
struct reader {
    struct config *config;
    const struct config_text *text;
    struct config_problems *problems;
    struct yaml *yaml;
    const struct config_key *keys;
    size_t n_keys;
    struct config_row *rows; /* one per key */
    unsigned active;         /* see config_key_applies */
    bool optimizer_unknown;  /* there is one, of a type that is not known: all keys of optimizers apply */
    bool scheduler_unknown;  /* likewise */
    bool is_foreign;         /* the file is DeepSpeed's or accelerate's */
    bool has_no_schedule;    /* the scheduler is left to the program */
    const struct config_given *given;
    int r;                   /* sticky: -ENOMEM */
};

/* A pair of the file that has a row in the table. */
struct pair {
    const struct config_key *key;
    struct config_row *row;
    struct fy_node *value;
    void *base; /* the struct whose field it fills */
};

DEFINE_CLEANUP(struct yaml *, yaml_free);

static void read_mapping(struct reader *reader, struct fy_node *mapping, const char *section, void *base);
static void read_pair(struct reader *reader, struct fy_node_pair *fy_pair, const char *section, void *base);

/* A text of the file as it may stand in a message: short, and nothing that a terminal would act upon. */
static void quote(char *shown, size_t n_shown, const char *text)
{
    size_t n = text ? strnlen(text, SHOWN_BYTES + 1) : 0;
    bool cut = n > SHOWN_BYTES;

    if (!text) {
        snprintf(shown, n_shown, "this value");
        return;
    }
    for (n = MIN(n, (size_t)SHOWN_BYTES); cut && n > 0 && !utf8_begins(text[n]);)
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

/* NULL: none is near, or the text is known, and refused. */
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

/* "VALUE is not ...; allowed: ...; nearest: ..." at the value, or at the key where the value is nowhere. */
static void refuse_value(struct reader *reader, const struct pair *pair, struct fy_node *at, const char *why)
{
    _cleanup_free_ char *allowed = allowed_text(reader, pair->key);
    const char *text = at ? yaml_text(at) : NULL;
    const char *nearest = text ? nearest_choice(pair->key, text) : NULL;
    struct config_spot spot = at ? yaml_spot(reader->yaml, at) : (struct config_spot){0};
    char shown[SHOWN_BYTES + 8];

    pair->row->bad = true;
    quote(shown, sizeof(shown), text);
    if (at && !fy_node_is_scalar(at))
        spot = pair->row->spot;
    config_problems_add(reader->problems, reader->text, spot.line > 0 ? &spot : &pair->row->spot, pair->key->path,
                        "%s %s; allowed: %s%s%s", shown, why, allowed ? allowed : "", nearest ? "; nearest: " : "",
                        nearest ? nearest : "");
}

/* Aliases and tags have no place here: each value stands where it is used, its type is the table's. */
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

/* Reads n items into an array of items of key's type; what is wrong with one is said of the whole list. */
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

/* Also one number without brackets, whose node is then no sequence. */
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

/* Keys that must be there, below one section, and are not. */
static void refuse_missing(struct reader *reader, const char *prefix, const struct config_spot *spot)
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
    /* The rows of a node's keys are used for one node after another. */
    for (size_t i = 0; i < reader->n_keys; i++) {
        if (strncmp(reader->keys[i].path, prefix, strlen(prefix)) == 0)
            reader->rows[i] = (struct config_row){0};
    }
    read_mapping(reader, item, "world.nodes[]", node);
    if (!lacks_keys(reader, prefix))
        return;
    spot = yaml_spot(reader->yaml, item);
    refuse_missing(reader, prefix, spot.line > 0 ? &spot : &list->row->spot);
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
    while (reader->problems->n_dropped == 0 && (item = fy_node_sequence_iterate(pair->value, &iter)))
        read_node(reader, pair, item, &nodes->items[nodes->n_items++]);
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
        refuse_value(reader, pair, pair->value, "has not two items");
    else if (pair->key->type == CONFIG_TRIPLE && n_items != 3)
        refuse_value(reader, pair, pair->value, "has not three items");
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

/* Where "auto" asks for nothing: the program's own settings count, or the default serves. */
static bool is_auto_by_nature(const struct config_key *key)
{
    return strncmp(key->path, "optimizer.", 10) == 0 || strncmp(key->path, "zero_optimization.", 18) == 0;
}

/* Where the program counts if it has a value: it clips, or sends lr with its step. */
static bool is_overruled(const struct config_key *key)
{
    return strcmp(key->path, "gradient_clipping") == 0 || strncmp(key->path, "scheduler.", 10) == 0;
}

/* Only Hugging Face's Trainer and accelerate know the length of a run; both have a schedule of their own, too. */
static void leave_schedule(struct reader *reader, const struct pair *pair)
{
    reader->has_no_schedule = true;
    config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                         "nothing fills in \"auto\" here, so the file has no schedule: the program's own counts, as a "
                         "Trainer's does; without one the learning rate stays as it is");
}

/* Hugging Face's integration fills "auto" in; one that is left over means the default, as for DeepSpeed. */
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

/* DeepSpeed's 0 may be "at once": no element waits for others. */
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

static void read_value(struct reader *reader, const struct pair *pair)
{
    const struct config_key *key = pair->key;
    const char *text = yaml_text(pair->value);

    if (yaml_is_null(pair->value)) {
        /* A section whose keys are all commented out is no mistake. */
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
        if (!is_plain_yaml(reader, pair->value, key->path))
            pair->row->bad = true;
        else if (fy_node_is_mapping(pair->value))
            read_mapping(reader, pair->value, key->path, pair->base);
        else
            refuse_value(reader, pair, pair->value, "is not a section");
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

/* Keys below a key that does nothing: those of the table are read. Return: how many there are. */
static size_t read_known(struct reader *reader, const struct pair *parent)
{
    struct fy_node_pair *fy_pair;
    void *iter = NULL;
    size_t n_known = 0;

    while (fy_node_is_mapping(parent->value) && (fy_pair = fy_node_mapping_iterate(parent->value, &iter))) {
        const char *name = fy_node_pair_key(fy_pair) ? yaml_text(fy_node_pair_key(fy_pair)) : NULL;

        if (!name || !config_table_find(parent->key->path, name, reader->active))
            continue;
        read_pair(reader, fy_pair, parent->key->path, parent->base);
        n_known++;
    }
    return n_known;
}

/* Is it one of the values that change nothing, or a list of them? */
static bool is_accepted(const char *accepted, struct fy_node *value)
{
    const char *text = yaml_text(value);
    struct fy_node *item;
    void *iter = NULL;

    if (yaml_is_null(value) || (text && (strcmp(text, "auto") == 0 || foreign_is_among(accepted, text))))
        return true;
    while (fy_node_is_sequence(value) && (item = fy_node_sequence_iterate(value, &iter))) {
        text = yaml_text(item);
        if (!text || !foreign_is_among(accepted, text))
            return false;
    }
    return fy_node_is_sequence(value);
}

static void read_inert(struct reader *reader, const struct pair *pair)
{
    const char *text = yaml_text(pair->value), *accepted = pair->key->accepted, *usual = pair->key->usual;

    if (accepted && !is_accepted(accepted, pair->value))
        config_problems_add(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                            "is refused: %s Allowed: %s", pair->key->sentence, accepted);
    else if (!accepted && !(usual && text && foreign_is_among(usual, text)) && !foreign_is_off(pair->value))
        config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                             "has no effect here: %s", pair->key->sentence);
    read_known(reader, pair);
}

static void read_refused(struct reader *reader, const struct pair *pair)
{
    if (!foreign_is_off(pair->value) && read_known(reader, pair) == 0)
        config_problems_add(reader->problems, reader->text, &pair->row->spot, pair->key->path, "is refused: %s",
                            pair->key->sentence);
}

/* The keys that a section has, those that DeepSpeed alone knows left out. */
static char *section_keys(struct reader *reader, const char *section)
{
    char *text = NULL;
    size_t n_bytes, n = 0;
    FILE *file = open_memstream(&text, &n_bytes);

    for (size_t i = 0; file && i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];
        const char *leaf = config_key_leaf(key);

        if (key->kind == CONFIG_OURS && config_table_find(section, leaf, reader->active) == key)
            fprintf(file, "%s%s", n++ > 0 ? ", " : "", leaf);
    }
    if (file)
        fclose(file);
    if (!text)
        reader->r = -ENOMEM;
    return text;
}

/* The optimizer or scheduler that was chosen, for a section of its keys. */
static const char *active_type(const struct reader *reader, const char *section)
{
    bool is_optimizer = strncmp(section, "optimizer", strlen("optimizer")) == 0;
    const struct config_key *key = config_table_lookup(is_optimizer ? "optimizer.type" : "scheduler.type", UINT_MAX);

    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if (reader->active &
            (is_optimizer ? CONFIG_ONLY_OPTIMIZER(choice->value) : CONFIG_ONLY_SCHEDULE(choice->value)))
            return choice->name;
    }
    return "this type";
}

/* Nobody knows the keys of a type that is not known. path: of the section, or of a key in it. */
static bool is_of_unknown_type(const struct reader *reader, const char *path)
{
    return (reader->optimizer_unknown && strncmp(path, "optimizer.params", 16) == 0) ||
           (reader->scheduler_unknown && strncmp(path, "scheduler.params", 16) == 0);
}

/*
 * A key that is not in the table, or is, but for another optimizer or scheduler. DeepSpeed, too, reads over what it
 * does not know at the top of a file, where programs have settings of their own.
 */
static void refuse_key(struct reader *reader, const char *section, const char *name, struct fy_node *at)
{
    bool elsewhere = config_table_find(section, name, UINT_MAX) != NULL;
    const struct config_key *nearest = elsewhere ? NULL : config_table_nearest(section, name, reader->active);
    bool is_settings = reader->is_foreign && !*section && !(nearest && !strchr(nearest->path, '.'));
    _cleanup_free_ char *keys = section_keys(reader, section);
    struct config_spot spot = yaml_spot(reader->yaml, at);
    char path[SHOWN_BYTES + 80], shown[SHOWN_BYTES + 8];

    quote(shown, sizeof(shown), name);
    shown[strlen(shown) - 1] = '\0';
    snprintf(path, sizeof(path), "%s%s%s", section, *section ? "." : "", shown + 1);
    if (is_settings)
        config_problems_note(reader->problems, reader->text, &spot, path,
                             "unknown key: DeepSpeed ignores it, and so does zerod%s%s",
                             nearest ? "; nearest valid key: " : "", nearest ? nearest->path : "");
    else
        config_problems_add(reader->problems, reader->text, &spot, path, "%s%s; allowed here: %s%s%s",
                            elsewhere ? "is not a key of " : "unknown key",
                            elsewhere ? active_type(reader, section) : "", keys ? keys : "",
                            nearest ? "; nearest valid key: " : "", nearest ? nearest->path : "");
}

/* Of accelerate's number of ranks. Return: whether something else says how many there are: -n, or the section world. */
static bool is_overruled_ranks(struct reader *reader, const struct pair *pair)
{
    const char *text = yaml_text(pair->value);
    struct config_spot spot;
    char ranks[16];

    if (reader->given->ranks == 0)
        return yaml_value_of(yaml_root(reader->yaml), "world") != NULL;
    snprintf(ranks, sizeof(ranks), "%u", reader->given->ranks);
    spot = yaml_spot(reader->yaml, pair->value);
    if (text && strcmp(text, ranks) != 0)
        config_problems_note(reader->problems, reader->text, &spot, "num_processes",
                             "the command line says %s, which counts", ranks);
    return true;
}

/* Likewise, if nothing overrules it. Return: whether it is that of several machines, which is refused. */
static bool is_of_machines(struct reader *reader, const struct pair *pair)
{
    const char *n_machines = yaml_text(yaml_value_of(yaml_root(reader->yaml), "num_machines"));
    struct config_spot spot = yaml_spot(reader->yaml, pair->value);
    char shown[SHOWN_BYTES + 8];

    if (!n_machines || foreign_is_same(n_machines, "1"))
        return false;
    quote(shown, sizeof(shown), n_machines);
    config_problems_add(reader->problems, reader->text, &spot, "num_processes",
                        "counts the ranks of all machines, and num_machines is %s; needed: zerodrun -n, the ranks of "
                        "each, and --nodes, or world.nodes",
                        shown);
    return true;
}

/* An alias leads to its key. Return: false when the pair is not to be read. */
static bool find_key(struct reader *reader, const char *section, const char *name, struct pair *pair)
{
    const char *text = pair->value ? yaml_text(pair->value) : NULL;

    pair->key = config_table_find(section, name, reader->active);
    while (pair->key && pair->key->kind == CONFIG_ALIAS && pair->key->same) {
        if (yaml_is_null(pair->value) || (text && strcmp(text, "none") == 0)) /* accelerate's null */
            return false;
        if (strcmp(pair->key->path, "num_processes") == 0 &&
            (is_overruled_ranks(reader, pair) || is_of_machines(reader, pair)))
            return false;
        pair->key = config_table_lookup(pair->key->same, reader->active);
    }
    return true;
}

/* Finds the row of a pair's key and notes where it stands. Return: false when the pair is not to be read. */
static bool find_row(struct reader *reader, const char *section, struct fy_node *key_node, struct pair *pair)
{
    const char *name = fy_node_is_alias(key_node) ? NULL : yaml_text(key_node);
    struct config_spot spot = {0};

    if (!name || fy_node_get_tag_token(key_node)) {
        spot = yaml_spot(reader->yaml, key_node);
        config_problems_add(reader->problems, reader->text, &spot, *section ? section : NULL,
                            "a key is a plain word; allowed: key: value");
        return false;
    }
    if (foreign_is_comment(name) || !find_key(reader, section, name, pair))
        return false;
    if (!pair->key) {
        if (!is_of_unknown_type(reader, section))
            refuse_key(reader, section, name, key_node);
        return false;
    }
    pair->row = &reader->rows[pair->key - reader->keys];
    if (pair->row->seen) {
        spot = yaml_spot(reader->yaml, key_node);
        config_problems_add(reader->problems, reader->text, &spot, pair->key->path,
                            "is given twice, first in line %u; allowed: once", pair->row->spot.line);
        return false;
    }
    pair->row->seen = true;
    if (!yaml_is_null(pair->value) && fy_node_is_scalar(pair->value))
        spot = yaml_spot(reader->yaml, pair->value);
    pair->row->spot = spot.line > 0 ? spot : yaml_spot(reader->yaml, key_node);
    return true;
}

static void read_pair(struct reader *reader, struct fy_node_pair *fy_pair, const char *section, void *base)
{
    struct pair pair = {.value = fy_node_pair_value(fy_pair), .base = base};
    struct fy_node *key_node = fy_node_pair_key(fy_pair);

    if (!key_node) {
        config_problems_add(reader->problems, reader->text, &(struct config_spot){0}, *section ? section : NULL,
                            "a value has no key; allowed: key: value");
        return;
    }
    if (!find_row(reader, section, key_node, &pair))
        return;
    if (pair.key->kind == CONFIG_ALIAS && pair.key->type != CONFIG_SECTION)
        return; /* deepspeed_config_file, which config_load() has followed */
    if (pair.key->kind == CONFIG_INERT)
        read_inert(reader, &pair);
    else if (pair.key->kind == CONFIG_REFUSED)
        read_refused(reader, &pair);
    else
        read_value(reader, &pair);
}

static void read_mapping(struct reader *reader, struct fy_node *mapping, const char *section, void *base)
{
    struct fy_node_pair *fy_pair;
    void *iter = NULL;

    while ((fy_pair = fy_node_mapping_iterate(mapping, &iter)) && reader->problems->n_dropped == 0)
        read_pair(reader, fy_pair, section, base);
}

/* The value of section.type among the choices of its row. Return: false when it is none of them. */
static bool choose_type(struct fy_node *section, const char *path, int *type)
{
    const struct config_key *key = config_table_lookup(path, UINT_MAX);
    struct fy_node *node = yaml_value_of(section, "type");
    const char *text = node ? yaml_text(node) : NULL;

    for (const struct config_choice *choice = key->choices; text && choice->name; choice++) {
        if (!choice->refused && strcasecmp(choice->name, text) == 0) {
            *type = choice->value;
            return true;
        }
    }
    return false;
}

/* Which optimizer and scheduler there are decides which of their keys apply: so these two are read first. */
static void choose_active(struct reader *reader)
{
    struct fy_node *optimizer = yaml_value_of(yaml_root(reader->yaml), "optimizer");
    struct fy_node *scheduler = yaml_value_of(yaml_root(reader->yaml), "scheduler");
    int type = OPTIMIZER_ADAMW;

    reader->optimizer_unknown = yaml_value_of(optimizer, "type") && !choose_type(optimizer, "optimizer.type", &type);
    reader->active = reader->optimizer_unknown ? ONLY_OPTIMIZERS : CONFIG_ONLY_OPTIMIZER(type);

    if (yaml_is_null(scheduler))
        return;
    reader->scheduler_unknown = !choose_type(scheduler, "scheduler.type", &type);
    reader->active |= reader->scheduler_unknown ? ONLY_SCHEDULES : CONFIG_ONLY_SCHEDULE(type);
}

/* The innermost section of a path that the file has, or NULL. */
static const struct config_row *section_row(const struct reader *reader, const char *path)
{
    const struct config_row *row = NULL;

    for (size_t i = 0; i < reader->n_keys; i++) {
        size_t n = strlen(reader->keys[i].path);

        if (reader->keys[i].type == CONFIG_SECTION && reader->rows[i].seen &&
            strncmp(reader->keys[i].path, path, n) == 0 && path[n] == '.')
            row = &reader->rows[i];
    }
    return row;
}

static void refuse_all_missing(struct reader *reader)
{
    for (size_t i = 0; i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];
        const struct config_row *section = section_row(reader, key->path);

        /* A node's keys were looked at with it; what an unknown scheduler needs, nobody knows. */
        if (!(key->flags & CONFIG_REQUIRED) || strstr(key->path, "[]") || (section && section->bad) ||
            (reader->scheduler_unknown && strncmp(key->path, "scheduler.params.", 17) == 0))
            continue;
        refuse_missing(reader, key->path, section ? &section->spot : &(struct config_spot){0});
    }
}

/* The table's text goes the way of a value from a file. One that does not read is our mistake. */
static void read_default(struct reader *reader, size_t i)
{
    const struct config_key *key = &reader->keys[i];
    struct config_key item = *key;
    double *reals = (void *)((char *)reader->config + key->offset);
    struct schedule_numbers *numbers = (void *)reals;
    struct config_value value = {.text = key->def};
    void *base = reader->config;
    const char *why = NULL;
    int r;

    if (key->type == CONFIG_PAIR || key->type == CONFIG_TRIPLE) {
        int n_reals = key->type == CONFIG_PAIR ? 2 : 3;

        r = sscanf(key->def, n_reals == 2 ? "[%lf, %lf]" : "[%lf, %lf, %lf]", &reals[0], &reals[1], &reals[2]);
        r = r == n_reals ? 0 : CONFIG_VALUE_E_BAD;
        assert(r == 0);
        return;
    }
    if (key->type == CONFIG_NUMBERS) {
        config_value_deinit(key, reader->config);
        numbers->items = calloc(1, sizeof(double));
        if (!numbers->items) {
            reader->r = -ENOMEM;
            return;
        }
        numbers->n_items = 1;
        item.type = CONFIG_REAL;
        item.offset = 0;
        base = numbers->items;
    }
    r = config_value_store(&item, &value, base, &why);
    assert(r <= 0);
    if (r < 0)
        reader->r = r;
}

static void read_defaults(struct reader *reader)
{
    for (size_t i = 0; i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];

        if (key->kind == CONFIG_OURS && key->def && !reader->rows[i].given && config_key_applies(key, reader->active))
            read_default(reader, i);
    }
}

static int keep_origins(struct reader *reader)
{
    struct config *config = reader->config;

    config->file = strdup(reader->text->name);
    config->origins = calloc(reader->n_keys, sizeof(*config->origins));
    if (!config->file || !config->origins)
        return -ENOMEM;
    for (size_t i = 0; i < reader->n_keys; i++) {
        config->origins[i] = (struct config_origin){
            .line = reader->rows[i].spot.line,
            .column = reader->rows[i].spot.column,
            .given = reader->rows[i].given,
        };
    }
    return 0;
}

/* Stores what the command line gives for a key, if the file has no value there. Line 0 is the command line. */
static void read_given(struct reader *reader, const char *path, const char *text)
{
    const struct config_key *key = config_table_lookup(path, reader->active);
    struct config_row *row = &reader->rows[key - reader->keys];
    const struct config_row *section = section_row(reader, path);
    struct config_value value = {.text = text};
    const char *why = "";
    int r;

    if (row->seen || (section && section->bad))
        return;
    row->seen = row->given = true;
    r = config_value_store(key, &value, reader->config, &why);
    if (r < 0)
        reader->r = r;
    if (r <= 0)
        return;
    row->bad = true;
    config_problems_add(reader->problems, reader->text, &row->spot, path, "of the command line %s: %s", why, text);
}

static void read_all_given(struct reader *reader)
{
    const struct config_given *given = reader->given;
    char ranks[16];

    snprintf(ranks, sizeof(ranks), "%u", given->ranks > 0 ? given->ranks : given->usual_ranks);
    if (given->socket)
        read_given(reader, "listen.socket", given->socket);
    if (given->ranks > 0 || given->usual_ranks > 0)
        read_given(reader, "world.size", ranks);
}

/* Would DeepSpeed read the file? One of accelerate may be for torch alone. */
static bool is_deepspeeds(const struct reader *reader)
{
    const char *type = yaml_text(yaml_value_of(yaml_root(reader->yaml), "distributed_type"));

    return reader->is_foreign && (!type || strcmp(type, "DEEPSPEED") == 0);
}

/* Keys that a file of DeepSpeed leaves to DeepSpeed's defaults, where those would train something else. */
static void note_defaults(struct reader *reader)
{
    for (size_t i = 0; is_deepspeeds(reader) && i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];
        const struct config_row *section;

        if (!key->elsewhere || reader->rows[i].seen || !config_key_applies(key, reader->active))
            continue;
        section = section_row(reader, key->path);
        if (strchr(key->path, '.') && (!section || !section->given || is_of_unknown_type(reader, key->path)))
            continue;
        config_problems_note(reader->problems, reader->text, section ? &section->spot : &(struct config_spot){0},
                             key->path, "is not given: the default is %s, DeepSpeed's is %s",
                             key->def ? key->def : "each group's own lr", key->elsewhere);
    }
}

/* Notes that a value is served as another one, which trains the same. */
static void note_served(struct reader *reader, const char *path, const char *text)
{
    const struct config_row *row = &reader->rows[config_table_lookup(path, reader->active) - reader->keys];

    if (!row->bad)
        config_problems_note(reader->problems, reader->text, &row->spot, path, "%s", text);
}

/* Puts the values that are used in the place of those that are only taken. */
static void settle(struct reader *reader)
{
    struct config *config = reader->config;

    if (config->zero.stage == 0) {
        note_served(reader, "zero_optimization.stage",
                    "0, nothing is partitioned: the daemon holds the state for all ranks, as in stage 1, which has the "
                    "same numbers");
        config->zero.stage = 1;
    }
    if (config->communication_data_type != DTYPE_F32 && config->world.nodes.n_items <= 1) {
        note_served(reader, "communication_data_type",
                    "is for gradients between nodes, and this job has one: nothing is rounded");
        config->communication_data_type = DTYPE_F32;
    }
    if (reader->has_no_schedule)
        config->scheduler.type = SCHEDULE_NONE;
}

static int reader_result(const struct reader *reader, size_t n_errors)
{
    if (reader->r < 0 || reader->problems->r < 0)
        return -ENOMEM;
    return reader->problems->n_errors > n_errors ? CONFIG_E_INVALID : 0;
}

static int read_text(struct reader *reader, const struct config_source *source)
{
    size_t n_errors = reader->problems->n_errors, n_items = reader->problems->n_items;
    int r;

    choose_active(reader);
    read_mapping(reader, yaml_root(reader->yaml), "", reader->config);
    read_all_given(reader);
    refuse_all_missing(reader);
    read_defaults(reader);
    note_defaults(reader);
    settle(reader);
    config_check(&(struct config_check){
        .config = reader->config,
        .rows = reader->rows,
        .active = reader->active,
        .build = source->build ? source->build : config_build_own(),
        .text = reader->text,
        .problems = reader->problems,
    });
    config_problems_sort(reader->problems, n_items);
    if (reader->config->zero.reduce_bucket_size == 0)
        reader->config->zero.reduce_bucket_size = config_usual_bucket_elems(reader->config);
    r = reader_result(reader, n_errors);
    return r ? r : keep_origins(reader);
}

/* accelerate refuses settings beside the name of the file that has them, too. */
static int read_cover_text(struct reader *reader)
{
    size_t n_errors = reader->problems->n_errors, n_items = reader->problems->n_items;

    choose_active(reader);
    read_mapping(reader, yaml_root(reader->yaml), "", reader->config);
    for (size_t i = 0; i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];

        if (reader->rows[i].given && key->kind == CONFIG_OURS && key->type != CONFIG_SECTION &&
            strcmp(key->path, "world.size") != 0)
            config_problems_add(reader->problems, reader->text, &reader->rows[i].spot, key->path,
                                "stands beside deepspeed_config_file, which is read instead; allowed: in that file");
    }
    config_problems_sort(reader->problems, n_items);
    return reader_result(reader, n_errors);
}

static int read_source(struct config *config, const struct config_source *source, struct config_problems *problems,
                       bool is_cover)
{
    _cleanup_(yaml_freep) struct yaml *yaml = NULL;
    _cleanup_free_ struct config_row *rows = NULL;
    struct reader reader = {.config = config, .text = &source->text, .problems = problems, .given = &source->given};
    int r;

    reader.keys = config_table(&reader.n_keys);
    reader.rows = rows = calloc(reader.n_keys, sizeof(*rows));
    if (!rows)
        return -ENOMEM;
    r = yaml_new(&yaml, &source->text, problems);
    if (r)
        return problems->r < 0 ? problems->r : r;
    reader.yaml = yaml;
    reader.is_foreign = foreign_is_file(yaml_root(yaml));
    return is_cover ? read_cover_text(&reader) : read_text(&reader, source);
}

int config_read(struct config *config, const struct config_source *source, struct config_problems *problems)
{
    return read_source(config, source, problems, false);
}

int config_read_cover(struct config *config, const struct config_source *source, struct config_problems *problems)
{
    return read_source(config, source, problems, true);
}
