/* SPDX-License-Identifier: Apache-2.0 */

/* The printer writes effective values, and compares the keys that must be equal on all nodes. */

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"
#include "core/config/config.h"

#include <assert.h>
#include <string.h>

enum { ORIGIN_COLUMN = 56 };

static unsigned active_of(const struct config *config)
{
    unsigned active = CONFIG_ONLY_OPTIMIZER(config->optimizer.type);

    if (config->scheduler.type != SCHEDULE_NONE)
        active |= CONFIG_ONLY_SCHEDULE(config->scheduler.type);
    return active;
}

static int depth_of(const struct config_key *key)
{
    int depth = 0;

    for (const char *c = key->path; *c; c++)
        depth += *c == '.';
    return depth;
}

static bool is_printed(const struct config_key *key, unsigned active)
{
    return key->kind == CONFIG_OURS && config_key_applies(key, active) && !strstr(key->path, "[]");
}

/* Return: an explanation for a value that needs one, or "". */
static const char *meaning(const struct config *config, const struct config_key *key)
{
    if (strcmp(key->path, "zero_optimization.reduce_bucket_size") == 0 && config_chooses_bucket(config))
        return "; auto";
    if (strcmp(key->path, "optimizer.type") != 0 || config->optimizer.type != OPTIMIZER_ADAM)
        return "";
    return config->optimizer.hyper.adam_w_mode ? "; decoupled weight decay, the same as AdamW"
                                               : "; weight decay through the gradient (L2)";
}

static void print_origin(FILE *file, const struct config *config, const struct config_origin *origin)
{
    if (!origin->given) {
        fputs("default", file);
        return;
    }
    if (origin->line == 0) {
        fputs("command line", file);
        return;
    }
    for (const char *c = config->file; *c; c++)
        fputc((unsigned char)*c < ' ' || *c == 0x7f ? '?' : *c, file);
    fprintf(file, ":%u:%u", origin->line, origin->column);
}

/* Return: the value on one line, which the caller frees, or NULL. */
static char *value_text(const struct config *config, const struct config_key *key)
{
    char *value = NULL;
    size_t n_bytes;
    FILE *memory = open_memstream(&value, &n_bytes);

    if (!memory)
        return NULL;
    config_value_print(memory, key, config);
    if (fclose(memory) != 0) {
        free(value);
        return NULL;
    }
    return value;
}

static int print_key(FILE *file, const struct config *config, const struct config_key *key,
                     const struct config_origin *origin)
{
    _cleanup_free_ char *value = value_text(config, key);
    int width;

    if (!value)
        return -ENOMEM;
    width = fprintf(file, "%*s%s: %s", 2 * depth_of(key), "", config_key_leaf(key), value);
    fprintf(file, "%*s# ", MAX(ORIGIN_COLUMN - width, 2), "");
    print_origin(file, config, origin);
    fprintf(file, "%s\n", meaning(config, key));
    return 0;
}

int config_print(FILE *file, const struct config *config)
{
    unsigned active = active_of(config);
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);
    int r;

    for (size_t i = 0; i < n_keys; i++) {
        if (!is_printed(&keys[i], active))
            continue;
        if (strcmp(keys[i].path, "scheduler") == 0 && config->scheduler.type == SCHEDULE_NONE) {
            fprintf(file, "scheduler: null%*s# default\n", ORIGIN_COLUMN - 15, "");
        } else if (keys[i].type == CONFIG_SECTION) {
            fprintf(file, "%*s%s:\n", 2 * depth_of(&keys[i]), "", config_key_leaf(&keys[i]));
        } else {
            r = print_key(file, config, &keys[i], &config->origins[i]);
            if (r < 0)
                return r;
        }
    }
    return flush_file(file);
}

/* ---- the keys that must be equal on all nodes ---------------------------------------------------------- */

enum {
    MAX_DIFFERENCES = 1000, /* counting ends here: a text with more is no configuration of zerod */
    NAMED_DIFFERENCES = 3,  /* picked; the first differences cause others, as optimizer.type does its params */
    VALUE_BYTES = 80,       /* shown of a value; a longer one is cut where both sides are equal */
    SAME_BYTES = 16,        /* equal bytes that are shown before the difference */
};

char *config_shared_text(const struct config *config)
{
    unsigned active = active_of(config);
    size_t n_keys, n_bytes;
    const struct config_key *keys = config_table(&n_keys);
    char *text = NULL;
    FILE *memory = open_memstream(&text, &n_bytes);
    bool failed = !memory;

    for (size_t i = 0; i < n_keys && !failed; i++) {
        _cleanup_free_ char *value = NULL;

        if (!is_printed(&keys[i], active) || (keys[i].flags & CONFIG_OWN))
            continue;
        if (strcmp(keys[i].path, "scheduler") == 0 && config->scheduler.type == SCHEDULE_NONE) {
            fputs("scheduler: null\n", memory);
        } else if (keys[i].type != CONFIG_SECTION) {
            value = value_text(config, &keys[i]);
            failed = !value || fprintf(memory, "%s: %s\n", keys[i].path, value) < 0;
        }
    }
    if (!memory || fclose(memory) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}

/* A line "key: value" of a shared text. */
struct shared_line {
    const char *key, *value;
    size_t n_key, n_value;
};

/* Reads the line at *at and moves *at to the next line. A line without ": " has no value. Return: false at the end. */
static bool next_line(const char **at, struct shared_line *line)
{
    size_t n = strcspn(*at, "\n");
    const char *colon = memmem(*at, n, ": ", 2);

    if (**at == '\0')
        return false;
    line->key = *at;
    line->n_key = colon ? (size_t)(colon - *at) : n;
    line->value = colon ? colon + 2 : *at + n;
    line->n_value = (size_t)(*at + n - line->value);
    *at += n + (*(*at + n) == '\n');
    return true;
}

static bool find_line(const char *text, const struct shared_line *wanted, struct shared_line *found)
{
    while (next_line(&text, found)) {
        if (found->n_key == wanted->n_key && memcmp(found->key, wanted->key, wanted->n_key) == 0)
            return true;
    }
    return false;
}

static bool same_value(const struct shared_line *a, const struct shared_line *b)
{
    return a->n_value == b->n_value && memcmp(a->value, b->value, a->n_value) == 0;
}

static void add_foreign_text(struct strbuf *out, const char *text, size_t n_bytes)
{
    char copy[VALUE_BYTES + 1];

    n_bytes = MIN(n_bytes, sizeof(copy) - 1);
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    strbuf_add_foreign(out, copy);
}

/* Adds a value, or "not known" if line is NULL. A long value is shown from shortly before the place where it
 * differs. */
static void add_value(struct strbuf *out, const struct shared_line *line, size_t n_same)
{
    size_t start = 0;

    if (!line) {
        strbuf_add(out, "not known");
        return;
    }
    assert(n_same <= line->n_value);
    if (line->n_value > VALUE_BYTES && n_same > SAME_BYTES)
        start = n_same - SAME_BYTES;
    if (start > 0)
        strbuf_add(out, "...");
    add_foreign_text(out, line->value + start, line->n_value - start);
    if (line->n_value - start > VALUE_BYTES)
        strbuf_add(out, "...");
}

static void add_difference(struct strbuf *out, const struct shared_line *here, const struct shared_line *there)
{
    const struct shared_line *any = here ? here : there;
    size_t n_same = 0;

    while (here && there && n_same < here->n_value && n_same < there->n_value &&
           here->value[n_same] == there->value[n_same])
        n_same++;
    if (out->n_bytes > 0)
        strbuf_add(out, ", ");
    add_foreign_text(out, any->key, any->n_key);
    strbuf_add(out, " is ");
    add_value(out, there, n_same);
    strbuf_add(out, " there and ");
    add_value(out, here, n_same);
    strbuf_add(out, " here");
}

size_t config_shared_difference(const char *here, const char *there, char *sentence, size_t size)
{
    struct strbuf out = {0};
    struct shared_line ours, theirs;
    size_t n_different = 0;

    for (const char *at = here; n_different < MAX_DIFFERENCES && next_line(&at, &ours);) {
        bool found = find_line(there, &ours, &theirs);

        if (found && same_value(&ours, &theirs))
            continue;
        if (n_different++ < NAMED_DIFFERENCES)
            add_difference(&out, &ours, found ? &theirs : NULL);
    }
    for (const char *at = there; n_different < MAX_DIFFERENCES && next_line(&at, &theirs);) {
        if (find_line(here, &theirs, &ours))
            continue;
        if (n_different++ < NAMED_DIFFERENCES)
            add_difference(&out, NULL, &theirs);
    }
    if (n_different > NAMED_DIFFERENCES)
        strbuf_add(&out, ", and %zu more", n_different - NAMED_DIFFERENCES);
    snprintf(sentence, size, "%s", strbuf_text(&out));
    strbuf_deinit(&out);
    return n_different;
}
