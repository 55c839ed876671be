/* SPDX-License-Identifier: Apache-2.0 */

/* Failpoints: parses the environment variable once, and counts passes. */

#include "core/base/failpoint.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/base/base.h"

enum { MAX_POINTS = 32, MAX_NAME = 48, DEFAULT_SLEEP_MS = 100 };

enum action { ACTION_KILL, ACTION_STOP, ACTION_SLEEP, ACTION_ERROR, ACTION_FUSE };

struct point {
    char name[MAX_NAME];
    enum action action;
    unsigned long time; /* ACTION_SLEEP: ms; ACTION_FUSE: ns */
    unsigned long pass; /* number of the pass, from 1; 0: every pass */
    atomic_ulong n_passed;
};

/* Global, because the environment is global. They exist only in test builds, and are written once. */
static struct point points[MAX_POINTS];
static size_t n_points;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Return: true when all of text is a number. */
static bool parse_number(const char *text, unsigned long *n)
{
    char *end;

    errno = 0;
    *n = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && errno == 0;
}

static bool parse_action(struct point *point, char *text)
{
    static const char *const words[] = {
        [ACTION_KILL] = "kill",   [ACTION_STOP] = "stop", [ACTION_SLEEP] = "sleep",
        [ACTION_ERROR] = "error", [ACTION_FUSE] = "fuse",
    };
    char *time = strchr(text, ':');

    if (time)
        *time++ = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        if (strcmp(text, words[i]) != 0)
            continue;
        point->action = (enum action)i;
        point->time = DEFAULT_SLEEP_MS;
        if (point->action == ACTION_FUSE)
            return time && parse_number(time, &point->time);
        return !time || (point->action == ACTION_SLEEP && parse_number(time, &point->time));
    }
    return false;
}

/* Parses name:action[:time][@pass]. */
static bool parse_point(struct point *point, char *text)
{
    char *action = strchr(text, ':'), *pass = strchr(text, '@');

    if (!action || action == text || action - text >= MAX_NAME || (pass && pass < action))
        return false;
    *action++ = '\0';
    if (pass)
        *pass++ = '\0';
    strcpy(point->name, text);
    point->pass = 1;
    if (pass && strcmp(pass, "*") == 0)
        point->pass = 0;
    else if (pass && (!parse_number(pass, &point->pass) || point->pass == 0))
        return false;
    return parse_action(point, action);
}

static void parse_variable(void)
{
    const char *variable = getenv("ZEROD_FAILPOINT");
    _cleanup_free_ char *text = variable ? strdup(variable) : NULL;
    char *rest = NULL;

    for (char *item = text ? strtok_r(text, ",", &rest) : NULL; item; item = strtok_r(NULL, ",", &rest)) {
        if (n_points < MAX_POINTS && parse_point(&points[n_points], item)) {
            n_points++;
            continue;
        }
        fprintf(stderr, "ZEROD_FAILPOINT=%s: \"%s\" is not name:kill|stop|sleep[:ms]|error|fuse:ns[@pass|@*]\n",
                variable, item);
        abort();
    }
}

static void sleep_ms(unsigned long ms)
{
    struct timespec left = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};

    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

/* Kills the process ns nanoseconds later, in the middle of what the caller does then. */
static void burn(unsigned long ns)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    const struct itimerspec at = {
        .it_value = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000) + 1}};
    timer_t timer;

    if (timer_create(CLOCK_MONOTONIC, &event, &timer) < 0 || timer_settime(timer, 0, &at, NULL) < 0)
        (void)kill(getpid(), SIGKILL);
}

static int act(const struct point *point)
{
    switch (point->action) {
    case ACTION_KILL:
        (void)kill(getpid(), SIGKILL);
        for (;;)
            pause(); /* the caller executes nothing more */
    case ACTION_STOP:
        (void)kill(getpid(), SIGSTOP);
        return 0;
    case ACTION_SLEEP:
        sleep_ms(point->time);
        return 0;
    case ACTION_FUSE:
        burn(point->time);
        return 0;
    case ACTION_ERROR:
        return -ENOMEM;
    }
    return 0;
}

int failpoint(const char *name)
{
    int r = 0;

    pthread_once(&once, parse_variable);
    for (size_t i = 0; i < n_points; i++) {
        struct point *point = &points[i];

        if (strcmp(point->name, name) != 0)
            continue;
        /* Each entry counts every pass, even if an earlier entry of the same name has returned an error. */
        if (atomic_fetch_add(&point->n_passed, 1) + 1 == point->pass || point->pass == 0)
            r = MIN(r, act(point));
    }
    return r;
}

int failpoint_at(const char *request, const char *where)
{
    char name[MAX_NAME];

    snprintf(name, sizeof(name), "%s.%s", request, where);
    return failpoint(name);
}
