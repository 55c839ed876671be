/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ZEROD_CLIENT_H
#define ZEROD_CLIENT_H

/*
 * libzerod: a trainer's side of zerod.
 *
 * zerod holds the optimizer of a training job outside the trainer processes. A
 * trainer attaches as one rank, declares its parameters, pushes gradients while
 * its backward runs, and asks for the step; weights appear in shared memory.
 *
 *     struct zerod *c = NULL;
 *     zerod_connect(&c, &(struct zerod_options){.rank = 0, .socket = "/run/zerod/job.sock"});
 *     zerod_declare(c, params, n_params);
 *     zerod_form(c);                                    waits for all ranks
 *     while (zerod_epoch(c).step < n_steps) {           a restarted trainer does not count from 0
 *             zerod_begin_backward(c, NULL);
 *             ... compute; for each parameter i, in any order:
 *             zerod_push(c, &(struct zerod_push){.param = i, .data = grad});
 *             zerod_end_backward(c, NULL, 0);
 *             zerod_step(c, NULL, &result);             waits for all ranks
 *             ... zerod_weight(c, i) now shows the new weights
 *     }
 *
 * Results. A call returns 0, a positive documented condition, or a negative fatal error (-errno). The daemon's answer
 * to any call may be ZEROD_REFUSED or ZEROD_ABORTED; zerod_error() then has the code, the text and the structured
 * diagnostic. A call that is "one way" waits for no answer.
 *  - ZEROD_REFUSED: something that this rank sent was refused. It is sticky: every later call that waits for an answer
 *    returns it again, until zerod_clear_fault() or zerod_abort_step(). An argument that zerod_step() refuses is not
 *    sent; that error is not sticky and has no code.
 *  - ZEROD_ABORTED: the step was aborted for all ranks. Begin again at micro-batch 0 of the step that zerod_epoch()
 *    returns. Only one call returns ZEROD_ABORTED.
 * A fatal error is sticky too: every later call returns it, and only zerod_close() remains.
 *
 * Ownership. Strings and arrays given to a call are copied or used up before it
 * returns. Results belong to the handle and live as long as the comment of the call says.
 *
 * GPUs. If zerod_job() says cuda, gradients and weights are in device memory. The addresses from zerod_slot() and
 * zerod_weight(), and those for zerod_push() and zerod_param.init, are device addresses, which the host must not
 * follow. zerod_push() starts a copy on the stream of zerod_set_stream() and does not wait for its end; the daemon and
 * zerod_end_backward() do. A context of the rank's GPU must be current before zerod_form() (cudaSetDevice,
 * cuCtxSetCurrent). libzerod does not link CUDA; it opens the driver when needed. In stage 3 this process allocates the
 * memory of gathered weights: about as much as is gathered at a time, up to 4 bytes for each of max_live_elems. A read
 * of released weights is an invalid access on the GPU.
 *
 * Threads. A handle is used by one thread at a time; different handles are
 * independent. The only global that changes is one SIGSEGV handler (see zerod_options.flags).
 *
 * Fork. In a forked child the handle is closed: calls on it return -ECHILD.
 *
 * Loops. Calls block up to timeout_ms. zerod_fd() is readable when the daemon has closed the connection, so any event
 * loop can watch it between calls.
 *
 * Replaced daemons. If the daemon ends unexpectedly and is started again with its state, the call that notices this
 * reconnects and continues; the caller does nothing. Such a call may take up to limits.reattach_timeout longer, but not
 * longer than timeout_ms. If no daemon is started, or the new one has lost the state, the call fails with a fatal
 * error. zerod_fd() keeps its number, but must be added to an epoll set again. Jobs on GPUs still end with their
 * daemon.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#else
#include <stdbool.h>
#endif

#if defined(__GNUC__)
#define ZEROD_API __attribute__((visibility("default")))
#else
#define ZEROD_API
#endif

struct zerod;

enum zerod_condition {
    ZEROD_OK = 0,
    ZEROD_RESUMED = 1, /* zerod_form: the daemon has committed state; weights and position are the run's */
    ZEROD_REFUSED = 2, /* see zerod_error() */
    ZEROD_ABORTED = 3, /* the step was aborted; see zerod_error(), zerod_epoch() */
};

enum zerod_dtype {
    ZEROD_F32 = 0,
    ZEROD_BF16 = 1,
    ZEROD_F16 = 2,
};

enum zerod_on_duplicate {
    ZEROD_ON_DUPLICATE_DEFAULT = 0, /* as the daemon is configured */
    ZEROD_ON_DUPLICATE_REJECT = 1,
    ZEROD_ON_DUPLICATE_ACCUMULATE = 2,
    ZEROD_ON_DUPLICATE_ABORT_STEP = 3,
};

enum zerod_flags {
    ZEROD_NO_SIGSEGV_HANDLER =
        1 << 0, /* no handler: writes to weights and reads of released ones are plain SIGSEGVs (no E1106, E1110) */
    ZEROD_OVERLAP_UPDATE = 1 << 1, /* zerod_step() returns when the step is decided. Weights change until zerod_wait()
                                      returns; call it before you read them */
    ZEROD_COPIES_FROM_GPU =
        1 << 2, /* the model is on a GPU, the daemon is in host memory, and the caller copies gradients to the addresses
                   from zerod_slot(). If all ranks set this, buckets and rings are large, so that a GPU need not wait
                   for room. Results are the same, bit for bit */
    ZEROD_AGAIN =
        1 << 3, /* this process has called zerod_leave() on an earlier handle of this rank, and continues the run:
                   zerod_connect() waits until all ranks have left, and then until rank 0 has connected again */
    ZEROD_ANEW = 1 << 4, /* as ZEROD_AGAIN, but begins another run, which may have other parameters and another run id;
                            the daemon drops the old run's state. Rank 0's flag decides for all ranks */
};

/* All fields may be zero. The struct itself is required. */
struct zerod_options {
    const char *socket; /* path; NULL: environment ZEROD_SOCKET */
    int rank;           /* from 0; below 0: environment RANK */
    const char *run_id; /* NULL: environment ZEROD_RUN_ID, or any */
    int timeout_ms;     /* for connecting and for each answered call; 0: connect 10 s, calls wait for ever.
                           A socket where no process listens is an error at once. */
    enum zerod_on_duplicate on_duplicate;
    unsigned flags;     /* enum zerod_flags */
    const char *client; /* name in the status; NULL: the process's. If it contains "torch", texts use torch's syntax */
    /* Called while a call waits: after a signal that interrupted the wait, and once a second because another thread may
       have handled a signal. A result other than 0 makes the call fail with -EINTR, which is fatal. NULL: signals do
       not end a wait. */
    int (*interrupted)(void *arg);
    void *interrupted_arg;
    /* A name as in zerod_job.optimizer; NULL: the daemon's. A daemon whose configuration has no optimizer, as
       zerodrun's without --config, uses the name of the first rank that connects. Otherwise the
       daemon's own optimizer, which zerod_job() returns, is used. */
    const char *optimizer;
    double momentum; /* only for the optimizer "SGD"; 0: no momentum buffer */
};

/* Bits of zerod_job.configured. */
enum zerod_configured {
    ZEROD_CONFIGURED_OPTIMIZER = 1 << 0,
    ZEROD_CONFIGURED_LR = 1 << 1,
    ZEROD_CONFIGURED_BETAS = 1 << 2,
    ZEROD_CONFIGURED_EPS = 1 << 3,
    ZEROD_CONFIGURED_WEIGHT_DECAY = 1 << 4,
    ZEROD_CONFIGURED_MOMENTUM = 1 << 5,
    ZEROD_CONFIGURED_DAMPENING = 1 << 6,
    ZEROD_CONFIGURED_NESTEROV = 1 << 7,
    ZEROD_CONFIGURED_LR_DECAY = 1 << 8,
    ZEROD_CONFIGURED_SCHEDULER = 1 << 9, /* a number of the scheduler */
    ZEROD_CONFIGURED_NS_COEFFICIENTS = 1 << 10,
    ZEROD_CONFIGURED_NS_STEPS = 1 << 11,
    ZEROD_CONFIGURED_ADJUST_LR_FN = 1 << 12,
    ZEROD_CONFIGURED_MAX_LR = 1 << 13, /* the schedule has its own rates (warmup_max_lr) and does not start from lr */
    ZEROD_CONFIGURED_LEAVE_CONTINUES = 1 << 14, /* diagnostics.on_leave: continue */
};

/* A parameter. All fields except init are equal on all ranks. */
struct zerod_param {
    const char *name;            /* any bytes, 1 to 1024 */
    size_t name_len;             /* 0 means strlen(name) */
    enum zerod_dtype dtype;      /* dtype of the weights */
    enum zerod_dtype grad_dtype; /* dtype of the gradients that will be pushed */
    unsigned ndim;               /* at most 16; 0 is one element */
    const uint64_t *shape;
    unsigned group;   /* index of its parameter group */
    bool trainable;   /* false: frozen, published but never updated */
    bool muon;        /* true: Muon updates it; false: AdamW. Only for two dimensions and the job's optimizer "Muon" */
    const void *init; /* initial weights in dtype; NULL: zeros. Only rank 0's are used, and only in a new run. Must stay
                         valid until zerod_form() returns. In a job on GPUs: device memory that the stream of
                         zerod_set_stream() writes */
};

/* The position of a job, from which a trainer starts or continues. */
struct zerod_position {
    uint64_t step;        /* the next step's number: steps committed so far, skipped ones included */
    uint32_t micro_batch; /* the next one to begin; the earlier ones of this step are reduced */
    uint32_t attempt;     /* number of aborts so far */
    uint32_t n_windows;   /* write windows that ended since the last step, with or without a change */
};

/* Counters for diagnosis; all may be zero. */
struct zerod_backward {
    uint64_t n_forwards;  /* forwards of the model so far */
    uint64_t n_backwards; /* backwards so far */
};

/* One gradient. The fields after data may be zero; most of them only serve diagnostics. */
struct zerod_push {
    unsigned param;      /* index in the manifest */
    const void *data;    /* n_elems of grad_dtype; NULL: already written at the address from zerod_slot() */
    uint32_t ordinal;    /* which outer backward of this micro-batch, from 1; 0: zerod_begin_backward() counts */
    uint64_t task;       /* graph task, unique within its outer backward. Texts print it ("nested backward 29"), so
                            count from 1 in each outer backward rather than send an id that grows with the process */
    uint32_t depth;      /* nesting of graph tasks, 0: the outermost */
    const char *segment; /* name of the checkpointed segment or module */
    uint32_t call;       /* number of the segment's call, from 1 */
    const char *site;    /* call site of the segment's forward, "file:line"; see ZEROD_PUSH_SITE_IS_BACKWARD */
    unsigned flags;      /* enum zerod_push_flags */
    size_t n_bytes;      /* size of the caller's gradient, checked against the manifest; 0: no check */
    int dtype_plus_one;  /* 1 + enum zerod_dtype of the gradient, checked too; 0: no check */
};

enum zerod_push_flags {
    ZEROD_PUSH_NESTED = 1 << 0,           /* from a graph task inside another one */
    ZEROD_PUSH_HOOK_TWICE = 1 << 1,       /* the hook has fired before in this graph task */
    ZEROD_PUSH_NEW_FORWARD = 1 << 2,      /* a forward ran since the last backward */
    ZEROD_PUSH_SITE_IS_BACKWARD = 1 << 3, /* site is the call site of the backward */
    ZEROD_PUSH_MORE = 1 << 4,             /* another call follows at once, so a small gradient's message may wait */
};

/*
 * Hyperparameters of one group, for one step. Only the configured optimizer's are used.
 *
 * `given` selects the settings that are used, by bits of enum zerod_configured. The other settings are as configured,
 * and lr follows the daemon's schedule, if there is one. 0 selects all settings, and switches the schedule off.
 * ZEROD_CONFIGURED_OPTIMIZER alone selects none. With ZEROD_CONFIGURED_LR | ZEROD_CONFIGURED_SCHEDULER the schedule
 * starts from this lr, unless the schedule has its own rates (ZEROD_CONFIGURED_MAX_LR).
 */
struct zerod_hyper {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay;
    bool nesterov;
    double ns_a, ns_b, ns_c; /* Muon's ns_coefficients */
    unsigned ns_steps;
    bool match_rms_adamw; /* Muon's adjust_lr_fn; false: original */
    unsigned given;
};

/* The daemon's configuration. Strings live until zerod_close(). */
struct zerod_job {
    unsigned world_size;
    unsigned stage; /* layout of memory: 1, 2 or 3. Stage 3 on one node in host memory has the layout of stage 2 */
    bool private_weights;
    enum zerod_on_duplicate on_duplicate; /* in force for this handle; never ZEROD_ON_DUPLICATE_DEFAULT */
    const char *run_id;                   /* "": the run has no name yet */
    const char *optimizer;    /* "AdamW" (Adam with adam_w_mode, too), "Adam", "SGD", "Lion", "Adagrad", "Muon" */
    struct zerod_hyper hyper; /* defaults of all groups; a field that the optimizer does not have is 0 */
    bool has_scheduler;       /* the schedule starts from hyper.lr; zerod_step_result has the lr that was used */
    double max_norm;          /* gradient_clipping; 0: off */
    bool mean;                /* gradients are the mean over ranks; false: the sum */
    bool fp16;                /* the daemon has a loss scale, static or dynamic */
    unsigned accumulation;    /* gradient_accumulation_steps; 0: auto, zerod_step() is the boundary */
    uint64_t max_live_elems;  /* stage3_max_live_parameters */
    bool cuda;                /* gradients and weights are in device memory */
    unsigned configured;      /* settings that the configuration has: enum zerod_configured */
    unsigned configured_stage; /* zero_optimization.stage */
};

/*
 * Evidence: why, as far as the client can see, parameters were not pushed in this step. Zero means not known. Texts are
 * cut to 1024 bytes.
 */
struct zerod_evidence {
    const char *exception;      /* that left the forward or the backward, such as "RuntimeError: CUDA out of memory" */
    const char *raised_at;      /* "trainer.py:12" */
    const char *swallowed_by;   /* frame that caught the exception: "training/trainer.py:216 training_step" */
    bool in_forward;            /* the exception left the forward, not the backward */
    bool requires_grad_changed; /* requires_grad of missing parameters differs from what was declared */
    const char *dead_segment;   /* one of the segments that ran, if all their parameters and no others are missing */
    unsigned n_dead_segments;   /* number of such segments */
    const char *site;           /* call site of dead_segment's forward */
    uint64_t n_forwards;        /* in this step */
    uint64_t n_backwards;
    const unsigned *not_called; /* parameters whose module was not called in this step; the first 16,384 count */
    size_t n_not_called;
    const unsigned *called; /* parameters whose module was called without reaching the loss; the first 16,384 count */
    size_t n_called;
};

/*
 * All fields may be zero; then all settings are as configured. All ranks must pass equal values (E1108), except the
 * blob.
 */
struct zerod_step_args {
    const struct zerod_hyper *groups; /* n_groups elements, or NULL */
    unsigned n_groups;
    const double *max_norm; /* NULL: gradient_clipping; 0 switches it off */
    double loss_scale;      /* scale of the gradients; 0: the daemon's scale (1 unless fp16 is enabled) */
    bool found_inf;         /* skip this step */
    const void *blob;       /* user state to be committed with the step; at most 64 KiB */
    size_t blob_len;
};

struct zerod_step_result {
    uint64_t epoch;     /* number of committed steps, this one included */
    bool applied;       /* false: skipped, state and weights unchanged */
    double grad_norm;   /* norm of the unscaled gradient before clipping; infinite or NaN if an element is */
    double loss_scale;  /* for the next loss; equal to zerod_loss_scale() */
    double lr;          /* the lr of group 0 in this step */
    unsigned n_missing; /* parameters that no rank pushed in this step; they do not change */
};

/*
 * State of a parameter. The optimizer (see zerod_job()) decides which moments exist. Adam and AdamW have ZEROD_EXP_AVG
 * and ZEROD_EXP_AVG_SQ. Lion, and SGD with a momentum above 0, have ZEROD_EXP_AVG. Adagrad has ZEROD_EXP_AVG_SQ, its
 * sum. SGD without momentum has none. With "Muon", parameters that Muon updates have ZEROD_EXP_AVG; other parameters
 * have both.
 */
enum zerod_state {
    ZEROD_MASTER = 0,
    ZEROD_EXP_AVG = 1,
    ZEROD_EXP_AVG_SQ = 2,
    ZEROD_GRAD_NORM = 3,  /* one double: the parameter's gradient norm in the last decided step */
    ZEROD_STEP_COUNT = 4, /* one double: number of applied steps in which the parameter was pushed */
};

/* One labelled line of a diagnostic. */
struct zerod_field {
    const char *label;
    const char *text;
};

/* The last error or refusal of a handle. Strings live until the next call on the handle. */
struct zerod_error {
    int status;                /* the value that the call returned */
    int code;                  /* 1001 for E1001; 0 for a local error */
    const char *text;          /* the lines of the text, separated by \n, without one at the end; never NULL */
    const char *cause_class;   /* such as "D1"; "" if none */
    long rank;                 /* -1: none */
    int64_t step;              /* -1: none */
    long micro_batch;          /* -1: none */
    const char *const *params; /* names of at most 5 parameters */
    unsigned n_params;         /* number of all parameters concerned */
    const struct zerod_field *fields;
    unsigned n_fields;
};

/*
 * Attaches as a rank. On 0 and on ZEROD_REFUSED *out is set; after ZEROD_REFUSED, read zerod_error() and close *out. On
 * a fatal error *out is NULL, and zerod_error(NULL) has the text for the calling thread. Refused: E1109 the daemon has
 * another run's state, E1301 the rank is taken, E1402 not allowed, E1403 unsupported version.
 */
ZEROD_API int zerod_connect(struct zerod **out, const struct zerod_options *options);

/*
 * Appends parameters to the manifest. A parameter's index is its place in the order of declaration. Return: -EBUSY
 * after zerod_form().
 */
ZEROD_API int zerod_declare(struct zerod *c, const struct zerod_param *params, size_t n_params);

/*
 * Waits until all ranks have declared the same parameters (else E1101), the daemon has reserved the memory (else
 * E1401), and the daemon has the initial weights. Return: 0 for a new run; ZEROD_RESUMED if the daemon has this run's
 * state, and the caller continues at zerod_epoch().
 */
ZEROD_API int zerod_form(struct zerod *c);

/* The position of this rank; valid after zerod_form(). */
ZEROD_API struct zerod_position zerod_epoch(const struct zerod *c);

/*
 * The daemon's loss scale, by which the caller multiplies the next loss; 1 unless fp16 is enabled. Valid after
 * zerod_form(). The value is from the daemon's last answer, also in a restarted rank.
 */
ZEROD_API double zerod_loss_scale(const struct zerod *c);

/*
 * The status of the job, for logging: *json is what `zerodctl --json status` prints (docs/schema/status.json), and
 * lives until the next zerod_status() or zerod_close(). The call opens another connection, so it delays no rank, and it
 * may be made at any time after zerod_connect(). An idle daemon answers in a fraction of a millisecond; a busy one
 * serves trainers first, for at most 100 ms. timeout_ms: limit of the whole call; 0: 10 s. Return: 0; or a negative
 * error with a text in zerod_error(), which is not sticky: -ECONNREFUSED (no daemon), -ETIMEDOUT, -EACCES, -EPROTO,
 * -EIO.
 */
ZEROD_API int zerod_status(struct zerod *c, int timeout_ms, const char **json);

/* Returns the last blob of this rank that a micro-batch or step has committed. *data is NULL if the rank has no blob.
 * The blob lives until zerod_close(). */
ZEROD_API int zerod_user_state(struct zerod *c, const void **data, size_t *len);

/* Number of ranks; valid after zerod_connect(). */
ZEROD_API unsigned zerod_world_size(const struct zerod *c);

/* Copies the daemon's configuration to *out. Valid after zerod_connect(). */
ZEROD_API int zerod_job(struct zerod *c, struct zerod_job *out);

/*
 * A job on GPUs: sets the CUstream (cudaStream_t) that computes the gradients of later pushes. NULL, the initial value,
 * is the default stream. The new stream waits for the work of earlier streams; the caller does not wait. zerod_step(),
 * zerod_write_begin() and zerod_write_end() wait until this stream is done, because it may read weights.
 * zerod_release() does not wait, but keeps the weights until this stream has done its present work. If other streams
 * read weights, this stream or the caller must wait for them before these calls. No effect in host memory. Return: 0 or
 * fatal.
 */
ZEROD_API int zerod_set_stream(struct zerod *c, void *stream);

/*
 * Opens the next micro-batch. A second call before zerod_end_backward() begins another backward of the same
 * micro-batch. info may be NULL.
 */
ZEROD_API int zerod_begin_backward(struct zerod *c, const struct zerod_backward *info);

/*
 * Says with which settings the coming zerod_step() will be called, if they are not those of the last step; the next
 * zerod_begin_backward() sends them. The daemon can then update before it is asked (zero_optimization.
 * speculative_update). A step with other settings is no error: it takes longer, and has the same numbers. It is enough
 * that rank 0 calls this. groups: n_groups elements, as in struct zerod_step_args, copied. Return: 0; 1, and nothing is
 * sent, if the daemon does not update early in this job; -EINVAL for another number of groups than was declared; or
 * fatal.
 */
ZEROD_API int zerod_expect(struct zerod *c, const struct zerod_hyper *groups, unsigned n_groups);

/*
 * Returns the place where the caller may write the next gradient of parameter i, to push it without a copy. The place
 * holds n_elems of grad_dtype and has 64-byte alignment. Valid until the gradient is pushed, or the micro-batch ends. A
 * gradient of more than reduce_bucket_size elements has a place in memory of this process, from which zerod_push()
 * copies it part by part. Return: NULL if no micro-batch is open, or on an error (zerod_error()).
 */
ZEROD_API void *zerod_slot(struct zerod *c, unsigned param);

enum zerod_memory {
    ZEROD_MEMORY_RING = 0,    /* where zerod_slot() usually points to; writable */
    ZEROD_MEMORY_WEIGHTS = 1, /* where zerod_weight() points to; read-only */
};

/*
 * Returns memory that is shared with the daemon. A caller may register it with a GPU's driver, so that copies from and
 * to the GPU need not wait. Valid after zerod_form(), until zerod_close(). *base is NULL for device memory, and for
 * weights of stage 3, which are not always mapped. Return: 0, -EINVAL or fatal.
 */
ZEROD_API int zerod_memory(struct zerod *c, enum zerod_memory which, void **base, size_t *n_bytes);

/*
 * Pushes one gradient: an increment, never the running sum. One way: the next call that waits for an answer returns a
 * refusal of this push. Return: 0, ZEROD_REFUSED (no slot: E1401), ZEROD_ABORTED, or fatal.
 */
ZEROD_API int zerod_push(struct zerod *c, const struct zerod_push *push);

/*
 * Sends the pushes that wait because of ZEROD_PUSH_MORE: fewer than 64 gradients, of less than 64 KiB together. Every
 * other call to the daemon sends them too. Call zerod_flush() at the end of a backward, if the caller then continues to
 * compute. Return: 0 or fatal.
 */
ZEROD_API int zerod_flush(struct zerod *c);

/* Ends the micro-batch, and stores blob (may be NULL) with it. Returns when all that this rank pushed is reduced. */
ZEROD_API int zerod_end_backward(struct zerod *c, const void *blob, size_t len);

/*
 * Abandons the open micro-batch (E1007). Return: 0 if nothing was reduced, and the caller begins the micro-batch again;
 * or ZEROD_ABORTED.
 */
ZEROD_API int zerod_abandon_backward(struct zerod *c, const char *why);

/*
 * Sends evidence about parameters that were not pushed, before zerod_step() asks for the step. The texts of E1005 and
 * of the warning under on_missing use the evidence. One way. The evidence is for this step only; a second call replaces
 * it.
 */
ZEROD_API int zerod_evidence(struct zerod *c, const struct zerod_evidence *e);

/*
 * Reports a fault that only the client can see. params: the parameters that the fault concerns; none before
 * zerod_form(). detail: a sentence that describes the fault, cut to 1024 bytes. Codes: 1102 gradient that cannot be
 * pushed (sparse), 1103 gradient of a parameter in no group, 1104 weights re-pointed, 1105 ranks drifted apart, 1106
 * write to published weights, 1107 reduced twice, 1110 released weight read. One way: the next call that waits for an
 * answer returns ZEROD_REFUSED, which is sticky.
 */
ZEROD_API int zerod_report(struct zerod *c, int code, const unsigned *params, size_t n_params, const char *detail);

/*
 * Asks for the step and waits until it is committed; with ZEROD_OVERLAP_UPDATE only until its result is final (see
 * zerod_wait()). args and result may be NULL. Refused without being sent: a max_norm or loss_scale that is negative,
 * infinite or NaN, and hyperparameters that torch.optim's constructors refuse.
 */
ZEROD_API int zerod_step(struct zerod *c, const struct zerod_step_args *args, struct zerod_step_result *result);

/*
 * Waits until these parameters (all, if params is NULL) have the weights of the last step. With ZEROD_OVERLAP_UPDATE
 * zerod_step() returns while the daemon still writes weights, in about the order of declaration. A forward that calls
 * this for each layer begins with the first layer while the daemon updates the last one. If the weights are already
 * written, the call costs nothing. Every other call to the daemon, such as zerod_begin_backward(), first waits for all
 * parameters, so no gradient is pushed during an update. zerod_weight() does not wait. A caller that writes to
 * published weights must wait first. If weights are private, or are not in host memory of one node, the call waits for
 * all parameters. It is not a collective. If the daemon ends before it completes the step, the next daemon completes
 * it, and the call waits for that. Return: as zerod_step(). If the step fails after zerod_step() has returned, this
 * call or the next one returns the error.
 */
ZEROD_API int zerod_wait(struct zerod *c, const unsigned *params, size_t n_params);
/* Return: 1 if zerod_wait() for this parameter would return 0 at once; else 0. For copies of weights that are there. */
ZEROD_API int zerod_is_written(const struct zerod *c, unsigned param);

/*
 * Collective: waits until all pushed gradients are reduced, and returns their norm. The norm is unscaled only if the
 * loss scale is the daemon's, because the daemon learns the caller's own loss scale with zerod_step(). Changes nothing.
 */
ZEROD_API int zerod_grad_norm(struct zerod *c, double *norm);

/*
 * Current weights of parameter i in its dtype, read-only, at an address that never changes; valid until zerod_close().
 * The weights change only while all ranks are inside zerod_step() or zerod_write_end(), or with ZEROD_OVERLAP_UPDATE
 * until zerod_wait() has returned. Stage 3: readable only between gather and release.
 */
ZEROD_API const void *zerod_weight(struct zerod *c, unsigned param);

/*
 * Stage 3: makes parameters readable / unreadable. A parameter gathered twice must be released twice. Gathered
 * parameters have new weights when the call that changed the weights has returned. Refused: E1401 over
 * stage3_max_live_parameters. Return: -ENOMEM, which is not sticky, if a GPU has no memory left; then none of these
 * parameters is gathered. No effect in stages 1 and 2.
 */
ZEROD_API int zerod_gather(struct zerod *c, const unsigned *params, size_t n_params);
ZEROD_API int zerod_release(struct zerod *c, const unsigned *params, size_t n_params);

/*
 * Stage 3: announces parameters that will be gathered soon. The daemon copies them while the caller computes, so that
 * the zerod_gather() that follows need not wait. It is a hint like madvise(MADV_WILLNEED): it does not wait, is never
 * refused, makes nothing readable, counts against no quota, and needs no release. The daemon ignores the hint while it
 * carries out an earlier one of this rank, or if the pool of gathered weights is full. Only the first 16,384 parameters
 * are used. One way.
 */
ZEROD_API int zerod_prefetch(struct zerod *c, const unsigned *params, size_t n_params);

/*
 * Checks whether the program has written to weights outside of a window, so that this rank's weights differ from the
 * job's. The write itself succeeds, in memory of this process, and a program that has completed its last step may
 * continue with the written weights. Return: 0; or ZEROD_REFUSED (E1106) if the weights differ, which is sticky:
 * zerod_clear_fault() and zerod_abort_step() drop the written weights. where (may be NULL) ends the sentence that
 * describes the write. zerod_begin_backward(), zerod_step() and zerod_write_begin() make this check first. Always 0 in
 * stage 3, where such a write ends the process; on GPUs, where the driver reports it; and with
 * ZEROD_NO_SIGSEGV_HANDLER, where it is a plain SIGSEGV.
 */
ZEROD_API int zerod_check_weights(struct zerod *c, const char *where);

/* Return: false if the program has not written to weights, so that zerod_check_weights() returns 0. Never waits. */
ZEROD_API bool zerod_has_written(const struct zerod *c);

/*
 * Asks for a checkpoint of the last committed step, with the user state that ranks have stored by then. Training
 * continues while the daemon writes it. wait: return only when the checkpoint is on the disk. A checkpoint that exists
 * is not written again. Not a collective: one rank is enough, and more do no harm. Refused, but not sticky: E1701 the
 * checkpoint cannot be written.
 */
ZEROD_API int zerod_save_checkpoint(struct zerod *c, bool wait);

/*
 * Collective write window between steps. Between begin and end every rank may write through zerod_window().
 * zerod_write_end() publishes rank 0's weights and, where bytes changed, makes them the masters. It drops the writes of
 * other ranks. Inside the window, another rank may see rank 0's writes where it has not written. Moments stay, except
 * those of zerod_write_state(). zerod_write_forget() ends the window without a change.
 */
ZEROD_API int zerod_write_begin(struct zerod *c);
ZEROD_API int zerod_write_end(struct zerod *c);
ZEROD_API int zerod_write_forget(struct zerod *c);

/*
 * Returns the writable weights of parameter i inside a window, or NULL outside. In host memory the address is that of
 * zerod_weight(). In a job on GPUs the window is in host memory, and the weights at zerod_weight() change only when the
 * window ends.
 */
ZEROD_API void *zerod_window(struct zerod *c, unsigned param);

/*
 * Copies the full state of a parameter into dst: n_elems floats, or one double for ZEROD_GRAD_NORM and
 * ZEROD_STEP_COUNT. Call it between steps. Not a collective: other ranks may have left. Inside a write window it copies
 * the committed state. A frozen parameter has only ZEROD_MASTER; the optimizer decides which moments others have (enum
 * zerod_state). Refused, but not sticky: E1403 no such state, E1401 no memory for the answer.
 */
ZEROD_API int zerod_read_state(struct zerod *c, unsigned param, enum zerod_state which, void *dst);

/*
 * Writes state of a parameter as a part of a write window, to load a checkpoint. The counterpart of zerod_read_state().
 *  - src: n_elems floats for ZEROD_MASTER, ZEROD_EXP_AVG and ZEROD_EXP_AVG_SQ; one double, a whole number from 0 to
 *    2^53, for ZEROD_STEP_COUNT. The call copies src before it returns.
 *  - zerod_write_end() commits the written state, together with the weights of the window. zerod_write_forget(), an
 *    abort and the death of rank 0 drop it; a new process of rank 0 begins the window again with nothing written. The
 *    last write of a state in a window counts. State that is not written stays as it is.
 *  - A written master has precedence over the weights in zerod_window(): an fp32 weight is equal to the master, and a
 *    16-bit weight is the master rounded to nearest even. zerod_window() and zerod_weight() show it after the end of
 *    the window.
 *  - Rank 0's values count. Other ranks may make this call too, so that all ranks may run the same code. Their values
 *    are checked and dropped.
 *  - A frozen parameter has no state to write. To load the weights of a frozen parameter, write them to zerod_window()
 *    in the same window.
 * The call does not change the number of the step (zerod_epoch()), the progress of the scheduler and of the loss scale,
 * or user state. Until the window ends, the pages of the written state count against limits.memory. Return: 0; -EINVAL
 * (not sticky) for an unknown parameter or state, ZEROD_GRAD_NORM, or an invalid count. Refused: E1003 no window is
 * open; E1403 the parameter is frozen, or the optimizer has no such moment; E1401 no memory. A refused call writes
 * nothing, and zerod_write_end() is refused too until zerod_clear_fault(); earlier writes in the window stay.
 * zerod_abort_step() ends the window for all ranks without a change.
 */
ZEROD_API int zerod_write_state(struct zerod *c, unsigned param, enum zerod_state which, const void *src);

/* Aborts the step for all ranks, and clears this rank's fault. Then continue at zerod_epoch(). */
ZEROD_API int zerod_abort_step(struct zerod *c, const char *why);

/* Clears this rank's fault, so that a caller that knows of the refusal can continue. */
ZEROD_API int zerod_clear_fault(struct zerod *c);

/*
 * Leaves the job, and ends the connection. diagnostics.on_leave decides whether the other ranks may continue with steps
 * and write windows. The other ranks may still call zerod_weight(), zerod_gather() and zerod_read_state(), which need
 * no other rank. For this handle only zerod_close() remains. The process may connect as this rank again with
 * ZEROD_AGAIN or ZEROD_ANEW.
 */
ZEROD_API int zerod_leave(struct zerod *c);

/*
 * Makes the rank leave if the process exits with status 0; with another status the rank is lost, as after a crash. For
 * languages whose runtime ends before the process. Do not close c after this call. The callback `interrupted` is not
 * called any more. Return: 0 or -ENOMEM.
 */
ZEROD_API int zerod_leave_at_exit(struct zerod *c);

/* Closes and frees; c may be NULL. Without zerod_leave() the rank may attach again, as after a crash. */
ZEROD_API void zerod_close(struct zerod *c);

/* The last error. c may be NULL after a failed zerod_connect(). Never NULL. */
ZEROD_API const struct zerod_error *zerod_error(const struct zerod *c);

/* The kind of a fault that DDP reported, or should have reported. */
enum zerod_observed {
    ZEROD_OBSERVED_TWICE = 0,    /* DDP: "mark a variable ready only once" */
    ZEROD_OBSERVED_MISSING = 1,  /* DDP: "finished reduction in the prior iteration"; or a step lacks gradients */
    ZEROD_OBSERVED_BYPASSED = 2, /* the model has gradients, but DDP's forward did not run */
};

/* A fault that an observer of DDP has seen, without a daemon. Every field except names may be zero. */
struct zerod_observation {
    enum zerod_observed what;
    const char *client;       /* as in zerod_options; decides the language of fixes */
    int64_t rank, step;       /* below 0: not known */
    const char *const *names; /* names of all trainable parameters */
    size_t n_names;
    const unsigned *params; /* the parameters concerned, as indices of names; TWICE: the one that DDP named */
    size_t n_params;
    struct zerod_push first, second; /* TWICE: of params[0]; an ordinal of 0 means that this push did not happen */
    unsigned world_size;
    bool same_on_all_ranks, same_every_step; /* MISSING: params are equal on all ranks, or in every step so far */
    uint64_t n_steps_seen;
    bool silent;                           /* MISSING: DDP did not notice */
    const struct zerod_evidence *evidence; /* MISSING: further evidence, or NULL; its ids are indices of names */
};

/*
 * Explains the cause of a fault, as the daemon does in its refusals. Free *out with zerod_explain_free(). Return: 0,
 * -EINVAL or -ENOMEM.
 */
ZEROD_API int zerod_explain(const struct zerod_observation *o, struct zerod_error **out);
ZEROD_API void zerod_explain_free(struct zerod_error *error); /* NULL is fine */

/*
 * The connection's descriptor. Poll it, but do not read it. With ZEROD_OVERLAP_UPDATE it is also readable from the end
 * of the update until the next call.
 */
ZEROD_API int zerod_fd(const struct zerod *c);

/* "0.2.0" */
ZEROD_API const char *zerod_version(void);

#ifdef __cplusplus
}
#endif

#endif
