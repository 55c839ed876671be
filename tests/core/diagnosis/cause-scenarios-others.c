/* SPDX-License-Identifier: Apache-2.0 */

/* Scenarios that are not about one gradient. */

#include "tests/core/diagnosis/cause-scenarios.h"

#include <math.h>
#include <string.h>

#include "core/layout/manifest.h"

/* ---- E1101 --------------------------------------------------------------------------------------------- */

enum { MAX_MANIFESTS = 8 };

static void declare(struct manifest *m, const char *name, uint64_t rows, enum dtype dtype, uint32_t group,
                    bool trainable)
{
    uint64_t shape[] = {rows, 32};

    assert_int_equal(manifest_add(m,
                                  &(struct layout_decl){
                                      .name = name,
                                      .name_len = strlen(name),
                                      .dtype = dtype,
                                      .group = group,
                                      .trainable = trainable,
                                      .n_dims = 2,
                                      .shape = shape,
                                  }),
                     0);
}

/* Compares the manifests that fill() makes for ranks 0 to n_declared - 1. The other ranks have not declared. */
static struct diagnostic *compare(void (*fill)(struct manifest *m, unsigned rank), unsigned n_declared,
                                  unsigned world_size)
{
    struct manifest manifests[MAX_MANIFESTS] = {0};
    const struct manifest *list[MAX_MANIFESTS] = {0};
    struct diagnostic *d;

    for (unsigned r = 0; r < n_declared; r++) {
        fill(&manifests[r], r);
        list[r] = &manifests[r];
    }
    d = cause_manifest(list, world_size);
    for (unsigned r = 0; r < world_size; r++)
        manifest_deinit(&manifests[r]);
    return d;
}

static void fill_dtype(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128, DTYPE_F32, 0, true);
    declare(m, "layers.0.w", 64, rank == 2 ? DTYPE_BF16 : DTYPE_F32, 0, true);
    declare(m, "layers.1.w", 64, DTYPE_F32, 0, true);
}

static void fill_shape(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", rank == 0 ? 32000 : 32128, DTYPE_F32, 0, true);
}

/* All ranks differ. */
static void fill_chaos(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128 + rank, DTYPE_F32, 0, true);
}

static void fill_order(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128, DTYPE_F32, 0, true);
    declare(m, rank == 0 ? "layers.1.w" : "layers.0.w", 64, DTYPE_F32, 0, true);
    declare(m, rank == 0 ? "layers.0.w" : "layers.1.w", 64, DTYPE_F32, 0, true);
}

static void fill_many(struct manifest *m, unsigned rank)
{
    declare(m, rank == 1 ? "embed.weights" : "embed.weight", 128, DTYPE_F32, 0, true);
    declare(m, "layers.0.w", rank == 2 ? 96 : 64, DTYPE_F32, 0, true);
    if (rank != 3)
        declare(m, "layers.1.w", 64, DTYPE_F32, 0, true);
}

static void fill_length(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128, DTYPE_F32, 0, true);
    if (rank == 1)
        declare(m, "lm_head.\xff\n", 128, DTYPE_F32, 0, true);
}

static void fill_trainable(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128, DTYPE_F32, 0, rank != 1);
}

static void fill_group(struct manifest *m, unsigned rank)
{
    declare(m, "embed.weight", 128, DTYPE_F32, rank & 1, true);
}

static struct diagnostic *e1101_dtype(const struct fixture *f)
{
    (void)f;
    return compare(fill_dtype, 4, 4);
}

static struct diagnostic *e1101_order(const struct fixture *f)
{
    (void)f;
    return compare(fill_order, 4, 4);
}

static struct diagnostic *e1101_many(const struct fixture *f)
{
    (void)f;
    return compare(fill_many, 4, 4);
}

static struct diagnostic *e1101_shape(const struct fixture *f)
{
    (void)f;
    return compare(fill_shape, 4, 4);
}

static struct diagnostic *e1101_chaos(const struct fixture *f)
{
    (void)f;
    return compare(fill_chaos, 8, 8);
}

static struct diagnostic *e1101_length(const struct fixture *f)
{
    (void)f;
    return compare(fill_length, 3, 4);
}

static struct diagnostic *e1101_trainable(const struct fixture *f)
{
    (void)f;
    return compare(fill_trainable, 3, 4);
}

static struct diagnostic *e1101_group(const struct fixture *f)
{
    (void)f;
    return compare(fill_group, 4, 4);
}

static struct diagnostic *e1101_declare(const struct fixture *f)
{
    struct evidence_at place = at(NULL, "zerod-example", 2, -1, -1);

    (void)f;
    return cause_declare(&place, "the manifest is not the one that this run was formed with",
                         "start the same model, or end the run: zerodctl drop");
}

/* ---- E1102, E1104 to E1110 as clients report them ------------------------------------------------------- */

static struct diagnostic *report(const struct fixture *f, enum diagnostic_code code, const char *client,
                                 const char *detail)
{
    struct evidence_at place = at(f->net, client, 1, 12, -1);

    return cause_report(&place, code, f->encoder, 1, detail, true);
}

static struct diagnostic *e1102_sparse(const struct fixture *f)
{
    return report(f, E_GRADIENT, TORCH, "a gradient that is torch.sparse_coo, in a backward from train.py:61");
}

static struct diagnostic *e1102_sparse_c(const struct fixture *f)
{
    return report(f, E_GRADIENT, "zerod-example", "a gradient of 3 rows");
}

static struct diagnostic *e1103_no_group(const struct fixture *f)
{
    return report(f, E_PARAMETER, TORCH, "a gradient in the step called at train.py:64");
}

static struct diagnostic *e1103_not_trainable(const struct fixture *f)
{
    return report(f, E_PARAMETER, "zerod-example", "a gradient of 64 elements");
}

static struct diagnostic *e1104(const struct fixture *f)
{
    return report(f, E_REPOINTED, TORCH, "storage moved to cuda:0 by model.to() at train.py:55");
}

static struct diagnostic *e1105(const struct fixture *f)
{
    return report(f, E_DRIFTED, TORCH, "checksum 91be1ccda5 on rank 1, 77aa010f3e on rank 0");
}

static struct diagnostic *e1106(const struct fixture *f)
{
    return report(f, E_WEIGHT_WRITTEN, TORCH, "write to its byte 128");
}

static struct diagnostic *e1106_c(const struct fixture *f)
{
    return report(f, E_WEIGHT_WRITTEN, "zerod-example", "write to its byte 128");
}

static struct diagnostic *e1107(const struct fixture *f)
{
    struct evidence_at place = at(NULL, TRAINER, 0, -1, -1);

    (void)f;
    return cause_report(&place, E_REDUCED_TWICE, NULL, 0, "the model is a DistributedDataParallel, made at train.py:40",
                        false);
}

static struct diagnostic *e1107_later(const struct fixture *f)
{
    struct evidence_at place = at(f->net, TORCH, 1, 12, 0);

    return cause_report(&place, E_REDUCED_TWICE, NULL, 0,
                        "the model is wrapped in DistributedDataParallel after zerod.Optimizer(model)", true);
}

static struct diagnostic *e1108(const struct fixture *f)
{
    return cause_step_args(&(struct evidence_args){.at = at(f->net, TORCH, 1, 7, -1),
                                                   .other_rank = 0,
                                                   .name = "lr of group 0",
                                                   .value = 0.001,
                                                   .other_value = 0.0009});
}

static struct diagnostic *e1108_not_given(const struct fixture *f)
{
    return cause_step_args(&(struct evidence_args){.at = at(f->net, "zerod-example", 1, 7, -1),
                                                   .other_rank = 0,
                                                   .name = "max_norm",
                                                   .value = NAN,
                                                   .other_value = 1});
}

static struct diagnostic *e1304(const struct fixture *f)
{
    struct evidence_at at = {.rank = 1, .step = -1, .micro_batch = -1};

    (void)f;
    return cause_held(&at, "the run has \"zero_optimization.stage 1\", the configuration of this daemon says "
                           "\"zero_optimization.stage 2\"");
}

static struct diagnostic *stopped(const struct fixture *f, int64_t step, struct evidence_stopped evidence)
{
    evidence.at = at(f->net, "zerod-example", -1, step, -1);
    return cause_stopped(&evidence);
}

static struct diagnostic *e1305(const struct fixture *f)
{
    return stopped(f, 1000, (struct evidence_stopped){.signal = "SIGINT", .is_kept = true});
}

static struct diagnostic *e1305_saved(const struct fixture *f)
{
    return stopped(f, 1000,
                   (struct evidence_stopped){.signal = "SIGINT",
                                             .is_kept = true,
                                             .dir = "/var/lib/zerod/pretrain",
                                             .saves_on_stop = true,
                                             .is_saved = true});
}

static struct diagnostic *e1305_not_saved(const struct fixture *f)
{
    return stopped(f, 1000,
                   (struct evidence_stopped){.signal = "SIGINT", .is_kept = true, .dir = "/var/lib/zerod/pretrain"});
}

static struct diagnostic *e1305_not_kept(const struct fixture *f)
{
    return stopped(
        f, 1000,
        (struct evidence_stopped){.signal = "SIGTERM", .dir = "/var/lib/zerod/pretrain", .saves_on_stop = true});
}

static struct diagnostic *e1305_forming(const struct fixture *f)
{
    return stopped(f, -1, (struct evidence_stopped){.signal = "SIGINT", .is_kept = true});
}

static struct diagnostic *e1701(const struct fixture *f)
{
    struct evidence_at at = {.rank = -1, .step = 1000, .micro_batch = -1};

    (void)f;
    return cause_not_saved(&at, "/data/ck", "optimizer.safetensors: No space left on device");
}

static struct diagnostic *e1111(const struct fixture *f)
{
    return cause_alike(
        &(struct evidence_alike){.at = at(f->net, TORCH, -1, 2, -1), .n_ranks = 4, .n_params = 17, .n_steps = 3});
}

static struct diagnostic *e1203(const struct fixture *f)
{
    static const bool set[] = {false, true, false, false};

    return cause_unscaled(&(struct evidence_unscaled){
        .at = at(f->net, TORCH, 1, 0, -1), .set = set, .world_size = 4, .ratio = 61234.5, .loss_scale = 65536});
}

static struct diagnostic *e1203_c(const struct fixture *f)
{
    static const bool set[] = {false, true, true, false};

    return cause_unscaled(&(struct evidence_unscaled){
        .at = at(f->net, "zerod-example", -1, 0, -1), .set = set, .world_size = 4, .ratio = 130, .loss_scale = 128});
}

static struct diagnostic *e1702(const struct fixture *f)
{
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};

    (void)f;
    return cause_not_loaded(&at, "/data/ck/step-00001000",
                            "it lacks state.bert.layer.0.q.weight.exp_avg, which this job has");
}

static struct diagnostic *e1702_folder(const struct fixture *f)
{
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};

    (void)f;
    return cause_no_folder(&at, "/data/ck", "/data/ck: Not a directory");
}

static struct diagnostic *e1109(const struct fixture *f)
{
    struct evidence_at place = at(NULL, "zerod-example", 0, -1, -1);

    (void)f;
    return cause_other_run(&place, "pretrain-7b", "pretrain-7b-lr2", 4711);
}

static struct diagnostic *e1109_nodes(const struct fixture *f)
{
    (void)f;
    return cause_runs_differ(&(struct evidence_at){.rank = -1, .step = -1, .micro_batch = -1},
                             "the ranks of node 1 have the run id tuesday, those of node 0 have monday");
}

static struct diagnostic *e1110(const struct fixture *f)
{
    return report(f, E_RELEASED_READ, TORCH, "access to its byte 0");
}

/* ---- E1201, E1202 -------------------------------------------------------------------------------------- */

static struct evidence_nonfinite finding(const struct fixture *f, const char *client)
{
    return (struct evidence_nonfinite){
        .at = at(f->net, client, 3, 250, 1),
        .param = f->used,
        .elem = 17,
        .value = NAN,
        .n_nan = 3,
        .n_inf = 1,
        .loss_scale = 1,
    };
}

static struct diagnostic *e1201_skipped(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, TORCH);

    return cause_nonfinite(&e);
}

static struct diagnostic *e1201_held(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, "zerod-example");

    e.value = -INFINITY;
    e.n_nan = 0;
    e.loss_scale = 65536;
    e.held = true;
    return cause_nonfinite(&e);
}

static struct diagnostic *e1201_c(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, "zerod-example");

    e.loss_scale = 0;
    return cause_nonfinite(&e);
}

static struct diagnostic *e1201_overflowed(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, "zerod-example");

    e.at.rank = -1;
    e.value = INFINITY;
    e.n_nan = 0;
    e.overflowed = true;
    return cause_nonfinite(&e);
}

static struct diagnostic *e1202_skipped(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, "zerod-example");

    e.loss_scale = 0.25;
    return cause_loss_scale(&e, 0.25);
}

static struct diagnostic *e1202(const struct fixture *f)
{
    struct evidence_nonfinite e = finding(f, TORCH);

    e.held = true;
    return cause_loss_scale(&e, 1);
}

/* ---- E1301 to E1303 ------------------------------------------------------------------------------------ */

static struct diagnostic *e1301(const struct fixture *f)
{
    struct evidence_at place = at(f->net, "zerod-example", 2, -1, -1);

    return cause_rank_taken(&place, 4242, UINT64_C(1000000000), UINT64_C(126000000000));
}

static struct diagnostic *e1301_itself(const struct fixture *f)
{
    struct evidence_at place = at(NULL, TORCH, 0, -1, -1);

    (void)f;
    return cause_rank_taken_by_itself(&place, 4242);
}

static struct diagnostic *e1301_itself_c(const struct fixture *f)
{
    struct evidence_at place = at(NULL, "trainer", 0, -1, -1);

    (void)f;
    return cause_rank_taken_by_itself(&place, 4242);
}

static struct diagnostic *e1301_torch(const struct fixture *f)
{
    struct evidence_at place = at(f->net, TORCH, 2, -1, -1);

    return cause_rank_taken(&place, 4242, UINT64_C(1000000000), UINT64_C(126000000000));
}

static struct evidence_lost lost(const struct fixture *f)
{
    return (struct evidence_lost){
        .at = at(f->net, "zerod-example", 2, 90, 1),
        .pid = 4242,
        .last_message = "Push",
        .outstanding = "5 of 17 parameters of micro-batch 1",
    };
}

static struct diagnostic *e1302_waiting(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_aborted(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.aborted = true;
    e.waited_ms = 600000;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_differs(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.aborted = e.differs = true;
    e.param = f->used;
    e.outstanding = NULL;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_differs_on_gpu(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.aborted = e.differs = e.on_gpu = true;
    e.param = f->used;
    e.outstanding = NULL;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_crossed(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.aborted = e.crossed = true;
    e.waited_ms = 2000;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_left(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.left = true;
    e.last_message = "Leave";
    e.outstanding = NULL;
    return cause_rank_lost(&e);
}

/* The evidence when the client is a PyTorch program. */
static struct evidence_lost lost_by_torch(const struct fixture *f)
{
    struct evidence_lost e = lost(f);

    e.at.client = TORCH;
    return e;
}

static struct diagnostic *e1302_waiting_torch(const struct fixture *f)
{
    struct evidence_lost e = lost_by_torch(f);

    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_differs_torch(const struct fixture *f)
{
    struct evidence_lost e = lost_by_torch(f);

    e.aborted = e.differs = true;
    e.param = f->used;
    e.outstanding = NULL;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_left_torch(const struct fixture *f)
{
    struct evidence_lost e = lost_by_torch(f);

    e.left = true;
    e.last_message = "Leave";
    e.outstanding = NULL;
    return cause_rank_lost(&e);
}

static struct diagnostic *e1302_back(const struct fixture *f)
{
    return cause_rank_back(&(struct evidence_at){.layout = f->net, .rank = 2, .step = 90, .micro_batch = -1});
}

static struct diagnostic *e1302_inherited(const struct fixture *f)
{
    struct diagnostic *refusal = cause_missing(&(struct evidence_missing){.at = at(f->net, TORCH, 2, 90, -1),
                                                                         .params = f->unused,
                                                                         .n_params = ARRAY_SIZE(f->unused),
                                                                         .n_trainable = 17,
                                                                         .world_size = 4});
    struct diagnostic *d = cause_inherited(
        &(struct evidence_inherited){.at = at(f->net, TORCH, 2, 90, -1), .n_ended = 1, .refusal = refusal});

    diagnostic_unref(refusal);
    return d;
}

static struct diagnostic *e1302_inherited_part(const struct fixture *f)
{
    return cause_inherited(&(struct evidence_inherited){.at = at(f->net, TORCH, 2, 90, -1), .n_ended = 2});
}

static struct diagnostic *e1302_inherited_arguments(const struct fixture *f)
{
    struct diagnostic *refusal = cause_step_args(&(struct evidence_args){
        .at = at(f->net, TORCH, 1, 90, -1), .other_rank = 2, .name = "max_norm", .value = 1, .other_value = 7});
    struct diagnostic *d = cause_inherited(&(struct evidence_inherited){
        .at = at(f->net, TORCH, 2, 90, -1), .n_ended = 2, .asked = true, .refusal = refusal});

    diagnostic_unref(refusal);
    return d;
}

static struct diagnostic *e1302_step_aborted(const struct fixture *f)
{
    struct evidence_duplicate duplicate = two_backwards(f, TORCH, 0);
    struct diagnostic *reason, *d;

    duplicate.abort_step = true;
    reason = cause_duplicate(&duplicate);
    d = cause_aborted(&(struct evidence_abort){.at = at(f->net, TORCH, 2, 7, -1), .reason = reason, .new_attempt = 1});
    diagnostic_unref(reason);
    return d;
}

static struct diagnostic *e1302_asked_for(const struct fixture *f)
{
    return cause_aborted(&(struct evidence_abort){
        .at = at(f->net, "zerod-example", 0, 7, -1), .why = "data was re-shuffled", .new_attempt = 2});
}

static struct diagnostic *e1302_by_administrator(const struct fixture *f)
{
    return cause_aborted(&(struct evidence_abort){.at = at(f->net, "zerod-example", -1, 7, -1), .new_attempt = 2});
}

static struct evidence_stall stall(const struct fixture *f)
{
    return (struct evidence_stall){
        .at = at(f->net, "zerod-example", 0, 4711, 0),
        .waiting = "rank 0, 2, at the end of a micro-batch",
        .blocking = "rank 1 (pid 1234, last message Push 12300 ms ago)",
        .since_ms = 12300,
    };
}

static struct diagnostic *e1303(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.params = f->encoder;
    e.n_params = 12;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_where(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.absent = true;
    e.where = "rank 1, main thread:\n  loader.py:21 in __next__\n  train.py:12 in <module>";
    return cause_stalled(&e);
}

static struct diagnostic *e1303_m7_aborted(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.aborted = e.absent = true;
    e.since_ms = 600000;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_deadlocked(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.blocking = "rank 1 (pid 1234, waits to open a write window)";
    e.deadlocked = true;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_window(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.blocking = "the end of the write window that is open";
    e.deadlocked = e.behind_window = true;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_forming(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.at = at(NULL, NULL, 0, -1, -1);
    e.waiting = "rank 0, to form the job";
    e.blocking = "rank 1 (never attached)";
    e.forming = e.aborted = true;
    e.since_ms = 3 * 3600 * 1000 + 600 * 1000;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_other_node(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.at.rank = 0;
    e.waiting = "rank 0, 1, in the step";
    e.blocking = "node 1 (10.0.0.2:7700), to push gradients, or to end a backward";
    e.n_params = 0;
    e.elsewhere = true;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_other_node_decided(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.at.rank = 2;
    e.waiting = "rank 2, in the step";
    e.blocking = "node 0 (10.0.0.1:7700), which decides what comes next; it knows for whom it waits";
    e.n_params = 0;
    e.elsewhere = e.decided = e.aborted = true;
    e.since_ms = 600000;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_cut_off(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.at.rank = 2;
    e.waiting = "rank 2, in the step";
    e.blocking = "node 0 (10.0.0.1:7700), which decides what comes next; it is not reached";
    e.n_params = 0;
    e.elsewhere = e.cut_off = e.aborted = true;
    e.since_ms = 600000;
    return cause_stalled(&e);
}

static struct diagnostic *e1303_other_node_forming(const struct fixture *f)
{
    struct evidence_stall e = stall(f);

    e.at = at(NULL, NULL, 2, -1, -1);
    e.waiting = "rank 2, to form the job";
    e.blocking = "node 0 (10.0.0.1:7700), which decides what comes next; it knows for whom it waits";
    e.n_params = 0;
    e.elsewhere = e.forming = true;
    return cause_stalled(&e);
}

/* ---- E1401 to E1403 ------------------------------------------------------------------------------------ */

static struct diagnostic *e1401_memory(const struct fixture *f)
{
    (void)f;
    return cause_quota(&(struct evidence_quota){
        .at = at(NULL, NULL, -1, -1, -1),
        .what = "memory of the job (limits.memory)",
        .unit = "bytes",
        .asked = 3000000000,
        .allowed = 2000000000,
        .sum = "state 1500000000 + gradient 500000000 + ring 400000000\n+ weights 500000000 + fixed "
               "100000000 = 3000000000 bytes",
        .fix = "raise limits.memory, or use more nodes or a higher stage (zerodctl plan shows what each needs)",
    });
}

static struct diagnostic *e1401_live(const struct fixture *f)
{
    return cause_quota(&(struct evidence_quota){
        .at = at(f->net, TORCH, 1, 3, 0),
        .what = "live parameters (stage3_max_live_parameters)",
        .unit = "elements",
        .asked = 4096,
        .held = 8192,
        .allowed = 10000,
        .fix = "release modules before gathering others, or raise zero_optimization.stage3_max_live_parameters",
    });
}

static struct diagnostic *e1401_machine(const struct fixture *f)
{
    return cause_quota(&(struct evidence_quota){
        .at = at(f->net, TORCH, 1, 3, 0),
        .what = "write window",
        .unit = "bytes",
        .asked = 4096,
        .fix = "free memory on this machine",
    });
}

static struct diagnostic *e1401_descriptors(const struct fixture *f)
{
    return cause_quota(&(struct evidence_quota){
        .at = at(f->net, TORCH, 1, 3, 0),
        .what = "state to be read",
        .unit = "bytes",
        .asked = 4096,
        .fix = "free memory on this machine",
        .limit = {PROCESS_LIMIT_OPEN_FILES, 1024},
    });
}

static struct diagnostic *e1401_address_space(const struct fixture *f)
{
    return cause_quota(&(struct evidence_quota){
        .at = at(f->net, TORCH, 1, 3, 0),
        .what = "state to be read",
        .unit = "bytes",
        .asked = 4096,
        .fix = "free memory on this machine",
        .limit = {PROCESS_LIMIT_ADDRESS_SPACE, UINT64_C(3) << 30},
    });
}

static struct diagnostic *e1401_answer(const struct fixture *f)
{
    return cause_quota(&(struct evidence_quota){
        .at = at(f->net, TORCH, 1, 3, 0),
        .what = "state to be read (limits.memory)",
        .unit = "bytes",
        .asked = 8388608,
        .held = 96000000,
        .allowed = 100000000,
        .of_job = true,
        .fix = "raise limits.memory: beside the job, the largest parameter's state must fit once for each rank that "
               "reads",
    });
}

static struct diagnostic *e1402_connect(const struct fixture *f)
{
    struct evidence_at nowhere = at(NULL, NULL, -1, -1, -1);

    (void)f;
    return cause_not_allowed(&nowhere, 1000, 1000, "connect (listen.allow_users, listen.allow_groups)");
}

static struct diagnostic *e1402_owner(const struct fixture *f)
{
    struct evidence_at place = at(NULL, NULL, 3, -1, -1);

    (void)f;
    return cause_rank_owned(&place, 1002, 1002, 1001);
}

static struct diagnostic *e1402_admin(const struct fixture *f)
{
    struct evidence_at nowhere = at(NULL, NULL, -1, -1, -1);

    (void)f;
    return cause_not_allowed(&nowhere, 1000, 1000, "change the job (listen.admin_users, listen.admin_groups)");
}

static struct diagnostic *e1402_draining(const struct fixture *f)
{
    struct evidence_at place = at(NULL, NULL, 3, -1, -1);

    (void)f;
    return cause_not_allowed(&place, 1000, 1000, "the job is being drained: no rank may attach");
}

static struct diagnostic *e1403(const struct fixture *f)
{
    struct evidence_at place = at(NULL, NULL, 1, -1, -1);

    (void)f;
    return cause_bad_message(&place, "Hello.rank: 9, expected 0 to 3 (world.size is 4)");
}

/* ---- E1501 to E1503 ------------------------------------------------------------------------------------ */

/*
 * Node 0's text about a node that it waits for. The next ones: about a node that it does not wait for, and the texts of
 * other nodes about node 0.
 */
static struct diagnostic *e1501(const struct fixture *f)
{
    return cause_node_silent(&(struct evidence_node){
        .at = at(f->net, NULL, -1, 7, -1),
        .node = 1,
        .first_rank = 4,
        .n_ranks = 4,
        .address = "10.0.0.2:7700",
        .waits = "node 0, for it to ask for the step",
        .why = "has not been heard for 1.5 s",
    });
}

static struct diagnostic *e1501_forming(const struct fixture *f)
{
    (void)f;
    return cause_node_silent(&(struct evidence_node){
        .at = at(NULL, NULL, -1, -1, -1),
        .node = 2,
        .first_rank = 2,
        .n_ranks = 1,
        .address = "[fd00::2]:7700",
        .waits = "nobody at this moment",
        .why = "the connection was lost: connection reset by peer",
    });
}

static struct diagnostic *e1501_differ(const struct fixture *f)
{
    (void)f;
    return cause_nodes_differ(&(struct evidence_node){
        .at = at(NULL, NULL, -1, -1, -1),
        .node = 1,
        .address = "10.0.0.2:7700",
        .why = "optimizer.params.lr is 0.1 there and 0.2 here",
    });
}

static struct diagnostic *e1501_node_0(const struct fixture *f)
{
    return cause_node_silent(&(struct evidence_node){
        .at = at(f->net, NULL, -1, 7, -1),
        .node = 0,
        .first_rank = 0,
        .n_ranks = 4,
        .address = "10.0.0.1:7700",
        .waits = "this node, for all that node 0 decides",
        .why = "nobody answers at 10.0.0.1:7700 (connection refused)",
    });
}

static struct diagnostic *engine_failed(const struct fixture *f, const char *why)
{
    return cause_engine(&(struct evidence_node){.at = at(f->net, NULL, -1, 7, -1), .generation = 3, .why = why});
}

static struct diagnostic *e1502(const struct fixture *f)
{
    return engine_failed(f, "the engine of node 1 (10.0.0.2:7700) was killed by signal 9 (Killed)");
}

static struct diagnostic *e1502_said(const struct fixture *f)
{
    return engine_failed(f, "the engine of node 0 (10.0.0.1:7700) says: waited 2000 ms for node 1 to send 4096 bytes "
                            "(move 1 of 2)");
}

static struct diagnostic *e1502_not_started(const struct fixture *f)
{
    return engine_failed(f, "node 1 (10.0.0.2:7700) has no engine: the engine cannot be set up: Too many open files");
}

static struct diagnostic *e1502_full(const struct fixture *f)
{
    return cause_device_unformed(&(struct evidence_device_unformed){
        .at = {.rank = -1, .step = -1, .micro_batch = -1},
        .why = "GPU 0 is full: 3.25 GiB of 79.6 GiB are free, and 7.45 GiB more are needed (cuMemCreate)",
        .gpu_bytes = UINT64_C(30) << 30,
        .offloaded_gpu_bytes = UINT64_C(8) << 30,
        .offloaded_host_bytes = UINT64_C(98) << 30,
    });
}

static struct diagnostic *e1503(const struct fixture *f)
{
    return cause_node_reborn(&(struct evidence_node){
        .at = at(f->net, NULL, -1, 7, -1),
        .why = "the daemon of node 1 (10.0.0.2:7700) was started anew, and what the one before it held of the run is "
               "gone",
    });
}

static const struct scenario scenarios[] = {
    {"e1101-dtype", e1101_dtype, "", false},
    {"e1101-order", e1101_order, "", false},
    {"e1101-many", e1101_many, "", false},
    {"e1101-shape", e1101_shape, "", false},
    {"e1101-chaos", e1101_chaos, "", false},
    {"e1101-length", e1101_length, "", false},
    {"e1101-trainable", e1101_trainable, "", false},
    {"e1101-group", e1101_group, "", false},
    {"e1101-declare", e1101_declare, "", false},
    {"e1102-sparse", e1102_sparse, "", false},
    {"e1102-sparse-c", e1102_sparse_c, "", false},
    {"e1103-no-group", e1103_no_group, "", false},
    {"e1103-not-trainable", e1103_not_trainable, "", false},
    {"e1104", e1104, "", false},
    {"e1105", e1105, "", false},
    {"e1106", e1106, "", false},
    {"e1106-c", e1106_c, "", false},
    {"e1107", e1107, "", false},
    {"e1107-later", e1107_later, "", false},
    {"e1108", e1108, "", false},
    {"e1108-not-given", e1108_not_given, "", false},
    {"e1304", e1304, "", false},
    {"e1305", e1305, "", false},
    {"e1305-saved", e1305_saved, "", false},
    {"e1305-not-saved", e1305_not_saved, "", false},
    {"e1305-not-kept", e1305_not_kept, "", false},
    {"e1305-forming", e1305_forming, "", false},
    {"e1701", e1701, "", true},
    {"e1702", e1702, "", false},
    {"e1702-folder", e1702_folder, "", false},
    {"e1111", e1111, "X2", true},
    {"e1109", e1109, "", false},
    {"e1109-nodes", e1109_nodes, "", false},
    {"e1110", e1110, "", false},
    {"e1201-skipped", e1201_skipped, "", true},
    {"e1201-held", e1201_held, "", false},
    {"e1201-c", e1201_c, "", true},
    {"e1201-overflowed", e1201_overflowed, "", true},
    {"e1202", e1202, "", false},
    {"e1203", e1203, "", true},
    {"e1203-c", e1203_c, "", true},
    {"e1202-skipped", e1202_skipped, "", true},
    {"e1301", e1301, "", false},
    {"e1301-torch", e1301_torch, "", false},
    {"e1301-itself", e1301_itself, "", false},
    {"e1301-itself-c", e1301_itself_c, "", false},
    {"e1302-waiting", e1302_waiting, "", true},
    {"e1302-aborted", e1302_aborted, "", false},
    {"e1302-differs", e1302_differs, "", false},
    {"e1302-differs-on-gpu", e1302_differs_on_gpu, "", false},
    {"e1302-crossed", e1302_crossed, "", false},
    {"e1302-left", e1302_left, "", false},
    {"e1302-waiting-torch", e1302_waiting_torch, "", true},
    {"e1302-differs-torch", e1302_differs_torch, "", false},
    {"e1302-left-torch", e1302_left_torch, "", false},
    {"e1302-back", e1302_back, "", false},
    {"e1302-inherited", e1302_inherited, "", false},
    {"e1302-inherited-part", e1302_inherited_part, "", false},
    {"e1302-inherited-arguments", e1302_inherited_arguments, "", false},
    {"e1302-step-aborted", e1302_step_aborted, "D2", false},
    {"e1302-asked-for", e1302_asked_for, "", true},
    {"e1302-by-administrator", e1302_by_administrator, "", false},
    {"e1303", e1303, "", true},
    {"e1303-where", e1303_where, "M7", true},
    {"e1303-m7-aborted", e1303_m7_aborted, "M7", false},
    {"e1303-deadlocked", e1303_deadlocked, "", true},
    {"e1303-window", e1303_window, "", true},
    {"e1303-forming", e1303_forming, "", false},
    {"e1303-other-node", e1303_other_node, "", true},
    {"e1303-other-node-decided", e1303_other_node_decided, "", false},
    {"e1303-other-node-forming", e1303_other_node_forming, "", true},
    {"e1303-cut-off", e1303_cut_off, "", false},
    {"e1401-memory", e1401_memory, "", false},
    {"e1401-live", e1401_live, "", false},
    {"e1401-machine", e1401_machine, "", false},
    {"e1401-address-space", e1401_address_space, "", false},
    {"e1401-descriptors", e1401_descriptors, "", false},
    {"e1401-answer", e1401_answer, "", false},
    {"e1402-connect", e1402_connect, "", false},
    {"e1402-owner", e1402_owner, "", false},
    {"e1402-admin", e1402_admin, "", false},
    {"e1402-draining", e1402_draining, "", false},
    {"e1403", e1403, "", false},
    {"e1501", e1501, "", true},
    {"e1501-forming", e1501_forming, "", true},
    {"e1501-node-0", e1501_node_0, "", true},
    {"e1501-differ", e1501_differ, "", false},
    {"e1502", e1502, "", true},
    {"e1502-said", e1502_said, "", true},
    {"e1502-not-started", e1502_not_started, "", true},
    {"e1502-full", e1502_full, "", false},
    {"e1503", e1503, "", false},
};

struct scenario_list scenarios_others(void)
{
    return (struct scenario_list){.items = scenarios, .n = ARRAY_SIZE(scenarios)};
}
