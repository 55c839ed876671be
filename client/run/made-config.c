/* SPDX-License-Identifier: Apache-2.0 */

/* Writes a configuration for a daemon. Values are JSON, which is also YAML. */

#include "client/run/made-config.h"

#include <errno.h>
#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "client/run/node-list.h"
#include "core/base/base.h"
#include "core/base/json.h"
#include "core/base/read-file.h"
#include "core/config/config-problem.h"
#include "core/config/config.h"

DEFINE_CLEANUP(FILE *, fclose);

/* Prints the text as a literal YAML string. */
static void print_quoted(FILE *file, const char *text)
{
    fputc('\'', file);
    for (; *text; text++)
        fputs(*text == '\'' ? "''" : (char[]){*text, '\0'}, file);
    fputc('\'', file);
}

/* ---- nodes --------------------------------------------------------------------------------------------- */

static void put_node(struct json *j, struct json_object *list, const char *host, unsigned port, unsigned n_ranks)
{
    struct json_object *node = json_new_object(j);
    bool is_ipv6 = strchr(host, ':') && *host != '[';
    char *address;

    if (asprintf(&address, is_ipv6 ? "[%s]:%u" : "%s:%u", host, port) < 0)
        address = NULL;
    json_put_string(j, node, "address", address);
    json_put_u64(j, node, "ranks", n_ranks);
    json_push(j, list, node);
    free(address);
}

/* Makes JSON with the key "world", and with "collective" if the base file lacks it. Return: text to be freed, or NULL.
 * */
static char *describe_nodes(const struct made_config *made)
{
    const struct nodes *nodes = made->nodes;
    struct json j = {};
    struct json_object *root = json_new_object(&j), *world = json_new_object(&j), *list = json_new_array(&j);

    for (unsigned i = 0; i < nodes->n; i++)
        put_node(&j, list, nodes->hosts[i], made->port > 0 ? made->port : NODES_DEFAULT_PORT, made->n_ranks);
    json_put_u64(&j, world, "size", (uint64_t)nodes->n * made->n_ranks);
    json_put_u64(&j, world, "node", nodes->node);
    json_put(&j, world, "nodes", list);
    json_put_string(&j, world, "key_file", made->key_path);
    json_put(&j, root, "world", world);
    if (!made->has_collective)
        json_put_string(&j, root, "collective", "gloo");
    return json_text(&j, root);
}

/* ---- files --------------------------------------------------------------------------------------------- */

static void print_small(FILE *file, const struct made_config *made)
{
    fputs("job: zerodrun\nlisten:\n  mode: \"0600\"\n  socket: ", file);
    print_quoted(file, made->socket);
    fputs("\nzero_optimization:\n  stage: 2\n", file);
}

/* Adds the keys of the JSON object `more` to a YAML or JSON text. */
static void print_with(FILE *file, const char *base, const char *more)
{
    const struct config_text text = {.text = base, .n_bytes = strlen(base)};
    size_t brace = config_find_brace(&text);
    struct json_object *root;

    if (brace < text.n_bytes) { /* the mapping has braces: insert the keys after the opening one */
        fprintf(file, "%.*s%.*s, %s", (int)brace, base, (int)strlen(more) - 1, more, base + brace + 1);
        return;
    }
    fprintf(file, "%s\n", base);
    root = json_tokener_parse(more);
    json_object_object_foreach(root, key, value)
        fprintf(file, "%s: %s\n", key, json_object_to_json_string_ext(value, JSON_C_TO_STRING_NOSLASHESCAPE));
    json_object_put(root);
}

static int print_nodes(FILE *file, const struct made_config *made, const char *base)
{
    _cleanup_free_ char *more = describe_nodes(made);

    if (!more)
        return -ENOMEM;
    print_with(file, base, more);
    return 0;
}

/* Return: 0 or a negative errno. */
static int print_all(FILE *file, const struct made_config *made)
{
    _cleanup_free_ char *base = NULL;
    size_t n_bytes;
    int r = 0;

    if (!made->base_path)
        print_small(file, made);
    if (made->nodes->n == 0) {
        fprintf(file, "world:\n  size: %u\n", made->n_ranks);
        return 0;
    }
    if (made->base_path) /* place_init() has just loaded this file */
        r = read_file(made->base_path, CONFIG_MAX_BYTES, &base, &n_bytes);
    return r < 0 ? r : print_nodes(file, made, base ? base : "");
}

int made_config_write(const struct made_config *made)
{
    _cleanup_(fclosep) FILE *file = fopen(made->path, "wxe");
    int r = file ? print_all(file, made) : -errno;

    if (r == 0)
        r = flush_file(file);
    if (r == 0)
        return 0;
    fprintf(stderr, "zerodrun: %s: %s\n", made->path, strerror(-r));
    return -EX_CANTCREAT;
}
