/* SPDX-License-Identifier: Apache-2.0 */
/* The table of kernels of one instruction set; compiled once for each. */

#include "kernels/isa.h"

const struct kernels ISA_FN(kernels) = {
    .isa = ISA_STRING(ISA),
    .reduce = ISA_FN(reduce),
    .update =
        {
            [OPTIMIZER_ADAMW] = ISA_FN(update_adamw),
            [OPTIMIZER_ADAM] = ISA_FN(update_adam),
            [OPTIMIZER_SGD] = ISA_FN(update_sgd),
            [OPTIMIZER_LION] = ISA_FN(update_lion),
            [OPTIMIZER_ADAGRAD] = ISA_FN(update_adagrad),
            [OPTIMIZER_MUON] = ISA_FN(update_muon),
        },
    .muon_momentum = ISA_FN(muon_momentum),
    .position_sum_update = ISA_FN(position_sum_update),
    .convert_to_f32 = ISA_FN(convert_to_f32),
    .convert_from_f32 = ISA_FN(convert_from_f32),
};
