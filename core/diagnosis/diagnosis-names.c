/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chooses the names in a text. A fault rarely concerns only one parameter, and 432 names say less than their common
 * prefix. A set is one group if all trainable parameters under its common prefix are in the set. Else the group is
 * split at the next component of the names, as long as five groups suffice.
 */

#include <assert.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/diagnosis/diagnosis-build.h"
#include "core/layout/layout.h"

struct set {
    const struct layout *layout;
    const uint32_t *ids;
    size_t n;
};

static const struct layout_param *param_at(const struct set *set, size_t i)
{
    return set->ids[i] < set->layout->n_params ? &set->layout->params[set->ids[i]] : NULL;
}

/* Is the name the prefix, or the prefix followed by a dot? Every name is under the empty prefix. */
static bool is_under(const struct layout_param *param, const char *prefix, size_t len)
{
    if (param->name_len < len || memcmp(param->name, prefix, len) != 0)
        return false;
    return len == 0 || param->name_len == len || param->name[len] == '.';
}

static const char *prefix_of(const struct set *set, const struct name_group *group)
{
    return set->layout->params[group->first].name;
}

/* Return: the length of the longest prefix of a's name, at most len, that ends before a dot and also is a prefix of b's
 * name. */
static size_t common_prefix(const struct layout_param *a, size_t len, const struct layout_param *b)
{
    while (len > 0 && !is_under(b, a->name, len)) {
        len--;
        while (len > 0 && a->name[len] != '.')
            len--;
    }
    return len;
}

/* Return: the length of the name up to the end of the first component after the first len bytes. */
static size_t next_component(const struct layout_param *param, size_t len)
{
    size_t at = MIN(len ? len + 1 : 1, param->name_len);

    while (at < param->name_len && param->name[at] != '.')
        at++;
    return at;
}

static bool is_whole(const struct set *set, const struct name_group *group)
{
    const char *prefix = prefix_of(set, group);
    size_t n = 0;

    for (uint32_t p = 0; p < set->layout->n_params; p++)
        n += set->layout->params[p].trainable && is_under(&set->layout->params[p], prefix, group->prefix_len);
    return n <= group->n;
}

/*
 * Extends the group's prefix to the longest that all members share, counts the members, and checks whether all
 * trainable parameters under it are in the set.
 */
static void complete_group(const struct set *set, struct name_group *group)
{
    const struct layout_param *first = &set->layout->params[group->first];
    size_t under = group->prefix_len, len = first->name_len;

    assert(group->prefix_len <= first->name_len);
    group->n = 0;
    for (size_t i = 0; i < set->n; i++) {
        const struct layout_param *param = param_at(set, i);

        if (!param || !is_under(param, first->name, under))
            continue;
        group->n++;
        len = common_prefix(first, len, param);
    }
    group->prefix_len = len;
    group->whole = is_whole(set, group);
}

/*
 * Splits a group at the next component of its members' names. Return: the number of parts; 0 if there are more than
 * max, or if a member's name is the prefix itself.
 */
static size_t split(const struct set *set, const struct name_group *group, struct name_group *parts, size_t max)
{
    const char *prefix = prefix_of(set, group);
    size_t n_parts = 0;

    for (size_t i = 0; i < set->n; i++) {
        const struct layout_param *param = param_at(set, i);
        bool known = false;

        if (!param || !is_under(param, prefix, group->prefix_len))
            continue;
        for (size_t k = 0; k < n_parts && !known; k++)
            known = is_under(param, prefix_of(set, &parts[k]), parts[k].prefix_len);
        if (known)
            continue;
        if (n_parts == max || (group->prefix_len && param->name_len == group->prefix_len))
            return 0;
        parts[n_parts++] = (struct name_group){
            .first = set->ids[i],
            .prefix_len = next_component(param, group->prefix_len),
        };
    }
    return n_parts;
}

/*
 * Splits groups until all trainable parameters under each group's prefix are in the set. Return: false if this needs
 * more groups than fit.
 */
static bool refine(const struct set *set, struct name_group *groups, size_t *n_groups)
{
    struct name_group parts[NAME_GROUPS_MAX];

    for (size_t g = 0; g < *n_groups;) {
        size_t n_others = *n_groups - 1, n_parts;

        if (groups[g].whole) {
            g++;
            continue;
        }
        n_parts = split(set, &groups[g], parts, NAME_GROUPS_MAX - n_others);
        if (n_parts < 2)
            return false;
        assert(n_others + n_parts <= NAME_GROUPS_MAX);
        memmove(&groups[g + n_parts], &groups[g + 1], (*n_groups - g - 1) * sizeof(*groups));
        memcpy(&groups[g], parts, n_parts * sizeof(*groups));
        *n_groups = n_others + n_parts;
        for (size_t k = 0; k < n_parts; k++)
            complete_group(set, &groups[g + k]);
    }
    return true;
}

/* Makes groups, one for each first component of the names, as many as fit. Return: the number of groups. */
static size_t first_components(const struct set *set, struct name_group *groups)
{
    size_t n_groups = 0;

    for (size_t i = 0; i < set->n && n_groups < NAME_GROUPS_MAX; i++) {
        const struct layout_param *param = param_at(set, i);
        bool known = !param;

        for (size_t k = 0; k < n_groups && !known; k++)
            known = is_under(param, prefix_of(set, &groups[k]), groups[k].prefix_len);
        if (known)
            continue;
        groups[n_groups] = (struct name_group){.first = set->ids[i], .prefix_len = next_component(param, 0)};
        complete_group(set, &groups[n_groups++]);
    }
    return n_groups;
}

size_t name_groups(struct name_group groups[NAME_GROUPS_MAX], size_t *n_groups, const struct layout *layout,
                   const uint32_t *ids, size_t n)
{
    struct set set = {.layout = layout, .ids = ids, .n = n};
    struct name_group all;
    size_t n_left = 0;

    *n_groups = 0;
    for (size_t i = 0; i < n; i++) {
        if (!param_at(&set, i))
            continue;
        if (n_left++ == 0)
            groups[0] = (struct name_group){.first = ids[i]};
    }
    if (n_left == 0)
        return 0;
    *n_groups = 1;
    complete_group(&set, &groups[0]);
    all = groups[0];
    if (!refine(&set, groups, n_groups)) {
        groups[0] = all;
        *n_groups = all.prefix_len ? 1 : first_components(&set, groups);
    }
    for (size_t g = 0; g < *n_groups; g++)
        n_left -= groups[g].n;
    return n_left;
}

void name_print(struct strbuf *buf, const char *name, size_t name_len)
{
    char printed[4 * 1024 + 1]; /* room for the longest possible name, with every byte as \xNN */

    layout_print_name(printed, sizeof(printed), name, name_len);
    strbuf_add(buf, "%s", printed);
}

static void print_few(struct strbuf *buf, const struct set *set)
{
    const char *separator = "";

    for (size_t i = 0; i < set->n; i++) {
        const struct layout_param *param = param_at(set, i);

        strbuf_add(buf, "%s", separator);
        separator = ", ";
        if (param)
            name_print(buf, param->name, param->name_len);
        else
            strbuf_add(buf, "number %u", set->ids[i]);
    }
}

static void print_group(struct strbuf *buf, const struct set *set, const struct name_group *group)
{
    const struct layout_param *first = &set->layout->params[group->first];

    name_print(buf, first->name, first->name_len);
    if (group->n == 1)
        return;
    strbuf_add(buf, " and %zu more", group->n - 1);
    if (group->prefix_len) {
        strbuf_add(buf, " under ");
        name_print(buf, first->name, group->prefix_len);
        strbuf_add(buf, ".*");
    } else if (group->whole) {
        strbuf_add(buf, ": every trainable parameter");
    }
}

void name_list_print(struct strbuf *buf, const struct layout *layout, const uint32_t *ids, size_t n)
{
    struct name_group groups[NAME_GROUPS_MAX];
    struct set set = {.layout = layout, .ids = ids, .n = n};
    size_t n_groups, n_left;
    bool whole = true;

    if (!layout) {
        strbuf_add(buf, n == 1 ? "number %u" : "number %u and %zu more", n ? ids[0] : 0, n - 1);
        return;
    }
    if (n <= DIAGNOSTIC_MAX_PARAMS) {
        print_few(buf, &set);
        return;
    }
    n_left = name_groups(groups, &n_groups, layout, ids, n);
    for (size_t g = 0; g < n_groups; g++) {
        if (g)
            strbuf_add(buf, "\n");
        print_group(buf, &set, &groups[g]);
        whole &= groups[g].whole;
    }
    if (n_left)
        strbuf_add(buf, "\nand %zu more elsewhere", n_left);
    /* If all groups are whole, their prefixes name every parameter. */
    if (n_left || !whole)
        strbuf_add(buf, "\n(every name: zerodctl diagnostics --json)");
}
