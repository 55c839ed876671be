/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hyperparameters of a parameter group, in the order of GroupHyper (zerod.proto). X gets, for each:
 *
 *     KIND    of its wire rule: HYPER_DOUBLE, HYPER_BOOL or HYPER_U32
 *     field   in struct wire_hyper and in struct zerod_hyper
 *     plain   the field in struct hyper
 *     text    its name in messages
 *     GIVES   the bit WIRE_GIVES_* that says that a trainer gives it
 *     RANGE   the allowed values, by the name of the range in hyper-check.c
 *     only    the optimizers that read it, by their names in hyper-check.c
 */
#define HYPER_FIELDS(X)                                                                                                \
    X(DOUBLE, lr, lr, "lr", LR, FROM_0, ALL)                                                                           \
    X(DOUBLE, beta1, beta1, "beta1", BETAS, FROM_0_BELOW_1, ADAM | ADAMW | LION | MUON)                                \
    X(DOUBLE, beta2, beta2, "beta2", BETAS, FROM_0_BELOW_1, ADAM | ADAMW | LION | MUON)                                \
    X(DOUBLE, eps, eps, "eps", EPS, ABOVE_0, ADAM | ADAMW | ADAGRAD | MUON)                                            \
    X(DOUBLE, weight_decay, weight_decay, "weight_decay", WEIGHT_DECAY, FROM_0, ALL)                                   \
    X(DOUBLE, momentum, momentum, "momentum", MOMENTUM, FROM_0_BELOW_1, SGD | MUON)                                    \
    X(DOUBLE, dampening, dampening, "dampening", DAMPENING, ANY, SGD)                                                  \
    X(DOUBLE, lr_decay, lr_decay, "lr_decay", LR_DECAY, FROM_0, ADAGRAD)                                               \
    X(BOOL, nesterov, nesterov, "nesterov", NESTEROV, ANY, SGD | MUON)                                                 \
    X(DOUBLE, ns_a, ns_coefficients[0], "ns_coefficients[0]", NS_COEFFICIENTS, ANY, MUON)                              \
    X(DOUBLE, ns_b, ns_coefficients[1], "ns_coefficients[1]", NS_COEFFICIENTS, ANY, MUON)                              \
    X(DOUBLE, ns_c, ns_coefficients[2], "ns_coefficients[2]", NS_COEFFICIENTS, ANY, MUON)                              \
    X(U32, ns_steps, ns_steps, "ns_steps", NS_STEPS, FROM_1_TO_99, MUON)                                               \
    X(BOOL, match_rms_adamw, adjust_lr_fn, "adjust_lr_fn: match_rms_adamw", ADJUST_LR_FN, ANY, MUON)

#define HYPER_TYPE_DOUBLE double
#define HYPER_TYPE_BOOL bool
#define HYPER_TYPE_U32 uint32_t
