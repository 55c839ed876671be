/* SPDX-License-Identifier: Apache-2.0 */

/*
 * E1101: ranks declared different parameters. Ranks are grouped by their declarations, the largest group first. Each
 * other group is compared with the largest at their first difference.
 */

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"
#include "core/layout/manifest.h"

enum {
    GROUPS_SHOWN = 5,       /* the largest group, and four that differ from it */
    ENTRY_BYTES = 5 * 1024, /* room for the longest possible name, and its form */
};

/* The kind of the first difference, in the order in which manifests are compared. */
enum difference {
    DIFFERENT_ORDER,
    DIFFERENT_NAME,
    DIFFERENT_LENGTH,
    DIFFERENT_SHAPE,
    DIFFERENT_DTYPE,
    DIFFERENT_GROUP,
    DIFFERENT_TRAINABLE,
};

struct rank_group {
    unsigned first; /* the lowest rank of the group */
    unsigned n;
    uint64_t digest;
};

struct comparison {
    const struct manifest *const *manifests;
    unsigned world_size;
    struct rank_group *groups; /* room for world_size groups; n_groups are used */
    unsigned n_groups, n_missing;
    uint64_t *digests; /* per rank */
    bool *set;         /* scratch memory, per rank */
};

static void comparison_deinit(struct comparison *c)
{
    free(c->groups);
    free(c->digests);
    free(c->set);
}

static void add_rank(struct comparison *c, unsigned rank)
{
    uint64_t digest = manifest_digest(c->manifests[rank]);

    c->digests[rank] = digest;
    for (unsigned g = 0; g < c->n_groups; g++) {
        if (c->groups[g].digest == digest) {
            c->groups[g].n++;
            return;
        }
    }
    assert(c->n_groups < c->world_size);
    c->groups[c->n_groups++] = (struct rank_group){.first = rank, .n = 1, .digest = digest};
}

/* Sorts larger groups first, and equal ones by their lowest rank. There are few groups. */
static void sort_groups(struct comparison *c)
{
    for (unsigned i = 1; i < c->n_groups; i++) {
        struct rank_group group = c->groups[i];
        unsigned k = i;

        for (; k > 0 && c->groups[k - 1].n < group.n; k--)
            c->groups[k] = c->groups[k - 1];
        c->groups[k] = group;
    }
}

/* Groups the ranks. Return: false if memory runs out. */
static bool comparison_init(struct comparison *c, const struct manifest *const *manifests, unsigned world_size)
{
    *c = (struct comparison){.manifests = manifests, .world_size = world_size};
    c->groups = calloc(world_size, sizeof(*c->groups));
    c->digests = calloc(world_size, sizeof(*c->digests));
    c->set = calloc(world_size, sizeof(*c->set));
    if (!c->groups || !c->digests || !c->set)
        return false;
    for (unsigned r = 0; r < world_size; r++) {
        if (manifests[r])
            add_rank(c, r);
        else
            c->n_missing++;
    }
    sort_groups(c);
    return true;
}

static const struct manifest *manifest_of(const struct comparison *c, unsigned group)
{
    assert(group < c->n_groups);
    return c->manifests[c->groups[group].first];
}

/* Prints the ranks of a group, as "rank 1" or "ranks 0, 2, 3". */
static void print_members(struct strbuf *buf, struct comparison *c, unsigned group)
{
    for (unsigned r = 0; r < c->world_size; r++)
        c->set[r] = c->manifests[r] && c->digests[r] == c->groups[group].digest;
    strbuf_add(buf, c->groups[group].n == 1 ? "rank " : "ranks ");
    cause_print_ranks(buf, c->set, c->world_size);
}

static void print_entry(struct strbuf *buf, const struct manifest *manifest, uint32_t i)
{
    char text[ENTRY_BYTES];

    if (i >= manifest->n) {
        strbuf_add(buf, "nothing: the list ends here");
        return;
    }
    manifest_print_entry(text, sizeof(text), &manifest->decls[i]);
    strbuf_add(buf, "%s", text);
}

/* Return: the index of the entry with decl's name; UINT32_MAX if there is none. */
static uint32_t find_name(const struct manifest *manifest, const struct layout_decl *decl)
{
    for (uint32_t i = 0; i < manifest->n; i++)
        if (manifest->decls[i].name_len == decl->name_len &&
            memcmp(manifest->decls[i].name, decl->name, decl->name_len) == 0)
            return i;
    return UINT32_MAX;
}

static enum difference classify_difference(const struct manifest *a, const struct manifest *b, uint32_t i)
{
    const struct layout_decl *x, *y;

    if (i >= a->n || i >= b->n)
        return DIFFERENT_LENGTH;
    x = &a->decls[i];
    y = &b->decls[i];
    if (x->name_len != y->name_len || memcmp(x->name, y->name, x->name_len) != 0)
        return find_name(b, x) != UINT32_MAX && find_name(a, y) != UINT32_MAX ? DIFFERENT_ORDER : DIFFERENT_NAME;
    if (x->n_dims != y->n_dims || (x->n_dims && memcmp(x->shape, y->shape, x->n_dims * sizeof(*x->shape)) != 0))
        return DIFFERENT_SHAPE;
    if (x->dtype != y->dtype || x->grad_dtype != y->grad_dtype)
        return DIFFERENT_DTYPE;
    return x->group != y->group ? DIFFERENT_GROUP : DIFFERENT_TRAINABLE;
}

/* ---- fields -------------------------------------------------------------------------------------------- */

static void add_groups(struct diagnostic *d, struct comparison *c)
{
    struct strbuf buf = {0};

    for (unsigned g = 0; g < MIN(c->n_groups, (unsigned)GROUPS_SHOWN); g++) {
        strbuf_add(&buf, "%s", g ? "\n" : "");
        print_members(&buf, c, g);
        strbuf_add(&buf, ": %" PRIu32 " parameter%s, digest %016" PRIx64, manifest_of(c, g)->n,
                   manifest_of(c, g)->n == 1 ? "" : "s", c->groups[g].digest);
    }
    if (c->n_groups > GROUPS_SHOWN)
        strbuf_add(&buf, "\nand %u more groups", c->n_groups - GROUPS_SHOWN);
    diagnostic_field_take(d, "declared", &buf);
}

static void add_missing(struct diagnostic *d, struct comparison *c)
{
    struct strbuf buf = {0};

    if (c->n_missing == 0)
        return;
    for (unsigned r = 0; r < c->world_size; r++)
        c->set[r] = !c->manifests[r];
    strbuf_add(&buf, c->n_missing == 1 ? "rank " : "ranks ");
    cause_print_ranks(&buf, c->set, c->world_size);
    strbuf_add(&buf, c->n_missing == 1 ? " has not declared yet" : " have not declared yet");
    diagnostic_field_take(d, "missing", &buf);
}

/* Prints the group's entry i, and the ranks with an equal entry i, as "parameter 17: w [64, 32] bf16 (ranks 0, 2,
 * 3)". */
static void print_difference(struct strbuf *buf, struct comparison *c, unsigned group, uint32_t i)
{
    const struct manifest *manifest = manifest_of(c, group);
    unsigned n = 0;

    for (unsigned r = 0; r < c->world_size; r++) {
        const struct manifest *other = c->manifests[r];

        c->set[r] =
            other && (i < manifest->n ? i < other->n && manifest_entry_equal(&manifest->decls[i], &other->decls[i])
                                      : i >= other->n);
        n += c->set[r];
    }
    strbuf_add(buf, "%sparameter %" PRIu32 ": ", buf->n_bytes ? "\n" : "", i);
    print_entry(buf, manifest, i);
    strbuf_add(buf, n == 1 ? "   (rank " : "   (ranks ");
    cause_print_ranks(buf, c->set, c->world_size);
    strbuf_add(buf, ")");
}

/* If the group has the largest group's entry i at another place, prints "w is parameter 18 of ranks 2, 3". */
static void print_place(struct strbuf *buf, struct comparison *c, unsigned group, uint32_t i)
{
    const struct manifest *majority = manifest_of(c, 0);
    uint32_t place = i < majority->n ? find_name(manifest_of(c, group), &majority->decls[i]) : UINT32_MAX;

    if (place == UINT32_MAX || place == i)
        return;
    strbuf_add(buf, "%s", buf->n_bytes ? "\n" : "");
    name_print(buf, majority->decls[i].name, majority->decls[i].name_len);
    strbuf_add(buf, " is parameter %" PRIu32 " of ", place);
    print_members(buf, c, group);
}

/* Adds the first difference of each other group from the largest group. */
static void add_differences(struct diagnostic *d, struct comparison *c)
{
    struct strbuf expected = {0}, got = {0}, elsewhere = {0};
    uint32_t places[GROUPS_SHOWN];
    unsigned n_shown = 0;

    for (unsigned g = 1; g < MIN(c->n_groups, (unsigned)GROUPS_SHOWN); g++) {
        uint32_t i = manifest_first_difference(manifest_of(c, 0), manifest_of(c, g));
        bool shown = false;

        for (unsigned k = 0; k < n_shown && !shown; k++)
            shown = places[k] == i;
        if (!shown) {
            assert(n_shown < GROUPS_SHOWN);
            places[n_shown++] = i;
            print_difference(&expected, c, 0, i);
        }
        print_difference(&got, c, g, i);
        print_place(&elsewhere, c, g, i);
    }
    diagnostic_field_take(d, "expected", &expected);
    diagnostic_field_take(d, "got", &got);
    diagnostic_field_take(d, "elsewhere", &elsewhere);
}

/* Adds the cause and the fix for the second largest group. */
static void add_cause(struct diagnostic *d, struct comparison *c)
{
    static const char *const causes[] = {
        [DIFFERENT_ORDER] = "the ranks declare the same parameters in different orders",
        [DIFFERENT_NAME] = "the ranks declare different models: one has a parameter that the other lacks",
        [DIFFERENT_LENGTH] = "the ranks declare the same parameters up to a point, where one list ends",
        [DIFFERENT_SHAPE] = "a parameter has another shape on other ranks",
        [DIFFERENT_DTYPE] = "a parameter, or its gradient, has another type on other ranks",
        [DIFFERENT_GROUP] = "a parameter is in another parameter group on other ranks",
        [DIFFERENT_TRAINABLE] = "a parameter is trained on some ranks and frozen on others",
    };
    static const char *const fixes[] = {
        [DIFFERENT_ORDER] = "declare in an order that is the same in every process: model.named_parameters(), no sets",
        [DIFFERENT_NAME] = "build the model from the same configuration and the same code on every rank",
        [DIFFERENT_LENGTH] = "build the model from the same configuration and the same code on every rank",
        [DIFFERENT_SHAPE] = ("the same configuration on every rank; resize vocabularies and heads before "
                             "declaring, everywhere alike"),
        [DIFFERENT_DTYPE] = "cast the model before declaring it, on every rank alike",
        [DIFFERENT_GROUP] = "make parameter groups by name or module, on every rank alike",
        [DIFFERENT_TRAINABLE] = "freeze the same parameters on every rank before declaring them",
    };
    const struct manifest *a = manifest_of(c, 0), *b = manifest_of(c, 1);
    enum difference difference = classify_difference(a, b, manifest_first_difference(a, b));

    diagnostic_field(d, "cause", "%s", causes[difference]);
    diagnostic_field(d, "fix", "%s", fixes[difference]);
}

struct diagnostic *cause_manifest(const struct manifest *const *manifests, unsigned world_size)
{
    struct evidence_at nowhere = {.rank = -1, .step = -1, .micro_batch = -1};
    struct diagnostic *d = cause_new(&nowhere, E_MANIFEST, NULL);
    struct comparison c;

    if (comparison_init(&c, manifests, world_size)) {
        add_groups(d, &c);
        add_missing(d, &c);
        if (c.n_groups > 1) {
            add_differences(d, &c);
            add_cause(d, &c);
        }
    }
    comparison_deinit(&c);
    diagnostic_field(d, "does not help",
                     "initial values: all ranks get those of rank 0; batch size; the order in which ranks attach");
    diagnostic_field(d, "state", "no job was formed and no memory is held: declare again on every rank");
    return diagnostic_finish(d);
}
