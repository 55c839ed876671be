/* SPDX-License-Identifier: Apache-2.0 */

#include "daemon/server/dispatch.h"

#include <stdio.h>

#include "core/base/base.h"
#include "core/diagnosis/cause.h"
#include "daemon/job/attendance.h"
#include "daemon/job/form.h"
#include "daemon/job/init.h"
#include "daemon/job/job.h"
#include "daemon/job/model/fault.h"
#include "daemon/job/model/model.h"
#include "daemon/job/model/rank.h"
#include "daemon/job/report.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/read-state.h"
#include "daemon/job/state/window.h"
#include "daemon/job/transaction/abort.h"
#include "daemon/job/transaction/admit.h"
#include "daemon/job/transaction/boundary.h"
#include "daemon/server/admin.h"
#include "daemon/server/places.h"
#include "daemon/server/server.h"
#include "daemon/server/session.h"

static void refuse(struct session *session, const char *what)
{
    struct evidence_at at = {.rank = server_rank_number(session), .step = -1, .micro_batch = -1};

    session_refuse(session, server_keep(session, cause_bad_message(&at, what)));
}

/* ---- hello --------------------------------------------------------------------------------------------- */

static void welcome(struct session *session)
{
    const struct job *job = server_job(session->server);
    const struct config *config = job->config;
    static const enum wire_on_duplicate policies[] = {
        [CONFIG_DUPLICATE_REJECT] = WIRE_ON_DUPLICATE_REJECT,
        [CONFIG_DUPLICATE_ACCUMULATE] = WIRE_ON_DUPLICATE_ACCUMULATE,
        [CONFIG_DUPLICATE_ABORT_STEP] = WIRE_ON_DUPLICATE_ABORT_STEP,
    };

    session_send(
        session,
        &(struct reply){
            .type = REPLY_WELCOME,
            .welcome =
                {
                    .version = WIRE_VERSION,
                    .world_size = config->world.size,
                    .stage = (uint32_t)config->zero.stage,
                    .bucket_elems = config->zero.reduce_bucket_size,
                    .on_duplicate =
                        policies[session->rank ? session->rank->on_duplicate : config->diagnostics.on_duplicate],
                    .server = server_version(),
                    .private_weights = config->weights == CONFIG_WEIGHTS_PRIVATE,
                    .run_id = job->run.id,
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
                },
        },
        NULL, 0);
}

/* Trainers are never more than the ranks, for which limits.clients must leave room; so it counts the others. */
static void control(struct session *session)
{
    unsigned clients = server_config(session->server)->limits.clients;
    struct evidence_quota evidence = {.at = {.rank = -1, .step = -1, .micro_batch = -1},
                                      .what = "control connections (limits.clients)",
                                      .unit = "clients",
                                      .asked = 1,
                                      .held = clients,
                                      .allowed = clients,
                                      .fix = "raise limits.clients"};

    if (!places_take(session->server, session)) {
        session_refuse(session, server_keep(session, cause_quota(&evidence)));
        return;
    }
    session->quiet_ns = server_now_ns(session->server);
    session_set_state(session, SESSION_CONTROL);
    welcome(session);
}

static void attach(struct session *session, const struct request_hello *hello)
{
    struct diagnostic *refusal = NULL;

    if (job_attach(server_job(session->server),
                   &(struct job_attach){.peer = session,
                                        .hello = hello,
                                        .pid = session->peer.pid,
                                        .uid = session->peer.uid,
                                        .gid = session->peer.gid,
                                        .is_admin = server_is_admin(session->server, &session->peer)},
                   &session->rank, &refusal) != 0) {
        session_refuse(session, refusal);
        diagnostic_unref(refusal);
        return;
    }
    session_set_state(session, SESSION_ATTACHED);
    welcome(session);
}

static void on_hello(struct session *session, const struct request *request)
{
    const struct request_hello *hello = &request->hello;
    struct evidence_at at = {.rank = -1, .step = -1, .micro_batch = -1};
    char what[160];

    if (!server_allows(session->server, &session->peer)) {
        session_refuse(session, server_keep(session,
                                            cause_not_allowed(&at, session->peer.uid, session->peer.gid,
                                                              "connect (listen.allow_users, listen.allow_groups)")));
        return;
    }
    if (hello->version_min > WIRE_VERSION || hello->version_max < WIRE_VERSION) {
        snprintf(what, sizeof(what),
                 "Hello.version: the client speaks %u to %u, this daemon %u; install matching versions",
                 hello->version_min, hello->version_max, WIRE_VERSION);
        refuse(session, what);
        return;
    }
    if (hello->role == WIRE_ROLE_TRAINER) {
        attach(session, hello);
        return;
    }
    control(session);
}

/* ---- the job's verbs ----------------------------------------------------------------------------------- */

static void on_declare(struct session *s, const struct request *r)
{
    job_declare(server_job(s->server), s->rank, &r->declare);
}

static void on_form(struct session *s, const struct request *r)
{
    job_form(server_job(s->server), s->rank, &r->form);
}

static void on_init(struct session *s, const struct request *r)
{
    job_init(server_job(s->server), s->rank, &r->init);
}

static void on_ready(struct session *s, const struct request *r)
{
    (void)r;
    job_ready(server_job(s->server), s->rank);
}

static void on_begin_backward(struct session *s, const struct request *r)
{
    job_begin_backward(server_job(s->server), s->rank, &r->begin_backward);
}

static void on_intern(struct session *s, const struct request *r)
{
    job_intern(server_job(s->server), s->rank, &r->intern);
}

static void on_push(struct session *s, const struct request *r)
{
    job_push(server_job(s->server), s->rank, &r->push);
}

static void on_event(struct session *s, const struct request *r)
{
    job_event(server_job(s->server), s->rank, &r->event);
}

static void on_slot_request(struct session *s, const struct request *r)
{
    job_slot_request(server_job(s->server), s->rank, &r->slot_request);
}

static void on_end_backward(struct session *s, const struct request *r)
{
    job_end_backward(server_job(s->server), s->rank, &r->end_backward);
}

static void on_abandon_backward(struct session *s, const struct request *r)
{
    job_abandon_backward(server_job(s->server), s->rank, &r->abandon_backward);
}

static void on_step(struct session *s, const struct request *r)
{
    job_step(server_job(s->server), s->rank, &r->step);
}

static void on_grad_norm(struct session *s, const struct request *r)
{
    (void)r;
    job_grad_norm(server_job(s->server), s->rank);
}

static void on_gather(struct session *s, const struct request *r)
{
    job_gather(server_job(s->server), s->rank, &r->gather);
}

static void on_release(struct session *s, const struct request *r)
{
    job_release(server_job(s->server), s->rank, &r->release);
}

static void on_prefetch(struct session *s, const struct request *r)
{
    job_prefetch(server_job(s->server), s->rank, &r->prefetch);
}

static void on_write_begin(struct session *s, const struct request *r)
{
    (void)r;
    job_write_begin(server_job(s->server), s->rank);
}

static void on_write_end(struct session *s, const struct request *r)
{
    job_write_end(server_job(s->server), s->rank, r->write_end.forget);
}

static void on_read_state(struct session *s, const struct request *r)
{
    job_read_state(server_job(s->server), s->rank, &r->read_state);
}

static void on_write_state(struct session *s, const struct request *r)
{
    job_write_state(server_job(s->server), s->rank, &r->write_state);
}

static void on_abort_step(struct session *s, const struct request *r)
{
    job_abort_step(server_job(s->server), s->rank, r->abort_step.why);
}

static void on_abort_seen(struct session *s, const struct request *r)
{
    job_abort_seen(server_job(s->server), s->rank, r->abort_seen.attempt);
}

static void on_clear_fault(struct session *s, const struct request *r)
{
    (void)r;
    job_clear_fault(server_job(s->server), s->rank);
}

static void on_report(struct session *s, const struct request *r)
{
    job_report(server_job(s->server), s->rank, &r->report);
}

static void on_evidence(struct session *s, const struct request *r)
{
    job_evidence(server_job(s->server), s->rank, &r->evidence);
}

static void on_leave(struct session *s, const struct request *r)
{
    (void)r;
    session_set_state(s, SESSION_LEFT);
    job_leave(server_job(s->server), s->rank);
}

static void on_admin(struct session *s, const struct request *r)
{
    admin_request(s, &r->admin);
}

/* ---- the table ----------------------------------------------------------------------------------------- */

enum { RANK = SESSION_ATTACHED | SESSION_FORMED };

static const struct {
    unsigned states; /* in which it is allowed */
    void (*handle)(struct session *session, const struct request *request);
} table[N_REQUEST_TYPES] = {
    [REQUEST_HELLO] = {SESSION_HELLO, on_hello},
    [REQUEST_DECLARE] = {SESSION_ATTACHED, on_declare},
    [REQUEST_FORM] = {SESSION_ATTACHED, on_form},
    [REQUEST_INIT] = {SESSION_FORMED, on_init},
    [REQUEST_READY] = {SESSION_FORMED, on_ready},
    [REQUEST_BEGIN_BACKWARD] = {SESSION_FORMED, on_begin_backward},
    [REQUEST_INTERN] = {RANK, on_intern},
    [REQUEST_PUSH] = {SESSION_FORMED, on_push},
    [REQUEST_SLOT_REQUEST] = {SESSION_FORMED, on_slot_request},
    [REQUEST_END_BACKWARD] = {SESSION_FORMED, on_end_backward},
    [REQUEST_ABANDON_BACKWARD] = {SESSION_FORMED, on_abandon_backward},
    [REQUEST_STEP] = {SESSION_FORMED, on_step},
    [REQUEST_GRAD_NORM] = {SESSION_FORMED, on_grad_norm},
    [REQUEST_GATHER] = {SESSION_FORMED, on_gather},
    [REQUEST_RELEASE] = {SESSION_FORMED, on_release},
    [REQUEST_WRITE_BEGIN] = {SESSION_FORMED, on_write_begin},
    [REQUEST_WRITE_END] = {SESSION_FORMED, on_write_end},
    [REQUEST_READ_STATE] = {SESSION_FORMED, on_read_state},
    [REQUEST_ABORT_STEP] = {SESSION_FORMED, on_abort_step},
    [REQUEST_ABORT_SEEN] = {SESSION_FORMED, on_abort_seen},
    [REQUEST_CLEAR_FAULT] = {RANK, on_clear_fault},
    [REQUEST_REPORT] = {RANK, on_report},
    [REQUEST_EVIDENCE] = {SESSION_FORMED, on_evidence},
    [REQUEST_LEAVE] = {RANK, on_leave},
    [REQUEST_ADMIN] = {SESSION_CONTROL, on_admin},
    [REQUEST_WRITE_STATE] = {SESSION_FORMED, on_write_state},
    [REQUEST_PREFETCH] = {SESSION_FORMED, on_prefetch},
    [REQUEST_EVENT] = {SESSION_FORMED, on_event},
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
    default:
        return "after Leave";
    }
}

void dispatch_request(struct session *session, const struct request *request)
{
    struct job *job = server_job(session->server);
    char what[128];

    if (session->rank) {
        session->rank->last_ns = server_now_ns(session->server);
        session->rank->last_request = request_type_name(request->type);
        /* Formed was answered: from here on it is a rank that takes part. */
        if (session->state == SESSION_ATTACHED && session->rank->formed)
            session_set_state(session, SESSION_FORMED);
    }
    if (!(table[request->type].states & session->state)) {
        snprintf(what, sizeof(what), "%s is not allowed %s", request_type_name(request->type),
                 state_word(session->state));
        refuse(session, what);
        return;
    }
    if (session->rank && session->rank->wait != WAIT_NONE) {
        snprintf(what, sizeof(what), "%s while the last request has not been answered",
                 request_type_name(request->type));
        job_drop_peer(job, session->rank, what);
        return;
    }
    /* A rank that sends another request has read the state that it asked for. */
    if (session->rank && request->type != REQUEST_READ_STATE)
        job_release_reading(job, session->rank);
    table[request->type].handle(session, request);
    job_settle(job);
}
