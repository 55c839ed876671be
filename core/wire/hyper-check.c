/* SPDX-License-Identifier: Apache-2.0 */

/* Checks that hyperparameters are in the ranges of torch.optim, and finite in fp32. */

#include "core/wire/hyper-check.h"

#include <float.h>
#include <math.h>

#include "core/base/base.h"
#include "kernels/update.h"

enum {
    ADAMW = 1 << OPTIMIZER_ADAMW,
    ADAM = 1 << OPTIMIZER_ADAM,
    SGD = 1 << OPTIMIZER_SGD,
    LION = 1 << OPTIMIZER_LION,
    ADAGRAD = 1 << OPTIMIZER_ADAGRAD,
    MUON = 1 << OPTIMIZER_MUON,
    ALL = (1 << N_OPTIMIZERS) - 1,
};

enum range { FROM_0, FROM_0_BELOW_1, ABOVE_0, FROM_1_TO_99, ANY };

static const char *const expectations[] = {
    [FROM_0] = "a number of at least 0",
    [FROM_0_BELOW_1] = "a number of at least 0 and below 1",
    [ABOVE_0] = "a number above 0",
    [FROM_1_TO_99] = "a whole number from 1 to 99", /* torch.optim.Muon's ns_steps */
    [ANY] = "a finite number",
};

static bool is_in(enum range range, double value)
{
    if (!isfinite(value) || fabs(value) > (double)FLT_MAX)
        return false;
    switch (range) {
    case FROM_0:
        return value >= 0;
    case FROM_0_BELOW_1:
        return value >= 0 && value < 1;
    case ABOVE_0:
        return (float)value > 0;
    case FROM_1_TO_99:
        return value >= 1 && value <= 99;
    case ANY:
        return true;
    }
    return false;
}

struct wire_hyper hyper_merge(const struct wire_hyper *configured, const struct wire_hyper *wanted)
{
    struct wire_hyper merged = *wanted;

    if (wanted->given == 0)
        return merged;
#define MERGE(kind, field, plain, text, gives, range, only)                                                            \
    if (!(wanted->given & WIRE_GIVES_##gives))                                                                         \
        merged.field = configured->field;
    HYPER_FIELDS(MERGE)
#undef MERGE
    return merged;
}

bool hyper_is_wrong(const char *optimizer, const struct wire_hyper *hyper, struct hyper_problem *problem)
{
#define ROW(kind, field, plain, text, gives, range, only) {text, hyper->field, range, only},
    const struct {
        const char *name;
        double value;
        enum range range;
        unsigned only;
    } rows[] = {HYPER_FIELDS(ROW)};
#undef ROW
    unsigned kind = 1u << optimizer_find(optimizer);

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        if (!(rows[i].only & kind) || is_in(rows[i].range, rows[i].value))
            continue;
        *problem = (struct hyper_problem){rows[i].name, rows[i].value, expectations[rows[i].range]};
        return true;
    }
    if (kind != SGD || !hyper->nesterov || (hyper->momentum > 0 && hyper->dampening == 0))
        return false;
    *problem = (struct hyper_problem){"nesterov", 1, "momentum above 0 and dampening 0 with it"};
    return true;
}
