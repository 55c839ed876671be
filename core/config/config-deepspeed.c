/* SPDX-License-Identifier: Apache-2.0 */

/* The files of DeepSpeed and accelerate: their switches, comments and file names, and the keys that only they have. */

#include "core/config/config-deepspeed.h"

#include "core/base/base.h"
#include "core/config/config-problem.h"
#include "core/config/config-reader.h"
#include "core/config/config-table.h"
#include "core/config/config-yaml.h"

#include <assert.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

DEFINE_CLEANUP(struct yaml *, yaml_free);

bool deepspeed_is_same(const char *a, const char *b)
{
    static const char digits[] = "-0123456789.";

    if (strcasecmp(a, b) == 0)
        return true;
    return *a && *b && a[strspn(a, digits)] == '\0' && b[strspn(b, digits)] == '\0' &&
           strtod(a, NULL) == strtod(b, NULL);
}

bool deepspeed_is_among(const char *list, const char *text)
{
    while (*list) {
        size_t n = strcspn(list, ",");
        char one[32];

        assert(n < sizeof(one));
        snprintf(one, sizeof(one), "%.*s", (int)n, list);
        if (deepspeed_is_same(one, text))
            return true;
        list += n;
        list += strspn(list, ", ");
    }
    return false;
}

static bool is_false_or_auto(struct fy_node *value)
{
    const char *text = value ? yaml_text(value) : NULL;

    return text && (strcasecmp(text, "false") == 0 || strcmp(text, "auto") == 0);
}

enum position { SWITCH_NONE, SWITCH_OFF, SWITCH_ON };

/*
 * Return: the position of a section's switch. A section without a switch is on if a section below it is on. The parser
 * limits the depth.
 */
static enum position position_of(struct fy_node *section)
{
    struct fy_node *enabled = yaml_value_of(section, "enabled");
    enum position position = SWITCH_NONE;
    struct fy_node_pair *pair;
    void *iter = NULL;

    if (enabled)
        return is_false_or_auto(enabled) ? SWITCH_OFF : SWITCH_ON;
    while (fy_node_is_mapping(section) && (pair = fy_node_mapping_iterate(section, &iter))) {
        struct fy_node *value = fy_node_pair_value(pair);

        if (value)
            position = MAX(position, position_of(value));
    }
    return position;
}

bool deepspeed_is_off(struct fy_node *value)
{
    const char *device = yaml_text(yaml_value_of(value, "device"));

    if (device && strcmp(device, "none") == 0) /* offload_param has a device */
        return true;
    if (yaml_is_null(value) || is_false_or_auto(value))
        return true;
    if (fy_node_is_mapping(value))
        return fy_node_mapping_item_count(value) == 0 || position_of(value) == SWITCH_OFF;
    return fy_node_is_sequence(value) && fy_node_sequence_item_count(value) == 0;
}

bool deepspeed_is_comment(const char *name)
{
    return *name == '_' || *name == '#' || strncmp(name, "//", 2) == 0 || strcmp(name, "comment") == 0 ||
           strcmp(name, "comments") == 0;
}

bool deepspeed_is_file(struct fy_node *root)
{
    struct fy_node_pair *pair;
    void *iter = NULL;

    if (yaml_value_of(root, "listen"))
        return false;
    while (fy_node_is_mapping(root) && (pair = fy_node_mapping_iterate(root, &iter))) {
        const char *name = fy_node_pair_key(pair) ? yaml_text(fy_node_pair_key(pair)) : NULL;
        const struct config_key *key = name ? config_table_find("", name, UINT_MAX) : NULL;

        if (key && key->kind != CONFIG_OURS)
            return true;
    }
    return false;
}

int deepspeed_named_file(char **out, const struct config_text *text)
{
    _cleanup_(yaml_freep) struct yaml *yaml = NULL;
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    int r = yaml_new(&yaml, text, &problems);
    const char *path = NULL;

    *out = NULL;
    config_problems_deinit(&problems);
    if (r == 0)
        path = yaml_text(yaml_value_of(yaml_value_of(yaml_root(yaml), "deepspeed_config"), "deepspeed_config_file"));
    if (path && *path && !(*out = strdup(path)))
        return -ENOMEM;
    return r < 0 ? r : 0;
}

/* ---- keys ---------------------------------------------------------------------------------------------- */

/* Does the value, or each item of a list, change nothing? */
static bool is_accepted(const char *accepted, struct fy_node *value)
{
    const char *text = yaml_text(value);
    struct fy_node *item;
    void *iter = NULL;

    if (yaml_is_null(value) || (text && (strcmp(text, "auto") == 0 || deepspeed_is_among(accepted, text))))
        return true;
    while (fy_node_is_sequence(value) && (item = fy_node_sequence_iterate(value, &iter))) {
        text = yaml_text(item);
        if (!text || !deepspeed_is_among(accepted, text))
            return false;
    }
    return fy_node_is_sequence(value);
}

void reader_read_inert(struct reader *reader, const struct pair *pair)
{
    const char *text = yaml_text(pair->value), *accepted = pair->key->accepted, *usual = pair->key->usual;

    if (accepted && !is_accepted(accepted, pair->value))
        config_problems_add(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                            "is refused: %s Allowed: %s", pair->key->sentence, accepted);
    else if (!accepted && !(usual && text && deepspeed_is_among(usual, text)) && !deepspeed_is_off(pair->value))
        config_problems_note(reader->problems, reader->text, &pair->row->spot, pair->key->path,
                             "has no effect here: %s", pair->key->sentence);
    reader_read_known(reader, pair);
}

void reader_read_refused(struct reader *reader, const struct pair *pair)
{
    if (!deepspeed_is_off(pair->value) && reader_read_known(reader, pair) == 0)
        config_problems_add(reader->problems, reader->text, &pair->row->spot, pair->key->path, "is refused: %s",
                            pair->key->sentence);
}

/* Would DeepSpeed read the file? A file of accelerate may be for torch alone. */
static bool is_deepspeeds(const struct reader *reader)
{
    const char *type = yaml_text(yaml_value_of(yaml_root(reader->yaml), "distributed_type"));

    return reader->is_foreign && (!type || strcmp(type, "DEEPSPEED") == 0);
}

void reader_note_defaults(struct reader *reader)
{
    for (size_t i = 0; is_deepspeeds(reader) && i < reader->n_keys; i++) {
        const struct config_key *key = &reader->keys[i];
        const struct config_row *section;

        if (!key->elsewhere || reader->rows[i].seen || !config_key_applies(key, reader->active))
            continue;
        section = reader_find_section(reader, key->path);
        if (strchr(key->path, '.') && (!section || !section->given || reader_is_of_unknown_type(reader, key->path)))
            continue;
        config_problems_note(reader->problems, reader->text, section ? &section->spot : &(struct config_spot){0},
                             key->path, "is not given: the default is %s, DeepSpeed's is %s",
                             key->def ? key->def : "each group's own lr", key->elsewhere);
    }
}
