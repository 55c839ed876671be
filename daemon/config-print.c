/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/base.h"
#include "daemon/config-table.h"
#include "daemon/config-value.h"
#include "daemon/config.h"

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

/* What a value means where it does not say so itself. */
static const char *meaning(const struct config *config, const struct config_key *key)
{
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
    for (const char *c = config->file; *c; c++)
        fputc((unsigned char)*c < ' ' || *c == 0x7f ? '?' : *c, file);
    fprintf(file, ":%u:%u", origin->line, origin->column);
}

static int print_key(FILE *file, const struct config *config, const struct config_key *key,
                     const struct config_origin *origin)
{
    _cleanup_free_ char *value = NULL;
    size_t n_bytes;
    FILE *memory = open_memstream(&value, &n_bytes);
    int width;

    if (!memory)
        return -errno;
    config_value_print(memory, key, config);
    if (fclose(memory) != 0)
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
    if (fflush(file) != 0 || ferror(file))
        return errno > 0 ? -errno : -EIO;
    return 0;
}

/* "AdamW, Adam" for a row that counts for some optimizers or schedulers only. */
static void print_only(FILE *file, const struct config_key *key)
{
    bool is_optimizer = (key->only & 0xff) != 0;
    const struct config_key *types = config_table_lookup(is_optimizer ? "optimizer.type" : "scheduler.type", ~0u);
    const char *separator = "";

    for (const struct config_choice *choice = types->choices; choice->name; choice++) {
        unsigned bit = is_optimizer ? CONFIG_ONLY_OPTIMIZER(choice->value) : CONFIG_ONLY_SCHEDULE(choice->value);

        if (!(key->only & bit))
            continue;
        fprintf(file, "%s%s", separator, choice->name);
        separator = ", ";
    }
}

static void describe(FILE *file, const struct config_key *key)
{
    fprintf(file, "%s\n    %s\n", key->path, key->sentence);
    if (key->only) {
        fputs("    for: ", file);
        print_only(file, key);
        fputc('\n', file);
    }
    if (key->kind == CONFIG_REFUSED) {
        fputs("    refused\n", file);
        return;
    }
    if (key->kind == CONFIG_INERT) {
        fprintf(file, "    no effect here; allowed: %s\n", key->accepted ? key->accepted : "anything");
        return;
    }
    if (key->type == CONFIG_SECTION)
        return;
    fputs("    allowed: ", file);
    config_value_allowed(file, key);
    fprintf(file, "\n    default: %s\n",
            key->flags & CONFIG_REQUIRED ? "none, it must be given"
            : key->def                   ? key->def
                                         : "none");
}

int config_describe(FILE *file, const char *path)
{
    size_t n_keys, n = path ? strlen(path) : 0;
    const struct config_key *keys = config_table(&n_keys);
    int r = CONFIG_E_INVALID;

    for (size_t i = 0; i < n_keys; i++) {
        char next = '\0';

        if (path && strncmp(keys[i].path, path, n) != 0)
            continue;
        next = keys[i].path[n];
        if (path && next != '\0' && next != '.' && next != '[')
            continue;
        describe(file, &keys[i]);
        r = 0;
    }
    return r;
}
