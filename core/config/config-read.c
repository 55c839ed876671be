/* SPDX-License-Identifier: Apache-2.0 */

/* The reader walks a YAML document by the table of keys, and reports faults. */

#include "core/config/config-read.h"

#include "core/base/base.h"
#include "core/config/config-deepspeed.h"
#include "core/config/config-reader.h"
#include "core/config/config-value.h"
#include "core/config/config.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

enum {
    ONLY_OPTIMIZERS = 0x00ff,
    ONLY_SCHEDULES = 0xff00,
};
_Static_assert((CONFIG_ONLY_OPTIMIZER(N_OPTIMIZERS - 1) & ~ONLY_OPTIMIZERS) == 0 &&
                   (CONFIG_ONLY_SCHEDULE(SCHEDULE_WARMUP_COSINE) & ~ONLY_SCHEDULES) == 0,
               "all types have a bit");

DEFINE_CLEANUP(struct yaml *, yaml_free);

static void read_pair(struct reader *reader, struct fy_node_pair *fy_pair, const char *section, void *base);

size_t reader_read_known(struct reader *reader, const struct pair *parent)
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

/* Return: the names of a section's keys, without DeepSpeed's keys that have no effect. The caller frees the text. */
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

/* Return: the name of the chosen type of optimizer or scheduler. section: selects one of the two. */
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

bool reader_is_of_unknown_type(const struct reader *reader, const char *path)
{
    return (reader->optimizer_unknown && strncmp(path, "optimizer.params", 16) == 0) ||
           (reader->scheduler_unknown && strncmp(path, "scheduler.params", 16) == 0);
}

/*
 * Refuses a key that the table does not have, or has only for another optimizer or scheduler. Only notes an unknown key
 * at the top of a DeepSpeed file, because DeepSpeed ignores such keys, and programs keep their own settings there.
 */
static void refuse_key(struct reader *reader, const char *section, const char *name, struct fy_node *at)
{
    bool elsewhere = config_table_find(section, name, UINT_MAX) != NULL;
    const struct config_key *nearest = elsewhere ? NULL : config_table_nearest(section, name, reader->active);
    bool is_settings = reader->is_foreign && !*section && !(nearest && !strchr(nearest->path, '.'));
    _cleanup_free_ char *keys = section_keys(reader, section);
    struct config_spot spot = yaml_spot(reader->yaml, at);
    char path[READER_SHOWN_BYTES + 80], shown[READER_SHOWN_BYTES + 8];

    reader_quote(shown, sizeof(shown), name);
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

/* Does -n or the section world replace accelerate's number of ranks? */
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

/* Does accelerate's number count the ranks of several machines? Such a number is reported as a problem. */
static bool is_of_machines(struct reader *reader, const struct pair *pair)
{
    const char *n_machines = yaml_text(yaml_value_of(yaml_root(reader->yaml), "num_machines"));
    struct config_spot spot = yaml_spot(reader->yaml, pair->value);
    char shown[READER_SHOWN_BYTES + 8];

    if (!n_machines || deepspeed_is_same(n_machines, "1"))
        return false;
    reader_quote(shown, sizeof(shown), n_machines);
    config_problems_add(reader->problems, reader->text, &spot, "num_processes",
                        "counts the ranks of all machines, and num_machines is %s; needed: zerodrun -n, the ranks of "
                        "each, and --nodes, or world.nodes",
                        shown);
    return true;
}

/* Finds the key of a pair, and follows aliases. Return: false if the pair is to be skipped. */
static bool find_key(struct reader *reader, const char *section, const char *name, struct pair *pair)
{
    const char *text = pair->value ? yaml_text(pair->value) : NULL;

    pair->key = config_table_find(section, name, reader->active);
    while (pair->key && pair->key->kind == CONFIG_ALIAS && pair->key->same) {
        if (yaml_is_null(pair->value) || (text && strcmp(text, "none") == 0)) /* accelerate's form of null */
            return false;
        if (strcmp(pair->key->path, "num_processes") == 0 &&
            (is_overruled_ranks(reader, pair) || is_of_machines(reader, pair)))
            return false;
        pair->key = config_table_lookup(pair->key->same, reader->active);
    }
    return true;
}

/* Finds the row of a pair's key, and records its place. Return: false if the pair is to be skipped. */
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
    if (deepspeed_is_comment(name) || !find_key(reader, section, name, pair))
        return false;
    if (!pair->key) {
        if (!reader_is_of_unknown_type(reader, section))
            refuse_key(reader, section, name, key_node);
        return false;
    }
    assert(pair->key >= reader->keys && pair->key < reader->keys + reader->n_keys);
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
        return; /* deepspeed_config_file: config_load() reads the file that it names */
    if (pair.key->kind == CONFIG_INERT)
        reader_read_inert(reader, &pair);
    else if (pair.key->kind == CONFIG_REFUSED)
        reader_read_refused(reader, &pair);
    else
        reader_read_value(reader, &pair);
}

void reader_read_mapping(struct reader *reader, struct fy_node *mapping, const char *section, void *base)
{
    struct fy_node_pair *fy_pair;
    void *iter = NULL;

    while ((fy_pair = fy_node_mapping_iterate(mapping, &iter)) && reader->problems->n_dropped == 0)
        read_pair(reader, fy_pair, section, base);
}

/* Finds the value at path among the choices of the path's row. Return: false if it is not among them. */
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

/* Reads the types of optimizer and scheduler first, because they decide which of their keys apply. */
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

const struct config_row *reader_find_section(const struct reader *reader, const char *path)
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
        const struct config_row *section = reader_find_section(reader, key->path);

        /* Keys of a node are checked with the node. Keys that an unknown scheduler requires are not known. */
        if (!(key->flags & CONFIG_REQUIRED) || strstr(key->path, "[]") || (section && section->bad) ||
            (reader->scheduler_unknown && strncmp(key->path, "scheduler.params.", 17) == 0))
            continue;
        reader_refuse_missing(reader, key->path, section ? &section->spot : &(struct config_spot){0});
    }
}

/* Stores the table's default like a value from a file. A default that cannot be read is a bug. */
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

/* Stores the command line's value of a key, if the file has none. Line 0 means the command line. */
static void read_given(struct reader *reader, const char *path, const char *text)
{
    const struct config_key *key = config_table_lookup(path, reader->active);
    struct config_row *row = &reader->rows[key - reader->keys];
    const struct config_row *section = reader_find_section(reader, path);
    struct config_value value = {.text = text};
    const char *why = "";
    int r;

    assert(key);
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

/* Notes that zerod uses another value with the same results. */
static void note_served(struct reader *reader, const char *path, const char *text)
{
    const struct config_row *row = &reader->rows[config_table_lookup(path, reader->active) - reader->keys];

    assert(row >= reader->rows && row < reader->rows + reader->n_keys);
    if (!row->bad)
        config_problems_note(reader->problems, reader->text, &row->spot, path, "%s", text);
}

/* Replaces values that zerod accepts but does not use by the values that it uses. */
static void settle_values(struct reader *reader)
{
    struct config *config = reader->config;

    if (config->zero.stage == 0) {
        note_served(reader, "zero_optimization.stage",
                    "0, nothing is partitioned: the daemon holds the state for all ranks, as in stage 1, which has the "
                    "same numbers");
        config->zero.stage = 1;
    }
    assert(config->zero.stage >= 1 && config->zero.stage <= 3);
    if (config->communication_data_type != DTYPE_F32 && config->world.nodes.n_items <= 1) {
        note_served(reader, "communication_data_type",
                    "is for gradients between nodes, and this job has one: nothing is rounded");
        config->communication_data_type = DTYPE_F32;
    }
    if (config->checkpoint.save_on_stop == CONFIG_SAVE_AUTO)
        config->checkpoint.save_on_stop = config->checkpoint.dir ? CONFIG_SAVE_ON_STOP : CONFIG_SAVE_NOT;
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
    reader_read_mapping(reader, yaml_root(reader->yaml), "", reader->config);
    read_all_given(reader);
    refuse_all_missing(reader);
    read_defaults(reader);
    reader_note_defaults(reader);
    settle_values(reader);
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

/* Refuses settings next to the name of the file that has the settings, as accelerate does. */
static int read_cover_text(struct reader *reader)
{
    size_t n_errors = reader->problems->n_errors, n_items = reader->problems->n_items;

    choose_active(reader);
    reader_read_mapping(reader, yaml_root(reader->yaml), "", reader->config);
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
    reader.is_foreign = deepspeed_is_file(yaml_root(yaml));
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
