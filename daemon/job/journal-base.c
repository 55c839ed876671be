/* SPDX-License-Identifier: Apache-2.0 */

/* The base of the journal is written when the job has been formed. Each daemon that adopts the job reads it. */

#include "daemon/job/journal-base.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/config/config.h"
#include "core/layout/manifest.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire-request.h"
#include "daemon/job/attendance.h"
#include "daemon/job/model/coordinator.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/memory/journal.h"

/* ---- configuration ------------------------------------------------------------------------------------- */

/* Writes a line for each setting: its name in the configuration, and its value. */
static void describe_config(const struct job *job, struct strbuf *out)
{
    const struct config *config = job->config;

    strbuf_add(out, "optimizer.type %s\n", config_optimizer_name(&config->optimizer));
    strbuf_add(out, "optimizer.params.momentum %a\n",
               config->optimizer.type == OPTIMIZER_SGD ? config->optimizer.hyper.momentum : 0);
    strbuf_add(out, "world.nodes %zu\n", MAX(job->config->world.nodes.n_items, (size_t)1));
    if (!job->coordinator->alone) { /* else the number of ranks may change (resize.h) and is in the head */
        strbuf_add(out, "world.size %u\n", job->world.size);
        strbuf_add(out, "world.node %u\n", job->config->world.node);
        strbuf_add(out, "world.ranks_per_node %u\n", job_n_local(job));
    }
    strbuf_add(out, "zero_optimization.stage %u\n", config_stage(config));
    strbuf_add(out, "zero_optimization.reduce_bucket_size %" PRIu64 "\n", (uint64_t)config->zero.reduce_bucket_size);
    strbuf_add(out, "zero_optimization.overlap_comm %d\n", config->zero.overlap_comm);
    strbuf_add(out, "gradient_accumulation_steps %" PRIu64 "\n", (uint64_t)config->gradient_accumulation_steps);
    strbuf_add(out, "gradient_allreduce_op %d\n", (int)config->gradient_allreduce_op);
    strbuf_add(out, "fp16.enabled %d\n", config->fp16.enabled);
    strbuf_add(out, "diagnostics.static_graph %d\n", config->diagnostics.static_graph);
    strbuf_add(out, "bf16.bf16_optimizer_states %d\n", config->bf16.optimizer_states);
    strbuf_add(out, "bf16.stochastic_rounding %d\n", config->bf16.stochastic_rounding);
    strbuf_add(out, "optimizer.params.optim_bits %u\n", config->optimizer.optim_bits);
    strbuf_add(out, "optimizer.params.master_weight_bits %u\n", config->optimizer.master_weight_bits);
    if (config->zero.gpu_room != CONFIG_GPU_ROOM_NONE) /* else an earlier version may adopt the run */
        strbuf_add(out, "room for gradients of GPUs %d\n", (int)config->zero.gpu_room);
    if (config->zero.spare_buckets > 0)
        strbuf_add(out, "speculative update, buckets %" PRIu32 "\n", config->zero.spare_buckets);
    if (config->zero.early_buckets > 0)
        strbuf_add(out, "copies before the decision, buckets %" PRIu32 "\n", config->zero.early_buckets);
}

/*
 * Reads the run's settings. An earlier version kept state only in fp32, and did not write all lines about the precision
 * of state. The missing lines are added with the values for fp32.
 */
static void read_description(const struct journal_record *record, struct strbuf *out)
{
    static const char *const fp32[] = {
        "bf16.bf16_optimizer_states 0\n",
        "bf16.stochastic_rounding 0\n",
        "optimizer.params.optim_bits 32\n",
        "optimizer.params.master_weight_bits 32\n",
    };

    strbuf_add(out, "%.*s", (int)record->n_bytes, (const char *)record->data);
    for (size_t i = 0; i < ARRAY_SIZE(fp32); i++) {
        if (out->data && !memmem(out->data, out->n_bytes, fp32[i], strcspn(fp32[i], " ") + 1))
            strbuf_add(out, "%s", fp32[i]);
    }
}

/* Writes the first pair of lines that differ in a and b to `why`. Return: false if a and b are equal. */
static bool find_difference(const char *a, const char *b, char *why, size_t why_size)
{
    while (*a || *b) {
        int n_a = (int)strcspn(a, "\n"), n_b = (int)strcspn(b, "\n");

        if (n_a != n_b || strncmp(a, b, (size_t)n_a) != 0) {
            snprintf(why, why_size, "the run has \"%.*s\", the configuration of this daemon says \"%.*s\"", n_a, a, n_b,
                     b);
            return true;
        }
        a += n_a + (a[n_a] != '\0');
        b += n_b + (b[n_b] != '\0');
    }
    return false;
}

/* Restores the optimizer, which a program has chosen if the configuration names none. */
static void choose_again(struct job *job, const char *text)
{
    char name[32] = "";
    double momentum = 0;

    if (sscanf(text, "optimizer.type %31s\noptimizer.params.momentum %la", name, &momentum) != 2)
        return;
    attendance_choose(job, name, momentum);
}

/* Restores the bucket size of the run, if the configuration sets none. Another version may have chosen another size. */
static void choose_bucket_again(struct job *job, const char *text)
{
    static const char name[] = "zero_optimization.reduce_bucket_size ";
    const char *line = strstr(text, name);
    uint64_t n_elems = 0;

    if (line && config_chooses_bucket(job->config) && sscanf(line + strlen(name), "%" SCNu64, &n_elems) == 1 &&
        n_elems > 0)
        job->run.chosen.zero.reduce_bucket_size = n_elems;
}

/* Restores the run's room for gradients of GPUs, so that the rings keep their size. */
static void choose_gpu_room_again(struct job *job, const char *text)
{
    static const char name[] = "\nroom for gradients of GPUs ";
    const char *line = strstr(text, name);

    unsigned long room = line ? strtoul(line + strlen(name), NULL, 10) : CONFIG_GPU_ROOM_NONE;

    if (line && room <= CONFIG_GPU_ROOM_MICRO_BATCH) /* else find_difference() reports the line */
        job->run.chosen.zero.gpu_room = (enum config_gpu_room)room;
}

/* Return: the number behind the name in the text; 0 if the name is not there. */
static uint32_t find_number(const char *text, const char *name)
{
    const char *line = strstr(text, name);

    return line ? (uint32_t)strtoul(line + strlen(name), NULL, 10) : 0;
}

/*
 * A run with spare places keeps them, because values of its state may be in them. It keeps the places for copies of
 * sums, too, because their memory is kept.
 */
static void choose_speculation_again(struct job *job, const char *text)
{
    job->run.chosen.zero.spare_buckets = find_number(text, "\nspeculative update, buckets ");
    job->run.chosen.zero.early_buckets = find_number(text, "\ncopies before the decision, buckets ");
}

/* An earlier version gathered weights in stage 3 on one node, too. A run of that version continues to gather. */
static void choose_stage3_again(struct job *job, const char *text)
{
    struct config_zero *zero = &job->run.chosen.zero;

    if (zero->stage == 3 && strstr(text, "\nzero_optimization.stage 3\n") &&
        !config_gives(job->config, "zero_optimization.stage3_on_one_node"))
        zero->stage3_on_one_node = CONFIG_STAGE3_GATHERED;
}

static int compare_config(struct job *job, const struct journal_record *record, char *why, size_t why_size)
{
    struct strbuf theirs = {0}, ours = {0};
    int r = -ENOMEM;

    read_description(record, &theirs);
    if (theirs.data) {
        choose_again(job, theirs.data);
        choose_bucket_again(job, theirs.data);
        choose_gpu_room_again(job, theirs.data);
        choose_stage3_again(job, theirs.data);
        choose_speculation_again(job, theirs.data);
        describe_config(job, &ours);
    }
    if (ours.data)
        r = find_difference(theirs.data, ours.data, why, why_size) ? -EINVAL : 0;
    strbuf_deinit(&theirs);
    strbuf_deinit(&ours);
    return r;
}

/* ---- manifest ------------------------------------------------------------------------------------------ */

/* Writes the declarations from the layout, because a rank's manifest is freed when its process dies. */
static void write_manifest(struct job *job)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    _cleanup_free_ uint8_t *packed = malloc(FRAME_MAX_BYTES);
    int n = packed ? wire_arena_init(&arena) : -ENOMEM;

    for (uint32_t p = 0; n >= 0 && p < job->layout->n_params; p++) {
        struct layout_decl decl = layout_declared(&job->layout->params[p]);

        n = wire_pack_request(&arena,
                              &(struct request){.type = REQUEST_DECLARE, .declare = {.params = &decl, .n_params = 1}},
                              packed, FRAME_MAX_BYTES);
        if (n > 0)
            journal_found(job->run.survival.journal, JOURNAL_DECLARE, packed, (size_t)n);
    }
    if (n < 0)
        journal_give_up(job->run.survival.journal, n);
    wire_arena_deinit(&arena);
}

static int read_param(struct wire_arena *arena, const struct journal_record *record, struct manifest *manifest,
                      char *why, size_t why_size)
{
    struct request request;
    int r = wire_unpack_request(arena, record->data, record->n_bytes, &request, why, why_size);

    if (r < 0)
        return r;
    if (r != 0 || request.type != REQUEST_DECLARE || request.declare.n_params != 1)
        return -EINVAL;
    return manifest_add(manifest, &request.declare.params[0]) == 0 ? 0 : -ENOMEM;
}

/* ---- configuration and manifest ------------------------------------------------------------------------ */

void base_write(struct job *job)
{
    struct strbuf config = {0};

    if (!job->run.survival.journal)
        return;
    describe_config(job, &config);
    if (config.data)
        journal_found(job->run.survival.journal, JOURNAL_CONFIG, config.data, config.n_bytes);
    else
        journal_give_up(job->run.survival.journal, -ENOMEM);
    strbuf_deinit(&config);
    write_manifest(job);
}

int base_read(struct job *job, struct manifest *manifest, char *why, size_t why_size)
{
    struct wire_arena arena = WIRE_ARENA_NULL;
    struct journal_record record;
    uint64_t at = 0;
    int r = wire_arena_init(&arena);

    assert(!job->layout); /* compare_config() changes settings that determine the layout */
    assert(manifest->n == 0);
    snprintf(why, why_size, "its journal is damaged");
    while (r == 0 && journal_read_base(job->run.survival.journal, &at, &record)) {
        if (record.type == JOURNAL_CONFIG)
            r = compare_config(job, &record, why, why_size);
        else
            r = record.type == JOURNAL_DECLARE ? read_param(&arena, &record, manifest, why, why_size) : -EINVAL;
    }
    if (r == 0 && manifest->n == 0)
        r = -EINVAL;
    wire_arena_deinit(&arena);
    return r;
}
