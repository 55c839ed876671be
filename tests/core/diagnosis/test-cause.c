/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares the texts of every function of core/diagnosis/cause.h, for every class of causes, with tests/golden-texts.
 * Also checks what holds for all texts: the order of labels, the labels cause, fix, "does not help" and state, the
 * class, the length of lines, and that a diagnostic is made even without memory. Linked with --wrap for malloc, calloc,
 * realloc and reallocarray, to make them fail.
 */

#include "tests/core/diagnosis/cause-scenarios.h"

#include <ctype.h>
#include <dirent.h>
#include <string.h>

#include "core/layout/manifest.h"
#include "tests/core/diagnosis/golden-text.h"

/* ---- memory that runs out ------------------------------------------------------------------------------ */

/* How many allocations still succeed; negative: all. The test has one thread. */
static long n_allowed = -1;

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_reallocarray(void *p, size_t n, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_reallocarray(void *p, size_t n, size_t size);

static bool allowed(void)
{
    if (n_allowed < 0)
        return true;
    if (n_allowed == 0)
        return false;
    n_allowed--;
    return true;
}

void *__wrap_malloc(size_t size)
{
    return allowed() ? __real_malloc(size) : NULL;
}

void *__wrap_calloc(size_t n, size_t size)
{
    return allowed() ? __real_calloc(n, size) : NULL;
}

void *__wrap_realloc(void *p, size_t size)
{
    return allowed() ? __real_realloc(p, size) : NULL;
}

void *__wrap_reallocarray(void *p, size_t n, size_t size)
{
    return allowed() ? __real_reallocarray(p, n, size) : NULL;
}

/* ---- models -------------------------------------------------------------------------------------------- */

enum { MAX_DECLS = 1024 };

static const uint64_t SHAPE[] = {64};

/* Declarations that are being collected. */
struct model {
    struct layout_decl decls[MAX_DECLS];
    char names[MAX_DECLS][64];
    uint32_t n;
};

static uint32_t model_add(struct model *m, bool trainable, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static uint32_t model_add(struct model *m, bool trainable, const char *format, ...)
{
    va_list args;

    assert_true(m->n < MAX_DECLS);
    va_start(args, format);
    vsnprintf(m->names[m->n], sizeof(m->names[0]), format, args);
    va_end(args);
    m->decls[m->n] = (struct layout_decl){
        .name = m->names[m->n],
        .name_len = strlen(m->names[m->n]),
        .trainable = trainable,
        .n_dims = 1,
        .shape = SHAPE,
    };
    return m->n++;
}

static struct layout *model_layout(struct model *m, unsigned world_size, uint64_t bucket_elems)
{
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, m->decls, m->n, world_size, bucket_elems, &bad), 0);
    return layout;
}

static void make_vision(struct fixture *f)
{
    static const char *const parts[16] = {
        "mlp.fc2.bias",
        "mlp.fc2.weight",
        "mlp.fc1.bias",
        "mlp.fc1.weight",
        "layer_norm2.bias",
        "layer_norm2.weight",
        "self_attn.out_proj.bias",
        "self_attn.out_proj.weight",
        "self_attn.q_proj.bias",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.v_proj.weight",
        "self_attn.k_proj.bias",
        "self_attn.k_proj.weight",
        "layer_norm1.bias",
        "layer_norm1.weight",
    };
    struct model *m = calloc(1, sizeof(*m));

    assert_non_null(m);
    for (unsigned i = 0; i < 69; i++)
        model_add(m, true, "llm.layers.%u.%s", i / 7,
                  ((const char *const[]){"q", "k", "v", "o", "gate", "up", "down"})[i % 7]);
    for (unsigned layer = 0; layer < 27; layer++)
        for (unsigned part = 16; part-- > 0;)
            f->tower[(26 - layer) * 16 + part] = model_add(m, true, "vpm.encoder.layers.%u.%s", layer, parts[part]);
    for (unsigned i = 0; i < 75; i++)
        model_add(m, true, "resampler.%u.weight", i);
    f->vision = model_layout(m, 2, 6 * 64);
    free(m);
}

static void make_net(struct fixture *f)
{
    struct model *m = calloc(1, sizeof(*m));
    size_t n = 0;

    assert_non_null(m);
    f->frozen = model_add(m, false, "bert.embeddings.weight");
    for (unsigned layer = 0; layer < 2; layer++) {
        for (unsigned i = 0; i < 3; i++) {
            f->encoder[n++] = model_add(m, true, "bert.layer.%u.%c.weight", layer, "qkv"[i]);
            f->encoder[n++] = model_add(m, true, "bert.layer.%u.%c.bias", layer, "qkv"[i]);
        }
    }
    f->unused[0] = model_add(m, true, "bert.pooler.dense.weight");
    f->unused[1] = model_add(m, true, "bert.pooler.dense.bias");
    f->used = model_add(m, true, "used.weight");
    f->unused[2] = model_add(m, true, "unused.weight");
    f->unused[3] = model_add(m, true, "unused.bias");
    f->net = model_layout(m, 4, 1024);
    free(m);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    make_vision(f);
    make_net(f);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    layout_free(f->vision);
    layout_free(f->net);
    free(f);
    return 0;
}

/* ---- what holds for all texts -------------------------------------------------------------------------- */

/* All labels, in the order in which every text has them and docs/diagnostics.md lists them. */
static const char *const labels[] = {
    "waits",    "on",          "where",     "parameter",  "argument",      "1st push", "2nd push",  "push",
    "bytes",    "partition",   "declared",  "ranks",      "missing",       "module",   "exception", "segment",
    "process",  "outstanding", "held by",   "what",       "asked",         "held",     "allowed",   "sum",
    "expected", "got",         "elsewhere", "loss scale", "minimum",       "guilty",   "reason",    "proves",
    "cause",    "to find out", "fix",       "or",         "does not help", "state",
};

static size_t label_index(const char *label)
{
    for (size_t i = 0; i < ARRAY_SIZE(labels); i++)
        if (strcmp(labels[i], label) == 0)
            return i;
    fail_msg("label '%s' is in no list", label);
    return 0;
}

static bool has_label(const struct diagnostic *d, const char *label)
{
    for (size_t i = 0; i < d->n_fields; i++)
        if (strcmp(d->fields[i].label, label) == 0)
            return true;
    return false;
}

static void check_fields(const struct diagnostic *d)
{
    size_t last = 0;

    for (size_t i = 0; i < d->n_fields; i++) {
        size_t at_label = label_index(d->fields[i].label);

        if (i && (at_label < last || (at_label == last && strcmp(d->fields[i].label, "or") != 0)))
            fail_msg("label '%s' is out of order in\n%s", d->fields[i].label, d->text);
        last = at_label;
    }
    if (!has_label(d, "cause") || !has_label(d, "fix") || !has_label(d, "state"))
        fail_msg("cause, fix or state is not there:\n%s", d->text);
    /* The warning that a rank is waited for is kept short, and the rank's own last output is printed above it. */
    if (!has_label(d, "does not help") && !(d->code == E_RANK_LOST && d->warning))
        fail_msg("does not help is not there:\n%s", d->text);
}

static void check_lines(const struct diagnostic *d)
{
    const char *line = d->text;

    assert_non_null(line);
    while (*line) {
        size_t len = strcspn(line, "\n");

        if (line[len] != '\n' || len == 0 || len > 140 || line[len - 1] == ' ')
            fail_msg("a line is empty, overlong, or ends in a space or nowhere: %.*s", (int)len, line);
        line += len + 1;
    }
}

/* Return: the i-th of all scenarios, or NULL after the last. */
static const struct scenario *scenario_at(size_t i)
{
    const struct scenario_list lists[] = {scenarios_pushes(), scenarios_missing(), scenarios_others()};

    for (size_t k = 0; k < ARRAY_SIZE(lists); k++) {
        if (i < lists[k].n)
            return &lists[k].items[i];
        i -= lists[k].n;
    }
    return NULL;
}

static void check_all(void **state)
{
    const struct scenario *s;

    for (size_t i = 0; (s = scenario_at(i)); i++) {
        struct diagnostic *d = s->make(*state);

        golden_check(s->name, d->text);
        assert_int_equal((int)d->code, atoi(s->name + 1));
        if (strcmp(d->cause_class, s->cause_class) != 0 || d->warning != s->warning)
            fail_msg("%s: class %s, warning %d", s->name, d->cause_class, d->warning);
        check_fields(d);
        check_lines(d);
        assert_null(strstr(d->text, "may be"));
        assert_int_equal(d->n_refs, 1);
        diagnostic_unref(d);
    }
}

/* Each golden text e1*.txt belongs to a scenario. Texts of other tests have other prefixes. */
static void check_no_orphans(void **state)
{
    char *path = source_path("tests/golden-texts", ".");
    DIR *dir = opendir(path);
    const struct scenario *s;
    struct dirent *entry;

    (void)state;
    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        bool known = strncmp(entry->d_name, "e1", 2) != 0 || strncmp(entry->d_name, "e1601", 5) == 0;

        for (size_t i = 0; !known && (s = scenario_at(i)); i++) {
            size_t n = strlen(s->name);

            known = strncmp(entry->d_name, s->name, n) == 0 && strcmp(entry->d_name + n, ".txt") == 0;
        }
        if (!known)
            fail_msg("%s belongs to no scenario", entry->d_name);
    }
    closedir(dir);
    free(path);
}

/* Each error code has a scenario, except the configuration's. */
static void check_codes_covered(void **state)
{
    size_t n;
    const struct diagnostic_info *infos = diagnostic_table(&n);
    const struct scenario *s;

    (void)state;
    for (size_t k = 0; k < n; k++) {
        bool known = infos[k].code == E_CONFIG;

        for (size_t i = 0; !known && (s = scenario_at(i)); i++)
            known = atoi(s->name + 1) == (int)infos[k].code;
        if (!known)
            fail_msg("E%d has no scenario", (int)infos[k].code);
    }
}

/* The manual lists the labels in the order of printing. */
static void check_labels_in_manual(void **state)
{
    char *path = source_path("docs", "diagnostics.md"), *manual = read_text(path), list[1024] = "";
    size_t n = 0;

    (void)state;
    assert_non_null(manual);
    for (char *c = manual; *c; c++)
        if (isspace((unsigned char)*c))
            *c = ' ';
    for (size_t i = 0; i < ARRAY_SIZE(labels); i++)
        n += (size_t)snprintf(list + n, sizeof(list) - n, "%s`%s`", i ? ", " : "", labels[i]);
    assert_true(n < sizeof(list));
    if (!strstr(manual, list))
        fail_msg("docs/diagnostics.md does not list the labels in this order: %s", list);
    free(manual);
    free(path);
}

/* Makes every text, with memory running out at every allocation. The text may be shorter, the code must be right. */
static void check_out_of_memory(void **state)
{
    const struct scenario *s;

    for (size_t i = 0; (s = scenario_at(i)); i++) {
        /* These scenarios assert that their manifests can be built, so memory may not run out. */
        if (strncmp(s->name, "e1101-", 6) == 0 && strcmp(s->name, "e1101-declare") != 0)
            continue;
        for (long n = 0;; n++) {
            struct diagnostic *d;
            bool all;

            n_allowed = n;
            d = s->make(*state);
            all = n_allowed > 0;
            n_allowed = -1;
            assert_non_null(d);
            assert_int_equal((int)d->code, atoi(s->name + 1));
            assert_non_null(d->title);
            assert_non_null(d->text);
            for (size_t k = 0; k < d->n_fields; k++)
                assert_true(d->fields[k].label && d->fields[k].text);
            diagnostic_ref(d);
            diagnostic_unref(d);
            diagnostic_unref(d);
            if (all)
                break;
        }
    }
}

/* Two ranks with a manifest, and one without. */
static void check_manifests_out_of_memory(void **state)
{
    struct manifest a = {0}, b = {0};
    const struct manifest *const list[] = {&a, NULL, &b};
    bool all = false;

    (void)state;
    assert_int_equal(manifest_add(&a, &(struct layout_decl){.name = "w", .name_len = 1}), 0);
    assert_int_equal(manifest_add(&b, &(struct layout_decl){.name = "v", .name_len = 1}), 0);
    for (long n = 0; !all; n++) {
        struct diagnostic *d;

        n_allowed = n;
        d = cause_manifest(list, ARRAY_SIZE(list));
        all = n_allowed > 0;
        n_allowed = -1;
        assert_int_equal((int)d->code, E_MANIFEST);
        assert_non_null(d->text);
        diagnostic_unref(d);
    }
    manifest_deinit(&a);
    manifest_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_all),           cmocka_unit_test(check_no_orphans),
        cmocka_unit_test(check_codes_covered), cmocka_unit_test(check_labels_in_manual),
        cmocka_unit_test(check_out_of_memory), cmocka_unit_test(check_manifests_out_of_memory),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
