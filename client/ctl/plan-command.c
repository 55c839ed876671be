/* SPDX-License-Identifier: Apache-2.0 */

/* The command `zerodctl plan`: computes from the layout the memory that a model will need. */

#include "client/ctl/plan-command.h"

#include <ctype.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sysexits.h>

#include "client/ctl/table.h"
#include "core/base/base.h"
#include "core/base/json.h"
#include "core/budget/budget.h"
#include "core/budget/muon-cost.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/layout/layout.h"
#include "kernels/muon.h"
#include "proto/credit.h"

#define MAX_PARAMS 1e15 /* picked: a thousand times the largest model of the paper */

enum {
    MAX_KINDS = 64,         /* picked: matrices of different shapes */
    MAX_MATRICES = 1 << 16, /* picked */
    MAX_CHUNKS = 1 << 19,   /* picked: of the layouts made for planning, which then take half a second */
};

static const char *const dtype_words[N_DTYPES] = {"fp32", "bf16", "fp16"};

/* Matrices of equal shape. */
struct plan_matrices {
    uint64_t shape[2];
    uint64_t n;
};

struct plan_request {
    const char *config_path;
    uint64_t n_params;
    unsigned n_ranks; /* 0: from the configuration */
    unsigned stage;   /* 0: from the configuration */
    enum dtype dtype, grad_dtype;
    bool has_grad_dtype;
    bool offload;                             /* models are on GPUs, the job in host memory */
    struct plan_matrices matrices[MAX_KINDS]; /* the matrices that Muon updates */
    size_t n_kinds;
    uint64_t n_matrices, matrix_elems; /* sums over all kinds */
};

struct plan {
    struct plan_request request; /* complete */
    const struct config *config;
    unsigned first_local_rank, n_local_ranks;
    uint64_t bucket_elems;
    uint64_t n_buckets;
    struct plan_bytes bytes;
    struct muon_cost muon;
    double flops_per_second; /* of one thread; 0: unknown */
    char why[256];           /* why flops_per_second is unknown */
};

/* ---- arguments ----------------------------------------------------------------------------------------- */

/* Parses "7.5e9", or "7.5B" as in the names of models. */
static int parse_params(const char *text, uint64_t *n_params)
{
    static const char suffixes[] = "KMBT"; /* thousands, millions, ... */
    char *end;
    double value = strtod(text, &end);
    const char *suffix = *end ? strchr(suffixes, toupper((unsigned char)*end)) : NULL;

    if (suffix && end > text) {
        value = nearbyint(value * pow(1000, (double)(suffix - suffixes + 1))); /* 1.1 * 1e9 is not exactly whole */
        end++;
    }
    if (end == text || *end || !(value >= 1 && value <= MAX_PARAMS) || value != floor(value)) {
        fprintf(stderr, "zerodctl: plan --params: '%s' is not a whole number from 1 to 1e15 (7.5e9 and 7.5B are one)\n",
                text);
        return -EX_USAGE;
    }
    *n_params = value;
    return 0;
}

static int parse_unsigned(const char *name, const char *text, unsigned max, unsigned *value)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (text[0] < '0' || text[0] > '9' || *end || n < 1 || n > max) {
        fprintf(stderr, "zerodctl: plan %s: '%s' is not a whole number from 1 to %u\n", name, text, max);
        return -EX_USAGE;
    }
    *value = n;
    return 0;
}

static int parse_dtype(const char *name, const char *text, enum dtype *dtype)
{
    size_t i;

    for (i = 0; i < N_DTYPES; i++) {
        if (strcmp(text, dtype_words[i]) == 0) {
            *dtype = i;
            return 0;
        }
    }
    fprintf(stderr, "zerodctl: plan %s: '%s' is none of fp32, bf16, fp16\n", name, text);
    return -EX_USAGE;
}

/* Parses "768x2304x12,768x768": rows, columns, and a number of matrices, which may be left out. */
static int parse_matrices(const char *text, struct plan_request *request)
{
    for (const char *at = text; *at;) {
        struct plan_matrices kind = {.n = 1};
        int n = 0, end = 0;

        if (sscanf(at, "%10" SCNu64 "x%10" SCNu64 "%n", &kind.shape[0], &kind.shape[1], &n) == 2 && at[n] == 'x')
            n = sscanf(at + n, "x%10" SCNu64 "%n", &kind.n, &end) == 1 ? n + end : 0;
        if (n == 0 || (at[n] != '\0' && (at[n] != ',' || at[n + 1] == '\0')) || kind.shape[0] < 1 ||
            kind.shape[1] < 1 || MAX(kind.shape[0], kind.shape[1]) > MUON_MAX_SIDE || kind.n < 1 ||
            kind.n > MAX_MATRICES - request->n_matrices || request->n_kinds == MAX_KINDS ||
            kind.shape[0] * kind.shape[1] > (uint64_t)MAX_PARAMS / kind.n) {
            fprintf(
                stderr,
                "zerodctl: plan --matrices: '%s' is not a list such as 768x2304x12,768x768 (rows x columns, and how "
                "many of them; at most %d shapes and %d matrices)\n",
                text, MAX_KINDS, MAX_MATRICES);
            return -EX_USAGE;
        }
        request->matrices[request->n_kinds++] = kind;
        request->n_matrices += kind.n;
        request->matrix_elems += kind.n * kind.shape[0] * kind.shape[1];
        at += n + (at[n] == ',');
    }
    return 0;
}

static int parse_option(struct plan_request *request, int option)
{
    switch (option) {
    case 'c':
        request->config_path = optarg;
        return 0;
    case 'p':
        return parse_params(optarg, &request->n_params);
    case 'r':
        return parse_unsigned("--ranks", optarg, CONFIG_MAX_RANKS, &request->n_ranks);
    case 's':
        return parse_unsigned("--stage", optarg, 3, &request->stage);
    case 'd':
        return parse_dtype("--dtype", optarg, &request->dtype);
    case 'g':
        request->has_grad_dtype = true;
        return parse_dtype("--grad-dtype", optarg, &request->grad_dtype);
    case 'm':
        return parse_matrices(optarg, request);
    case 'o':
        request->offload = true;
        return 0;
    default:
        return -EX_USAGE;
    }
}

static int parse_plan_options(struct plan_request *request, int argc, char **argv, bool *json)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'}, {"params", required_argument, NULL, 'p'},
        {"ranks", required_argument, NULL, 'r'},  {"stage", required_argument, NULL, 's'},
        {"dtype", required_argument, NULL, 'd'},  {"grad-dtype", required_argument, NULL, 'g'},
        {"json", no_argument, NULL, 'j'},         {"matrices", required_argument, NULL, 'm'},
        {"offload", no_argument, NULL, 'o'},      {},
    };
    int option, r;

    *request = (struct plan_request){.dtype = DTYPE_F32};
    optind = 0; /* glibc: restart the parsing */
    while ((option = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (option == 'j') {
            *json = true;
            continue;
        }
        r = parse_option(request, option);
        if (r < 0)
            return r;
    }
    if (!request->has_grad_dtype)
        request->grad_dtype = request->dtype;
    if (optind < argc || request->n_params == 0 || (!request->config_path && request->n_ranks == 0)) {
        fputs("zerodctl: plan needs --params N, and --ranks N or --config FILE\n", stderr);
        return -EX_USAGE;
    }
    if (request->matrix_elems > request->n_params) {
        fprintf(stderr, "zerodctl: plan: --matrices have %" PRIu64 " elements, more than the %" PRIu64 " of --params\n",
                request->matrix_elems, request->n_params);
        return -EX_USAGE;
    }
    return 0;
}

/* ---- the sums ------------------------------------------------------------------------------------------ */

/* The classes of memory, in the order of `zerodctl status`. */
static const struct {
    const char *word;
    size_t offset;
    bool on_device; /* with device: cuda */
} classes[] = {
    {"state", offsetof(struct plan_bytes, state), true}, {"gradient", offsetof(struct plan_bytes, gradient), true},
    {"ring", offsetof(struct plan_bytes, ring), true},   {"overflow", offsetof(struct plan_bytes, overflow)},
    {"staging", offsetof(struct plan_bytes, staging)},   {"weights", offsetof(struct plan_bytes, weights), true},
    {"pool", offsetof(struct plan_bytes, pool), true},   {"fixed", offsetof(struct plan_bytes, fixed)},
};

static int load_config(const struct plan_request *request, struct config **config)
{
    static const char defaults[] = "job: plan\nlisten: {socket: /run/zerod/plan.sock}\nworld: {size: 1}\n";
    struct config_source source = {
        .text = {.name = "defaults", .text = defaults, .n_bytes = sizeof(defaults) - 1},
    };
    /* A plan needs no socket, so any path will do. --ranks has precedence over the configuration. */
    const struct config_given given = {.socket = "/run/zerod/plan.sock", .ranks = request->n_ranks};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    int r;

    if (request->config_path)
        r = config_load(config, request->config_path, &given, &problems);
    else
        r = config_load_string(config, &source, &problems);
    if (r != 0)
        config_problems_print(stderr, &problems);
    config_problems_deinit(&problems);
    return r == 0 ? 0 : r < 0 ? -EX_OSERR : -EX_CONFIG;
}

/* Elements of the parameters that Muon does not update. */
static uint64_t other_elems(const struct plan *plan)
{
    return plan->request.n_params - plan->request.matrix_elems;
}

static void declare_matrices(const struct plan_request *request, struct layout_decl *decls)
{
    for (size_t kind = 0; kind < request->n_kinds; kind++)
        for (uint64_t i = 0; i < request->matrices[kind].n; i++, decls++) {
            decls->muon = true;
            decls->n_dims = 2;
            decls->shape = request->matrices[kind].shape;
        }
}

/*
 * Makes the layout for the plan: the given matrices, full buckets of one parameter each, and one parameter with the
 * remaining elements. A real model with many small parameters needs about as much.
 */
static int make_layout(const struct plan *plan, uint64_t n_full, struct layout **layout)
{
    uint64_t rest_elems = other_elems(plan) % plan->bucket_elems, n_matrices = plan->request.n_matrices;
    uint64_t n = n_matrices + n_full + (rest_elems > 0), i;
    _cleanup_free_ struct layout_decl *decls = calloc(n, sizeof(*decls));
    _cleanup_free_ char(*names)[24] = calloc(n, sizeof(*names));
    uint32_t bad;

    if (!decls || !names)
        return -EX_OSERR;
    for (i = 0; i < n; i++) {
        snprintf(names[i], sizeof(names[i]), "p%" PRIu64, i);
        decls[i] = (struct layout_decl){
            .name = names[i],
            .name_len = strlen(names[i]),
            .dtype = plan->request.dtype,
            .grad_dtype = plan->request.grad_dtype,
            .trainable = true,
            .n_dims = 1,
            .shape = i < n_matrices + n_full ? &plan->bucket_elems : &rest_elems,
        };
    }
    declare_matrices(&plan->request, decls);
    return layout_new(layout, decls, n, plan->request.n_ranks, plan->bucket_elems, &bad) == 0 ? 0 : -EX_OSERR;
}

static int plan_layout(const struct plan *plan, uint64_t n_full, struct plan_bytes *bytes, struct muon_cost *muon)
{
    struct layout *layout = NULL;
    struct plan_options options;
    int r = make_layout(plan, n_full, &layout);

    if (r < 0)
        return r;
    /* n_buckets is the model's number, and may be larger than the layout's: see plan_sum(). */
    options = budget_options(
        plan->config, layout,
        (struct budget_ranks){.first_local = plan->first_local_rank, .n_local = plan->n_local_ranks}, plan->n_buckets);
    options.stage = plan->n_local_ranks < plan->request.n_ranks ? plan->request.stage
                                                                : config_stage_of(plan->config, plan->request.stage);
    plan_bytes_by_class(layout, &options, bytes);
    muon_cost_count(layout, plan->first_local_rank, plan->n_local_ranks, plan->config->optimizer.hyper.ns_steps, muon);
    layout_free(layout);
    return 0;
}

static bool is_on_device(const struct plan *plan, size_t i)
{
    bool is_state = classes[i].offset == offsetof(struct plan_bytes, state);

    return plan->bytes.device > 0 && classes[i].on_device && !(is_state && plan->bytes.offloaded);
}

static uint64_t *class_of(struct plan_bytes *bytes, size_t i)
{
    return (uint64_t *)((char *)bytes + classes[i].offset);
}

/* Continues the line through a at n_a and b at n_b to n. */
static uint64_t extrapolate(uint64_t a, uint64_t n_a, uint64_t b, uint64_t n_b, uint64_t n)
{
    unsigned __int128 more = (unsigned __int128)(b - a) * (n - n_b) / (n_b - n_a);

    return more > UINT64_MAX - b ? UINT64_MAX : b + (uint64_t)more;
}

/*
 * Computes the plan's bytes. A layout for 1e12 parameters on 1,024 ranks would be too large for this machine. Because
 * all full buckets are equal, the bytes of a large model are extrapolated from those of two smaller ones. Only the pool
 * has an upper limit.
 */
static int plan_sum(struct plan *plan, uint64_t n_full)
{
    uint64_t chunks_per_bucket = plan->bucket_elems / CHUNK_ELEMS + plan->request.n_ranks;
    uint64_t n_b = MAX(MAX_CHUNKS / chunks_per_bucket, (uint64_t)32), n_a = n_b / 2, i;
    uint64_t max_pool = plan->config->zero.stage3_max_live_parameters * sizeof(float) * plan->n_local_ranks;
    uint64_t on_device = 0;
    struct plan_bytes a;
    int r = plan_layout(plan, MIN(n_full, n_b), &plan->bytes, &plan->muon);

    if (r < 0 || n_full <= n_b)
        return r;
    r = plan_layout(plan, n_a, &a, &plan->muon);
    if (r < 0)
        return r;
    plan->bytes.needed = plan->bytes.total = 0;
    for (i = 0; i < ARRAY_SIZE(classes); i++) {
        uint64_t *n_bytes = class_of(&plan->bytes, i);

        *n_bytes = extrapolate(*class_of(&a, i), n_a, *n_bytes, n_b, n_full);
        if (n_bytes == &plan->bytes.pool && !is_on_device(plan, i))
            *n_bytes = MIN(*n_bytes, round_up(max_pool, sysconf(_SC_PAGESIZE)));
        if (is_on_device(plan, i))
            on_device += *n_bytes;
        else
            plan->bytes.total += *n_bytes;
    }
    plan->bytes.device = on_device;
    plan->bytes.needed = plan->bytes.total - plan->bytes.overflow;
    return 0;
}

static int plan_compute(struct plan *plan)
{
    const struct config *config = plan->config;
    struct plan_request *request = &plan->request;
    int r;

    if (request->stage == 0)
        request->stage = config->zero.stage;
    if (request->n_ranks == 0 || request->n_ranks == config->world.size) {
        request->n_ranks = config->world.size;
        plan->first_local_rank = config_first_rank(config);
        plan->n_local_ranks = config_local_ranks(config);
    } else {
        plan->n_local_ranks = MIN(request->n_ranks, (unsigned)CONFIG_MAX_LOCAL_RANKS);
    }
    plan->bucket_elems = config->zero.reduce_bucket_size;
    plan->n_buckets = div_round_up(request->n_params, plan->bucket_elems);
    r = plan_sum(plan, other_elems(plan) / plan->bucket_elems);
    if (r < 0)
        fprintf(stderr, "zerodctl: plan: out of memory\n");
    return r;
}

/*
 * Chooses the large buckets and rings of a job whose models are on GPUs, and the spare places of its speculative
 * update. The daemon makes them smaller, or does without, if memory is short.
 */
static int choose_gpu_room(const struct plan_request *request, struct config *config)
{
    bool can = config_can_speculate(config);

    if (can && config->zero.speculative_update == CONFIG_SPECULATE)
        config->zero.spare_buckets = UINT32_MAX; /* all */
    if (config_offloads(config) && config->zero.speculative_update == CONFIG_SPECULATE)
        config->zero.early_buckets = UINT32_MAX;
    if (!request->offload)
        return 0;
    if (config->device != CONFIG_DEVICE_CPU) {
        fprintf(stderr, "zerodctl: plan --offload is for models on GPUs whose job is in host memory (device: cpu)\n");
        return -EX_USAGE;
    }
    config_choose_gpu_room(config, CONFIG_GPU_ROOM_MICRO_BATCH);
    if (can && config->zero.speculative_update == CONFIG_SPECULATE_AUTO)
        config->zero.spare_buckets = UINT32_MAX;
    return 0;
}

static int check_matrices(const struct plan *plan)
{
    if (plan->request.n_matrices == 0 || plan->config->optimizer.type == OPTIMIZER_MUON)
        return 0;
    fprintf(stderr, "zerodctl: plan --matrices is for optimizer: {type: Muon} in the file of --config\n");
    return -EX_USAGE;
}

static void measure_muon(struct plan *plan)
{
    const struct gemm *gemm;

    if (!config_needs_openblas(plan->config, OPTIMIZER_MUON)) {
        snprintf(plan->why, sizeof(plan->why), "GPUs compute it, and were not measured");
        return;
    }
    gemm_one_thread();
    if (gemm_load(&gemm, plan->why, sizeof(plan->why)) == 0)
        plan->flops_per_second = muon_cost_measure(gemm);
}

/* ---- the answer ---------------------------------------------------------------------------------------- */

static struct json_object *muon_object(struct json *j, const struct plan *plan)
{
    unsigned n_threads = config_n_threads(plan->config);
    struct json_object *o = json_new_object(j);

    json_put_u64(j, o, "n_matrices", plan->muon.n_matrices);
    json_put_u64(j, o, "n_elems", plan->muon.n_elems);
    json_put_double(j, o, "flop", plan->muon.flops);
    json_put_u64(j, o, "threads", n_threads);
    if (plan->flops_per_second > 0) {
        json_put_double(j, o, "flops_per_second", plan->flops_per_second);
        json_put_double(j, o, "seconds", muon_cost_seconds(&plan->muon, plan->flops_per_second, n_threads));
    }
    return o;
}

static int print_json(struct plan *plan)
{
    static const char *const stages[] = {"0", "1", "2", "3"};
    const struct plan_request *request = &plan->request;
    struct json j = {};
    struct json_object *o = json_new_object(&j), *by_stage = json_new_object(&j), *by_class = json_new_object(&j);
    _cleanup_free_ char *text = NULL;
    size_t i;

    json_put_u64(&j, o, "schema_version", 1);
    json_put_u64(&j, o, "params", request->n_params);
    json_put_u64(&j, o, "ranks", request->n_ranks);
    json_put_u64(&j, o, "ranks_on_node", plan->n_local_ranks);
    json_put_u64(&j, o, "stage", request->stage);
    json_put_string(&j, o, "dtype", dtype_words[request->dtype]);
    json_put_string(&j, o, "grad_dtype", dtype_words[request->grad_dtype]);
    json_put_bool(&j, o, "offload", request->offload);
    json_put_u64(&j, o, "bucket_elems", plan->bucket_elems);
    json_put_u64(&j, o, "n_buckets", plan->n_buckets);
    json_put_double(&j, o, "model_states_gb", plan_model_states(request->n_params, request->n_ranks, request->stage));
    for (i = 0; i < ARRAY_SIZE(stages); i++)
        json_put_double(&j, by_stage, stages[i], plan_model_states(request->n_params, request->n_ranks, i));
    json_put(&j, o, "model_states_gb_by_stage", by_stage);
    for (i = 0; i < ARRAY_SIZE(classes); i++)
        json_put_u64(&j, by_class, classes[i].word, *class_of(&plan->bytes, i));
    json_put(&j, o, "bytes_by_class", by_class);
    json_put_u64(&j, o, "needed_bytes", plan->bytes.needed);
    json_put_u64(&j, o, "total_bytes", plan->bytes.total);
    json_put_u64(&j, o, "device_bytes", plan->bytes.device);
    if (request->n_matrices > 0)
        json_put(&j, o, "muon", muon_object(&j, plan));
    text = json_text(&j, o);
    if (!text)
        return -EX_OSERR;
    puts(text);
    return 0;
}

static void print_muon(const struct plan *plan)
{
    unsigned n_threads = config_n_threads(plan->config);

    printf("\nmuon: %.4g Gflop for each step, for %" PRIu64 " matrices of %.4g million elements\n",
           plan->muon.flops / 1e9, plan->muon.n_matrices, (double)plan->muon.n_elems / 1e6);
    if (plan->flops_per_second > 0)
        printf("about %.2g s on %u threads of %.3g Gflop/s each, as just measured on this machine\n",
               muon_cost_seconds(&plan->muon, plan->flops_per_second, n_threads), n_threads,
               plan->flops_per_second / 1e9);
    else
        printf("how long that takes is not known: %s\n", plan->why);
}

static void print_text(struct plan *plan)
{
    static const char *const what[] = {"nothing partitioned", "optimizer state", "and gradients", "and weights"};
    const struct plan_request *request = &plan->request;
    char text[PRINT_SIZE];
    unsigned i;

    printf("model_states_gb: %s parameters on %u ranks, GB of 1e9 bytes on each, by the ZeRO paper's formulas\n",
           print_count(text, request->n_params), request->n_ranks);
    for (i = 0; i <= 3; i++)
        printf("%s stage %u  %10.6g   %s\n", i == request->stage ? "*" : " ", i,
               plan_model_states(request->n_params, request->n_ranks, i), what[i]);
    printf("\nbytes_by_class: what zerod holds for the %u ranks of a node, stage %u, weights %s, gradients "
           "%s%s,\n",
           plan->n_local_ranks, request->stage, dtype_words[request->dtype], dtype_words[request->grad_dtype],
           request->offload ? " copied from GPUs" : "");
    printf("in %" PRIu64 " buckets of at most %" PRIu64 " elements\n", plan->n_buckets, plan->bucket_elems);
    for (i = 0; i < ARRAY_SIZE(classes); i++)
        printf("  %-10s %16" PRIu64 "   %s%s\n", classes[i].word, *class_of(&plan->bytes, i),
               print_bytes(text, *class_of(&plan->bytes, i)), is_on_device(plan, i) ? ", on the GPUs" : "");
    printf("  %-10s %16" PRIu64 "   %s, what forming the job takes\n", "needed", plan->bytes.needed,
           print_bytes(text, plan->bytes.needed));
    printf("  %-10s %16" PRIu64 "   %s, if all of overflow is ever used\n", "total", plan->bytes.total,
           print_bytes(text, plan->bytes.total));
    if (plan->bytes.device > 0)
        printf("  %-10s %16" PRIu64 "   %s, of all GPUs of the node together; the sums above are of host memory\n",
               "GPUs", plan->bytes.device, print_bytes(text, plan->bytes.device));
    if (request->n_matrices > 0)
        print_muon(plan);
}

int plan_command(int argc, char **argv, bool json)
{
    struct plan plan = {};
    struct config *config = NULL;
    int r = parse_plan_options(&plan.request, argc, argv, &json);

    if (r < 0)
        return r;
    r = load_config(&plan.request, &config);
    if (r < 0)
        return r;
    plan.config = config;
    r = choose_gpu_room(&plan.request, config);
    if (r == 0)
        r = check_matrices(&plan);
    if (r == 0)
        r = plan_compute(&plan);
    if (r == 0 && plan.request.n_matrices > 0)
        measure_muon(&plan);
    if (r == 0 && json)
        r = print_json(&plan);
    else if (r == 0)
        print_text(&plan);
    config_free(config);
    return r;
}
