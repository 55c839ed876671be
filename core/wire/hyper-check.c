/* SPDX-License-Identifier: Apache-2.0 */

/* The hyperparameter check applies the ranges of torch.optim, and requires finite values in fp32. */

#include "core/wire/hyper-check.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/base/base.h"

enum { ADAM = 1, ADAMW = 2, SGD = 4, LION = 8, ADAGRAD = 16, MUON = 32, ALL = 63 };

enum { MAX_NS_STEPS = 99 }; /* as in torch.optim.Muon */

enum range { FROM_0, FROM_0_BELOW_1, ABOVE_0, ANY };

static const char *const expectations[] = {
    [FROM_0] = "a number of at least 0",
    [FROM_0_BELOW_1] = "a number of at least 0 and below 1",
    [ABOVE_0] = "a number above 0",
    [ANY] = "a finite number",
};

static const struct {
    const char *name;
    size_t offset;
    enum range range;
    unsigned only;
} rules[] = {
    {"lr", offsetof(struct wire_hyper, lr), FROM_0, ALL},
    {"beta1", offsetof(struct wire_hyper, beta1), FROM_0_BELOW_1, ADAM | ADAMW | LION | MUON},
    {"beta2", offsetof(struct wire_hyper, beta2), FROM_0_BELOW_1, ADAM | ADAMW | LION | MUON},
    {"eps", offsetof(struct wire_hyper, eps), ABOVE_0, ADAM | ADAMW | ADAGRAD | MUON},
    {"weight_decay", offsetof(struct wire_hyper, weight_decay), FROM_0, ALL},
    {"momentum", offsetof(struct wire_hyper, momentum), FROM_0_BELOW_1, SGD | MUON},
    {"dampening", offsetof(struct wire_hyper, dampening), ANY, SGD},
    {"lr_decay", offsetof(struct wire_hyper, lr_decay), FROM_0, ADAGRAD},
    {"ns_coefficients[0]", offsetof(struct wire_hyper, ns_a), ANY, MUON},
    {"ns_coefficients[1]", offsetof(struct wire_hyper, ns_b), ANY, MUON},
    {"ns_coefficients[2]", offsetof(struct wire_hyper, ns_c), ANY, MUON},
};

static unsigned kind_of(const char *optimizer)
{
    static const char *const names[] = {"Adam", "AdamW", "SGD", "Lion", "Adagrad", "Muon"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (strcmp(optimizer, names[i]) == 0)
            return 1u << i;
    return 0;
}

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
    case ANY:
        return true;
    }
    return false;
}

struct wire_hyper hyper_merge(const struct wire_hyper *configured, const struct wire_hyper *wanted)
{
    static const struct {
        unsigned bit;
        size_t offset, n_bytes;
    } fields[] = {
#define FIELD(bit, first, last)                                                                                        \
    {bit, offsetof(struct wire_hyper, first),                                                                          \
     offsetof(struct wire_hyper, last) + sizeof(wanted->last) - offsetof(struct wire_hyper, first)}
        FIELD(WIRE_GIVES_LR, lr, lr),
        FIELD(WIRE_GIVES_BETAS, beta1, beta2),
        FIELD(WIRE_GIVES_EPS, eps, eps),
        FIELD(WIRE_GIVES_WEIGHT_DECAY, weight_decay, weight_decay),
        FIELD(WIRE_GIVES_MOMENTUM, momentum, momentum),
        FIELD(WIRE_GIVES_DAMPENING, dampening, dampening),
        FIELD(WIRE_GIVES_NESTEROV, nesterov, nesterov),
        FIELD(WIRE_GIVES_LR_DECAY, lr_decay, lr_decay),
        FIELD(WIRE_GIVES_NS_COEFFICIENTS, ns_a, ns_c),
        FIELD(WIRE_GIVES_NS_STEPS, ns_steps, ns_steps),
        FIELD(WIRE_GIVES_ADJUST_LR_FN, match_rms_adamw, match_rms_adamw),
#undef FIELD
    };
    struct wire_hyper merged = *wanted;

    for (size_t i = 0; wanted->given && i < ARRAY_SIZE(fields); i++)
        if (!(wanted->given & fields[i].bit))
            memcpy((char *)&merged + fields[i].offset, (const char *)configured + fields[i].offset, fields[i].n_bytes);
    return merged;
}

bool hyper_is_wrong(const char *optimizer, const struct wire_hyper *hyper, struct hyper_problem *problem)
{
    unsigned kind = kind_of(optimizer);

    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        double value;

        memcpy(&value, (const char *)hyper + rules[i].offset, sizeof(value));
        if (!(rules[i].only & kind) || is_in(rules[i].range, value))
            continue;
        *problem = (struct hyper_problem){rules[i].name, value, expectations[rules[i].range]};
        return true;
    }
    if (kind == MUON && (hyper->ns_steps < 1 || hyper->ns_steps > MAX_NS_STEPS)) {
        *problem = (struct hyper_problem){"ns_steps", hyper->ns_steps, "a whole number from 1 to 99"};
        return true;
    }
    if (kind != SGD || !hyper->nesterov || (hyper->momentum > 0 && hyper->dampening == 0))
        return false;
    *problem = (struct hyper_problem){"nesterov", 1, "momentum above 0 and dampening 0 with it"};
    return true;
}
