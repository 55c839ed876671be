/* SPDX-License-Identifier: Apache-2.0 */

/* Stores, prints, describes and frees scalars, with one row for each type. */

#include "core/config/config-value.h"

#include "core/base/base.h"
#include "core/config/config.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

struct unit {
    const char *name;
    uint64_t factor;
};

struct units {
    struct unit items[11];
    size_t n_items;
};

/*
 * Units, the largest first, because printing uses the first unit that divides the value. Decimal units are only read;
 * binary units are also printed.
 */
static const struct units no_units;
static const struct units size_units = {.n_items = 11,
                                        .items = {
                                            {"TiB", 1ull << 40},
                                            {"GiB", 1ull << 30},
                                            {"MiB", 1ull << 20},
                                            {"KiB", 1ull << 10},
                                            {"TB", 1000000000000ull},
                                            {"GB", 1000000000ull},
                                            {"MB", 1000000ull},
                                            {"kB", 1000ull},
                                            {"KB", 1000ull},
                                            {"B", 1},
                                            {"", 1},
                                        }};
static const struct units duration_units = {
    .n_items = 5, .items = {{"d", 86400000}, {"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1}}};

struct decimal {
    uint64_t digits; /* all digits, without the point */
    int exponent;    /* value = digits x 10^exponent */
};

enum { DECIMAL_MAX_EXPONENT = 4096 };

/*
 * Reads digits with at most one point. Return: the rest of the text; NULL if there are no digits, or more than fit in
 * 64 bits.
 */
static const char *read_digits(const char *s, struct decimal *decimal)
{
    bool point = false, any = false;

    for (; isdigit((unsigned char)*s) || (*s == '.' && !point); s++) {
        if (*s == '.') {
            point = true;
            continue;
        }
        any = true;
        decimal->exponent -= point;
        if (__builtin_mul_overflow(decimal->digits, 10u, &decimal->digits) ||
            __builtin_add_overflow(decimal->digits, (uint64_t)(*s - '0'), &decimal->digits))
            return NULL;
    }
    return any ? s : NULL;
}

/* Reads an exponent if there is one; "5EiB" has none. Return: the rest of the text. */
static const char *read_exponent(const char *s, struct decimal *decimal)
{
    const char *digit = s + 1;
    bool negative = false;
    int exponent = 0;

    if (*s != 'e' && *s != 'E')
        return s;
    if (*digit == '+' || *digit == '-')
        negative = *digit++ == '-';
    if (!isdigit((unsigned char)*digit))
        return s;
    for (; isdigit((unsigned char)*digit); digit++)
        exponent = MIN(exponent * 10 + (*digit - '0'), DECIMAL_MAX_EXPONENT);
    decimal->exponent += negative ? -exponent : exponent;
    return digit;
}

/* Computes digits x 10^exponent x factor. Return: NULL, or the reason for a failure. */
static const char *decimal_to_whole(struct decimal decimal, uint64_t factor, uint64_t *whole)
{
    unsigned __int128 n = (unsigned __int128)decimal.digits * factor;

    if (n == 0) {
        *whole = 0;
        return NULL;
    }
    for (; decimal.exponent < 0; decimal.exponent++) {
        if (n % 10 != 0)
            return "is not a whole number";
        n /= 10;
    }
    for (; decimal.exponent > 0 && n <= UINT64_MAX; decimal.exponent--)
        n *= 10;
    *whole = (uint64_t)n;
    return n <= UINT64_MAX ? NULL : "is too large";
}

/*
 * Reads a number and its unit, which is one of `units`. If `units` is empty, the number has no unit. Return: NULL, or
 * the reason for a failure.
 */
static const char *read_whole(const char *text, const struct units *units, uint64_t *whole)
{
    struct decimal decimal = {0};
    const char *s = read_digits(text, &decimal);
    uint64_t factor = 1;

    if (!s)
        return isdigit((unsigned char)*text) ? "is too large" : "is not a number from 0 up";
    s = read_exponent(s, &decimal);
    if (*s == '_')
        return "is not a number: YAML 1.2 knows no underscores in numbers";
    while (*s == ' ')
        s++;

    size_t i = 0;
    while (i < units->n_items && strcmp(units->items[i].name, s) != 0)
        i++;
    if (i < units->n_items)
        factor = units->items[i].factor;
    else if (*s != '\0')
        return units->n_items > 0 ? "has an unknown unit" : "is not a whole number";
    else if (units->n_items > 0 && decimal.digits != 0)
        return "lacks a unit";
    return decimal_to_whole(decimal, factor, whole);
}

static const char *read_real(const char *text, double *real)
{
    size_t n = strspn(text, "0123456789+-.eE");
    char *end;

    if (text[n] == '_')
        return "is not a number: YAML 1.2 knows no underscores in numbers";
    if (n == 0 || text[n] != '\0')
        return "is not a number";
    *real = strtod(text, &end);
    if (*end != '\0')
        return "is not a number";
    return isfinite(*real) ? NULL : "is too large";
}

static bool in_range(const struct config_key *key, double value)
{
    if (value < key->min || ((key->flags & CONFIG_ABOVE_MIN) && value == key->min))
        return false;
    return !(value > key->max || ((key->flags & CONFIG_BELOW_MAX) && value == key->max));
}

static void *field(const struct config_key *key, void *base)
{
    return (char *)base + key->offset;
}

static const void *constant_field(const struct config_key *key, const void *base)
{
    return (const char *)base + key->offset;
}

/* Stores a whole number into a field of 4 or 8 bytes. The caller has checked the range. */
static void put_whole(const struct config_key *key, void *base, uint64_t whole)
{
    assert(key->size == sizeof(uint64_t) || key->size == sizeof(uint32_t));
    assert(key->size == sizeof(uint64_t) || whole <= UINT32_MAX);
    if (key->size == sizeof(uint64_t))
        *(uint64_t *)field(key, base) = whole;
    else
        *(uint32_t *)field(key, base) = (uint32_t)whole;
}

static uint64_t get_whole(const struct config_key *key, const void *base)
{
    const void *at = constant_field(key, base);

    assert(key->size == sizeof(uint64_t) || key->size == sizeof(uint32_t));
    return key->size == sizeof(uint64_t) ? *(const uint64_t *)at : *(const uint32_t *)at;
}

/* Reads and stores a whole number. Return: NULL, or the reason for a failure. */
static const char *put_in_range(const struct config_key *key, const char *text, const struct units *units, void *base)
{
    uint64_t whole = 0;
    const char *why = read_whole(text, units, &whole);

    if (why)
        return why;
    if (!in_range(key, (double)whole))
        return "is out of range";
    put_whole(key, base, whole);
    return NULL;
}

/* Stores 0 if the value is "auto" and the key allows it. Return: true if the value is stored. */
static bool put_auto(const struct config_key *key, const struct config_value *value, void *base)
{
    if (!(key->flags & CONFIG_AUTO) || strcmp(value->text, "auto") != 0)
        return false;
    put_whole(key, base, 0);
    return true;
}

static const char *store_whole(const struct config_key *key, const struct config_value *value, void *base)
{
    if (put_auto(key, value, base))
        return NULL;
    if (value->quoted)
        return "is a string: leave the quotes out";
    return put_in_range(key, value->text, &no_units, base);
}

static const char *store_size(const struct config_key *key, const struct config_value *value, void *base)
{
    if (put_auto(key, value, base))
        return NULL;
    return put_in_range(key, value->text, &size_units, base);
}

static const char *store_duration(const struct config_key *key, const struct config_value *value, void *base)
{
    return put_in_range(key, value->text, &duration_units, base);
}

static const char *store_real(const struct config_key *key, const struct config_value *value, void *base)
{
    const char *why;
    double real;

    if (value->quoted)
        return "is a string: leave the quotes out";
    why = read_real(value->text, &real);
    if (why)
        return why;
    if (!in_range(key, real))
        return "is out of range";
    *(double *)field(key, base) = real + 0.0; /* turns -0 into 0 */
    return NULL;
}

static const char *store_bool(const struct config_key *key, const struct config_value *value, void *base)
{
    const char *text = value->text;
    bool is_true = strcmp(text, "true") == 0 || strcmp(text, "True") == 0 || strcmp(text, "TRUE") == 0;

    assert(key->size == sizeof(bool));
    if (value->quoted)
        return "is a string: leave the quotes out";
    if (!is_true && strcmp(text, "false") != 0 && strcmp(text, "False") != 0 && strcmp(text, "FALSE") != 0)
        return "is not a truth value";
    *(bool *)field(key, base) = is_true;
    return NULL;
}

static const char *store_choice(const struct config_key *key, const struct config_value *value, void *base)
{
    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if (strcasecmp(choice->name, value->text) != 0)
            continue;
        if (!choice->refused)
            put_whole(key, base, (uint64_t)choice->value);
        return choice->refused;
    }
    return "is not known";
}

static const char *store_mode(const struct config_key *key, const struct config_value *value, void *base)
{
    const char *s = strncmp(value->text, "0o", 2) == 0 ? value->text + 2 : value->text;
    size_t n = strspn(s, "01234567");
    unsigned long mode;

    assert(key->size == sizeof(mode_t));
    if (n < 3 || n > 4 || s[n] != '\0')
        return "is not an octal mode";
    mode = strtoul(s, NULL, 8);
    if (mode > 0777)
        return "is out of range";
    *(mode_t *)field(key, base) = (mode_t)mode;
    return NULL;
}

static bool is_printable(const char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f)
            return false;
    }
    return true;
}

static const char *check_name(const char *text)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

    if (*text == '\0')
        return "is empty";
    if (*text == '-' || *text == '.')
        return "begins with a character that a name may not begin with";
    if (text[strspn(text, letters)] != '\0')
        return "has a character that a name may not have";
    return strlen(text) <= 64 ? NULL : "is too long";
}

static const char *check_pattern(const char *text)
{
    for (const char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            return "has a control character";
    return *text == '\0' ? "is empty" : strlen(text) <= 255 ? NULL : "is too long";
}

static const char *check_path_form(const char *text)
{
    if (*text == '\0')
        return "is empty";
    if (*text != '/')
        return "is not an absolute path";
    if (!is_printable(text))
        return "has a control character";
    return text[strlen(text) - 1] == '/' ? "names a folder" : NULL;
}

static const char *check_path(const char *text)
{
    const char *why = check_path_form(text);

    return why || strlen(text) < 4096 ? why : "is too long";
}

static const char *check_folder(const char *text)
{
    if (*text != '/')
        return "is not an absolute path";
    if (!is_printable(text))
        return "has a control character";
    return strlen(text) < 4096 ? NULL : "is too long";
}

static const char *check_load(const char *text)
{
    if (strcmp(text, CONFIG_LOAD_LATEST) == 0 || strcmp(text, CONFIG_LOAD_NEVER) == 0)
        return NULL;
    return *text == '/' ? check_folder(text) : "is not known";
}

static const char *check_socket(const char *text)
{
    const char *why = check_path_form(text);

    return why || strlen(text) <= CONFIG_MAX_SOCKET_BYTES ? why : "is longer than a socket's path can be";
}

/* Checks host:port. A host that contains colons needs brackets. Return: NULL, or the reason for a failure. */
static const char *check_address(const char *text)
{
    const char *colon = strrchr(text, ':');
    char *end;

    if (!colon || colon == text)
        return "is not host:port";
    if (!is_printable(text) || strchr(text, ' '))
        return "has a character that an address may not have";
    if (colon - text > 255)
        return "is too long";
    if (memchr(text, ':', (size_t)(colon - text)) && (*text != '[' || colon[-1] != ']'))
        return "is not host:port; an IPv6 address stands in brackets";
    if (!isdigit((unsigned char)colon[1]) || strlen(colon + 1) > 5)
        return "has no port from 1 to 65535";
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (*end != '\0' || port < 1 || port > 65535)
        return "has no port from 1 to 65535";
    return NULL;
}

/*
 * Writes the shortest decimal that reads back to the same bits, with a point because YAML 1.1 reads 1e-08 as a string.
 */
static void write_real(FILE *file, double real)
{
    char buffer[32];
    size_t n_mantissa;

    if (fabs(real) < 1e15 && real == floor(real)) {
        fprintf(file, "%.0f", real);
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(buffer, sizeof(buffer), "%.*g", precision, real);
        if (strtod(buffer, NULL) == real)
            break;
    }
    n_mantissa = strcspn(buffer, "e");
    fprintf(file, "%.*s%s%s", (int)n_mantissa, buffer, strcspn(buffer, ".e") == n_mantissa ? ".0" : "",
            buffer + n_mantissa);
}

static void write_string(FILE *file, const char *string)
{
    if (!string) {
        fputs("null", file);
        return;
    }
    fputc('"', file);
    for (; *string; string++) {
        if (*string == '"' || *string == '\\')
            fputc('\\', file);
        fputc(*string, file);
    }
    fputc('"', file);
}

static void write_with_unit(FILE *file, uint64_t whole, const struct units *units)
{
    size_t i = 0;

    if (whole == 0) {
        fputc('0', file);
        return;
    }
    while (i + 1 < units->n_items && whole % units->items[i].factor != 0)
        i++;
    fprintf(file, "%" PRIu64 "%s", whole / units->items[i].factor, units->items[i].name);
}

static void print_choice(FILE *file, const struct config_key *key, const void *base)
{
    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if (!choice->refused && !choice->spelling && (uint64_t)choice->value == get_whole(key, base))
            fputs(choice->name, file);
    }
}

static void write_reals(FILE *file, const double *items, size_t n_items)
{
    fputc('[', file);
    for (size_t i = 0; i < n_items; i++) {
        fputs(i > 0 ? ", " : "", file);
        write_real(file, items[i]);
    }
    fputc(']', file);
}

static void print_numbers(FILE *file, const struct config_key *key, const void *base)
{
    const struct schedule_numbers *numbers = constant_field(key, base);

    if (numbers->n_items == 0)
        fputs("null", file);
    else if (numbers->n_items == 1)
        write_real(file, numbers->items[0]);
    else
        write_reals(file, numbers->items, numbers->n_items);
}

static void print_names(FILE *file, const struct config_key *key, const void *base)
{
    const struct config_names *names = constant_field(key, base);

    fputc('[', file);
    for (size_t i = 0; i < names->n_items; i++) {
        fputs(i > 0 ? ", " : "", file);
        write_string(file, names->items[i]);
    }
    fputc(']', file);
}

static void print_nodes(FILE *file, const struct config_key *key, const void *base)
{
    const struct config_nodes *nodes = constant_field(key, base);

    if (nodes->n_items == 0) {
        fputs("null", file);
        return;
    }
    fputc('[', file);
    for (size_t i = 0; i < nodes->n_items; i++) {
        fprintf(file, "%s{address: ", i > 0 ? ", " : "");
        write_string(file, nodes->items[i].address);
        fprintf(file, ", ranks: %u}", nodes->items[i].ranks);
    }
    fputc(']', file);
}

static void print_string(FILE *file, const struct config_key *key, const void *base)
{
    write_string(file, *(char *const *)constant_field(key, base));
}

static void print_bool(FILE *file, const struct config_key *key, const void *base)
{
    fputs(*(const bool *)constant_field(key, base) ? "true" : "false", file);
}

static void print_whole(FILE *file, const struct config_key *key, const void *base)
{
    if ((key->flags & CONFIG_AUTO) && get_whole(key, base) == 0)
        fputs("auto", file);
    else
        fprintf(file, "%" PRIu64, get_whole(key, base));
}

static void print_real(FILE *file, const struct config_key *key, const void *base)
{
    write_real(file, *(const double *)constant_field(key, base));
}

static void print_size(FILE *file, const struct config_key *key, const void *base)
{
    if ((key->flags & CONFIG_AUTO) && get_whole(key, base) == 0)
        fputs("auto", file);
    else
        write_with_unit(file, get_whole(key, base), &size_units);
}

static void print_duration(FILE *file, const struct config_key *key, const void *base)
{
    write_with_unit(file, get_whole(key, base), &duration_units);
}

static void print_mode(FILE *file, const struct config_key *key, const void *base)
{
    fprintf(file, "\"%04o\"", (unsigned)*(const mode_t *)constant_field(key, base));
}

static void print_pair(FILE *file, const struct config_key *key, const void *base)
{
    write_reals(file, constant_field(key, base), 2);
}

static void print_triple(FILE *file, const struct config_key *key, const void *base)
{
    write_reals(file, constant_field(key, base), 3);
}

/* ---- the values that are allowed ----------------------------------------------------------------------- */

static void allow_range(FILE *file, const struct config_key *key)
{
    fputs(key->flags & CONFIG_ABOVE_MIN ? "above " : "from ", file);
    write_real(file, key->min);
    fputs(key->flags & CONFIG_BELOW_MAX ? " to below " : " to ", file);
    write_real(file, key->max);
    if (key->unit)
        fprintf(file, " (%s)", key->unit);
}

static void allow_range_with_units(FILE *file, const struct config_key *key, const struct units *units)
{
    if (key->min > 0) {
        fputs(" from ", file);
        write_with_unit(file, (uint64_t)key->min, units);
    }
    fputs(key->min > 0 ? " to " : " up to ", file);
    write_with_unit(file, (uint64_t)key->max, units);
    if (key->min == 0)
        fputs(", or 0", file);
}

static void allow_whole(FILE *file, const struct config_key *key)
{
    fputs(key->flags & CONFIG_AUTO ? "auto, or a whole number " : "a whole number ", file);
    allow_range(file, key);
}

static void allow_real(FILE *file, const struct config_key *key)
{
    fputs("a number ", file);
    allow_range(file, key);
}

static void allow_size(FILE *file, const struct config_key *key)
{
    fputs(key->flags & CONFIG_AUTO ? "auto, or a size such as 512MB or 64GiB," : "a size such as 512MB or 64GiB,",
          file);
    allow_range_with_units(file, key, &size_units);
}

static void allow_duration(FILE *file, const struct config_key *key)
{
    fputs("a time such as 500ms, 10s or 10min,", file);
    allow_range_with_units(file, key, &duration_units);
}

static void allow_choice(FILE *file, const struct config_key *key)
{
    fputs("one of ", file);
    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if (!choice->refused && !choice->spelling)
            fprintf(file, "%s%s", choice > key->choices ? ", " : "", choice->name);
    }
}

static void allow_socket(FILE *file, const struct config_key *key)
{
    (void)key;
    fprintf(file, "an absolute path of at most %d bytes", CONFIG_MAX_SOCKET_BYTES);
}

static void allow_names(FILE *file, const struct config_key *key)
{
    fprintf(file, "a list of at most %zu names or ids", key->max_items);
}

static void allow_patterns(FILE *file, const struct config_key *key)
{
    fprintf(file, "a list of at most %zu patterns of names", key->max_items);
}

static void allow_numbers(FILE *file, const struct config_key *key)
{
    fputs("a number, or a list with one for each group, ", file);
    allow_range(file, key);
}

static void allow_pair(FILE *file, const struct config_key *key)
{
    fputs("a list of two numbers ", file);
    allow_range(file, key);
}

static void allow_triple(FILE *file, const struct config_key *key)
{
    fputs("a list of three numbers ", file);
    allow_range(file, key);
}

static void allow_nodes(FILE *file, const struct config_key *key)
{
    fprintf(file, "a list of at most %zu nodes, each {address, ranks}", key->max_items);
}

/* ---- freeing values ------------------------------------------------------------------------------------ */

static void string_deinit(void *at)
{
    free(*(char **)at);
    *(char **)at = NULL;
}

static void numbers_deinit(void *at)
{
    struct schedule_numbers *numbers = at;

    free(numbers->items);
    *numbers = (struct schedule_numbers){0};
}

static void names_deinit(void *at)
{
    struct config_names *names = at;

    for (size_t i = 0; i < names->n_items; i++)
        free(names->items[i]);
    free(names->items);
    *names = (struct config_names){0};
}

static void nodes_deinit(void *at)
{
    struct config_nodes *nodes = at;

    for (size_t i = 0; i < nodes->n_items; i++)
        free(nodes->items[i].address);
    free(nodes->items);
    *nodes = (struct config_nodes){0};
}

/* ---- one row for each type ----------------------------------------------------------------------------- */

static const struct config_value_type {
    const char *(*check)(const char *text); /* for strings, which are stored as they are; returns NULL or a reason */
    /* Stores scalars that are no strings. Return: NULL, or the reason for a failure. */
    const char *(*store)(const struct config_key *key, const struct config_value *value, void *base);
    void (*print)(FILE *file, const struct config_key *key, const void *base);
    const char *allowed; /* NULL: allow() prints it */
    void (*allow)(FILE *file, const struct config_key *key);
    void (*deinit)(void *at); /* NULL: the field owns nothing */
} types[] = {
    [CONFIG_SECTION] = {.allowed = "a mapping of keys to values"},
    [CONFIG_NAME] = {.check = check_name,
                     .print = print_string,
                     .allowed = "a name of letters, digits, '.', '_', '-', at most 64",
                     .deinit = string_deinit},
    [CONFIG_PATTERN] = {check_pattern, NULL, print_string, "a pattern of at most 255 bytes, such as '*.experts.*'",
                        NULL, string_deinit},
    [CONFIG_PATH] = {check_path, NULL, print_string, "an absolute path", NULL, string_deinit},
    [CONFIG_FOLDER] = {check_folder, NULL, print_string, "an absolute path", NULL, string_deinit},
    [CONFIG_LOAD] = {check_load, NULL, print_string, CONFIG_LOAD_LATEST ", " CONFIG_LOAD_NEVER " or an absolute path",
                     NULL, string_deinit},
    [CONFIG_SOCKET] = {check_socket, NULL, print_string, NULL, allow_socket, string_deinit},
    [CONFIG_ADDRESS] = {check_address, NULL, print_string, "host:port", NULL, string_deinit},
    [CONFIG_BOOL] = {NULL, store_bool, print_bool, "true or false", NULL, NULL},
    [CONFIG_WHOLE] = {NULL, store_whole, print_whole, NULL, allow_whole, NULL},
    [CONFIG_REAL] = {NULL, store_real, print_real, NULL, allow_real, NULL},
    [CONFIG_SIZE] = {NULL, store_size, print_size, NULL, allow_size, NULL},
    [CONFIG_DURATION] = {NULL, store_duration, print_duration, NULL, allow_duration, NULL},
    [CONFIG_CHOICE] = {NULL, store_choice, print_choice, NULL, allow_choice, NULL},
    [CONFIG_MODE] = {NULL, store_mode, print_mode, "an octal mode such as \"0660\"", NULL, NULL},
    [CONFIG_NAMES] = {NULL, NULL, print_names, NULL, allow_names, names_deinit},
    [CONFIG_PATTERNS] = {NULL, NULL, print_names, NULL, allow_patterns, names_deinit},
    [CONFIG_NUMBERS] = {NULL, NULL, print_numbers, NULL, allow_numbers, numbers_deinit},
    [CONFIG_PAIR] = {NULL, NULL, print_pair, NULL, allow_pair, NULL},
    [CONFIG_TRIPLE] = {NULL, NULL, print_triple, NULL, allow_triple, NULL},
    [CONFIG_NODES] = {NULL, NULL, print_nodes, NULL, allow_nodes, nodes_deinit},
};
_Static_assert(ARRAY_SIZE(types) == CONFIG_NODES + 1, "a row for each type");

static int store_string(const struct config_key *key, const char *text, void *base)
{
    char **at = field(key, base), *copy = strdup(text);

    assert(key->size == sizeof(*at));
    if (!copy)
        return -ENOMEM;
    free(*at);
    *at = copy;
    return 0;
}

int config_value_store(const struct config_key *key, const struct config_value *value, void *base, const char **why)
{
    const struct config_value_type *type = &types[key->type];

    *why = type->check ? type->check(value->text) : type->store ? type->store(key, value, base) : "is a single value";
    if (*why)
        return CONFIG_VALUE_E_BAD;
    return type->check ? store_string(key, value->text, base) : 0;
}

void config_value_print(FILE *file, const struct config_key *key, const void *base)
{
    if (types[key->type].print)
        types[key->type].print(file, key, base);
}

void config_value_allowed(FILE *file, const struct config_key *key)
{
    if (types[key->type].allowed)
        fputs(types[key->type].allowed, file);
    else
        types[key->type].allow(file, key);
}

void config_value_deinit(const struct config_key *key, void *base)
{
    if (types[key->type].deinit)
        types[key->type].deinit(field(key, base));
}
