/* SPDX-License-Identifier: Apache-2.0 */

/* Finds keys in the table by path, by section and name, or by similarity. */

#include "core/base/base.h"
#include "core/config/config-table.h"

#include <ctype.h>
#include <string.h>

const char *config_key_leaf(const struct config_key *key)
{
    const char *dot = strrchr(key->path, '.');

    return dot ? dot + 1 : key->path;
}

bool config_key_applies(const struct config_key *key, unsigned active)
{
    return key->only == 0 || (key->only & active) != 0;
}

/* Is key a direct child of section? */
static bool stands_in(const struct config_key *key, const char *section)
{
    size_t n = (size_t)(config_key_leaf(key) - key->path);
    size_t n_section = strlen(section);

    if (n == 0)
        return n_section == 0;
    return n == n_section + 1 && memcmp(key->path, section, n_section) == 0;
}

const struct config_key *config_table_lookup(const char *path, unsigned active)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        if (config_key_applies(&keys[i], active) && strcmp(keys[i].path, path) == 0)
            return &keys[i];
    }
    return NULL;
}

const struct config_key *config_table_find(const char *section, const char *name, unsigned active)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        if (config_key_applies(&keys[i], active) && strcmp(config_key_leaf(&keys[i]), name) == 0 &&
            stands_in(&keys[i], section))
            return &keys[i];
    }
    return NULL;
}

/* Computes the optimal string alignment distance, without regard to case. Three rows suffice because a swap looks two
 * rows back. */
unsigned config_distance(const char *a, const char *b)
{
    enum { LONGEST = 64 };
    unsigned rows[3][LONGEST + 1];
    size_t n_a = strnlen(a, LONGEST), n_b = strnlen(b, LONGEST);

    for (size_t j = 0; j <= n_b; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= n_a; i++) {
        unsigned *row = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n_b; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            unsigned best = MIN(above[j], row[j - 1]) + 1;

            best = MIN(best, above[j - 1] + (x != y));
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) && y == tolower((unsigned char)a[i - 2]))
                best = MIN(best, above2[j - 2] + 1);
            row[j] = best;
        }
    }
    return rows[n_a % 3][n_b];
}

bool config_is_near(const char *name, const char *other)
{
    return config_distance(name, other) <= MAX(strlen(name) / 4, (size_t)1);
}

/* Return: the key of this name in the only section that has one: "stage" means zero_optimization.stage. */
static const struct config_key *find_elsewhere(const char *name, unsigned active)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys), *found = NULL;

    for (size_t i = 0; i < n_keys; i++) {
        if (keys[i].kind == CONFIG_ALIAS || !config_key_applies(&keys[i], active) ||
            strcmp(config_key_leaf(&keys[i]), name) != 0)
            continue;
        if (found)
            return NULL;
        found = &keys[i];
    }
    return found && found->kind == CONFIG_OURS ? found : NULL;
}

/* If two keys are equally near, prefers the key that has an effect. */
const struct config_key *config_table_nearest(const char *section, const char *name, unsigned active)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys), *nearest = NULL;
    unsigned least = 0;

    for (size_t i = 0; i < n_keys; i++) {
        const char *leaf = config_key_leaf(&keys[i]);
        unsigned remote = 2 * config_distance(name, leaf) + (keys[i].kind != CONFIG_OURS);

        if (keys[i].kind == CONFIG_REFUSED || !config_key_applies(&keys[i], active) || !stands_in(&keys[i], section) ||
            !config_is_near(name, leaf))
            continue;
        if (!nearest || remote < least) {
            nearest = &keys[i];
            least = remote;
        }
    }
    return nearest ? nearest : find_elsewhere(name, active);
}
