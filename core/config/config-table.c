/* SPDX-License-Identifier: Apache-2.0 */

/* The table of configuration keys has one row for each key; lookups are by path, by section, and by nearness. */

#include "core/config/config-table.h"

#include "core/base/base.h"
#include "core/config/config.h"

#include <ctype.h>
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
#define REFUSED(path_, sentence_, ...)                                                                                 \
    {                                                                                                                  \
        .path = path_, .sentence = sentence_, .kind = CONFIG_REFUSED, __VA_ARGS__                                      \
    }

static const struct config_choice log_levels[] = {{"error", LOG_ERR}, {"warning", LOG_WARNING}, {"notice", LOG_NOTICE},
                                                  {"info", LOG_INFO}, {"debug", LOG_DEBUG},     {}};
static const struct config_choice devices[] = {{"cpu", CONFIG_DEVICE_CPU}, {"cuda", CONFIG_DEVICE_CUDA}, {}};
static const struct config_choice collectives[] = {
    {"local", CONFIG_COLLECTIVE_LOCAL}, {"gloo", CONFIG_COLLECTIVE_GLOO}, {"nccl", CONFIG_COLLECTIVE_NCCL}, {}};
static const struct config_choice stage3_on_one_node[] = {
    {"mapped", CONFIG_STAGE3_MAPPED}, {"gathered", CONFIG_STAGE3_GATHERED}, {}};
static const struct config_choice optim_bits[] = {{"32", 32}, {"8", 8}, {}};
static const struct config_choice master_weight_bits[] = {{"32", 32}, {"24", 24}, {}};
static const struct config_choice offloads[] = {{"none", CONFIG_OFFLOAD_NONE}, {"cpu", CONFIG_OFFLOAD_CPU}, {}};
static const struct config_choice optimizers[] = {{"AdamW", OPTIMIZER_ADAMW},
                                                  {"Adam", OPTIMIZER_ADAM},
                                                  {"SGD", OPTIMIZER_SGD},
                                                  {"Lion", OPTIMIZER_LION},
                                                  {"Adagrad", OPTIMIZER_ADAGRAD},
                                                  {"Muon", OPTIMIZER_MUON},
                                                  {}};
static const struct config_choice adjust_lr_fns[] = {
    {"original", MUON_ORIGINAL}, {"match_rms_adamw", MUON_MATCH_RMS_ADAMW}, {}};
static const struct config_choice schedulers[] = {{"WarmupLR", SCHEDULE_WARMUP},
                                                  {"WarmupDecayLR", SCHEDULE_WARMUP_DECAY},
                                                  {"WarmupCosineLR", SCHEDULE_WARMUP_COSINE},
                                                  {}};
static const struct config_choice warmups[] = {{"log", SCHEDULE_WARMUP_LOG}, {"linear", SCHEDULE_WARMUP_LINEAR}, {}};
static const struct config_choice allreduce_ops[] = {
    {"mean", CONFIG_ALLREDUCE_MEAN}, {"sum", CONFIG_ALLREDUCE_SUM}, {}};
static const struct config_choice wire_types[] = {{"fp32", DTYPE_F32}, {"bf16", DTYPE_BF16}, {}};
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

/* Long ranges by name. Where a bound has no reason of its own, it is picked: far above any use, below any
 * overflow. */
#define MAX_ELEMS 1e12
#define MAX_STEPS 1e12
#define MAX_MS 2592000000.0 /* 30 days */
#define MIN_EPS 1e-30       /* still positive after rounding to fp32: 0 / (sqrt(0) + eps) must not be NaN */

static const struct config_key table[] = {
    KEY("job", NAME, job, "Name of the job, in segment names, in the log and in status.", .def = "train"),
    KEY("log_level", CHOICE, log_level, "Least severity that is logged.", OWN, .def = "info", .choices = log_levels),

    SECTION("listen", "Where trainers connect and who may."),
    KEY("listen.socket", SOCKET, listen.socket,
        "Path of the Unix socket, absolute, at most 107 bytes. Its folder must exist.",
        .flags = CONFIG_REQUIRED | CONFIG_OWN),
    KEY("listen.mode", MODE, listen.mode, "Permissions of the socket, octal.", OWN, .def = "0660"),
    KEY("listen.allow_users", NAMES, listen.allow_users,
        "Users (names or ids) that may attach, besides root and the daemon's own user; listen.mode has to let them "
        "open the socket.",
        OWN, .max_items = 64),
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
        "What is partitioned: 1 optimizer state, 2 gradients too, 3 weights too.", DEEPSPEED, .def = "2", RANGE(1, 3)),
    KEY("zero_optimization.reduce_bucket_size", WHOLE, zero.reduce_bucket_size,
        "Largest bucket; a larger parameter is its own bucket, pushed in parts of this size. auto: 500000, with "
        "several nodes 8000000; if the models are on GPUs 50000000, with Muon 8000000.",
        .flags = CONFIG_DEEPSPEED | CONFIG_AUTO, .unit = "elements", .def = "auto", RANGE(1, MAX_ELEMS)),
    KEY("zero_optimization.overlap_comm", BOOL, zero.overlap_comm,
        "Room for several buckets in the ring, so that reductions hide behind the backward, and for a whole "
        "micro-batch if the models are on GPUs; false: for two, less memory.",
        .flags = CONFIG_DEEPSPEED | CONFIG_NULLABLE, .def = "true"),
    KEY("zero_optimization.stage3_max_live_parameters", WHOLE, zero.stage3_max_live_parameters,
        "Stage 3: what a rank may hold gathered at one time.", DEEPSPEED, .unit = "elements", .def = "1000000000",
        RANGE(1, MAX_ELEMS)),
    KEY("zero_optimization.stage3_on_one_node", CHOICE, zero.stage3_on_one_node,
        "Stage 3 where one node's memory has all weights. mapped: they are read where they lie, as in stage 2. "
        "gathered: only what a rank has gathered can be read, as with several nodes.",
        .def = "mapped", .choices = stage3_on_one_node),
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
        .only = ADAMW | ADAM | SGD | MUON),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.0001", RANGE(0, 1e6),
        .only = LION),
    KEY("optimizer.params.lr", REAL, optimizer.hyper.lr, "Learning rate.", DEEPSPEED, .def = "0.01", RANGE(0, 1e6),
        .only = ADAGRAD),
    KEY("optimizer.params.betas", PAIR, optimizer.hyper.beta1, "Decay of the first and second moment, per step.",
        .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX, .def = "[0.9, 0.999]", RANGE(0, 1), .only = ADAMW | ADAM | MUON),
    KEY("optimizer.params.betas", PAIR, optimizer.hyper.beta1,
        "Weight of the momentum in the update, and its decay per step.", .flags = CONFIG_DEEPSPEED | CONFIG_BELOW_MAX,
        .def = "[0.9, 0.99]", RANGE(0, 1), .only = LION),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps, "Added to the denominator.", DEEPSPEED, .def = "1.0e-8",
        RANGE(MIN_EPS, 1), .only = ADAMW | ADAM),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps,
        "Added to AdamW's denominator; the least norm by which a matrix is divided.", DEEPSPEED, .def = "1.0e-8",
        RANGE(MIN_EPS, 1), .only = MUON),
    KEY("optimizer.params.eps", REAL, optimizer.hyper.eps, "Added to the denominator.", DEEPSPEED, .def = "1.0e-10",
        RANGE(MIN_EPS, 1), .only = ADAGRAD),
    KEY("optimizer.params.weight_decay", REAL, optimizer.hyper.weight_decay, "Weight decay, decoupled.", DEEPSPEED,
        .def = "0.01", RANGE(0, 1e3), .only = ADAMW),
    KEY("optimizer.params.weight_decay", REAL, optimizer.hyper.weight_decay, "Weight decay, decoupled.", DEEPSPEED,
        .def = "0.1", RANGE(0, 1e3), .only = MUON),
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
    INERT_ONLY("optimizer.params.adam_w_mode", "true", "AdamW is always decoupled; type: Adam has the other mode.",
               .only = ADAMW),
    INERT_ONLY("optimizer.params.bias_correction", "true", "The moments' bias is always corrected.",
               .only = ADAMW | ADAM),
    INERT("optimizer.params.torch_adam", "There is one implementation.", .only = ADAMW | ADAM),
    INERT_ONLY("optimizer.params.fp32_optimizer_states", "true", "bf16.bf16_optimizer_states says what it is.",
               .only = ADAMW | ADAM),
    REFUSED("optimizer.params.max_grad_norm", "Clipping is set for the whole job: gradient_clipping."),

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
        .flags = CONFIG_DEEPSPEED | CONFIG_NULLABLE, RANGE(0, 1e6), .max_items = 256, .only = WARMUP),
    KEY("scheduler.params.warmup_max_lr", NUMBERS, scheduler.warmup_max_lr,
        "Learning rate after the warm-up; a list gives one for each group.", DEEPSPEED, .def = "0.001", RANGE(0, 1e6),
        .max_items = 256, .only = DECAY),
    KEY("scheduler.params.warmup_min_ratio", REAL, scheduler.warmup_min_ratio,
        "Start of the warm-up, relative to the group's lr.", DEEPSPEED, .def = "0", RANGE(0, 1), .only = COSINE),
    KEY("scheduler.params.warmup_num_steps", WHOLE, scheduler.warmup_num_steps, "Length of the warm-up.", DEEPSPEED,
        .unit = "steps", .def = "1000", RANGE(1, MAX_STEPS), .only = WARMUP | DECAY | COSINE),
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
        .def = "0", RANGE(0, 1e12)),
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
    KEY("fp16.min_loss_scale", REAL, fp16.scale.min_scale, "The scale never goes below; an overflow there is E1202.",
        .flags = CONFIG_DEEPSPEED | CONFIG_ABOVE_MIN, .def = "1", RANGE(0, 1e20)),
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
    KEY("checkpoint.save_steps", WHOLE, checkpoint.save_steps, "Save each time so many steps are committed; 0: not so.",
        OWN, .unit = "steps", .def = "0", RANGE(0, MAX_STEPS)),
    KEY("checkpoint.save_interval", DURATION, checkpoint.save_interval_ms,
        "Save when the last save began so long ago; 0: not so.", OWN, .def = "0", RANGE(0, MAX_MS)),
    KEY("checkpoint.save_total_limit", WHOLE, checkpoint.save_total_limit,
        "Keep this many checkpoints; older ones are removed when a newer one is whole; 0: keep all.", OWN,
        .unit = "checkpoints", .def = "0", RANGE(0, 1e6)),
    KEY("checkpoint.save_on_stop", BOOL, checkpoint.save_on_stop, "Save before the daemon ends on SIGTERM.", OWN,
        .def = "false"),
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

    /* DeepSpeed's keys that have no effect here, in the order of its manual. */
    INERT("train_batch_size", "The batch belongs to the trainers; see gradient_accumulation_steps."),
    INERT("train_micro_batch_size_per_gpu", "The batch belongs to the trainers."),
    INERT("managed_gradient_accumulation", "zerod sees the boundaries of micro-batches itself."),
    INERT("prescale_gradients", "Unscaling, averaging and clipping are one factor, applied once, in fp32."),
    INERT("gradient_predivide_factor", "Unscaling, averaging and clipping are one factor, applied once, in fp32."),
    INERT("disable_allgather", "On one node weights are shared, between nodes always gathered."),
    INERT("sparse_gradients", "Gradients are pushed dense."),
    INERT("seq_parallel_communication_data_type", "Sequence parallelism belongs to the trainers."),
    INERT("data_types", "Gradients are always accumulated in fp32."),
    INERT_IF_NOT("true", "zero_allow_untested_optimizer", "All optimizers listed here are tested."),
    INERT_IF_NOT("true", "zero_force_ds_cpu_optimizer", "There is one implementation."),
    INERT("aio", "Nothing is offloaded to disk."),
    INERT("elasticity", "The number of ranks is world.size."),
    INERT("activation_checkpointing", "Activations belong to the trainers."),
    INERT("flops_profiler", "Profiling belongs to the trainers; zerodctl status says where a step's time goes."),
    INERT("comms_logger", "zerodctl status says where a step's time goes."),
    INERT("steps_per_print", "zerodctl status shows progress at any time."),
    INERT("wall_clock_breakdown", "zerodctl status says where a step's time goes."),
    INERT("memory_breakdown", "zerodctl status shows memory by class."),
    INERT("dump_state", "zerod --print-config shows the effective configuration."),
    INERT("tensorboard", "Logging of metrics belongs to the trainers."),
    INERT("wandb", "Logging of metrics belongs to the trainers."),
    INERT("csv_monitor", "Logging of metrics belongs to the trainers."),

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
    INERT("zero_optimization.offload_optimizer.nvme_path", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.buffer_count", "Nothing is offloaded to disk."),
    INERT_IF_NOT("true", "zero_optimization.offload_optimizer.pin_memory",
                 "Host memory is registered by the client that needs it."),
    INERT("zero_optimization.offload_optimizer.pipeline_read", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.pipeline_write", "Nothing is offloaded to disk."),
    INERT("zero_optimization.offload_optimizer.fast_init", "Nothing is offloaded to disk."),
    INERT_ONLY("zero_optimization.offload_optimizer.ratio", "1.0", "The state is offloaded as a whole or not at all."),
    INERT_ONLY("zero_optimization.offload_optimizer.super_offload", "false", "The state is offloaded by zerod itself."),
    INERT("zero_optimization.offload_optimizer.cpuadam_cores_perc", "threads says how many threads update."),
    INERT("zero_optimization.zero_hpz_partition_size", "A node holds its weights once, for all its ranks."),
    INERT_ONLY("zero_optimization.zero_quantized_weights", "false", "Weights are never quantized."),
    INERT_ONLY("zero_optimization.zero_quantized_nontrainable_weights", "false", "Weights are never quantized."),
    INERT_ONLY("zero_optimization.zero_quantized_gradients", "false",
               "Gradients are never quantized; communication_data_type can make them bf16."),
    INERT_ONLY("zero_optimization.mics_shard_size", "-1", "Partitions are always one for each rank of the world."),
    INERT("zero_optimization.mics_hierarchical_params_gather", "A node gathers for all its ranks at once."),
    INERT("zero_optimization.memory_efficient_linear", "Layers belong to the trainers."),
    INERT("zero_optimization.pipeline_loading_checkpoint", "Checkpoints are loaded by the trainers."),
    INERT("zero_optimization.override_module_apply", "Modules belong to the trainers."),
    INERT("zero_optimization.log_trace_cache_warnings", "There is no trace to get out of step with."),
    INERT("zero_optimization.enable_sanity_checks", "The checks are always on."),
    INERT("zero_optimization.leaf_module", "The trainers say what is gathered together."),
    REFUSED("zero_optimization.cpu_offload",
            "Deprecated by DeepSpeed as well: write offload_optimizer: {device: cpu}."),
    REFUSED("zero_optimization.zenflow",
            "Updates that lag behind their gradients change what is trained; zerod's steps are whole."),
    REFUSED("zero_optimization.legacy_stage1", "There is one stage 1; leave the key out."),
    REFUSED("amp", "Apex is not supported; use fp16, or declare bf16 parameters."),
};

const struct config_key *config_table(size_t *n_keys)
{
    *n_keys = ARRAY_SIZE(table);
    return table;
}

const char *config_key_leaf(const struct config_key *key)
{
    const char *dot = strrchr(key->path, '.');

    return dot ? dot + 1 : key->path;
}

bool config_key_applies(const struct config_key *key, unsigned active)
{
    return key->only == 0 || (key->only & active) != 0;
}

/* Is key a direct child of section? */
static bool stands_in(const struct config_key *key, const char *section)
{
    size_t n = (size_t)(config_key_leaf(key) - key->path);
    size_t n_section = strlen(section);

    if (n == 0)
        return n_section == 0;
    return n == n_section + 1 && memcmp(key->path, section, n_section) == 0;
}

const struct config_key *config_table_lookup(const char *path, unsigned active)
{
    for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
        if (config_key_applies(&table[i], active) && strcmp(table[i].path, path) == 0)
            return &table[i];
    }
    return NULL;
}

const struct config_key *config_table_find(const char *section, const char *name, unsigned active)
{
    for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
        if (config_key_applies(&table[i], active) && strcmp(config_key_leaf(&table[i]), name) == 0 &&
            stands_in(&table[i], section))
            return &table[i];
    }
    return NULL;
}

/*
 * Optimal string alignment, letters without regard to case. Three rows suffice: a swap looks two rows back.
 */
unsigned config_distance(const char *a, const char *b)
{
    enum { LONGEST = 64 };
    unsigned rows[3][LONGEST + 1];
    size_t n_a = strnlen(a, LONGEST), n_b = strnlen(b, LONGEST);

    for (size_t j = 0; j <= n_b; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= n_a; i++) {
        unsigned *row = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n_b; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            unsigned best = MIN(above[j], row[j - 1]) + 1;

            best = MIN(best, above[j - 1] + (x != y));
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) && y == tolower((unsigned char)a[i - 2]))
                best = MIN(best, above2[j - 2] + 1);
            row[j] = best;
        }
    }
    return rows[n_a % 3][n_b];
}

/*
 * Nearness in quarters of a letter. A key that is only accepted costs a letter more than one that works.
 * Another section costs two and a half: "stage" at the top means zero_optimization.stage, but "sise" under
 * world is no reason to leave world.
 */
static unsigned remoteness(const struct config_key *key, const char *section, const char *name)
{
    unsigned remote = 4 * config_distance(name, config_key_leaf(key));

    if (key->kind != CONFIG_OURS)
        remote += 4;
    if (!stands_in(key, section))
        remote += 8 + 2;
    return remote;
}

const struct config_key *config_table_nearest(const char *section, const char *name, unsigned active)
{
    const struct config_key *nearest = NULL;
    unsigned least = 0;

    for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
        unsigned remote = remoteness(&table[i], section, name);

        if (table[i].kind == CONFIG_REFUSED || !config_key_applies(&table[i], active))
            continue;
        if (!nearest || remote < least) {
            nearest = &table[i];
            least = remote;
        }
    }
    return nearest;
}
