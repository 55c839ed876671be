/* SPDX-License-Identifier: Apache-2.0 */

/* Decides which connection is closed when there is no place for another connection. */

#include "daemon/server/places.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/config/config.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"

enum standing { ANYBODY, ADMINISTRATOR, ROOT };

static enum standing standing_of(const struct service *service, const struct session *session)
{
    if (session->peer.uid == 0)
        return ROOT;
    return listener_is_admin(service->listener, &session->peer) ? ADMINISTRATOR : ANYBODY;
}

/* Return: the time at which the daemon began to wait for the peer, or UINT64_MAX if it does not wait for the peer. */
static uint64_t silent_since_ns(const struct session *session)
{
    if (session->state == SESSION_HELLO)
        return session->hello ? UINT64_MAX : session->accepted_ns;
    if (session->state != SESSION_CONTROL)
        return UINT64_MAX;
    switch (session->question.state) {
    case QUESTION_NONE:
        return session->quiet_ns;
    case QUESTION_BLOCKED: /* the peer does not read its answer */
        return session->question.blocked_ns;
    default:
        return UINT64_MAX;
    }
}

static uint64_t silence_ns(const struct session *session, uint64_t now_ns)
{
    uint64_t since_ns = silent_since_ns(session);

    return since_ns < now_ns ? now_ns - since_ns : 0;
}

void places_close_silent(struct service *service, uint64_t now_ns)
{
    uint64_t timeout_ns = service->config->limits.handshake_timeout_ms * UINT64_C(1000000);

    for (struct session *s = service->sessions; s; s = s->next)
        if (silence_ns(s, now_ns) > timeout_ns)
            session_doom(s);
}

uint64_t places_rest_ns(const struct service *service, uint64_t now_ns)
{
    uint64_t timeout_ns = service->config->limits.handshake_timeout_ms * UINT64_C(1000000), rest_ns = UINT64_MAX;

    for (const struct session *s = service->sessions; s; s = s->next) {
        uint64_t silent_ns = MIN(silence_ns(s, now_ns), timeout_ns);

        if (silent_since_ns(s) != UINT64_MAX)
            rest_ns = MIN(rest_ns, timeout_ns - silent_ns);
    }
    return rest_ns;
}

/*
 * Finds the connection to close for the newcomer, among the connections in one of the states: first the lowest
 * standing, then the longest silence. A connection of higher standing is never closed. A connection of the newcomer's
 * standing must have been silent for min_silence_ns. Return: the connection, or NULL if none may be closed.
 */
static struct session *find_lowest(struct service *service, const struct session *newcomer, unsigned states,
                                   uint64_t min_silence_ns)
{
    enum standing standing = standing_of(service, newcomer), lowest = ROOT;
    uint64_t now_ns = service_now_ns(), longest_ns = 0;
    struct session *found = NULL;

    for (struct session *s = service->sessions; s; s = s->next) {
        enum standing its = standing_of(service, s);
        uint64_t silent_ns = silence_ns(s, now_ns);

        if (s == newcomer || s->doomed || !(s->state & states) || its > standing)
            continue;
        if (its == standing && silent_ns < min_silence_ns)
            continue;
        if (found && (its > lowest || (its == lowest && silent_ns <= longest_ns)))
            continue;
        found = s;
        lowest = its;
        longest_ns = silent_ns;
    }
    return found;
}

static bool close_for(struct session *session)
{
    if (session)
        session_doom(session);
    return session != NULL;
}

bool places_take(struct service *service, struct session *session)
{
    uint64_t n_places = service->config->limits.clients;
    uint64_t n_taken = 0;

    assert(session->state == SESSION_HELLO);
    if (standing_of(service, session) > ANYBODY)
        n_places += PLACES_KEPT;
    for (const struct session *s = service->sessions; s; s = s->next)
        n_taken += s->state == SESSION_CONTROL && !s->doomed;
    return n_taken < n_places || close_for(find_lowest(service, session, SESSION_CONTROL, PLACES_SILENT_NS));
}

bool places_make_room(struct service *service, struct session *session, bool equals)
{
    unsigned states = equals ? SESSION_HELLO : SESSION_HELLO | SESSION_CONTROL;

    assert(session->state == SESSION_HELLO);
    return close_for(find_lowest(service, session, states, equals ? 0 : UINT64_MAX));
}
