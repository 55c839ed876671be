/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The companion process (companion.h). It shares the daemon's memory without being one of its threads, so it calls no
 * library functions, only system calls.
 */

#include "daemon/server/companion.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)

/* A build with ThreadSanitizer has no companion, because ThreadSanitizer needs data for each thread. */
int companion_start(void)
{
    return -ENOTSUP;
}

void companion_stop(int pid)
{
    (void)pid;
}

void companion_note_end(_Atomic(uint64_t) *place)
{
    (void)place;
}

#else

enum {
    STACK_BYTES = 16 * 1024,
    ROUND_US = 50,
    MAX_ROUNDS = 20000, /* rounds of ROUND_US: the start may take a second */
};

static _Alignas(64) uint8_t stack[STACK_BYTES];
static pid_t daemon_pid;
static struct pollfd end; /* pidfd of the daemon */
static atomic_int state;  /* state of the companion: 0 starting, 1 ready, -1 failed */
static _Atomic(_Atomic(uint64_t) *) end_place;

/*
 * Opens a pidfd of the daemon, which becomes readable when all of the daemon's threads have ended. PR_SET_PDEATHSIG
 * would be too early, because it signals the end of the main thread. A worker could then outlive the companion and
 * would have to free the address space.
 */
static bool watch_daemon(void)
{
    if (syscall(SYS_close_range, 0, ~0U, 0) < 0)
        return false;
    end = (struct pollfd){.fd = (int)syscall(SYS_pidfd_open, daemon_pid, 0), .events = POLLIN};
    return end.fd >= 0 && syscall(SYS_getppid) == daemon_pid; /* else the daemon has died, and its pid may be reused */
}

static void note_end(void)
{
    _Atomic(uint64_t) *place = atomic_load(&end_place);
    struct timespec now;

    if (place && syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now) == 0)
        atomic_store(place, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec);
}

/*
 * The main function of the companion. It uses the errno of the daemon's main thread, which waits until `state` is set.
 * Later calls of ppoll() do not set errno, because no signal interrupts them.
 */
static int run_companion(void *unused)
{
    (void)unused;
    syscall(SYS_prctl, PR_SET_NAME, "zerod-memory", 0, 0, 0);
    if (!watch_daemon()) {
        atomic_store(&state, -1);
        return 1;
    }
    atomic_store(&state, 1);
    syscall(SYS_ppoll, &end, 1, NULL, NULL, 0);
    note_end();
    return 0;
}

void companion_note_end(_Atomic(uint64_t) *place)
{
    atomic_store(&end_place, place);
}

int companion_start(void)
{
    sigset_t all, before;
    int pid, r;

    sigfillset(&all);
    daemon_pid = getpid();
    atomic_store(&state, 0);
    sigprocmask(SIG_SETMASK, &all, &before); /* the companion inherits the mask, and runs no handlers */
    pid = clone(run_companion, stack + sizeof(stack), CLONE_VM, NULL);
    r = pid < 0 ? -errno : pid;
    for (unsigned i = 0; pid > 0 && atomic_load(&state) == 0 && i < MAX_ROUNDS; i++)
        usleep(ROUND_US);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (pid > 0 && atomic_load(&state) != 1) {
        companion_stop(pid);
        return -ENOSYS;
    }
    return r;
}

void companion_stop(int pid)
{
    assert(pid > 0); /* kill() sends to a group of processes if pid <= 0 */
    (void)kill(pid, SIGKILL);
    while (waitpid(pid, NULL, __WCLONE) < 0 && errno == EINTR)
        ;
}

#endif
