/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * For the files that are compiled once per instruction set, with -DISA=NAME and its -m flags: ISA_FN(reduce) is
 * reduce_NAME. All other functions in those files are static. Otherwise the linker could use a function for a wide
 * instruction set instead of the function with the same name for a narrow one.
 */

#include "kernels/kernels.h"

#define ISA_JOIN_(name, isa) name##_##isa
#define ISA_JOIN(name, isa) ISA_JOIN_(name, isa)
#define ISA_FN(name) ISA_JOIN(name, ISA)

#define ISA_STRING_(isa) #isa
#define ISA_STRING(isa) ISA_STRING_(isa)

#define always_inline inline __attribute__((always_inline))

/* Before a loop whose arrays do not overlap. gcc ignores restrict after it inlines a function into a loop. */
#ifdef __clang__
#define no_overlap _Pragma("clang loop vectorize(assume_safety)")
#else
#define no_overlap _Pragma("GCC ivdep")
#endif

void ISA_FN(reduce)(const struct reduce_args *args, struct reduce_result *result);
void ISA_FN(update_adamw)(const struct update_args *args);
void ISA_FN(update_adam)(const struct update_args *args);
void ISA_FN(update_sgd)(const struct update_args *args);
void ISA_FN(update_lion)(const struct update_args *args);
void ISA_FN(update_adagrad)(const struct update_args *args);
void ISA_FN(update_muon)(const struct update_args *args);
void ISA_FN(muon_momentum)(const struct update_args *args);
void ISA_FN(position_sum_update)(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                                 size_t start_elem);
void ISA_FN(convert_to_f32)(float *dst, const void *src, enum dtype dtype, size_t n_elems);
void ISA_FN(convert_from_f32)(void *dst, const float *src, enum dtype dtype, size_t n_elems);

extern const struct kernels ISA_FN(kernels);
