/* SPDX-License-Identifier: Apache-2.0 */

/* The table of configuration keys has one row for each key. */

#include "core/config/config-table.h"

#include "core/base/base.h"
#include "core/config/config.h"

#include <math.h>
#include <string.h>
#include <syslog.h>

#define ADAMW CONFIG_ONLY_OPTIMIZER(OPTIMIZER_ADAMW)
#define ADAM CONFIG_ONLY_OPTIMIZER(OPTIMIZER_ADAM)
#define SGD CONFIG_ONLY_OPTIMIZER(OPTIMIZER_SGD)
#define LION CONFIG_ONLY_OPTIMIZER(OPTIMIZER_LION)
#define ADAGRAD CONFIG_ONLY_OPTIMIZER(OPTIMIZER_ADAGRAD)
#define MUON CONFIG_ONLY_OPTIMIZER(OPTIMIZER_MUON)
#define WARMUP CONFIG_ONLY_SCHEDULE(SCHEDULE_WARMUP)
#define DECAY CONFIG_ONLY_SCHEDULE(SCHEDULE_WARMUP_DECAY)
#define COSINE CONFIG_ONLY_SCHEDULE(SCHEDULE_WARMUP_COSINE)

#define REQUIRED .flags = CONFIG_REQUIRED
#define DEEPSPEED .flags = CONFIG_DEEPSPEED
#define OWN .flags = CONFIG_OWN
#define RANGE(min_, max_) .min = (min_), .max = (max_)

#define FIELD(struct_, member) .offset = offsetof(struct struct_, member), .size = sizeof(((struct struct_ *)0)->member)
#define SECTION(path_, sentence_, ...)                                                                                 \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .type = CONFIG_SECTION, __VA_ARGS__                                      \
    }
#define KEY(path_, type_, member, sentence_, ...)                                                                      \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .type = CONFIG_##type_, FIELD(config, member), __VA_ARGS__               \
    }
#define NODE_KEY(path_, type_, member, sentence_, ...)                                                                 \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .type = CONFIG_##type_, FIELD(config_node, member), __VA_ARGS__          \
    }
#define INERT(path_, sentence_, ...)                                                                                   \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .kind = CONFIG_INERT, __VA_ARGS__                                        \
    }
#define INERT_ONLY(path_, accepted_, sentence_, ...) INERT(path_, sentence_, .accepted = accepted_, __VA_ARGS__)
#define INERT_IF_NOT(usual_, path_, sentence_) INERT(path_, sentence_, .usual = usual_)
#define ALIAS(path_, same_, ...)                                                                                       \
    {                                                                                                                  \
        .path = path_, .same = same_, .sentence = "Another name of " same_ ".", .kind = CONFIG_ALIAS, __VA_ARGS__      \
    }
#define REFUSED(path_, sentence_, ...)                                                                                 \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .kind = CONFIG_REFUSED, __VA_ARGS__                                      \
    }

static const struct config_choice log_levels[] = {{"error", LOG_ERR}, {"warning", LOG_WARNING}, {"notice", LOG_NOTICE},
                                                  {"info", LOG_INFO}, {"debug", LOG_DEBUG},     {}};
static const struct config_choice save_on_stop[] = {
    {"auto", CONFIG_SAVE_AUTO}, {"true", CONFIG_SAVE_ON_STOP}, {"false", CONFIG_SAVE_NOT}, {}};
static const struct config_choice devices[] = {
    {"cpu", CONFIG_DEVICE_CPU}, {"cuda", CONFIG_DEVICE_CUDA}, {"gpu", .refused = "is called cuda"}, {}};
static const struct config_choice collectives[] = {
    {"local", CONFIG_COLLECTIVE_LOCAL}, {"gloo", CONFIG_COLLECTIVE_GLOO}, {"nccl", CONFIG_COLLECTIVE_NCCL}, {}};
static const struct config_choice stage3_on_one_node[] = {
    {"mapped", CONFIG_STAGE3_MAPPED}, {"gathered", CONFIG_STAGE3_GATHERED}, {}};
static const struct config_choice speculates[] = {
    {"auto", CONFIG_SPECULATE_AUTO}, {"true", CONFIG_SPECULATE}, {"false", CONFIG_SPECULATE_NOT}, {}};
static const struct config_choice optim_bits[] = {{"32", 32}, {"8", 8}, {}};
static const struct config_choice master_weight_bits[] = {{"32", 32}, {"24", 24}, {}};
static const struct config_choice offloads[] = {{"none", CONFIG_OFFLOAD_NONE},
                                                {"cpu", CONFIG_OFFLOAD_CPU},
                                                {"false", CONFIG_OFFLOAD_NONE, .spelling = true}, /* cpu_offload */
                                                {"true", CONFIG_OFFLOAD_CPU, .spelling = true},
                                                {"nvme", .refused = "is a disk, and zerod offloads nothing to disk"},
                                                {}};

#define ONE_BIT "sends one bit for each element of a gradient, which changes what is trained"
#define NO_OPTIMIZER "is another optimizer, which zerod does not have"
static const struct config_choice optimizers[] = {{"AdamW", OPTIMIZER_ADAMW},
                                                  {"Adam", OPTIMIZER_ADAM},
                                                  {"SGD", OPTIMIZER_SGD},
                                                  {"Lion", OPTIMIZER_LION},
                                                  {"Adagrad", OPTIMIZER_ADAGRAD},
                                                  {"Muon", OPTIMIZER_MUON},
                                                  {"OneBitAdam", .refused = ONE_BIT},
                                                  {"ZeroOneAdam", .refused = ONE_BIT},
                                                  {"OneBitLamb", .refused = ONE_BIT},
                                                  {"Lamb", .refused = NO_OPTIMIZER},
                                                  {"MuAdam", .refused = NO_OPTIMIZER},
                                                  {"MuAdamW", .refused = NO_OPTIMIZER},
                                                  {"MuSGD", .refused = NO_OPTIMIZER},
                                                  {"NAdam", .refused = NO_OPTIMIZER},
                                                  {"RAdam", .refused = NO_OPTIMIZER},
                                                  {"Adamax", .refused = NO_OPTIMIZER},
                                                  {"ASGD", .refused = NO_OPTIMIZER},
                                                  {}};
static const struct config_choice adjust_lr_fns[] = {
    {"original", MUON_ORIGINAL}, {"match_rms_adamw", MUON_MATCH_RMS_ADAMW}, {}};
#define NO_SCHEDULE "is another schedule, which zerod does not have; a scheduler of torch's in the program will do"
static const struct config_choice schedulers[] = {{"WarmupLR", SCHEDULE_WARMUP},
                                                  {"WarmupDecayLR", SCHEDULE_WARMUP_DECAY},
                                                  {"WarmupCosineLR", SCHEDULE_WARMUP_COSINE},
                                                  {"OneCycle", .refused = NO_SCHEDULE},
                                                  {"LRRangeTest", .refused = NO_SCHEDULE},
                                                  {}};
static const struct config_choice warmups[] = {{"log", SCHEDULE_WARMUP_LOG}, {"linear", SCHEDULE_WARMUP_LINEAR}, {}};
static const struct config_choice allreduce_ops[] = {
    {"mean", CONFIG_ALLREDUCE_MEAN}, {"sum", CONFIG_ALLREDUCE_SUM}, {}};
static const struct config_choice wire_types[] = {
    {"fp32", DTYPE_F32}, {"bf16", DTYPE_BF16}, {"fp16", DTYPE_F16, .spelling = true}, {}};
static const struct config_choice persist[] = {
    {"restart", CONFIG_PERSIST_RESTART}, {"off", CONFIG_PERSIST_OFF}, {}};
static const struct config_choice weights[] = {
    {"shared", CONFIG_WEIGHTS_SHARED}, {"private", CONFIG_WEIGHTS_PRIVATE}, {}};
static const struct config_choice on_duplicate[] = {{"reject", CONFIG_DUPLICATE_REJECT},
                                                    {"accumulate", CONFIG_DUPLICATE_ACCUMULATE},
                                                    {"abort_step", CONFIG_DUPLICATE_ABORT_STEP},
                                                    {}};
static const struct config_choice on_missing[] = {
    {"zero", CONFIG_MISSING_ZERO}, {"error", CONFIG_MISSING_ERROR}, {"skip", CONFIG_MISSING_SKIP}, {}};
static const struct config_choice on_nonfinite[] = {
    {"skip", CONFIG_NONFINITE_SKIP}, {"error", CONFIG_NONFINITE_ERROR}, {}};
static const struct config_choice on_leave[] = {{"stop", CONFIG_LEAVE_STOP}, {"continue", CONFIG_LEAVE_CONTINUE}, {}};

/* Names of long ranges. A bound without a reason is picked: far above any use, below any overflow. */
#define MAX_ELEMS 1e12
#define MAX_STEPS 1e12
#define MAX_MS 2592000000.0 /* 30 days */
#define DATA_PARALLEL "zerod is data-parallel: each rank has the whole model, and a batch of its own."
#define QUANTIZED "Training with quantized weights is DeepSpeed's own; zerod trains the weights as they are."
#define ENGINE_DATA "DeepSpeed's engine chooses the data; with zerod the trainers do."
#define LAUNCHER "zerodrun starts the ranks."
#define NO_BF16_SCALE "Only fp16 has a loss scale, for DeepSpeed, too."
#define RATES "Write the rates into the groups of the program: lr of those with use_muon, and lr of the others."
#define MIN_EPS 1e-30       /* still positive after rounding to fp32: 0 / (sqrt(0) + eps) must not be NaN */

static const struct config_key table[] = {
    KEY("job", NAME, job, "Name of the job, in segment names, in the log and in status.", .def = "train"),
    KEY("log_level", CHOICE, log_level, "Least severity that is logged.", OWN, .def = "info", .choices = log_levels),

    SECTION("listen", "Where trainers connect and who may."),
    KEY("listen.socket", SOCKET, listen.socket,
        "Path of the Unix socket, absolute, at most 107 bytes. Its folder must exist.",
        .flags = CONFIG_REQUIRED | CONFIG_OWN),
    KEY("listen.mode", MODE, listen.mode,
        "Permissions of the socket, octal. Users and groups that the lists below name have those of a group.", OWN,
        .def = "0660"),
    KEY("listen.allow_users", NAMES, listen.allow_users,
        "Users (names or ids) that may attach, besides root and the daemon's own user.", OWN, .max_items = 64),
    KEY("listen.allow_groups", NAMES, listen.allow_groups, "Groups (names or ids) whose members may attach.", OWN,
        .max_items = 64),
    KEY("listen.admin_users", NAMES, listen.admin_users,
        "Users that may change the job (save, abort-step, resize, drain, drop), besides root and the daemon's own "
        "user.",
        OWN, .max_items = 64),
    KEY("listen.admin_groups", NAMES, listen.admin_groups, "Groups whose members may change the job.", OWN,
        .max_items = 64),

    SECTION("world", "The ranks of the job and the nodes they run on."),
    KEY("world.size", WHOLE, world.size, "Ranks in all, on all nodes; at most 64 of them on one.", REQUIRED,
        .unit = "ranks", RANGE(1, CONFIG_MAX_RANKS)),
    KEY("world.nodes", NODES, world.nodes,
        "The nodes in rank order, each as {address, ranks}; left out when there is one.", .flags = CONFIG_NULLABLE,
        .max_items = CONFIG_MAX_NODES),
    NODE_KEY("world.nodes[].address", ADDRESS, address, "Where this node's daemon is reached by the others, host:port.",
             REQUIRED),
    NODE_KEY("world.nodes[].ranks", WHOLE, ranks, "Ranks that run on this node; all nodes' together are world.size.",
             REQUIRED, .unit = "ranks", RANGE(1, CONFIG_MAX_LOCAL_RANKS)),
    KEY("world.node", WHOLE, world.node, "Which of the nodes this is, counted from 0.", OWN, .def = "0",
        RANGE(0, CONFIG_MAX_NODES - 1)),
    KEY("world.key_file", PATH, world.key_file,
        "File with the key that the nodes' daemons share; needed with more than one node.",
        .flags = CONFIG_NULLABLE | CONFIG_OWN),

    SECTION("zero_optimization", "How state, gradients and weights are partitioned."),
    KEY("zero_optimization.stage", WHOLE, zero.stage,
        "What is partitioned: 1 optimizer state, 2 gradients too, 3 weights too. 0 (nothing) runs as 1, with the same "
        "numbers.",
        DEEPSPEED, .def = "2", RANGE(0, 3)),
    KEY("zero_optimization.reduce_bucket_size", WHOLE, zero.reduce_bucket_size,
        "Largest bucket; a larger parameter is its own bucket, pushed in parts of this size. auto: 500000, with "
        "several nodes 8000000; if the models are on GPUs 50000000, with Muon 8000000.",
        .flags = CONFIG_DEEPSPEED | CONFIG_AUTO | CONFIG_AT_ONCE, .unit = "elements", .def = "auto",
        RANGE(0, MAX_ELEMS)),
    KEY("zero_optimization.overlap_comm", BOOL, zero.overlap_comm,
        "Room for several buckets in the ring, so that reductions hide behind the backward, and for a whole "
        "micro-batch if the models are on GPUs; false: for two, less memory.",
        .flags = CONFIG_DEEPSPEED | CONFIG_NULLABLE, .def = "true"),
    KEY("zero_optimization.stage3_max_live_parameters", WHOLE, zero.stage3_max_live_parameters,
        "Stage 3: what a rank may hold gathered at one time.", .flags = CONFIG_DEEPSPEED | CONFIG_AT_ONCE,
        .unit = "elements", .def = "1000000000", RANGE(0, MAX_ELEMS)),
    KEY("zero_optimization.stage3_on_one_node", CHOICE, zero.stage3_on_one_node,
        "Stage 3 where one node's memory has all weights. mapped: they are read where they lie, as in stage 2. "
        "gathered: only what a rank has gathered can be read, as with several nodes.",
        .def = "mapped", .choices = stage3_on_one_node),
    KEY("zero_optimization.speculative_update", CHOICE, zero.speculative_update,
        "The update begins in the backward, into spare memory as large as the state, and counts only if the step is "
        "decided as expected; the numbers are the same. One node, state in host memory, stages 1 and 2. With "
        "offload_optimizer, sums are copied to the host in the backward, on several nodes and in stage 3, too. "
        "auto: if the models are on GPUs and the memory is there.",
        .def = "auto", .choices = speculates),
    SECTION("zero_optimization.offload_optimizer", "Where the optimizer state lives when the device is a GPU."),
    KEY("zero_optimization.offload_optimizer.device", CHOICE, zero.offload_optimizer,
        "cpu: in host memory; none: on the device. With device: cpu both are host memory.", DEEPSPEED, .def = "none",
        .choices = offloads),

    KEY("device", CHOICE, device, "Where state lives and kernels run.", .def = "cpu", .choices = devices),
    KEY("collective", CHOICE, collective, "What carries gradients and weights between nodes.", .def = "local",
        .choices = collectives),
    KEY("deterministic", BOOL, deterministic,
        "The same bits for any number of nodes and any order of arrival, also where a faster sum would "
        "differ.",
        .def = "true"),

    SECTION("optimizer", "The optimizer and the settings of groups that declare none."),
    KEY("optimizer.type", CHOICE, optimizer.type,
        "The optimizer. Adam means decoupled weight decay, as AdamW, unless adam_w_mode is false. Muon updates the "
        "matrices that the program gives it, and AdamW the rest.",
        .def = "AdamW", .choices = optimizers),
    SECTION("optimizer.params", "Depends on optimizer.type; what the type does not take is refused."),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.001", RANGE(0, 1e6),
        .only = ADAMW | ADAM | SGD),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.001",
        .elsewhere = "0.02 for Muon's matrices and 0.0003 for the rest", RANGE(0, 1e6), .only = MUON),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.0001",
        .elsewhere = "0.001", RANGE(0, 1e6), .only = LION),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.01", RANGE(0, 1e6),
        .only = ADAGRAD),
    KEY("optimizer.params.betas", PAIR, optimizer.hyper.beta1, "Decay of the first and second moment, per step.",
        .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX, .def = "[0.9, 0.999]", RANGE(0, 1), .only = ADAMW | ADAM),
    KEY("optimizer.params.betas", PAIR, optimizer.hyper.beta1, "Decay of the first and second moment, per step.",
        .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX, .def = "[0.9, 0.999]", RANGE(0, 1), .elsewhere = "[0.9, 0.95]",
        .only = MUON),
    KEY("optimizer.params.betas", PAIR, optimizer.hyper.beta1,
        "Weight of the momentum in the update, and its decay per step.", .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX,
        .def = "[0.9, 0.99]", .elsewhere = "[0.9, 0.999]", RANGE(0, 1), .only = LION),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps, "Added to the denominator.", DEEPSPEED, .def = "1.0e-8",
        RANGE(MIN_EPS, 1), .only = ADAMW | ADAM),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps,
        "Added to AdamW's denominator; the least norm by which a matrix is divided.", DEEPSPEED, .def = "1.0e-8",
        RANGE(MIN_EPS, 1), .elsewhere = "1e-10", .only = MUON),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps, "Added to the denominator.", DEEPSPEED, .def = "1.0e-10",
        RANGE(MIN_EPS, 1), .only = ADAGRAD),
    KEY("optimizer.params.weight_decay", REAL, optimizer.hyper.weight_decay, "Weight decay, decoupled.", DEEPSPEED,
        .def = "0.01", .elsewhere = "0", RANGE(0, 1e3), .only = ADAMW),
    KEY("optimizer.params.weight_decay", REAL, optimizer.hyper.weight_decay, "Weight decay, decoupled.", DEEPSPEED,
        .def = "0.1", .elsewhere = "0", RANGE(0, 1e3), .only = MUON),
    KEY("optimizer.params.weight_decay", REAL, optimizer.hyper.weight_decay,
        "Weight decay: decoupled for Lion and for Adam with adam_w_mode, else added to the gradient.", DEEPSPEED,
        .def = "0", RANGE(0, 1e3), .only = ADAM | SGD | LION | ADAGRAD),
    KEY("optimizer.params.adam_w_mode", BOOL, optimizer.hyper.adam_w_mode,
        "true: decoupled weight decay, the same as AdamW; false: weight decay goes through the gradient "
        "(L2).",
        .def = "true", .only = ADAM),
    KEY("optimizer.params.momentum", REAL, optimizer.hyper.momentum, "Momentum; 0 keeps no momentum buffer.",
        .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX, .def = "0", RANGE(0, 1), .only = SGD),
    KEY("optimizer.params.momentum", REAL, optimizer.hyper.momentum, "Decay of the momentum buffer, per step.",
        .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX, .def = "0.95", RANGE(0, 1), .only = MUON),
    KEY("optimizer.params.dampening", REAL, optimizer.hyper.dampening,
        "How much of the gradient is kept out of the momentum buffer.", DEEPSPEED, .def = "0", RANGE(0, 1),
        .only = SGD),
    KEY("optimizer.params.nesterov", BOOL, optimizer.hyper.nesterov,
        "Nesterov momentum; needs momentum, and dampening 0.", DEEPSPEED, .def = "false", .only = SGD),
    KEY("optimizer.params.nesterov", BOOL, optimizer.hyper.nesterov,
        "Nesterov momentum: what is orthogonalised has the gradient once more.", DEEPSPEED, .def = "true",
        .only = MUON),
    KEY("optimizer.params.ns_steps", WHOLE, optimizer.hyper.ns_steps,
        "Newton-Schulz iterations with which a matrix is orthogonalised.", DEEPSPEED, .def = "5", RANGE(1, 99),
        .only = MUON),
    KEY("optimizer.params.ns_coefficients", TRIPLE, optimizer.hyper.ns_coefficients,
        "What an iteration takes of the matrix, of its third and of its fifth power.", DEEPSPEED,
        .def = "[3.4445, -4.775, 2.0315]", RANGE(-1e3, 1e3), .only = MUON),
    KEY("optimizer.params.adjust_lr_fn", CHOICE, optimizer.hyper.adjust_lr_fn,
        "Factor of the learning rate of a matrix of A rows and B columns. original: sqrt(max(1, A / B)); "
        "match_rms_adamw: 0.2 * sqrt(max(A, B)), for a rate that was tuned for AdamW.",
        DEEPSPEED, .def = "original", .choices = adjust_lr_fns, .only = MUON),
    KEY("optimizer.params.lr_decay", REAL, optimizer.hyper.lr_decay, "The rate is lr / (1 + (step - 1) * lr_decay).",
        DEEPSPEED, .def = "0", RANGE(0, 1e6), .only = ADAGRAD),
    KEY("optimizer.params.optim_bits", CHOICE, optimizer.optim_bits,
        "Bits of each moment; 8: in groups of 64, rounded at random.", .def = "32", .choices = optim_bits),
    KEY("optimizer.params.master_weight_bits", CHOICE, optimizer.master_weight_bits,
        "Bits of the master weights of bf16 parameters; 24: the weight, and a byte beside it.", .def = "32",
        .choices = master_weight_bits),
    INERT("optimizer.params.adam_w_mode", "AdamW is always decoupled; type: Adam has the other mode.", .usual = "true",
          .only = ADAMW),
    INERT_ONLY("optimizer.params.bias_correction", "true", "The moments' bias is always corrected.",
               .only = ADAMW | ADAM),
    INERT("optimizer.params.torch_adam", "There is one implementation.", .only = ADAMW | ADAM),
    INERT_ONLY("optimizer.params.fp32_optimizer_states", "true", "bf16.bf16_optimizer_states says what it is.",
               .only = ADAMW | ADAM),
    INERT_ONLY("optimizer.params.amsgrad", "false", "The largest second moment is not kept."),
    INERT_ONLY("optimizer.params.maximize", "false", "A loss is always minimised."),
    INERT_ONLY("optimizer.params.max_grad_norm", "0", "Clipping is set for the whole job: gradient_clipping."),
    INERT("optimizer.params.set_grad_none", "Gradients belong to the trainers."),
    INERT("optimizer.params.fused", "There is one implementation."),
    INERT("optimizer.params.foreach", "There is one implementation."),
    INERT("optimizer.params.capturable", "There is one implementation."),
    REFUSED("optimizer.params.muon_lr", RATES, .only = MUON),
    REFUSED("optimizer.params.adam_lr", RATES, .only = MUON),
    INERT_ONLY("optimizer.params.ns_method", "standard", "Iterations are the standard ones, in fp32.", .only = MUON),
    INERT("optimizer.legacy_fusion", "There is one implementation."),

    SECTION("scheduler",
            "Learning rate schedule; left out, lr is constant. A client that sends lr with its step wins."),
    KEY("scheduler.type", CHOICE, scheduler.type, "The schedule, DeepSpeed's of that name.", REQUIRED,
        .choices = schedulers, .only = WARMUP | DECAY | COSINE),
    SECTION("scheduler.params", "Depends on scheduler.type; what the type does not take is refused.",
            .only = WARMUP | DECAY | COSINE),
    KEY("scheduler.params.warmup_min_lr", NUMBERS, scheduler.warmup_min_lr,
        "Learning rate at the start; a list gives one for each group.", DEEPSPEED, .def = "0", RANGE(0, 1e6),
        .max_items = 256, .only = WARMUP | DECAY),
    KEY("scheduler.params.warmup_max_lr", NUMBERS, scheduler.warmup_max_lr,
        "Learning rate after the warm-up; a list gives one for each group; null: each group's own lr.",
        .flags = CONFIG_DEEPSPEED | CONFIG_NULLABLE, .elsewhere = "0.001", RANGE(0, 1e6), .max_items = 256,
        .only = WARMUP),
    KEY("scheduler.params.warmup_max_lr", NUMBERS, scheduler.warmup_max_lr,
        "Learning rate after the warm-up; a list gives one for each group.", DEEPSPEED, .def = "0.001", RANGE(0, 1e6),
        .max_items = 256, .only = DECAY),
    KEY("scheduler.params.warmup_min_ratio", REAL, scheduler.warmup_min_ratio,
        "Start of the warm-up, relative to the group's lr.", DEEPSPEED, .def = "0", RANGE(0, 1), .only = COSINE),
    KEY("scheduler.params.warmup_num_steps", WHOLE, scheduler.warmup_num_steps, "Length of the warm-up, at least 2.",
        DEEPSPEED, .unit = "steps", .def = "1000", RANGE(0, MAX_STEPS), .only = WARMUP | DECAY | COSINE),
    KEY("scheduler.params.warmup_type", CHOICE, scheduler.warmup_type, "Shape of the warm-up.", DEEPSPEED, .def = "log",
        .choices = warmups, .only = WARMUP | DECAY | COSINE),
    KEY("scheduler.params.total_num_steps", WHOLE, scheduler.total_num_steps, "Where the decay ends.",
        .flags = CONFIG_REQUIRED | CONFIG_DEEPSPEED, .unit = "steps", RANGE(1, MAX_STEPS), .only = DECAY | COSINE),
    KEY("scheduler.params.cos_min_ratio", REAL, scheduler.cos_min_ratio,
        "What the cosine ends at, relative to the group's lr.", DEEPSPEED, .def = "0.0001", RANGE(0, 1),
        .only = COSINE),
    INERT_ONLY("scheduler.params.last_batch_iteration", "-1", "zerod counts the applied steps itself.",
               .only = WARMUP | DECAY | COSINE),

    KEY("gradient_accumulation_steps", WHOLE, gradient_accumulation_steps,
        "Micro-batches in a step. auto: step() is the boundary; a number makes any other count a fault.",
        .flags = CONFIG_AUTO, .unit = "micro-batches", .def = "auto", RANGE(1, 1e6)),
    KEY("gradient_clipping", REAL, gradient_clipping, "Largest global norm; 0, as in torch: no clipping.", DEEPSPEED,
        .def = "0", .elsewhere = "1 since its version 0.19.3, and 0 before", RANGE(0, 1e12)),
    KEY("gradient_allreduce_op", CHOICE, gradient_allreduce_op, "mean divides the sum over the ranks by world.size.",
        DEEPSPEED, .def = "mean", .choices = allreduce_ops),
    KEY("communication_data_type", CHOICE, communication_data_type,
        "Type of gradients between nodes: each node's sum is rounded to it once. On one node nothing is converted.",
        .flags = CONFIG_DEEPSPEED | CONFIG_NULLABLE, .def = "fp32", .choices = wire_types),

    SECTION("fp16", "Loss scaling."),
    KEY("fp16.enabled", BOOL, fp16.enabled, "Scale the loss.", DEEPSPEED, .def = "false"),
    KEY("fp16.loss_scale", REAL, fp16.scale.static_scale, "A fixed scale; 0: dynamic.", DEEPSPEED, .def = "0",
        RANGE(0, 1e20)),
    KEY("fp16.initial_scale_power", WHOLE, fp16.scale.initial_power, "The dynamic scale starts at 2 to this power.",
        DEEPSPEED, .def = "16", RANGE(0, 64)),
    KEY("fp16.loss_scale_window", WHOLE, fp16.scale.window,
        "Steps without overflow; the next one without doubles the scale.", DEEPSPEED, .unit = "steps", .def = "1000",
        RANGE(1, MAX_STEPS)),
    KEY("fp16.hysteresis", WHOLE, fp16.scale.hysteresis, "Overflows until the scale halves.", DEEPSPEED,
        .unit = "overflows", .def = "2", RANGE(1, 1e6)),
    KEY("fp16.consecutive_hysteresis", BOOL, fp16.scale.consecutive_hysteresis,
        "A step without overflow refills the hysteresis; false: only a doubling does.", DEEPSPEED, .def = "false"),
    KEY("fp16.min_loss_scale", REAL, fp16.scale.min_scale,
        "The scale never goes below, nor below 2 to the power of -126; an overflow there is E1202.", DEEPSPEED,
        .def = "1", RANGE(0, 1e20)),
    INERT("fp16.opt_level", "Casting happens in the trainers."),
    INERT("fp16.auto_cast", "Casting happens in the trainers."),
    INERT_ONLY("fp16.fp16_master_weights_and_grads", "false", "Master weights and sums are always fp32."),

    SECTION("bf16", "What of the optimizer's state is bf16."),
    KEY("bf16.bf16_optimizer_states", BOOL, bf16.optimizer_states,
        "Moments are bf16: 4 bytes less for each parameter, and a faster update.", DEEPSPEED, .def = "false"),
    KEY("bf16.stochastic_rounding", BOOL, bf16.stochastic_rounding,
        "bf16 moments are rounded up or down at random, so that small changes are not lost; false: to the nearest.",
        .def = "false"),
    INERT("bf16.enabled", "The type of each parameter comes from the trainers."),
    INERT_ONLY("bf16.bf16_master_weights_and_grads", "false", "Master weights and sums are always fp32."),
    INERT("bf16.auto_cast", "Casting happens in the trainers."),
    INERT_IF_NOT("0, 1", "bf16.loss_scale", NO_BF16_SCALE),
    INERT("bf16.initial_scale_power", NO_BF16_SCALE),
    INERT("bf16.loss_scale_window", NO_BF16_SCALE),
    INERT("bf16.hysteresis", NO_BF16_SCALE),
    INERT("bf16.consecutive_hysteresis", NO_BF16_SCALE),
    INERT("bf16.min_loss_scale", NO_BF16_SCALE),
    INERT("bf16.immediate_grad_update", "Gradients are added as they come."),
    INERT("bf16.check_grad_overflow", "The check is always on."),

    KEY("weights", CHOICE, weights,
        "Stages 1 and 2: one mapping of the weights for all ranks of a node, or one copy for each.", .def = "shared",
        .choices = weights),
    KEY("persist", CHOICE, persist,
        "restart: the state outlives a daemon that dies, where systemd or zerodrun keeps it. off: it does not.",
        .def = "restart", .choices = persist),
    KEY("threads", WHOLE, threads, "Worker threads; auto: one for each CPU that the daemon may run on.",
        .flags = CONFIG_AUTO | CONFIG_OWN, .unit = "threads", .def = "auto", RANGE(1, CONFIG_MAX_THREADS)),

    SECTION("diagnostics", "What happens when a training program breaks a rule."),
    KEY("diagnostics.on_duplicate", CHOICE, diagnostics.on_duplicate,
        "A second gradient of a parameter in one micro-batch: refuse it, add it, or abort the step.", .def = "reject",
        .choices = on_duplicate),
    KEY("diagnostics.on_missing", CHOICE, diagnostics.on_missing,
        "Parameters without a gradient at the step: no contribution, refuse the step, or skip it on all "
        "ranks.",
        .def = "zero", .choices = on_missing),
    KEY("diagnostics.unused", PATTERNS, diagnostics.unused,
        "Names of parameters that need not get a gradient in every step, such as '*.experts.*': nothing is said of "
        "them, and "
        "they hold or skip no step.",
        .max_items = 64),
    KEY("diagnostics.on_nonfinite", CHOICE, diagnostics.on_nonfinite,
        "NaN or infinity in a gradient: skip the step on all ranks, or hold it.", .def = "skip",
        .choices = on_nonfinite),
    KEY("diagnostics.on_leave", CHOICE, diagnostics.on_leave,
        "A rank is done before the others: they stop too, or go on without its gradients.", .def = "stop",
        .choices = on_leave),
    KEY("diagnostics.static_graph", BOOL, diagnostics.static_graph,
        "Learn from the first step which parameters are pushed and how often; a change is a fault.", .def = "false"),
    KEY("diagnostics.stall_warning", DURATION, diagnostics.stall_warning_ms,
        "After this time of waiting, and three median steps, say who waits for whom; 0: never.", .def = "5s",
        RANGE(0, MAX_MS)),
    KEY("diagnostics.stall_timeout", DURATION, diagnostics.stall_timeout_ms,
        "After this time of waiting the step is aborted; 0: never.", .def = "10min", RANGE(0, MAX_MS)),
    KEY("diagnostics.trace_dir", FOLDER, diagnostics.trace_dir,
        "Folder for traces of the last steps, one when the job stalls, a rank is lost or a step is aborted; at most "
        "10. "
        "Left out, none is written.",
        .flags = CONFIG_NULLABLE | CONFIG_OWN),

    SECTION("checkpoint", "Checkpoints, written by the daemon while training goes on."),
    KEY("checkpoint.dir", FOLDER, checkpoint.dir,
        "Folder of the job's checkpoints, which all nodes see; it is made if its parent exists. Left out, none is "
        "written or loaded.",
        .flags = CONFIG_NULLABLE),
    KEY("checkpoint.allow_groups", NAMES, checkpoint.allow_groups,
        "Groups (names or ids) whose members may read the checkpoints that are written from now on. The folder's own "
        "group and all others then may not. Left out, the daemon's umask says who may: in the unit of systemd only its "
        "user.",
        OWN, .max_items = 64),
    KEY("checkpoint.save_steps", WHOLE, checkpoint.save_steps, "Save each time so many steps are committed; 0: not so.",
        OWN, .unit = "steps", .def = "0", RANGE(0, MAX_STEPS)),
    KEY("checkpoint.save_interval", DURATION, checkpoint.save_interval_ms,
        "Save when the last save began so long ago; 0: not so.", OWN, .def = "0", RANGE(0, MAX_MS)),
    KEY("checkpoint.save_total_limit", WHOLE, checkpoint.save_total_limit,
        "Keep this many checkpoints; older ones are removed when a newer one is whole; 0: keep all.", OWN,
        .unit = "checkpoints", .def = "0", RANGE(0, 1e6)),
    KEY("checkpoint.save_on_stop", CHOICE, checkpoint.save_on_stop,
        "Save before the daemon ends on SIGTERM or SIGINT, and when a run ends and another begins. auto: if "
        "checkpoint.dir is given.",
        OWN, .def = "auto", .choices = save_on_stop),
    KEY("checkpoint.load", LOAD, checkpoint.load,
        "Begin with the newest whole checkpoint of checkpoint.dir, if there is one; or with none; or with the one in "
        "that folder.",
        .def = "latest"),
    KEY("checkpoint.strict", BOOL, checkpoint.strict,
        "Refuse a checkpoint that lacks a parameter of the model, or has one that the model lacks.", .def = "true"),
    KEY("checkpoint.memory", SIZE, checkpoint.memory_bytes,
        "Most memory for values that steps change before they are written; when it is full, updates wait for the disk. "
        "auto: half of what is free.",
        .flags = CONFIG_AUTO | CONFIG_OWN, .def = "auto", RANGE(1, 0x1p50)),
    INERT("checkpoint.tag_validation", "A step has one checkpoint."),
    INERT("checkpoint.load_universal", "Every checkpoint can be loaded into any number of ranks."),
    INERT("checkpoint.use_node_local_storage", "All nodes write into checkpoint.dir, which they share."),
    INERT("checkpoint.parallel_write", "One thread fills a disk."),
    INERT("checkpoint.checkpoint_serialization", "The format is safetensors."),
    INERT("checkpoint.writer", "One thread fills a disk, while training goes on."),

    SECTION("limits", "What the daemon may hold and how long it waits."),
    KEY("limits.memory", SIZE, limits.memory_bytes,
        "Most memory for the job on this node; 0: bounded by what is free and by the cgroup.", OWN, .def = "0",
        RANGE(0, 0x1p50)),
    KEY("limits.clients", WHOLE, limits.clients,
        "Connections of zerodctl at one time; administrators have 8 places more.", OWN, .unit = "connections",
        .def = "64", RANGE(1, 65536)),
    KEY("limits.handshake_timeout", DURATION, limits.handshake_timeout_ms,
        "A connection is closed when for this time it has not said Hello, asked its question or read its answer; "
        "trainers that have attached stay.",
        OWN, .def = "10s", RANGE(100, MAX_MS)),
    KEY("limits.reattach_timeout", DURATION, limits.reattach_timeout_ms,
        "A lost rank's successor must come within this time, else the step is aborted.", OWN, .def = "10min",
        RANGE(1000, MAX_MS)),

    /* DeepSpeed's keys without an effect in zerod, in the order of its manual. */
    INERT("train_batch_size", "The batch belongs to the trainers; see gradient_accumulation_steps."),
    INERT("train_micro_batch_size_per_gpu", "The batch belongs to the trainers."),
    INERT("managed_gradient_accumulation", "zerod sees the boundaries of micro-batches itself."),
    INERT("prescale_gradients", "Unscaling, averaging and clipping are one factor, applied once, in fp32."),
    INERT("gradient_predivide_factor", "Unscaling, averaging and clipping are one factor, applied once, in fp32."),
    INERT("disable_allgather", "On one node weights are shared, between nodes always gathered."),
    INERT("allgather_size", "Weights travel in the buckets of reduce_bucket_size."),
    INERT("sparse_gradients", "Gradients are pushed dense."),
    INERT("seq_parallel_communication_data_type", "Sequence parallelism belongs to the trainers."),
    INERT("data_types", "Types are the trainers', and gradients are always accumulated in fp32."),
    INERT_IF_NOT("true", "zero_allow_untested_optimizer", "All optimizers listed here are tested."),
    INERT_IF_NOT("true", "zero_force_ds_cpu_optimizer", "There is one implementation."),
    INERT("torch_autocast", "Casting happens in the trainers."),
    INERT("fp8", "The type of each parameter comes from the trainers."),
    INERT("aio", "Nothing is offloaded to disk."),
    INERT("elasticity", "The number of ranks is world.size, and the batch belongs to the trainers."),
    INERT("autotuning", "There are no experiments; auto and the defaults are for the job as it is."),
    INERT("activation_checkpointing", "Activations belong to the trainers."),
    INERT("sparse_attention", "Attention belongs to the trainers; a program that reads this key itself still does."),
    INERT("compile", "The model belongs to the trainers, and so does compiling it."),
    INERT_ONLY("compile.passes", "z1, z3", DATA_PARALLEL),
    INERT("graph_harvesting", "The model belongs to the trainers, and so does compiling it."),
    INERT("eigenvalue", "It is for quantize_training alone."),
    INERT("hybrid_engine", "Generating belongs to the trainers."),
    INERT("flops_profiler", "Profiling belongs to the trainers; zerodctl status says where a step's time goes."),
    INERT("comms_logger", "zerodctl status says where a step's time goes."),
    INERT("comms_config", "zerodctl status says where a step's time goes."),
    INERT("timers", "zerodctl status says where a step's time goes."),
    INERT("steps_per_print", "zerodctl status shows progress at any time."),
    INERT("wall_clock_breakdown", "zerodctl status says where a step's time goes."),
    INERT("memory_breakdown", "zerodctl status shows memory by class."),
    INERT("dump_state", "zerod --print-config shows the effective configuration."),
    INERT("monitor_config", "Logging of metrics belongs to the trainers."),
    INERT("tensorboard", "Logging of metrics belongs to the trainers."),
    INERT("wandb", "Logging of metrics belongs to the trainers."),
    INERT("csv_monitor", "Logging of metrics belongs to the trainers."),
    INERT("comet", "Logging of metrics belongs to the trainers."),
    INERT("nebula", "The daemon writes checkpoints; see the section checkpoint."),
    INERT("datastates_ckpt", "The daemon writes checkpoints; see the section checkpoint."),
    INERT("dataloader_drop_last", "Data loaders belong to the trainers."),
    INERT("vocabulary_size", "The model belongs to the trainers."),
    INERT("use_data_before_expert_parallelism", "zerod is data-parallel."),
    INERT_ONLY("sequence_parallel_size", "1", DATA_PARALLEL),

    INERT_IF_NOT("true", "zero_optimization.contiguous_gradients",
                 "Gradients are pushed into contiguous buckets anyway."),
    INERT_IF_NOT("true", "zero_optimization.reduce_scatter",
                 "Every rank's partition is reduced to its owner in any case."),
    INERT_IF_NOT("true", "zero_optimization.use_multi_rank_bucket_allreduce",
                 "Every partition is reduced to its owner only."),
    INERT_IF_NOT("true", "zero_optimization.allgather_partitions",
                 "On one node weights are shared, between nodes always gathered."),
    INERT("zero_optimization.allgather_bucket_size", "Weights travel in the buckets of reduce_bucket_size."),
    INERT_IF_NOT("true", "zero_optimization.load_from_fp32_weights",
                 "Masters start from the declared weights, exactly."),
    INERT("zero_optimization.elastic_checkpoint", "Checkpoints are written by the trainers."),
    INERT_IF_NOT("true", "zero_optimization.ignore_unused_parameters",
                 "diagnostics.on_missing decides what happens to them."),
    INERT_IF_NOT("true", "zero_optimization.find_unused_parameters",
                 "diagnostics.on_missing decides what happens to them."),
    INERT("zero_optimization.ignore_missing_optim_state", "checkpoint.strict says what a checkpoint may lack."),
    INERT("zero_optimization.legacy_stage1", "There is one stage 1."),
    INERT("zero_optimization.grad_hooks", "Gradients leave as they become ready."),
    INERT("zero_optimization.round_robin_gradients", "All owners are served by one pool of threads."),
    INERT("zero_optimization.sub_group_size", "The update runs in pieces that fit a processor's cache."),
    INERT("zero_optimization.stage3_prefetch_bucket_size",
          "Gathering is a local copy; the trainers say what is gathered next."),
    INERT("zero_optimization.stage3_param_persistence_threshold",
          "Gathering is a local copy, cheap for small parameters too."),
    INERT("zero_optimization.stage3_model_persistence_threshold",
          "Gathering is a local copy, cheap for small parameters too."),
    INERT("zero_optimization.stage3_max_reuse_distance", "The trainers say when a parameter is released."),
    INERT_IF_NOT("true", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                 "zerod_weight() and zerod_read_state() give whole parameters."),
    INERT("zero_optimization.stage3_module_granularity_threshold", "The trainers say what is gathered together."),
    INERT("zero_optimization.stage3_use_all_reduce_for_fetch_params", "Gathering is a local copy."),
    INERT("zero_optimization.stage3_allgather_sequential", "Gathering is a local copy."),
    INERT("zero_optimization.offload_param", "Weights live where the state lives; see device."),
    INERT_ONLY("zero_optimization.offload_param.device", "none, cpu", "Nothing is offloaded to disk."),
    INERT("zero_optimization.cpu_offload_param", "Weights live where the state lives; see device."),
    INERT("zero_optimization.cpu_offload_use_pin_memory", "Host memory is registered by the client that needs it."),
    INERT("zero_optimization.offload_optimizer.nvme_path", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.buffer_count", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.buffer_size", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.max_in_cpu", "Nothing is offloaded to disk."),
    INERT_IF_NOT("true", "zero_optimization.offload_optimizer.pin_memory",
                 "Host memory is registered by the client that needs it."),
    INERT("zero_optimization.offload_optimizer.pipeline", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.pipeline_read", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.pipeline_write", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.fast_init", "Nothing is offloaded to disk."),
    INERT_IF_NOT("1", "zero_optimization.offload_optimizer.ratio", "The state is offloaded as a whole or not at all."),
    INERT("zero_optimization.offload_optimizer.super_offload", "The state is offloaded by zerod itself."),
    INERT("zero_optimization.offload_optimizer.cpuadam_cores_perc", "threads says how many threads update."),
    INERT_IF_NOT("1", "zero_optimization.zero_hpz_partition_size", "A node holds its weights once, for all its ranks."),
    INERT_ONLY("zero_optimization.zero_quantized_weights", "false", "Weights are never quantized."),
    INERT_ONLY("zero_optimization.zero_quantized_nontrainable_weights", "false", "Weights are never quantized."),
    INERT_ONLY("zero_optimization.zero_quantized_gradients", "false",
               "Gradients are never quantized; communication_data_type can make them bf16."),
    INERT("zero_optimization.zeropp_loco_param", "It is for zero_quantized_gradients alone."),
    INERT_IF_NOT("-1", "zero_optimization.mics_shard_size", "Partitions are always one for each rank of the world."),
    INERT("zero_optimization.mics_hierarchical_params_gather", "A node gathers for all its ranks at once."),
    INERT("zero_optimization.memory_efficient_linear", "Layers belong to the trainers."),
    INERT("zero_optimization.pipeline_loading_checkpoint", "Checkpoints are loaded by the trainers."),
    INERT("zero_optimization.override_module_apply", "Modules belong to the trainers."),
    INERT("zero_optimization.log_trace_cache_warnings", "There is no trace to get out of step with."),
    INERT("zero_optimization.enable_sanity_checks", "The checks are always on."),
    INERT("zero_optimization.save_muon_momentum_buffer_in_memory", "The momentum is always in memory."),
    INERT("zero_optimization.leaf_module", "The trainers say what is gathered together."),

    /* Refused keys: they change the numbers, or ask for other kinds of parallelism. */
    REFUSED("zero_optimization.zenflow",
            "Updates that lag behind their gradients change what is trained; zerod's steps are whole."),
    REFUSED("amp", "Apex is not supported; use fp16, or declare bf16 parameters."),
    REFUSED("msamp", "Optimizer states of 8-bit floats are not supported; optimizer.params.optim_bits: 8 has another "
                     "form of 8 bits."),
    REFUSED("tensor_parallel", DATA_PARALLEL),
    INERT_ONLY("tensor_parallel.autotp_size", "0, 1", DATA_PARALLEL),
    INERT_ONLY("tensor_parallel.tp_size", "0, 1", DATA_PARALLEL),
    REFUSED("tensor_parallel.tp", DATA_PARALLEL),
    INERT_ONLY("tensor_parallel.tp.tp_size", "1", DATA_PARALLEL),
    REFUSED("sequence_parallel", DATA_PARALLEL),
    REFUSED("expert_parallel", DATA_PARALLEL),
    REFUSED("pipeline", DATA_PARALLEL),
    REFUSED("quantize_training", QUANTIZED),
    REFUSED("weight_quantization", QUANTIZED),
    REFUSED("compression_training", "Pruned and quantized layers are DeepSpeed's own; leave it out, or prune in the "
                                    "program."),
    REFUSED("progressive_layer_drop", "DeepSpeed's engine leaves layers out; zerod does not touch the model."),
    REFUSED("curriculum_learning", ENGINE_DATA),
    REFUSED("data_efficiency", ENGINE_DATA),

    /* DeepSpeed's other names of keys. */
    ALIAS("bfloat16", "bf16"),
    ALIAS("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
    ALIAS("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    ALIAS("zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
    ALIAS("zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold"),
    ALIAS("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),
    ALIAS("zero_optimization.gather_16bit_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    ALIAS("zero_optimization.gather_fp16_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    ALIAS("zero_optimization.stage3_gather_fp16_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    ALIAS("zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold"),
    ALIAS("zero_optimization.use_all_reduce_for_fetch_params",
          "zero_optimization.stage3_use_all_reduce_for_fetch_params"),
    ALIAS("zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential"),
    ALIAS("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"),
    ALIAS("zero_optimization.cpu_offload_params", "zero_optimization.cpu_offload_param"),

    /* Keys of accelerate's files. */
    ALIAS("num_processes", "world.size"),
    {.path = "deepspeed_config", .kind = CONFIG_ALIAS, .sentence = "accelerate's names of DeepSpeed's keys."},
    ALIAS("deepspeed_config.zero_stage", "zero_optimization.stage"),
    ALIAS("deepspeed_config.gradient_accumulation_steps", "gradient_accumulation_steps"),
    ALIAS("deepspeed_config.gradient_clipping", "gradient_clipping"),
    ALIAS("deepspeed_config.offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ALIAS("deepspeed_config.offload_param_device", "zero_optimization.offload_param.device"),
    ALIAS("deepspeed_config.offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ALIAS("deepspeed_config.zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    {.path = "deepspeed_config.deepspeed_config_file",
     .kind = CONFIG_ALIAS,
     .type = CONFIG_PATH,
     .sentence = "The DeepSpeed file that has the settings."},
    INERT("deepspeed_config.offload_param_nvme_path", "Nothing is offloaded to disk."),
    INERT("deepspeed_config.zero3_init_flag", "Ranks other than 0 may build the model under torch.device(\"meta\")."),
    INERT("deepspeed_config.deepspeed_multinode_launcher", LAUNCHER),
    INERT("deepspeed_config.deepspeed_hostfile", LAUNCHER),
    INERT("deepspeed_config.deepspeed_exclusion_filter", LAUNCHER),
    INERT("deepspeed_config.deepspeed_inclusion_filter", LAUNCHER),
    INERT("deepspeed_config.deepspeed_moe_layer_cls_names", "The trainers say what is gathered together."),
    INERT_IF_NOT("LOCAL_MACHINE", "compute_environment", LAUNCHER),
    INERT_ONLY("distributed_type",
               "NO, DEEPSPEED, FSDP, MULTI_CPU, MULTI_GPU, MULTI_NPU, MULTI_MLU, MULTI_SDAA, "
               "MULTI_MUSA, MULTI_XPU, MULTI_HPU, MULTI_NEURON",
               DATA_PARALLEL),
    INERT_IF_NOT("no", "mixed_precision", "The type of each parameter, and casting, are the trainers'."),
    INERT_IF_NOT("no", "downcast_bf16", "It is for TPUs alone."),
    INERT("fp8_config", "The type of each parameter, and casting, are the trainers'."),
    INERT_IF_NOT("1", "num_machines", "Nodes are world.nodes, or those of zerodrun --nodes."),
    INERT_IF_NOT("0", "machine_rank", "Nodes are world.nodes, or those of zerodrun --nodes."),
    INERT("main_process_ip", LAUNCHER),
    INERT("main_process_port", LAUNCHER),
    INERT_IF_NOT("main", "main_training_function", LAUNCHER),
    INERT_IF_NOT("static", "rdzv_backend", LAUNCHER),
    INERT_IF_NOT("true", "same_network", LAUNCHER),
    INERT_IF_NOT("all", "gpu_ids", "Ranks see the GPUs of CUDA_VISIBLE_DEVICES."),
    INERT("use_cpu", "The model is where the program puts it."),
    INERT("debug", "The checks are always on."),
    INERT("enable_cpu_affinity", LAUNCHER),
    INERT("mpirun_config", LAUNCHER),
    INERT("ipex_config", "The model belongs to the trainers."),
    INERT_IF_NOT("NO", "dynamo_backend", "The model belongs to the trainers, and so does compiling it."),
    INERT("dynamo_config", "The model belongs to the trainers, and so does compiling it."),
    INERT("fsdp_config", "zero_optimization says what is partitioned; the numbers are the same."),
    REFUSED("megatron_lm_config", DATA_PARALLEL),
    REFUSED("parallelism_config", DATA_PARALLEL),
    INERT_IF_NOT("1", "parallelism_config.parallelism_config_dp_shard_size",
                 "zero_optimization says what is partitioned."),
    INERT_IF_NOT("1", "parallelism_config.parallelism_config_dp_replicate_size",
                 "zero_optimization says what is partitioned."),
    INERT_ONLY("parallelism_config.parallelism_config_tp_size", "1", DATA_PARALLEL),
    INERT_ONLY("parallelism_config.parallelism_config_cp_size", "1", DATA_PARALLEL),
    INERT_ONLY("parallelism_config.parallelism_config_sp_size", "1", DATA_PARALLEL),
    INERT("tpu_env", LAUNCHER),
    INERT("tpu_name", LAUNCHER),
    INERT("tpu_zone", LAUNCHER),
    INERT("tpu_vm", LAUNCHER),
    INERT("tpu_use_cluster", LAUNCHER),
    INERT("tpu_use_sudo", LAUNCHER),
    INERT("command_file", LAUNCHER),
    INERT("commands", LAUNCHER),
};

const struct config_key *config_table(size_t *n_keys)
{
    *n_keys = ARRAY_SIZE(table);
    return table;
}
