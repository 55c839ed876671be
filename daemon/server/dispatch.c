/* SPDX-License-Identifier: Apache-2.0 */

/* Checks that a request is allowed in the state of its session, and calls the job's function for the request. */

#include "daemon/server/dispatch.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/keep.h"
#include "core/diagnosis/cause.h"
#include "core/wire/wire-reply.h"
#include "daemon/job/attendance.h"
#include "daemon/job/rank-lost.h"
#include "daemon/job/job.h"
#include "daemon/job/look.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/model/survival.h"
#include "daemon/job/request.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/job/transaction/step-args.h"
#include "daemon/server/admin.h"
#include "daemon/server/places.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"

static void refuse_request(struct session *session, const char *what)
{
    struct evidence_at at = {.rank = session_rank_number(session), .step = -1, .micro_batch = -1};

    session_refuse(session, session_keep(session, cause_bad_message(&at, what)));
}

/* ---- hello --------------------------------------------------------------------------------------------- */

static void welcome(struct session *session, bool resumed)
{
    const struct job *job = session->service->job;
    const struct config *config = job->config;

    session_send(session,
                 &(struct reply){
                     .type = REPLY_WELCOME,
                     .welcome =
                         {
                             .version = WIRE_VERSION,
                             .world_size = config->world.size,
                             .stage = config_stage(config),
                             .configured_stage = (uint32_t)config->zero.stage,
                             .bucket_elems = config->zero.reduce_bucket_size,
                             .on_duplicate = session->rank ? session->rank->kept.on_duplicate
                                                           : attendance_policy(job, WIRE_ON_DUPLICATE_AS_CONFIGURED),
                             .server = service_version(),
                             .private_weights = config->weights == CONFIG_WEIGHTS_PRIVATE,
                             .run_id = job->kept.run_id,
                             .stage3_max_live_elems = config->zero.stage3_max_live_parameters,
                             .optimizer = config_optimizer_name(&config->optimizer),
                             .hyper = job_wire_hyper(&config->optimizer.hyper),
                             .has_scheduler = config->scheduler.type != SCHEDULE_NONE,
                             .max_norm = config->gradient_clipping,
                             .mean = config->gradient_allreduce_op == CONFIG_ALLREDUCE_MEAN,
                             .fp16 = config->fp16.enabled,
                             .accumulation = (uint32_t)config->gradient_accumulation_steps,
                             .cuda = config->device == CONFIG_DEVICE_CUDA,
                             .configured = config_configured(config),
                             .resumed = resumed,
                             .n_received = resumed ? session->rank->kept.n_received : 0,
                             .reattach_ms = keep_is_on() ? config->limits.reattach_timeout_ms : 0,
                             .looks = true,
                         },
                 },
                 NULL, 0);
}

/*
 * Attaches a control connection if a place is free. limits.clients counts only control connections, because each rank
 * has a place for its trainer's connection.
 */
static void control(struct session *session)
{
    unsigned clients = session->service->config->limits.clients;
    struct evidence_quota evidence = {.at = {.rank = -1, .step = -1, .micro_batch = -1},
                                      .what = "control connections (limits.clients)",
                                      .unit = "clients",
                                      .asked = 1,
                                      .held = clients,
                                      .allowed = clients,
                                      .fix = "raise limits.clients"};

    if (!places_take(session->service, session)) {
        session_refuse(session, session_keep(session, cause_quota(&evidence)));
        return;
    }
    session->quiet_ns = service_now_ns();
    session_set_state(session, SESSION_CONTROL);
    welcome(session, false);
}

/*
 * Resumes a rank that was attached to an earlier daemon. Sends the rank the number of its requests that the earlier
 * daemon received, and the answer for which the rank still waits.
 */
static void resume(struct session *session, const struct request_hello *hello)
{
    struct job_rank *rank = session->rank;

    assert(rank->peer == session);
    session_set_state(session, SESSION_ATTACHED);
    session_set_state(session, SESSION_FORMED);
    welcome(session, true);
    if (rank->away.answer && hello->waits && hello->n_sent == rank->kept.n_received)
        session_send_packed(session, rank->away.answer, rank->away.n_answer_bytes);
    rank_forget_away(rank);
}

static void record_attach(struct session *session, const struct job_attach *attach)
{
    const struct frame_packet *packet = session->service->packet;
    const struct journal_attach record = {.pid = attach->pid,
                                          .uid = attach->uid,
                                          .gid = attach->gid,
                                          .is_admin = attach->is_admin,
                                          .all_had_left = attach->all_had_left};

    job_record(session->service->job, NULL, JOURNAL_ATTACH, &record, sizeof(record), packet->data, packet->n_bytes);
}

/* Keeps the packed Hello. sessions_reap() serves it again after each event until the rank may attach. */
static void keep_hello(struct session *session, const struct request_hello *hello)
{
    const struct frame_packet *packet = session->service->packet;

    if (session->hello)
        return;
    session->hello = malloc(packet->n_bytes);
    if (!session->hello) {
        session_doom(session);
        return;
    }
    memcpy(session->hello, packet->data, packet->n_bytes);
    session->n_hello_bytes = packet->n_bytes;
    session->hello_rank = hello->rank;
}

static void attach(struct session *session, const struct request_hello *hello)
{
    struct job *job = session->service->job;
    struct diagnostic *refusal = NULL;
    const struct job_attach attach = {.peer = session,
                                      .hello = hello,
                                      .pid = session->peer.pid,
                                      .uid = session->peer.uid,
                                      .gid = session->peer.gid,
                                      .is_admin = listener_is_admin(session->service->listener, &session->peer),
                                      .all_had_left = job_all_left(job)};

    assert(!session->rank);
    if (hello->resumes && job_resume(job, &attach, &session->rank)) {
        resume(session, hello);
        return;
    }
    rank_lost_tick(job); /* the rank's earlier process may have died while no daemon ran */
    if (attendance_must_wait(job, &attach)) {
        keep_hello(session, hello);
        return;
    }
    record_attach(session, &attach);
    free(steal_ptr(session->hello)); /* no longer needed: service->packet was recorded */
    if (job_attach(job, &attach, &session->rank, &refusal) != 0) {
        session_refuse(session, refusal);
        diagnostic_unref(refusal);
        return;
    }
    session_set_state(session, SESSION_ATTACHED);
    welcome(session, false);
}

/*
 * Attaches a watch, the second connection of a rank's process. A watch that is too late, a duplicate, or of no attached
 * rank is closed without an answer, and its process tries again.
 */
static void attach_watch(struct session *session, const struct request_hello *hello)
{
    struct job *job = session->service->job;

    session->watched = look_attach(job, hello->rank, hello->incarnation, session->peer.uid, session);
    if (session->watched)
        session_set_state(session, SESSION_WATCH);
    else
        session_doom(session);
}

static void on_hello(struct session *session, const struct request *request)
{
    const struct request_hello *hello = &request->hello;
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};
    char what[160];

    if (!listener_allows(session->service->listener, &session->peer)) {
        session_refuse(session,
                       session_keep(session, cause_not_allowed(&at, session->peer.uid, session->peer.gid,
                                                               "connect (listen.allow_users, listen.allow_groups)")));
        return;
    }
    if (hello->version_min > WIRE_VERSION || hello->version_max < WIRE_VERSION) {
        snprintf(what, sizeof(what),
                 "Hello.version: the client speaks %u to %u, this daemon %u; install matching versions",
                 hello->version_min, hello->version_max, WIRE_VERSION);
        refuse_request(session, what);
        return;
    }
    if (hello->role == WIRE_ROLE_TRAINER)
        attach(session, hello);
    else if (hello->role == WIRE_ROLE_WATCH)
        attach_watch(session, hello);
    else
        control(session);
}

/* ---- after Hello --------------------------------------------------------------------------------------- */

enum { RANK = SESSION_ATTACHED | SESSION_FORMED };

static void on_request(struct session *s, const struct request *r)
{
    const struct frame_packet *packet = s->service->packet;

    assert(s->rank->peer == s); /* a session that lost its rank to a newer one is already closed */
    if (r->type == REQUEST_LEAVE)
        session_set_state(s, SESSION_LEFT);
    request_take(s->service->job, s->rank, r, packet->data, packet->n_bytes);
}

static void on_admin(struct session *s, const struct request *r)
{
    admin_request(s, &r->admin);
}

static void on_stack(struct session *s, const struct request *r)
{
    if (s->watched->process.look.watch != s || !look_answered(s->service->job, s->watched, r->stack.text))
        refuse_request(s, "Stack, which nobody has asked for");
}

/* ---- the table ----------------------------------------------------------------------------------------- */

static const struct {
    unsigned states; /* the session states that allow the request */
    void (*handle)(struct session *session, const struct request *request);
} table[N_REQUEST_TYPES] = {
    [REQUEST_HELLO] = {SESSION_HELLO, on_hello},
    [REQUEST_DECLARE] = {SESSION_ATTACHED, on_request},
    [REQUEST_FORM] = {SESSION_ATTACHED, on_request},
    [REQUEST_INIT] = {SESSION_FORMED, on_request},
    [REQUEST_READY] = {SESSION_FORMED, on_request},
    [REQUEST_BEGIN_BACKWARD] = {SESSION_FORMED, on_request},
    [REQUEST_INTERN] = {RANK, on_request},
    [REQUEST_PUSH] = {SESSION_FORMED, on_request},
    [REQUEST_PUSHES] = {SESSION_FORMED, on_request},
    [REQUEST_SLOT_REQUEST] = {SESSION_FORMED, on_request},
    [REQUEST_END_BACKWARD] = {SESSION_FORMED, on_request},
    [REQUEST_ABANDON_BACKWARD] = {SESSION_FORMED, on_request},
    [REQUEST_STEP] = {SESSION_FORMED, on_request},
    [REQUEST_GRAD_NORM] = {SESSION_FORMED, on_request},
    [REQUEST_GATHER] = {SESSION_FORMED, on_request},
    [REQUEST_RELEASE] = {SESSION_FORMED, on_request},
    [REQUEST_PREFETCH] = {SESSION_FORMED, on_request},
    [REQUEST_HELD] = {SESSION_FORMED, on_request},
    [REQUEST_WRITE_BEGIN] = {SESSION_FORMED, on_request},
    [REQUEST_READ_STATE] = {SESSION_FORMED, on_request},
    [REQUEST_WRITE_STATE] = {SESSION_FORMED, on_request},
    [REQUEST_SAVE_CHECKPOINT] = {SESSION_FORMED, on_request},
    [REQUEST_CLEAR_FAULT] = {RANK, on_request},
    [REQUEST_REPORT] = {RANK, on_request},
    [REQUEST_EVIDENCE] = {SESSION_FORMED, on_request},
    [REQUEST_WRITE_END] = {SESSION_FORMED, on_request},
    [REQUEST_ABORT_STEP] = {SESSION_FORMED, on_request},
    [REQUEST_ABORT_SEEN] = {SESSION_FORMED, on_request},
    [REQUEST_LEAVE] = {RANK, on_request},
    [REQUEST_ADMIN] = {SESSION_CONTROL, on_admin},
    [REQUEST_STACK] = {SESSION_WATCH, on_stack},
};

static const char *state_word(enum session_state state)
{
    switch (state) {
    case SESSION_HELLO:
        return "before Hello";
    case SESSION_ATTACHED:
        return "before Formed";
    case SESSION_FORMED:
        return "on a formed rank";
    case SESSION_CONTROL:
        return "on a control connection";
    case SESSION_WATCH:
        return "on a watch";
    default:
        return "after Leave";
    }
}

/*
 * Return: whether a resuming rank sends this request again right after Welcome, even while it waits for the answer to
 * an earlier request.
 */
static bool comes_after_welcome(const struct request *request)
{
    return request->type == REQUEST_INTERN || request->type == REQUEST_HELD;
}

void dispatch_request(struct session *session, const struct request *request)
{
    struct job *job = session->service->job;
    char what[128];

    assert(request->type < N_REQUEST_TYPES);
    assert(session->state != SESSION_CLOSED);
    assert(!session->doomed);
    if (session->rank) {
        session->rank->last_ns = service_now_ns();
        session->rank->last_request = request_type_name(request->type);
        /* The rank was sent Formed, so it may send the requests of a formed job. */
        if (session->state == SESSION_ATTACHED && session->rank->kept.formed)
            session_set_state(session, SESSION_FORMED);
    }
    if (!(table[request->type].states & session->state)) {
        snprintf(what, sizeof(what), "%s is not allowed %s", request_type_name(request->type),
                 state_word(session->state));
        refuse_request(session, what);
        return;
    }
    if (session->rank && session->rank->wait != WAIT_NONE && !comes_after_welcome(request)) {
        snprintf(what, sizeof(what), "%s while the last request has not been answered",
                 request_type_name(request->type));
        job_drop_peer(job, session->rank, what);
        return;
    }
    /* Releases the state that the rank was reading, because a rank that sends another request has finished reading. */
    if (session->rank && request->type != REQUEST_READ_STATE)
        job_release_reading(job, session->rank);
    table[request->type].handle(session, request);
    job_settle(job);
}
