/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The task: the options that the trainer and the single-process reference share, so that a test can start both with the
 * same options. Also the two files that both programs can write: a report of JSON lines and the final weights.
 */

#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tests/example/model.h"

struct task {
    struct model_shape shape;
    uint64_t seed;
    uint64_t n_steps;
    unsigned n_micro_batches;
    const char *text_folder;
    const char *dump_path;   /* NULL: no dump */
    const char *report_path; /* NULL: no report */

    /* AdamW, named as in docs/numerics.md. */
    double lr, beta1, beta2, eps, weight_decay;
    double max_norm;
    bool lr_given, max_norm_given;
};

/* Option values for getopt_long(). The program's own options use values below 1000. */
enum task_option {
    TASK_STEPS = 1000,
    TASK_MICRO_BATCHES,
    TASK_BATCH,
    TASK_SEQ,
    TASK_LAYERS,
    TASK_WIDTH,
    TASK_HEADS,
    TASK_SEED,
    TASK_TEXT,
    TASK_DUMP,
    TASK_REPORT,
    TASK_LR,
    TASK_BETA1,
    TASK_BETA2,
    TASK_EPS,
    TASK_WEIGHT_DECAY,
    TASK_CLIP,
};

/* clang-format off */
#define TASK_LONG_OPTIONS                                                       \
    {"steps", required_argument, NULL, TASK_STEPS},                             \
    {"micro-batches", required_argument, NULL, TASK_MICRO_BATCHES},             \
    {"batch", required_argument, NULL, TASK_BATCH},                             \
    {"seq", required_argument, NULL, TASK_SEQ},                                 \
    {"layers", required_argument, NULL, TASK_LAYERS},                           \
    {"width", required_argument, NULL, TASK_WIDTH},                             \
    {"heads", required_argument, NULL, TASK_HEADS},                             \
    {"seed", required_argument, NULL, TASK_SEED},                               \
    {"text", required_argument, NULL, TASK_TEXT},                               \
    {"dump", required_argument, NULL, TASK_DUMP},                               \
    {"report", required_argument, NULL, TASK_REPORT},                           \
    {"lr", required_argument, NULL, TASK_LR},                                   \
    {"beta1", required_argument, NULL, TASK_BETA1},                             \
    {"beta2", required_argument, NULL, TASK_BETA2},                             \
    {"eps", required_argument, NULL, TASK_EPS},                                 \
    {"weight-decay", required_argument, NULL, TASK_WEIGHT_DECAY},               \
    {"clip", required_argument, NULL, TASK_CLIP}
/* clang-format on */

/* Lines for --help. */
extern const char task_help[];

void task_init(struct task *t);

/* Handles one option. Return: 0, -EINVAL after a sentence on stderr, or 1 if the task has no such option. */
int task_take(struct task *t, int option, const char *value);

/* Parses a whole number in [min, max]. Return: 0, or -EINVAL after a sentence on stderr that names the option. */
int task_parse_count(const char *option, const char *value, uint64_t min, uint64_t max, uint64_t *out);

/* model_new(), with a sentence on stderr for an invalid shape. */
int task_new_model(const struct task *t, struct model **out);

/*
 * Writes the weights (n_params arrays), each as in memory, one array after the other. Calls the hooks enter and leave
 * around the arrays of each segment. Return: 0, -errno after a sentence on stderr, or the result of a hook.
 */
int task_dump(const struct task *t, const struct model *m, const float *const *weights,
              const struct model_hooks *hooks);

/* Writes a report, a stream of JSON objects, one a line. If f is NULL, nothing is written. */
void report_string(FILE *f, const char *key, const char *text);
void report_number(FILE *f, const char *key, double value);
void report_count(FILE *f, const char *key, uint64_t value);
/* report_begin() opens an object and writes its "event"; report_end() closes the object. */
void report_begin(FILE *f, const char *event);
void report_end(FILE *f);
