/* SPDX-License-Identifier: Apache-2.0 */

/* The options that the trainer and the reference share, and the files that both write. */

#include "tests/example/task.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/example/text.h"

const char task_help[] =
    "What is trained (equal on all ranks, and in the reference):\n"
    "  --steps N            optimizer steps in all (200)\n"
    "  --micro-batches N    backwards per step (1)\n"
    "  --batch N            sequences per rank and micro-batch (8)\n"
    "  --seq N              characters per sequence, a multiple of 8 (32)\n"
    "  --layers N           transformer blocks (8)\n"
    "  --width N            of the residual stream (112)\n"
    "  --heads N            attention heads; width / heads is a multiple of 8 (7)\n"
    "  --seed N             of initial weights and batches (1)\n"
    "  --text FOLDER        the text to learn (" TEXT_DEFAULT_FOLDER ")\n"
    "AdamW:\n"
    "  --lr X --beta1 X --beta2 X --eps X --weight-decay X   (1e-3 0.9 0.95 1e-8 0.01)\n"
    "  --clip X             largest gradient norm, 0 for no clipping (1)\n"
    "Output:\n"
    "  --report FILE        append one JSON object per event and step\n"
    "  --dump FILE          write the final weights: fp32, in the order of declaration, nothing between\n";

void task_init(struct task *t)
{
    *t = (struct task){
        .shape = {.n_layers = 8, .width = 112, .n_heads = 7, .n_seqs = 8, .seq_len = 32},
        .seed = 1,
        .n_steps = 200,
        .n_micro_batches = 1,
        .text_folder = TEXT_DEFAULT_FOLDER,
        .lr = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.01,
        .max_norm = 1,
    };
}

int task_parse_count(const char *option, const char *value, uint64_t min, uint64_t max, uint64_t *out)
{
    char *end = NULL;
    unsigned long long n;

    errno = 0;
    n = strtoull(value, &end, 10);
    if (errno || *end || value[0] < '0' || value[0] > '9' || n < min || n > max) {
        fprintf(stderr, "--%s %s: a whole number from %llu to %llu is needed\n", option, value, (unsigned long long)min,
                (unsigned long long)max);
        return -EINVAL;
    }
    *out = n;
    return 0;
}

static int parse_unsigned(const char *option, const char *value, unsigned min, unsigned max, unsigned *out)
{
    uint64_t n;
    int r = task_parse_count(option, value, min, max, &n);

    if (r == 0)
        *out = n;
    return r;
}

static int parse_real(const char *option, const char *value, double *out)
{
    char *end = NULL;
    double x = strtod(value, &end);

    if (end == value || *end || !isfinite(x) || x < 0) {
        fprintf(stderr, "--%s %s: a number that is not negative is needed\n", option, value);
        return -EINVAL;
    }
    *out = x;
    return 0;
}

static int take_shape(struct model_shape *s, int option, const char *value)
{
    switch (option) {
    case TASK_BATCH:
        return parse_unsigned("batch", value, 1, 1 << 12, &s->n_seqs);
    case TASK_SEQ:
        return parse_unsigned("seq", value, 8, 1 << 12, &s->seq_len);
    case TASK_LAYERS:
        return parse_unsigned("layers", value, 1, 1000, &s->n_layers);
    case TASK_WIDTH:
        return parse_unsigned("width", value, 8, 1 << 14, &s->width);
    case TASK_HEADS:
        return parse_unsigned("heads", value, 1, 1 << 11, &s->n_heads);
    default:
        return 1;
    }
}

static int take_adamw(struct task *t, int option, const char *value)
{
    switch (option) {
    case TASK_LR:
        t->lr_given = true;
        return parse_real("lr", value, &t->lr);
    case TASK_BETA1:
        return parse_real("beta1", value, &t->beta1);
    case TASK_BETA2:
        return parse_real("beta2", value, &t->beta2);
    case TASK_EPS:
        return parse_real("eps", value, &t->eps);
    case TASK_WEIGHT_DECAY:
        return parse_real("weight-decay", value, &t->weight_decay);
    case TASK_CLIP:
        t->max_norm_given = true;
        return parse_real("clip", value, &t->max_norm);
    default:
        return 1;
    }
}

int task_take(struct task *t, int option, const char *value)
{
    int r;

    switch (option) {
    case TASK_STEPS:
        return task_parse_count("steps", value, 1, UINT32_MAX, &t->n_steps);
    case TASK_MICRO_BATCHES:
        return parse_unsigned("micro-batches", value, 1, 1 << 16, &t->n_micro_batches);
    case TASK_SEED:
        return task_parse_count("seed", value, 0, UINT64_MAX, &t->seed);
    case TASK_TEXT:
        t->text_folder = value;
        return 0;
    case TASK_DUMP:
        t->dump_path = value;
        return 0;
    case TASK_REPORT:
        t->report_path = value;
        return 0;
    default:
        r = take_shape(&t->shape, option, value);
        return r == 1 ? take_adamw(t, option, value) : r;
    }
}

int task_new_model(const struct task *t, struct model **out)
{
    const struct model_shape *s = &t->shape;
    int r = model_new(out, s);

    if (r == -EINVAL)
        fprintf(stderr, "no model has --width %u --heads %u --seq %u: width / heads and seq are multiples of 8\n",
                s->width, s->n_heads, s->seq_len);
    return r;
}

static int dump_segments(FILE *f, const struct model *m, const float *const *weights, const struct model_hooks *hooks)
{
    for (unsigned s = 0; s < model_n_segments(m); s++) {
        const struct model_segment *segment = model_segment(m, s);
        int r = hooks->enter(hooks->ctx, s);

        if (r)
            return r;
        for (unsigned i = segment->first; i < segment->first + segment->n_params; i++)
            fwrite(weights[i], sizeof(float), model_param(m, i)->n_elems, f);
        r = hooks->leave(hooks->ctx, s);
        if (r)
            return r;
    }
    return 0;
}

int task_dump(const struct task *t, const struct model *m, const float *const *weights, const struct model_hooks *hooks)
{
    FILE *f = fopen(t->dump_path, "we");
    int r, error = 0;

    if (!f) {
        error = errno;
        fprintf(stderr, "%s: %s\n", t->dump_path, strerror(error));
        return -error;
    }
    r = dump_segments(f, m, weights, hooks);
    if (ferror(f))
        error = EIO;
    if (fclose(f) != 0)
        error = errno;
    if (error)
        fprintf(stderr, "%s: not written: %s\n", t->dump_path, strerror(error));
    return r ? r : -error;
}

static void write_quoted(FILE *f, const char *text)
{
    fputc('"', f);
    for (; *text; text++) {
        unsigned char ch = *text;

        if (ch == '"' || ch == '\\')
            fprintf(f, "\\%c", ch);
        else if (ch < 0x20)
            fprintf(f, "\\u%04x", ch);
        else
            fputc(ch, f);
    }
    fputc('"', f);
}

void report_begin(FILE *f, const char *event)
{
    if (!f)
        return;
    fputs("{\"event\": ", f);
    write_quoted(f, event);
}

void report_string(FILE *f, const char *key, const char *text)
{
    if (!f)
        return;
    fprintf(f, ", \"%s\": ", key);
    write_quoted(f, text);
}

void report_number(FILE *f, const char *key, double value)
{
    if (!f)
        return;
    /* JSON has no infinity and no NaN. */
    if (isfinite(value))
        fprintf(f, ", \"%s\": %.17g", key, value);
    else
        fprintf(f, ", \"%s\": null", key);
}

void report_count(FILE *f, const char *key, uint64_t value)
{
    if (f)
        fprintf(f, ", \"%s\": %llu", key, (unsigned long long)value);
}

void report_end(FILE *f)
{
    if (!f)
        return;
    fputs("}\n", f);
    fflush(f);
}
