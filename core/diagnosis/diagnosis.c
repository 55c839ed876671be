/* SPDX-License-Identifier: Apache-2.0 */

/* Builds diagnostics field by field, and renders each as one text. */

#include "core/diagnosis/diagnosis.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/diagnosis/diagnosis-build.h"
#include "core/layout/layout.h"

enum { LABEL_WIDTH = 15 };

/*
 * All codes: number, short text, and the sentence for operators in the index of docs/diagnostics.md. The complete texts
 * are in texts/. A test compares the manual with this list.
 */
#define CODES(X)                                                                                                       \
    X(1001, E_DUPLICATE, "duplicate gradient refused",                                                                 \
      "A parameter's gradient was pushed again in the same micro-batch.")                                              \
    X(1002, E_STALE, "stale push refused",                                                                             \
      "A push names a step or micro-batch that is closed, or comes from another life of the rank.")                    \
    X(1003, E_EARLY, "early push refused", "A push names a step or micro-batch that is not open yet.")                 \
    X(1004, E_AFTER_BOUNDARY, "push after the boundary refused",                                                       \
      "A parameter was pushed after its rank had ended the backward.")                                                 \
    X(1005, E_MISSING, "missing gradient", "Trainable parameters got no gradient in the step.")                        \
    X(1006, E_GRAPH_CHANGED, "changed graph refused",                                                                  \
      "static_graph is true and a step pushed another set of parameters than the first one.")                          \
    X(1007, E_ABANDONED, "backward abandoned", "A backward was given up before its end.")                              \
    X(1101, E_MANIFEST, "manifest mismatch, job not formed", "Ranks declared different parameters.")                   \
    X(1102, E_GRADIENT, "gradient of another form refused",                                                            \
      "A gradient's size, type, shape or device is not what the manifest says.")                                       \
    X(1103, E_PARAMETER, "push of an unknown or frozen parameter refused",                                             \
      "The parameter is not in the manifest, or was declared frozen.")                                                 \
    X(1104, E_REPOINTED, "weights re-pointed, step refused",                                                           \
      "A parameter's storage left the memory that zerod publishes weights in.")                                        \
    X(1105, E_DRIFTED, "ranks drifted apart", "Parameters differ between ranks that should agree.")                    \
    X(1106, E_WEIGHT_WRITTEN, "write to published weights", "A program wrote to weights outside a window.")            \
    X(1107, E_REDUCED_TWICE, "gradients would be reduced twice, attach refused",                                       \
      "The model is wrapped in DDP or FSDP, which reduces gradients before zerod does.")                               \
    X(1108, E_STEP_ARGS, "step arguments differ, step held", "Ranks asked for one step with different arguments.")     \
    X(1109, E_OTHER_RUN, "another run's state, attach refused", "The daemon holds the state of another run.")          \
    X(1110, E_RELEASED_READ, "read of a released weight", "Stage 3: a weight was read while not gathered.")            \
    X(1111, E_ALIKE, "ranks push the same gradients", "All ranks compute on the same data, step after step.")          \
    X(1201, E_NONFINITE, "non-finite gradient", "A gradient, or the sum of gradients, is infinite or NaN.")            \
    X(1202, E_LOSS_SCALE, "loss scale at its minimum",                                                                 \
      "Gradients overflow and the loss scale cannot be lowered any more.")                                             \
    X(1203, E_UNSCALED, "gradients without the loss scale",                                                            \
      "A rank's gradients are smaller than the others' by the loss scale.")                                            \
    X(1301, E_RANK_TAKEN, "rank taken, attach refused", "The rank is held by a living process.")                       \
    X(1302, E_RANK_LOST, "rank lost", "A trainer is gone, or the step was aborted for all.")                           \
    X(1303, E_STALLED, "stalled", "Someone has waited longer than is usual for this job.")                             \
    X(1304, E_HELD, "state is held, attach refused",                                                                   \
      "The state of an earlier daemon is here, and this one cannot take it over.")                                     \
    X(1305, E_STOPPED, "daemon stopped, the run ends",                                                                 \
      "The daemon was told to stop while ranks were attached, and no other one goes on with the run.")                 \
    X(1401, E_QUOTA, "over quota, refused", "More was asked for than the client or the job may hold.")                 \
    X(1402, E_NOT_ALLOWED, "not allowed", "The user may not connect, or may not do this.")                             \
    X(1403, E_BAD_MESSAGE, "bad message refused", "A message breaks the protocol.")                                    \
    X(1501, E_NODE_LOST, "peer node lost", "Another node of the job does not answer.")                                 \
    X(1502, E_ENGINE, "engine failed", "The process that talks to other nodes or the GPU failed.")                     \
    X(1503, E_GENERATION, "generation mismatch", "A node came back without what it held of the run.")                  \
    X(1601, E_CONFIG, "configuration refused", "zerod does not understand the configuration.")                         \
    X(1701, E_NOT_SAVED, "checkpoint not saved", "A checkpoint could not be written.")                                 \
    X(1702, E_NOT_LOADED, "checkpoint not loaded", "The job was to begin with a checkpoint that it cannot use.")

#define INFO(number, name, title, summary) {name, title, summary},
static const struct diagnostic_info infos[] = {CODES(INFO)};
#undef INFO

/* Replaces each string that could not be allocated. It is never written to. */
static char nothing[] = "";

/*
 * diagnostic_new() returns a spare if it cannot allocate the struct. A spare has the code and the short text. All such
 * diagnostics of a code share it. Only the module that stores diagnostics changes it, and it is never freed.
 */
#define SPARE(number, name, title_, summary)                                                                           \
    {.code = name,                                                                                                     \
     .title = (char *)title_,                                                                                          \
     .first = {.segment = nothing, .site = nothing},                                                                   \
     .second = {.segment = nothing, .site = nothing},                                                                  \
     .text = (char *)"E" #number " " title_ "\n  state          out of memory: nothing more can be said\n"},
static struct diagnostic spares[] = {
    CODES(SPARE){
        .title = (char *)"refused",
        .first = {.segment = nothing, .site = nothing},
        .second = {.segment = nothing, .site = nothing},
        .text = (char *)"refused\n  state          out of memory: nothing more can be said\n",
    },
};
#undef SPARE

_Static_assert(ARRAY_SIZE(spares) == ARRAY_SIZE(infos) + 1, "a spare for each code, and one for any other");

static bool is_spare(const struct diagnostic *d)
{
    return d >= spares && d < spares + ARRAY_SIZE(spares);
}

const struct diagnostic_info *diagnostic_table(size_t *n)
{
    *n = ARRAY_SIZE(infos);
    return infos;
}

const struct diagnostic_info *diagnostic_info(enum diagnostic_code code)
{
    for (size_t i = 0; i < ARRAY_SIZE(infos); i++)
        if (infos[i].code == code)
            return &infos[i];
    return NULL;
}

/* ---- strings ------------------------------------------------------------------------------------------- */

static char *copy_or_nothing(const char *text)
{
    size_t n = text ? strlen(text) : 0;
    char *s = n ? malloc(n + 1) : NULL;

    return s ? memcpy(s, text, n + 1) : nothing;
}

/* Return: the text of the buffer. The buffer is empty afterwards. */
static char *take_text(struct strbuf *buf)
{
    char *s = buf->data ? steal_ptr(buf->data) : nothing;

    strbuf_deinit(buf);
    return s;
}

static void free_copy(char *text)
{
    if (text != nothing)
        free(text);
}

/* ---- life ---------------------------------------------------------------------------------------------- */

static struct diagnostic *spare_of(enum diagnostic_code code)
{
    for (size_t i = 0; i < ARRAY_SIZE(infos); i++)
        if (infos[i].code == code)
            return &spares[i];
    return &spares[ARRAY_SIZE(infos)];
}

struct diagnostic *diagnostic_new(enum diagnostic_code code, const char *title)
{
    const struct diagnostic_info *info = diagnostic_info(code);
    struct diagnostic *d = calloc(1, sizeof(*d));

    if (!d)
        return spare_of(code);
    d->code = code;
    d->title = copy_or_nothing(title ? title : info ? info->title : "refused");
    d->text = nothing;
    d->first.segment = d->first.site = d->second.segment = d->second.site = nothing;
    d->n_refs = 1;
    return d;
}

struct diagnostic *diagnostic_ref(struct diagnostic *d)
{
    assert(is_spare(d) || d->n_refs > 0);
    if (!is_spare(d))
        d->n_refs++;
    return d;
}

static void diagnostic_free(struct diagnostic *d)
{
    assert(d->n_params_named <= DIAGNOSTIC_MAX_PARAMS);
    assert(d->n_fields <= DIAGNOSTIC_MAX_FIELDS);
    for (size_t i = 0; i < d->n_params_named; i++)
        free_copy(d->params[i]);
    for (size_t i = 0; i < d->n_fields; i++) {
        free_copy(d->fields[i].label);
        free_copy(d->fields[i].text);
    }
    free_copy(d->first.segment);
    free_copy(d->first.site);
    free_copy(d->second.segment);
    free_copy(d->second.site);
    free_copy(d->title);
    free_copy(d->text);
    free(d->param_ids);
    free(d);
}

void diagnostic_unref(struct diagnostic *d)
{
    assert(!d || is_spare(d) || d->n_refs > 0);
    if (d && !is_spare(d) && --d->n_refs == 0)
        diagnostic_free(d);
}

/* ---- building ------------------------------------------------------------------------------------------ */

void diagnostic_at(struct diagnostic *d, int64_t rank, int64_t step, int64_t micro_batch)
{
    if (is_spare(d))
        return;
    d->has_rank = rank >= 0;
    d->rank = d->has_rank ? (uint32_t)rank : 0;
    d->has_step = step >= 0;
    d->step = d->has_step ? (uint64_t)step : 0;
    d->has_micro_batch = micro_batch >= 0;
    d->micro_batch = d->has_micro_batch ? (uint32_t)micro_batch : 0;
}

void diagnostic_class(struct diagnostic *d, const char *cause_class)
{
    assert(strlen(cause_class) < sizeof(d->cause_class));
    if (!is_spare(d))
        snprintf(d->cause_class, sizeof(d->cause_class), "%s", cause_class);
}

void diagnostic_warn(struct diagnostic *d)
{
    if (!is_spare(d))
        d->warning = true;
}

/* Copies a segment or a site, which is text from the client, and replaces bytes that are not printable. */
static char *copy_foreign(const char *text)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, text);
    return take_text(&buf);
}

static void copy_push(struct diagnostic_push *dst, const struct diagnostic_push *src)
{
    if (!src || !src->present)
        return;
    assert(!dst->present);
    dst->present = true;
    dst->record = src->record;
    free_copy(dst->segment);
    free_copy(dst->site);
    dst->segment = copy_foreign(src->segment);
    dst->site = copy_foreign(src->site);
}

void diagnostic_pushes(struct diagnostic *d, const struct diagnostic_push *first, const struct diagnostic_push *second)
{
    if (is_spare(d))
        return;
    copy_push(&d->first, first);
    copy_push(&d->second, second);
}

void diagnostic_field_take(struct diagnostic *d, const char *label, struct strbuf *buf)
{
    char *name;

    assert(is_spare(d) || d->text == nothing); /* not finished yet */
    assert(d->n_fields <= DIAGNOSTIC_MAX_FIELDS);
    if (is_spare(d) || d->n_fields == DIAGNOSTIC_MAX_FIELDS || buf->n_bytes == 0) {
        strbuf_deinit(buf);
        return;
    }
    name = copy_or_nothing(label);
    if (name == nothing) {
        strbuf_deinit(buf);
        return;
    }
    d->fields[d->n_fields++] = (struct diagnostic_field){.label = name, .text = take_text(buf)};
}

void diagnostic_field(struct diagnostic *d, const char *label, const char *format, ...)
{
    struct strbuf buf = {0};
    va_list args;

    va_start(args, format);
    strbuf_vadd(&buf, format, args);
    va_end(args);
    diagnostic_field_take(d, label, &buf);
}

static char *param_name(const struct layout *layout, uint32_t id)
{
    struct strbuf buf = {0};

    if (layout && id < layout->n_params)
        name_print(&buf, layout->params[id].name, layout->params[id].name_len);
    else
        strbuf_add(&buf, "number %" PRIu32, id);
    return take_text(&buf);
}

/* Copies each id once, although a parameter may have been pushed more than twice. Return: the number of copied ids. */
static size_t copy_once(uint32_t *dst, const struct layout *layout, const uint32_t *ids, size_t n)
{
    _cleanup_free_ uint8_t *seen = layout ? calloc(layout->n_params, 1) : NULL;
    size_t n_copied = 0;

    for (size_t i = 0; i < n; i++) {
        if (seen && ids[i] < layout->n_params) {
            if (seen[ids[i]])
                continue;
            seen[ids[i]] = 1;
        }
        dst[n_copied++] = ids[i];
    }
    return n_copied;
}

void diagnostic_param_ids(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n)
{
    if (is_spare(d) || d->n_params || n == 0 || n > UINT32_MAX)
        return;
    assert(d->n_params_named == 0);
    assert(d->text == nothing);
    d->param_ids = calloc(n, sizeof(*ids));
    if (d->param_ids) {
        n = copy_once(d->param_ids, layout, ids, n);
        ids = d->param_ids;
    }
    d->n_params = (uint32_t)n;
    for (size_t i = 0; i < n && i < DIAGNOSTIC_MAX_PARAMS; i++)
        d->params[d->n_params_named++] = param_name(layout, ids[i]);
}

void diagnostic_params(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n)
{
    struct strbuf buf = {0};

    if (n == 0)
        return;
    diagnostic_param_ids(d, layout, ids, n);
    if (d->param_ids)
        name_list_print(&buf, layout, d->param_ids, d->n_params);
    else
        name_list_print(&buf, layout, ids, n);
    diagnostic_field_take(d, "parameter", &buf);
}

/* ---- rendering ----------------------------------------------------------------------------------------- */

static void render_first_line(struct strbuf *buf, const struct diagnostic *d)
{
    const char *separator = ": ";

    strbuf_add(buf, "E%d %s%s", (int)d->code, d->warning ? "warning, " : "", d->title);
    if (d->has_rank) {
        strbuf_add(buf, "%srank %" PRIu32, separator, d->rank);
        separator = ", ";
    }
    if (d->has_step) {
        strbuf_add(buf, "%sstep %" PRIu64, separator, d->step);
        separator = ", ";
    }
    if (d->has_micro_batch)
        strbuf_add(buf, "%smicro-batch %" PRIu32, separator, d->micro_batch);
    strbuf_add(buf, "\n");
}

static void render_field(struct strbuf *buf, const struct diagnostic_field *field)
{
    const char *line = field->text;
    size_t label_len = strlen(field->label);

    strbuf_add(buf, "  %-*s%s", LABEL_WIDTH, field->label, label_len < LABEL_WIDTH ? "" : " ");
    for (;;) {
        size_t len = strcspn(line, "\n");

        strbuf_add_bytes(buf, line, len);
        strbuf_add(buf, "\n");
        line += len;
        if (*line == '\0' || *++line == '\0')
            return;
        strbuf_add(buf, "  %-*s", LABEL_WIDTH, "");
    }
}

struct diagnostic *diagnostic_finish(struct diagnostic *d)
{
    struct strbuf buf = {0};

    if (is_spare(d))
        return d;
    assert(d->text == nothing);
    assert(d->n_refs == 1);
    render_first_line(&buf, d);
    for (size_t i = 0; i < d->n_fields; i++)
        render_field(&buf, &d->fields[i]);
    free_copy(d->text);
    d->text = take_text(&buf);
    return d;
}
