/* SPDX-License-Identifier: Apache-2.0 */

#include "core/config/config-value.h"

#include "core/base/base.h"
#include "core/config/config.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

struct unit {
    const char *name;
    uint64_t factor;
};

/* Largest first: printing takes the first that divides. Decimal ones are read, binary ones are printed. */
static const struct unit size_units[] = {
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
};
static const struct unit duration_units[] = {
    {"d", 86400000}, {"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1},
};

struct decimal {
    uint64_t digits; /* all of them, without the point */
    int exponent;    /* value = digits x 10^exponent */
};

enum { DECIMAL_MAX_EXPONENT = 4096 };

/* Reads digits with at most one point. Return: what follows, or NULL: there are none, or more than fit 64
 * bits. */
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

/* Reads an exponent if there is one; "5EiB" has none. Return: what follows. */
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

/* digits x 10^exponent x factor. Return: NULL, or why not. */
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

/* A number and its unit, one of `units`, none when there are none. Return: NULL, or why not. */
static const char *read_whole(const char *text, const struct unit *units, size_t n_units, uint64_t *whole)
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
    while (i < n_units && strcmp(units[i].name, s) != 0)
        i++;
    if (i < n_units)
        factor = units[i].factor;
    else if (*s != '\0')
        return n_units > 0 ? "has an unknown unit" : "is not a whole number";
    else if (n_units > 0 && decimal.digits != 0)
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

/* Fields of whole numbers are 4 or 8 bytes wide; what is stored has been checked against the range. */
static void put_whole(const struct config_key *key, void *base, uint64_t whole)
{
    if (key->size == sizeof(uint64_t))
        *(uint64_t *)field(key, base) = whole;
    else
        *(uint32_t *)field(key, base) = (uint32_t)whole;
}

static uint64_t get_whole(const struct config_key *key, const void *base)
{
    const char *at = (const char *)base + key->offset;

    return key->size == sizeof(uint64_t) ? *(const uint64_t *)at : *(const uint32_t *)at;
}

static const char *store_whole(const struct config_key *key, const struct config_value *value, void *base)
{
    const struct unit *units = NULL;
    size_t n_units = 0;
    const char *why;
    uint64_t whole = 0;

    if ((key->flags & CONFIG_AUTO) && strcmp(value->text, "auto") == 0) {
        put_whole(key, base, 0);
        return NULL;
    }
    if (value->quoted && key->type == CONFIG_WHOLE)
        return "is a string: leave the quotes out";
    if (key->type == CONFIG_SIZE) {
        units = size_units;
        n_units = ARRAY_SIZE(size_units);
    } else if (key->type == CONFIG_DURATION) {
        units = duration_units;
        n_units = ARRAY_SIZE(duration_units);
    }
    why = read_whole(value->text, units, n_units, &whole);
    if (why)
        return why;
    if (!in_range(key, (double)whole))
        return "is out of range";
    put_whole(key, base, whole);
    return NULL;
}

static const char *store_real(const struct config_key *key, const char *text, void *base)
{
    double real;
    const char *why = read_real(text, &real);

    if (why)
        return why;
    if (!in_range(key, real))
        return "is out of range";
    *(double *)field(key, base) = real + 0.0; /* no -0 */
    return NULL;
}

static const char *store_bool(const struct config_key *key, const char *text, void *base)
{
    bool is_true = strcmp(text, "true") == 0 || strcmp(text, "True") == 0 || strcmp(text, "TRUE") == 0;

    if (!is_true && strcmp(text, "false") != 0 && strcmp(text, "False") != 0 && strcmp(text, "FALSE") != 0)
        return "is not a truth value";
    *(bool *)field(key, base) = is_true;
    return NULL;
}

static const char *store_choice(const struct config_key *key, const char *text, void *base)
{
    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if (strcmp(choice->name, text) == 0) {
            put_whole(key, base, (uint64_t)choice->value);
            return NULL;
        }
    }
    return "is not known";
}

static const char *store_mode(const struct config_key *key, const char *text, void *base)
{
    const char *s = strncmp(text, "0o", 2) == 0 ? text + 2 : text;
    size_t n = strspn(s, "01234567");
    unsigned long mode;

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

static const char *check_path(const struct config_key *key, const char *text)
{
    size_t n_bytes = strlen(text);

    if (n_bytes == 0)
        return "is empty";
    if (*text != '/')
        return "is not an absolute path";
    if (!is_printable(text))
        return "has a control character";
    if (text[n_bytes - 1] == '/')
        return "names a folder";
    if (key->type == CONFIG_SOCKET && n_bytes > CONFIG_MAX_SOCKET_BYTES)
        return "is longer than a socket's path can be";
    return n_bytes < 4096 ? NULL : "is too long";
}

/* host:port, host in brackets when it has colons itself. */
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

static int store_string(const struct config_key *key, const char *text, void *base, const char **why)
{
    char **at = field(key, base), *copy;

    if (key->type == CONFIG_NAME)
        *why = check_name(text);
    else if (key->type == CONFIG_ADDRESS)
        *why = check_address(text);
    else
        *why = check_path(key, text);
    if (*why)
        return CONFIG_VALUE_E_BAD;

    copy = strdup(text);
    if (!copy)
        return -ENOMEM;
    free(*at);
    *at = copy;
    return 0;
}

int config_value_store(const struct config_key *key, const struct config_value *value, void *base, const char **why)
{
    const char *text = value->text;

    *why = NULL;
    switch (key->type) {
    case CONFIG_NAME:
    case CONFIG_PATH:
    case CONFIG_SOCKET:
    case CONFIG_ADDRESS:
        return store_string(key, text, base, why);
    case CONFIG_CHOICE:
        *why = store_choice(key, text, base);
        break;
    case CONFIG_MODE:
        *why = store_mode(key, text, base);
        break;
    case CONFIG_WHOLE:
    case CONFIG_SIZE:
    case CONFIG_DURATION:
        *why = store_whole(key, value, base);
        break;
    case CONFIG_REAL:
        *why = value->quoted ? "is a string: leave the quotes out" : store_real(key, text, base);
        break;
    case CONFIG_BOOL:
        *why = value->quoted ? "is a string: leave the quotes out" : store_bool(key, text, base);
        break;
    default:
        *why = "is a single value";
    }
    return *why ? CONFIG_VALUE_E_BAD : 0;
}

/* The shortest decimal that reads back to the same bits, with a point: YAML 1.1 takes 1e-08 for a string. */
static void print_real(FILE *file, double real)
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

static void print_string(FILE *file, const char *string)
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

static void print_with_unit(FILE *file, uint64_t whole, const struct unit *units, size_t n_units)
{
    size_t i = 0;

    if (whole == 0) {
        fputc('0', file);
        return;
    }
    while (i + 1 < n_units && whole % units[i].factor != 0)
        i++;
    fprintf(file, "%" PRIu64 "%s", whole / units[i].factor, units[i].name);
}

static void print_choice(FILE *file, const struct config_key *key, const void *base)
{
    for (const struct config_choice *choice = key->choices; choice->name; choice++) {
        if ((uint64_t)choice->value == get_whole(key, base))
            fputs(choice->name, file);
    }
}

static void print_reals(FILE *file, const double *items, size_t n_items)
{
    fputc('[', file);
    for (size_t i = 0; i < n_items; i++) {
        fputs(i > 0 ? ", " : "", file);
        print_real(file, items[i]);
    }
    fputc(']', file);
}

static void print_numbers(FILE *file, const struct schedule_numbers *numbers)
{
    if (numbers->n_items == 0)
        fputs("null", file);
    else if (numbers->n_items == 1)
        print_real(file, numbers->items[0]);
    else
        print_reals(file, numbers->items, numbers->n_items);
}

static void print_names(FILE *file, const struct config_names *names)
{
    fputc('[', file);
    for (size_t i = 0; i < names->n_items; i++) {
        fputs(i > 0 ? ", " : "", file);
        print_string(file, names->items[i]);
    }
    fputc(']', file);
}

static void print_nodes(FILE *file, const struct config_nodes *nodes)
{
    if (nodes->n_items == 0) {
        fputs("null", file);
        return;
    }
    fputc('[', file);
    for (size_t i = 0; i < nodes->n_items; i++) {
        fprintf(file, "%s{address: ", i > 0 ? ", " : "");
        print_string(file, nodes->items[i].address);
        fprintf(file, ", ranks: %u}", nodes->items[i].ranks);
    }
    fputc(']', file);
}

void config_value_print(FILE *file, const struct config_key *key, const void *base)
{
    const void *at = (const char *)base + key->offset;

    switch (key->type) {
    case CONFIG_NAME:
    case CONFIG_PATH:
    case CONFIG_SOCKET:
    case CONFIG_ADDRESS:
        print_string(file, *(char *const *)at);
        break;
    case CONFIG_BOOL:
        fputs(*(const bool *)at ? "true" : "false", file);
        break;
    case CONFIG_WHOLE:
        if ((key->flags & CONFIG_AUTO) && get_whole(key, base) == 0)
            fputs("auto", file);
        else
            fprintf(file, "%" PRIu64, get_whole(key, base));
        break;
    case CONFIG_REAL:
        print_real(file, *(const double *)at);
        break;
    case CONFIG_SIZE:
        print_with_unit(file, get_whole(key, base), size_units, ARRAY_SIZE(size_units));
        break;
    case CONFIG_DURATION:
        print_with_unit(file, get_whole(key, base), duration_units, ARRAY_SIZE(duration_units));
        break;
    case CONFIG_CHOICE:
        print_choice(file, key, base);
        break;
    case CONFIG_MODE:
        fprintf(file, "\"%04o\"", (unsigned)*(const mode_t *)at);
        break;
    case CONFIG_NAMES:
        print_names(file, at);
        break;
    case CONFIG_NUMBERS:
        print_numbers(file, at);
        break;
    case CONFIG_PAIR:
        print_reals(file, at, 2);
        break;
    case CONFIG_NODES:
        print_nodes(file, at);
        break;
    case CONFIG_SECTION:
        break;
    }
}

static void print_range(FILE *file, const struct config_key *key)
{
    fputs(key->flags & CONFIG_ABOVE_MIN ? "above " : "from ", file);
    print_real(file, key->min);
    fputs(key->flags & CONFIG_BELOW_MAX ? " to below " : " to ", file);
    print_real(file, key->max);
    if (key->unit)
        fprintf(file, " (%s)", key->unit);
}

static void print_range_with_units(FILE *file, const struct config_key *key, const struct unit *units, size_t n_units)
{
    if (key->min > 0) {
        fputs(" from ", file);
        print_with_unit(file, (uint64_t)key->min, units, n_units);
    }
    fputs(key->min > 0 ? " to " : " up to ", file);
    print_with_unit(file, (uint64_t)key->max, units, n_units);
    if (key->min == 0)
        fputs(", or 0", file);
}

static void print_choices(FILE *file, const struct config_choice *choice)
{
    fputs("one of ", file);
    for (size_t i = 0; choice[i].name; i++)
        fprintf(file, "%s%s", i > 0 ? ", " : "", choice[i].name);
}

void config_value_allowed(FILE *file, const struct config_key *key)
{
    switch (key->type) {
    case CONFIG_NAME:
        fputs("a name of letters, digits, '.', '_', '-', at most 64", file);
        break;
    case CONFIG_PATH:
        fputs("an absolute path", file);
        break;
    case CONFIG_SOCKET:
        fprintf(file, "an absolute path of at most %d bytes", CONFIG_MAX_SOCKET_BYTES);
        break;
    case CONFIG_ADDRESS:
        fputs("host:port", file);
        break;
    case CONFIG_BOOL:
        fputs("true or false", file);
        break;
    case CONFIG_WHOLE:
        fputs(key->flags & CONFIG_AUTO ? "auto, or a whole number " : "a whole number ", file);
        print_range(file, key);
        break;
    case CONFIG_REAL:
        fputs("a number ", file);
        print_range(file, key);
        break;
    case CONFIG_SIZE:
        fputs("a size such as 512MB or 64GiB,", file);
        print_range_with_units(file, key, size_units, ARRAY_SIZE(size_units));
        break;
    case CONFIG_DURATION:
        fputs("a time such as 500ms, 10s or 10min,", file);
        print_range_with_units(file, key, duration_units, ARRAY_SIZE(duration_units));
        break;
    case CONFIG_CHOICE:
        print_choices(file, key->choices);
        break;
    case CONFIG_MODE:
        fputs("an octal mode such as \"0660\"", file);
        break;
    case CONFIG_NAMES:
        fprintf(file, "a list of at most %zu names or ids", key->max_items);
        break;
    case CONFIG_NUMBERS:
        fputs("a number, or a list with one for each group, ", file);
        print_range(file, key);
        break;
    case CONFIG_PAIR:
        fputs("a list of two numbers ", file);
        print_range(file, key);
        break;
    case CONFIG_NODES:
        fprintf(file, "a list of at most %zu nodes, each {address, ranks}", key->max_items);
        break;
    case CONFIG_SECTION:
        fputs("a mapping of keys to values", file);
        break;
    }
}

static void names_deinit(struct config_names *names)
{
    for (size_t i = 0; i < names->n_items; i++)
        free(names->items[i]);
    free(names->items);
    *names = (struct config_names){0};
}

static void nodes_deinit(struct config_nodes *nodes)
{
    for (size_t i = 0; i < nodes->n_items; i++)
        free(nodes->items[i].address);
    free(nodes->items);
    *nodes = (struct config_nodes){0};
}

void config_value_deinit(const struct config_key *key, void *base)
{
    switch (key->type) {
    case CONFIG_NAME:
    case CONFIG_PATH:
    case CONFIG_SOCKET:
    case CONFIG_ADDRESS:
        free(*(char **)field(key, base));
        *(char **)field(key, base) = NULL;
        break;
    case CONFIG_NAMES:
        names_deinit(field(key, base));
        break;
    case CONFIG_NUMBERS:
        free(((struct schedule_numbers *)field(key, base))->items);
        *(struct schedule_numbers *)field(key, base) = (struct schedule_numbers){0};
        break;
    case CONFIG_NODES:
        nodes_deinit(field(key, base));
        break;
    default:
        break;
    }
}
