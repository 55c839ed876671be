/* SPDX-License-Identifier: Apache-2.0 */

/* The table of keys, the manual, the manual page and the sample files must name the same keys, values and defaults. */

#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"
#include "core/config/config.h"
#include "tests/core/config/config-text.h"
#include "tests/group.h"

#include <ctype.h>
#include <libfyaml.h>

/* Asserts that each row is well formed, and that no two rows are for one key. */
static void test_table(void **state)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        const char *sentence = keys[i].sentence;

        assert_true(isupper((unsigned char)*sentence) || strchr(sentence, ' ') != NULL);
        assert_int_equal(sentence[strlen(sentence) - 1], '.');
        assert_int_equal(keys[i].type == CONFIG_CHOICE, keys[i].choices != NULL);
        for (size_t j = 0; j < i; j++) {
            bool overlap = keys[i].only == 0 || keys[j].only == 0 || (keys[i].only & keys[j].only) != 0;

            assert_false(strcmp(keys[i].path, keys[j].path) == 0 && overlap);
        }
    }
}

/* Return: the next line of text that begins with start + path + end, or NULL. */
static const char *find_entry(const char *text, const char *start, const char *path, const char *end)
{
    char wanted[256];
    const char *at = text;

    snprintf(wanted, sizeof(wanted), "%s%s%s", start, path, end);
    while ((at = strstr(at, wanted)) && at != text && at[-1] != '\n')
        at++;
    return at;
}

/*
 * Return: whether an entry for the key has its sentence, its allowed values and its default. An entry ends at `stop`.
 */
static bool is_described(const char *text, const struct config_key *key, const char *start, const char *end,
                         const char *stop)
{
    char allowed[512] = "";
    FILE *file = fmemopen(allowed, sizeof(allowed), "w");

    config_value_allowed(file, key);
    fclose(file);
    for (const char *at = text; (at = find_entry(at, start, key->path, end)); at++) {
        const char *behind = strstr(at + 1, stop);
        _cleanup_free_ char *entry = strndup(at, behind ? (size_t)(behind - at) : strlen(at));

        if (!strstr(entry, key->sentence))
            continue;
        if (key->kind != CONFIG_OURS && (!key->accepted || strstr(entry, key->accepted)))
            return true;
        if (key->kind == CONFIG_OURS && strstr(entry, allowed) && strstr(entry, key->def ? key->def : ""))
            return true;
    }
    return false;
}

/* Removes roff's escapes: the manual page writes - as \-. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *from = text; *from; from++) {
        if (!(from[0] == '\\' && (from[1] == '-' || from[1] == '&')))
            *to++ = *from;
        else if (*++from == '-')
            *to++ = '-';
    }
    *to = '\0';
}

static void test_manuals_describe_every_key(void **state)
{
    char *manual = read_whole_file("docs/configuration.md"), *page = read_whole_file("man/zerod.yaml.5");
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    unescape(page);
    for (size_t i = 0; i < n_keys; i++) {
        if (keys[i].type == CONFIG_SECTION && keys[i].kind == CONFIG_OURS)
            continue;
        if (!is_described(manual, &keys[i], "| `", "` |", "\n"))
            fail_msg("docs/configuration.md does not say this of %s", keys[i].path);
        if (!is_described(page, &keys[i], ".B ", "\n", ".TP"))
            fail_msg("man/zerod.yaml.5 does not say this of %s", keys[i].path);
    }
    free(manual);
    free(page);
}

/* Asserts that each entry of a text is a key of the table. An entry is what one line has between start and end. */
static void assert_entries_are_keys(const char *path, const char *start, char end)
{
    char *text = read_whole_file(path), *rest = text, *line;
    size_t n_entries = 0;

    while ((line = strsep(&rest, "\n"))) {
        if (strncmp(line, start, strlen(start)) != 0)
            continue;
        line += strlen(start);
        line[strcspn(line, (char[]){end, '\0'})] = '\0';
        if (!config_table_lookup(line, ~0u))
            fail_msg("%s describes %s, which is no key", path, line);
        n_entries++;
    }
    assert_true(n_entries > 100);
    free(text);
}

static void test_manuals_describe_only_keys(void **state)
{
    assert_entries_are_keys("docs/configuration.md", "| `", '`');
}

static void test_page_describes_only_keys(void **state)
{
    char *page = read_whole_file("man/zerod.yaml.5"), *from = strstr(page, ".SH KEYS\n");
    char *to = strstr(page, ".SH EXAMPLE\n");
    size_t n_entries = 0;

    assert_non_null(from);
    assert_non_null(to);
    for (*to = '\0'; (from = strstr(from, "\n.B ")); n_entries++) {
        from += strlen("\n.B ");
        char *path = strndup(from, strcspn(from, "\n"));

        if (!config_table_lookup(path, ~0u))
            fail_msg("man/zerod.yaml.5 describes %s, which is no key", path);
        free(path);
    }
    assert_true(n_entries > 100);
    free(page);
}

/* Uncomments "#key: value". Prose has a blank after the #, and stays a comment. */
static void uncomment(char *text)
{
    bool in_indent = true;
    char *to = text;

    for (const char *from = text; *from; from++) {
        if (*from == '#' && in_indent && isalpha((unsigned char)from[1]))
            continue;
        in_indent = *from == '\n' || (in_indent && *from == ' ');
        *to++ = *from;
    }
    *to = '\0';
}

/* Marks the rows of the table whose keys a mapping has, whatever the type of the optimizer. */
static void mark_keys(struct fy_node *node, const char *section, bool *named)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);
    struct fy_node_pair *pair;
    struct fy_node *item;
    char path[256];
    void *iter = NULL;

    if (node && fy_node_is_sequence(node)) {
        snprintf(path, sizeof(path), "%s[]", section);
        while ((item = fy_node_sequence_iterate(node, &iter)))
            mark_keys(item, path, named);
        return;
    }
    while (node && fy_node_is_mapping(node) && (pair = fy_node_mapping_iterate(node, &iter))) {
        bool found = false;

        snprintf(path, sizeof(path), "%s%s%s", section, *section ? "." : "",
                 fy_node_get_scalar0(fy_node_pair_key(pair)));
        for (size_t i = 0; i < n_keys; i++) {
            if (strcmp(keys[i].path, path) == 0)
                named[i] = found = true;
        }
        if (!found)
            fail_msg("a sample file has %s, which is no key", path);
        mark_keys(fy_node_pair_value(pair), path, named);
    }
}

static void test_sample_files_name_every_key(void **state)
{
    static const char *const files[] = {"config/stage1.yaml", "config/stage2.yaml",     "config/stage3.yaml",
                                        "config/cuda.yaml",   "config/cuda-nodes.yaml", "config/multi-node.yaml"};
    struct fy_parse_cfg cfg = {.flags = FYPCF_ALLOW_DUPLICATE_KEYS};
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);
    bool *named = calloc(n_keys, sizeof(*named));

    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        char *text = read_whole_file(files[i]);
        struct fy_document *document;

        uncomment(text);
        document = fy_document_build_from_string(&cfg, text, FY_NT);
        assert_non_null(document);
        mark_keys(fy_document_root(document), "", named);
        fy_document_destroy(document);
        free(text);
    }
    for (size_t i = 0; i < n_keys; i++) {
        if (keys[i].kind == CONFIG_OURS && !named[i])
            fail_msg("%s is in none of the sample files", keys[i].path);
    }
    free(named);
}

static void load_sample(const char *path, struct config **config)
{
    char *text = read_whole_file(path);
    struct config_problems problems = CONFIG_PROBLEMS_NULL;

    /* fixed, so that the engines of this build do not matter */
    if (load(config, text, &both_engines, &problems) != 0 || problems.n_items > 0) {
        config_problems_print(stderr, &problems);
        fail_msg("%s draws complaints", path);
    }
    config_problems_deinit(&problems);
    free(text);
}

static void test_sample_files_load(void **state)
{
    static const char *const files[] = {"config/stage1.yaml", "config/stage2.yaml", "config/stage3.yaml"};
    struct config *config;

    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        load_sample(files[i], &config);
        assert_int_equal(config->zero.stage, i + 1);
        config_free(config);
    }
    load_sample("config/multi-node.yaml", &config);
    assert_int_equal(config->zero.stage, 2);
    assert_int_equal(config->world.nodes.n_items, 2);
    assert_int_equal(config_local_ranks(config), 4);
    assert_int_equal(config->collective, CONFIG_COLLECTIVE_GLOO);
    config_free(config);
    load_sample("config/cuda.yaml", &config);
    assert_int_equal(config->world.size, 8);
    assert_int_equal(config->device, CONFIG_DEVICE_CUDA);
    assert_int_equal(config->collective, CONFIG_COLLECTIVE_NCCL);
    config_free(config);
    load_sample("config/cuda-nodes.yaml", &config);
    assert_int_equal(config->world.nodes.n_items, 2);
    assert_int_equal(config_local_ranks(config), 8);
    assert_int_equal(config->device, CONFIG_DEVICE_CUDA);
    config_free(config);
    load_sample("config/quickstart.yaml", &config);
    assert_int_equal(config->zero.stage, 2);
    assert_int_equal(config->world.size, 2);
    assert_int_equal(config->optimizer.type, OPTIMIZER_ADAMW);
    assert_int_equal(config->scheduler.type, SCHEDULE_WARMUP_COSINE);
    assert_true(config->gradient_clipping == 1.0);
    assert_true(config->zero.reduce_bucket_size <= 1000000 / 20); /* 5 % of a model of 1 M parameters */
    config_free(config);
}

/* Where a sample file has a key in a comment, the comment shows the key's default. */
static void test_sample_files_show_defaults(void **state)
{
    char *text = read_whole_file("config/stage1.yaml"), *rest = text, *line;
    size_t n_shown = 0;

    while ((line = strsep(&rest, "\n"))) {
        size_t n_indent = strspn(line, " ");
        char name[64], value[64], allowed_path[128];
        const char *section = n_indent > 0 ? "fp16" : "";

        if (sscanf(line + n_indent, "#%63[a-z0-9_]: %63[^\n]", name, value) != 2)
            continue;
        for (const char *const *s = (const char *const[]){section, "listen", NULL}; *s; s++) {
            const struct config_key *key = config_table_find(*s, name, ~0u);

            if (!key)
                continue;
            snprintf(allowed_path, sizeof(allowed_path), "%s", key->path);
            if (key->type == CONFIG_MODE)
                assert_string_equal(value, "\"0660\"");
            else if (key->type == CONFIG_NAMES)
                assert_string_equal(value, "[]");
            else if (strcmp(value, key->def) != 0)
                fail_msg("config/stage1.yaml shows %s for %s", value, allowed_path);
            n_shown++;
        }
    }
    assert_int_equal(n_shown, 13);
    free(text);
}

/* The manual's YAML examples load, and its sample of errors is what config_problems_print() prints. */
static void test_manual_examples(void **state)
{
    static const char wrong[] = "job: pretrain\nlisten: {socket: /run/zerod/pretrain.sock}\nworld: {size: 4}\n"
                                "zero_optimization:\n  stage: 4\n  reduce_bucket_sise: 5e8\n";
    char *manual = read_whole_file("docs/configuration.md"), *from, *to, buffer[4096];
    struct config_source source = {.text = {.name = "job.yaml", .text = wrong, .n_bytes = strlen(wrong)}};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;

    from = strstr(manual, "```text\n") + strlen("```text\n");
    to = strstr(from, "```");
    *to = '\0';
    assert_int_equal(config_load_string(&config, &source, &problems), CONFIG_E_INVALID);
    print_problems(buffer, sizeof(buffer), &problems);
    assert_string_equal(from, buffer);
    *to = '`';
    config_problems_deinit(&problems);

    from = strstr(manual, "```yaml\n") + strlen("```yaml\n");
    *strstr(from, "```") = '\0';
    config_free(load_valid(from));
    free(manual);
}

TEST_GROUP(config_docs)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_manuals_describe_every_key),
        cmocka_unit_test(test_manuals_describe_only_keys),
        cmocka_unit_test(test_page_describes_only_keys),
        cmocka_unit_test(test_sample_files_name_every_key),
        cmocka_unit_test(test_sample_files_load),
        cmocka_unit_test(test_sample_files_show_defaults),
        cmocka_unit_test(test_manual_examples),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
