/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The YAML wrapper is the only file that parses with libfyaml. It refuses text that a configuration must not contain.
 */

#include "core/config/config-yaml.h"

#include "core/base/base.h"
#include "core/base/utf8.h"
#include "core/config/config.h"

#include <assert.h>
#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

struct yaml {
    char *copy; /* copy of the text if it had comments like JSON's; else NULL */
    struct fy_diag *diag;
    struct fy_parser *parser;
    struct fy_document *document;
    char report[512]; /* the beginning of the library's last message */
    size_t n_report;
};

static const char place_marker[] = "here";

/*
 * Limits above which the library takes seconds or minutes. Picked: DeepSpeed's largest files need 6 levels and 200
 * items.
 */
enum {
    MAX_FLOW_DEPTH = 32, /* levels of [ and { */
    MAX_ITEMS = 20000,   /* keys and list members, counted by the characters : , and ? */
    MAX_ANCHORS = 1000,  /* counted by the character & */
};

void yaml_free(struct yaml *yaml)
{
    if (!yaml)
        return;
    if (yaml->document)
        fy_parse_document_destroy(yaml->parser, yaml->document);
    if (yaml->parser)
        fy_parser_destroy(yaml->parser);
    if (yaml->diag)
        fy_diag_unref(yaml->diag);
    free(yaml->copy);
    free(yaml);
}

DEFINE_CLEANUP(struct yaml *, yaml_free);

static void keep_report(struct fy_diag *diag, void *userdata, const char *buffer, size_t n_bytes)
{
    struct yaml *yaml = userdata;
    size_t n = MIN(n_bytes, sizeof(yaml->report) - 1 - yaml->n_report);

    (void)diag;
    assert(yaml->n_report < sizeof(yaml->report));
    memcpy(yaml->report + yaml->n_report, buffer, n);
    yaml->n_report += n;
    yaml->report[yaml->n_report] = '\0';
}

static void forget_report(struct yaml *yaml)
{
    yaml->n_report = 0;
    yaml->report[0] = '\0';
}

/* Reads a number backwards from *end, and moves *end before the colon in front of it. Return: false if there is
 * none. */
static bool number_before(const char *start, const char **end, unsigned *number)
{
    const char *s = *end;

    while (s > start && isdigit((unsigned char)s[-1]))
        s--;
    if (s == *end || s == start || s[-1] != ':')
        return false;
    *number = (unsigned)strtoul(s, NULL, 10);
    *end = s - 1;
    return true;
}

/*
 * Splits a report "NAME:LINE:COLUMN: error: TEXT". Reads it from the end to skip NAME, the library's name for a text in
 * memory. Return: TEXT, with the place in *spot; or NULL.
 */
static char *split_report(struct yaml *yaml, struct config_spot *spot)
{
    static const char mark[] = ": error: ";
    char *at = strstr(yaml->report, mark);
    const char *end = at;

    *spot = (struct config_spot){0};
    if (!at || !number_before(yaml->report, &end, &spot->column) || !number_before(yaml->report, &end, &spot->line)) {
        spot->line = 0;
        return NULL;
    }
    at += strlen(mark);
    at[strcspn(at, "\n")] = '\0';
    return at;
}

/*
 * Return: the offset of the first byte that is not UTF-8 or belongs to a control character; SIZE_MAX if there is none.
 * The library also reads UTF-16 and UTF-32, and accepts some bytes that a terminal or a log should never show.
 */
static size_t bad_byte(const struct config_text *text)
{
    const char *s = text->text;
    size_t i = 0, n;

    for (; i < text->n_bytes; i += n) {
        n = utf8_length(s + i, text->n_bytes - i);
        if (n == 0 || (utf8_is_control(s + i) && s[i] != '\n' && s[i] != '\t' && s[i] != '\r'))
            return i;
    }
    return SIZE_MAX;
}

/* Return: line and column of a byte. The bytes before it must be valid text. */
static struct config_spot spot_of_byte(const struct config_text *text, size_t at)
{
    struct config_spot spot = {.line = 1, .column = 1};

    assert(at <= text->n_bytes);
    for (size_t i = 0; i < at; i++) {
        if (text->text[i] == '\n') {
            spot.line++;
            spot.column = 1;
        } else if (utf8_begins(text->text[i])) {
            spot.column++;
        }
    }
    return spot;
}

/* Return: the end of the comment or quoted text that begins at i; i if neither begins there. */
static size_t skip_text(const struct config_text *text, size_t i)
{
    const char *s = text->text;
    char before = i > 0 ? s[i - 1] : '\n', quote = s[i];
    bool begins = strchr(" \t\r\n[{,:", before) != NULL;

    if (!begins || (quote != '#' && quote != '"' && quote != '\''))
        return i;
    for (i++; i < text->n_bytes && s[i] != (quote == '#' ? '\n' : quote); i++)
        i += quote == '"' && s[i] == '\\';
    return i;
}

/* Return: the end of the comment that begins at i with // or with the mark of C; i if no comment begins there. */
static size_t skip_json_comment(const struct config_text *text, size_t i)
{
    const char *s = text->text, *end = s + text->n_bytes, *stop;
    bool is_first = i == 0 || (i == 3 && memcmp(s, "\xef\xbb\xbf", 3) == 0); /* UTF-8's byte order mark */

    if (i + 1 >= text->n_bytes || s[i] != '/' || !(is_first || strchr(" \t\r\n,{}[]\"", s[i - 1])))
        return i;
    if (s[i + 1] == '/') {
        stop = memchr(s + i, '\n', (size_t)(end - s) - i);
        return stop ? (size_t)(stop - s) : text->n_bytes;
    }
    if (s[i + 1] != '*')
        return i;
    stop = memmem(s + i + 2, (size_t)(end - s) - i - 2, "*/", 2);
    return stop ? (size_t)(stop - s) + 2 : text->n_bytes;
}

size_t config_find_brace(const struct config_text *text)
{
    size_t i = 0;

    while (i < text->n_bytes && strchr(" \t\r\n\xef\xbb\xbf/#", text->text[i])) {
        size_t end = MAX(skip_json_comment(text, i), skip_text(text, i));

        i = MAX(end, i + 1);
    }
    return i < text->n_bytes && text->text[i] == '{' ? i : text->n_bytes;
}

/*
 * Replaces comments like JSON's by blanks, so that the places of nodes stay the same. *copy stays NULL if the text has
 * no such comments. Return: 0 or -ENOMEM.
 */
static int blank_json_comments(const struct config_text *text, char **copy)
{
    for (size_t i = 0; i < text->n_bytes; i++) {
        size_t end;

        i = skip_text(text, i);
        end = skip_json_comment(text, i);
        if (end > i && !*copy) {
            *copy = malloc(text->n_bytes);
            if (!*copy)
                return -ENOMEM;
            memcpy(*copy, text->text, text->n_bytes);
        }
        for (; i < end; i++) {
            if ((*copy)[i] != '\n' && (*copy)[i] != '\r')
                (*copy)[i] = ' ';
        }
    }
    return 0;
}

/* Depth and numbers of a text, outside of comments and quotes. */
struct extent {
    size_t depth, n_items, n_anchors;
};

static void extend(struct extent *extent, char c)
{
    if (c == '[' || c == '{')
        extent->depth++;
    else if (c == ']' || c == '}')
        extent->depth -= extent->depth > 0;
    else if (c == ':' || c == ',' || c == '?')
        extent->n_items++;
    else if (c == '&')
        extent->n_anchors++;
}

static bool is_too_large(const struct extent *extent)
{
    return extent->depth > MAX_FLOW_DEPTH || extent->n_items > MAX_ITEMS || extent->n_anchors > MAX_ANCHORS;
}

/*
 * Return: the offset at which the text becomes too deep or too large for the library; SIZE_MAX if it does not. *extent:
 * of the text up to there.
 */
static size_t find_excess(const struct config_text *text, struct extent *extent)
{
    *extent = (struct extent){0};
    for (size_t i = 0; i < text->n_bytes; i++) {
        i = skip_text(text, i);
        if (i >= text->n_bytes)
            break;
        extend(extent, text->text[i]);
        if (is_too_large(extent))
            return i;
    }
    return SIZE_MAX;
}

static void refuse_excess(const struct config_text *text, const struct config_spot *spot, const struct extent *extent,
                          struct config_problems *problems)
{
    if (extent->depth > MAX_FLOW_DEPTH)
        config_problems_add(problems, text, spot, NULL, "is nested too deeply; allowed: %d levels of [ and {",
                            MAX_FLOW_DEPTH);
    else if (extent->n_items > MAX_ITEMS)
        config_problems_add(problems, text, spot, NULL, "has too many keys and members of lists; allowed: %d",
                            MAX_ITEMS);
    else
        config_problems_add(problems, text, spot, NULL, "has too many anchors; allowed: %d", MAX_ANCHORS);
}

static int check_bytes(const struct config_text *text, struct config_problems *problems)
{
    struct config_spot nowhere = {0}, spot;
    size_t at;

    if (text->n_bytes > CONFIG_MAX_BYTES) {
        config_problems_add(problems, text, &nowhere, NULL, "is %zu bytes long; allowed: at most %d", text->n_bytes,
                            CONFIG_MAX_BYTES);
        return CONFIG_E_INVALID;
    }
    at = bad_byte(text);
    if (at != SIZE_MAX) {
        spot = spot_of_byte(text, at);
        config_problems_add(problems, text, &spot, NULL,
                            "byte 0x%02x is no text; allowed: UTF-8 without control characters",
                            (unsigned char)text->text[at]);
        return CONFIG_E_INVALID;
    }
    return 0;
}

static int check_extent(const struct config_text *text, struct config_problems *problems)
{
    struct config_spot spot;
    struct extent extent;
    size_t at = find_excess(text, &extent);

    if (at == SIZE_MAX)
        return 0;
    spot = spot_of_byte(text, at);
    refuse_excess(text, &spot, &extent, problems);
    return CONFIG_E_INVALID;
}

static int yaml_open(struct yaml *yaml, const struct config_text *text)
{
    struct fy_diag_cfg diag_cfg;
    struct fy_parse_cfg parse_cfg = {
        .search_path = "",
        .flags = FYPCF_DEFAULT_VERSION_1_2 | FYPCF_JSON_NONE | FYPCF_ALLOW_DUPLICATE_KEYS,
    };

    fy_diag_cfg_default(&diag_cfg);
    diag_cfg.fp = NULL;
    diag_cfg.output_fn = keep_report;
    diag_cfg.user = yaml;
    diag_cfg.level = FYET_ERROR;
    diag_cfg.colorize = false;
    diag_cfg.show_source = diag_cfg.show_position = diag_cfg.show_type = diag_cfg.show_module = false;

    yaml->diag = fy_diag_create(&diag_cfg);
    if (!yaml->diag)
        return -ENOMEM;
    parse_cfg.diag = yaml->diag;
    yaml->parser = fy_parser_create(&parse_cfg);
    if (!yaml->parser)
        return -ENOMEM;
    return fy_parser_set_string(yaml->parser, text->text, text->n_bytes) < 0 ? -ENOMEM : 0;
}

static int syntax_problem(struct yaml *yaml, const struct config_text *text, struct config_problems *problems)
{
    struct config_spot spot;
    const char *why = split_report(yaml, &spot);

    config_problems_add(problems, text, &spot, NULL, "not valid YAML: %s", why ? why : "it cannot be read");
    return CONFIG_E_INVALID;
}

static int yaml_read(struct yaml *yaml, const struct config_text *text, struct config_problems *problems)
{
    struct config_spot spot = {0};
    struct fy_document *second;

    forget_report(yaml);
    yaml->document = fy_parse_load_document(yaml->parser);
    if (fy_parser_get_stream_error(yaml->parser))
        return syntax_problem(yaml, text, problems);
    if (!yaml->document || yaml_is_null(yaml_root(yaml))) {
        config_problems_add(problems, text, &spot, NULL, "is empty; needed at least: listen.socket, world.size");
        return CONFIG_E_INVALID;
    }
    if (!fy_node_is_mapping(yaml_root(yaml))) {
        spot = yaml_spot(yaml, yaml_root(yaml));
        config_problems_add(problems, text, &spot, NULL, "is no configuration; allowed: a mapping of keys to values");
        return CONFIG_E_INVALID;
    }

    second = fy_parse_load_document(yaml->parser);
    if (fy_parser_get_stream_error(yaml->parser)) {
        if (second)
            fy_parse_document_destroy(yaml->parser, second);
        return syntax_problem(yaml, text, problems);
    }
    if (second) {
        spot = fy_document_root(second) ? yaml_spot(yaml, fy_document_root(second)) : spot;
        fy_parse_document_destroy(yaml->parser, second);
        config_problems_add(problems, text, &spot, NULL, "a second document begins here; allowed: one");
        return CONFIG_E_INVALID;
    }
    return 0;
}

int yaml_new(struct yaml **out, const struct config_text *text, struct config_problems *problems)
{
    _cleanup_(yaml_freep) struct yaml *yaml = NULL;
    struct config_text plain = *text;
    int r;

    r = check_bytes(text, problems);
    if (r)
        return r;
    yaml = calloc(1, sizeof(*yaml));
    if (!yaml)
        return -ENOMEM;
    r = config_find_brace(text) < text->n_bytes ? blank_json_comments(text, &yaml->copy) : 0;
    if (r < 0)
        return r;
    if (yaml->copy)
        plain.text = yaml->copy;
    r = check_extent(&plain, problems);
    if (r)
        return r;
    r = yaml_open(yaml, &plain);
    if (r < 0)
        return r;
    r = yaml_read(yaml, text, problems);
    if (r)
        return r;
    *out = steal_ptr(yaml);
    return 0;
}

struct fy_node *yaml_root(const struct yaml *yaml)
{
    return fy_document_root(yaml->document);
}

struct config_spot yaml_spot(struct yaml *yaml, struct fy_node *node)
{
    enum fy_node_style style = fy_node_get_style(node);
    struct config_spot spot;
    size_t n_bytes = 0;

    forget_report(yaml);
    fy_node_report(node, FYET_ERROR, "%s", place_marker);
    if (!split_report(yaml, &spot))
        return spot;
    if (fy_node_is_scalar(node) && fy_node_get_scalar(node, &n_bytes))
        spot.n_columns = (unsigned)MIN(n_bytes, (size_t)1000);
    /* The library places quoted texts and aliases after their first character, a quote or an asterisk. */
    if (style == FYNS_SINGLE_QUOTED || style == FYNS_DOUBLE_QUOTED || style == FYNS_ALIAS) {
        spot.column -= spot.column > 1;
        spot.n_columns += style == FYNS_ALIAS ? 1 : 2;
    }
    return spot;
}

const char *yaml_text(struct fy_node *node)
{
    const char *text = NULL;
    size_t n_bytes;

    if (!node || !fy_node_is_scalar(node) || !fy_node_get_scalar(node, &n_bytes))
        return NULL;
    text = fy_node_get_scalar0(node);
    return text && strlen(text) == n_bytes ? text : NULL;
}

struct fy_node *yaml_value_of(struct fy_node *mapping, const char *name)
{
    struct fy_node_pair *pair;
    void *iter = NULL;

    while (mapping && fy_node_is_mapping(mapping) && (pair = fy_node_mapping_iterate(mapping, &iter))) {
        const char *text = fy_node_pair_key(pair) ? yaml_text(fy_node_pair_key(pair)) : NULL;

        if (text && strcmp(text, name) == 0)
            return fy_node_pair_value(pair);
    }
    return NULL;
}

bool yaml_is_quoted(struct fy_node *node)
{
    return fy_node_is_scalar(node) && fy_node_get_style(node) != FYNS_PLAIN;
}

bool yaml_is_null(struct fy_node *node)
{
    const char *text;

    if (!node || (fy_node_is_scalar(node) && fy_node_is_null(node)))
        return true;
    text = fy_node_is_scalar(node) && !yaml_is_quoted(node) ? yaml_text(node) : NULL;
    return text && (strcmp(text, "~") == 0 || strcmp(text, "null") == 0 || strcmp(text, "Null") == 0 ||
                    strcmp(text, "NULL") == 0 || *text == '\0');
}
