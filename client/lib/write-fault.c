/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The handler of SIGSEGV. The first write to published weights makes them private to the process (written.c), and the
 * program continues. A program that reads released weights, or writes to gathered ones, ends with SIGSEGV as without
 * this handler, but a text on stderr names the parameter. The handler is async-signal-safe, because it only reads
 * memory that does not change.
 */

#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <ucontext.h>

#include "client/lib/write-fault.h"
#include "client/lib/handle.h"
#include "client/lib/api-weights.h"
#include "client/lib/written.h"
#include "core/base/base.h"
#include "core/diagnosis/cause.h"

enum { MAX_WATCHED = 64, MAX_FRAMES = 12 };

struct watched {
    _Atomic(struct zerod *) client; /* NULL: the entry is free */
    const uint8_t *base;
    size_t n_bytes;
};

/* All handles share these, because the process has one SIGSEGV handler. */
static struct watched watched[MAX_WATCHED];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static bool installed;

static void write_stderr(const char *text)
{
    (void)!write(STDERR_FILENO, text, strlen(text));
}

static void say_name(const struct layout_param *param)
{
    for (size_t i = 0; i < param->name_len; i++) {
        char c = param->name[i];

        (void)!write(STDERR_FILENO, c >= ' ' && c <= '~' ? &c : "?", 1);
    }
}

/* Writes a number to stderr, because a handler must not call printf(). */
static void say_number(uint64_t number)
{
    char digits[20];
    size_t i = sizeof(digits);

    do
        digits[--i] = (char)('0' + number % 10);
    while (number /= 10);
    (void)!write(STDERR_FILENO, digits + i, sizeof(digits) - i);
}

static const struct layout_param *find_param(const struct zerod *c, uint64_t offset)
{
    for (uint32_t p = 0; p < c->layout->n_params; p++) {
        const struct layout_param *param = &c->layout->params[p];
        uint64_t start = weights_offset(c, p);

        if (offset >= start && offset < start + param->n_elems * dtype_size(param->dtype))
            return param;
    }
    return NULL;
}

/* Writes the text that the daemon has for this fault, because the process ends too soon to ask the daemon. */
static void say_text(const struct report_text *text, size_t language)
{
    write_stderr("\n  cause          ");
    write_stderr(text->cause);
    write_stderr("\n  fix            ");
    write_stderr(text->fix[language]);
    if (text->alternative[language]) {
        write_stderr("\n  or             ");
        write_stderr(text->alternative[language]);
    }
    write_stderr("\n  does not help  ");
    write_stderr(text->does_not_help);
    write_stderr("\n  state          ");
    write_stderr(text->state_at_end ? text->state_at_end : text->state);
}

static void explain_fault(const struct zerod *c, uint64_t offset)
{
    bool released = weights_is_stage3(c);
    const struct layout_param *param = find_param(c, offset);
    void *frames[MAX_FRAMES];

    if (released && param && c->gathered[param - c->layout->params] > 0)
        released = false; /* the parameter is readable, so this was a write */
    write_stderr(released ? "E1110 read of a released weight: rank " : "E1106 write to published weights: rank ");
    say_number(c->rank);
    write_stderr(", step ");
    say_number(c->position.step);
    write_stderr("\n  parameter      ");
    if (param) {
        say_name(param);
        write_stderr(released ? "\n  got            access to its byte " : "\n  got            write to its byte ");
        say_number(offset - weights_offset(c, (uint32_t)(param - c->layout->params)));
    } else {
        write_stderr("(padding between parameters)");
    }
    say_text(cause_report_text(released ? E_RELEASED_READ : E_WEIGHT_WRITTEN), c->is_torch ? 1 : 0);
    write_stderr("\n  call site\n");
    backtrace_symbols_fd(frames, backtrace(frames, MAX_FRAMES), STDERR_FILENO);
}

/* Return: true if the fault is a jump into the weights, which would fail even if they were writable. */
static bool is_jump(const siginfo_t *info, const void *context)
{
#if defined(__x86_64__)
    return (uintptr_t)((const ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] == (uintptr_t)info->si_addr;
#elif defined(__aarch64__)
    return (uintptr_t)((const ucontext_t *)context)->uc_mcontext.pc == (uintptr_t)info->si_addr;
#else
    (void)info;
    (void)context;
    return false;
#endif
}

static void on_sigsegv(int number, siginfo_t *info, void *context)
{
    const uint8_t *address = info->si_addr;
    int saved = errno;

    (void)number;
    for (size_t i = 0; i < MAX_WATCHED; i++) {
        struct zerod *c = atomic_load(&watched[i].client);

        if (!c || info->si_code <= 0 || address < watched[i].base || address >= watched[i].base + watched[i].n_bytes)
            continue;
        if (!is_jump(info, context) && written_begin(c)) {
            errno = saved;
            return; /* the program repeats the write, which succeeds */
        }
        explain_fault(c, (uint64_t)(address - watched[i].base));
        break;
    }
    /* When this handler returns, the faulting instruction runs again and faults into the previous handler. */
    sigaction(SIGSEGV, &previous, NULL);
    if (info->si_code <= 0) /* kill() has sent the signal, so no instruction faults again */
        (void)raise(SIGSEGV);
}

static void install(void)
{
    struct sigaction action = {.sa_sigaction = on_sigsegv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    void *frame[1];

    (void)backtrace(frame, 1); /* the first call of backtrace() loads a library, which a handler must not */
    installed = sigaction(SIGSEGV, &action, &previous) == 0;
}

void fault_register(struct zerod *c, const uint8_t *base, size_t n_bytes)
{
    pthread_mutex_lock(&lock);
    if (!installed)
        install();
    for (size_t i = 0; i < MAX_WATCHED; i++) {
        if (atomic_load(&watched[i].client))
            continue;
        watched[i].base = base;
        watched[i].n_bytes = n_bytes;
        atomic_store(&watched[i].client, c);
        break;
    }
    pthread_mutex_unlock(&lock);
}

void fault_unregister(const struct zerod *c)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_WATCHED; i++)
        if (atomic_load(&watched[i].client) == c)
            atomic_store(&watched[i].client, NULL);
    pthread_mutex_unlock(&lock);
}
