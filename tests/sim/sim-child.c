/* SPDX-License-Identifier: Apache-2.0 */

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "sim-child.h"

/* ---- children ------------------------------------------------------------------------------------------- */

static _Noreturn void run_child(const char *env, void (*body)(void *arg), void *arg, int error_fd)
{
    dup2(error_fd, STDERR_FILENO);
    close(error_fd);
    signal(SIGABRT, SIG_DFL); /* so that cmocka's handler does not see the child's abort */
    signal(SIGSEGV, SIG_DFL);
    setenv("ZEROD_SIM", env, 1);
    body(arg);
    exit(0); /* not _exit(), because sanitizers look for leaks at exit */
}

/* Return: the child's status, as of waitpid(). */
static int run(const char *env, void (*body)(void *arg), void *arg, char *text, size_t n_text)
{
    int fds[2], status;
    size_t n = 0;
    ssize_t here;
    pid_t pid;

    assert_int_equal(pipe(fds), 0);
    fflush(NULL); /* the child must not write cmocka's buffered output again */
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        run_child(env, body, arg, fds[1]);
    }
    close(fds[1]);
    while (n < n_text - 1 && (here = read(fds[0], text + n, n_text - 1 - n)) > 0)
        n += here;
    text[n] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

void child_passes(const char *env, void (*body)(void *arg), void *arg)
{
    char text[4096];
    int status = run(env, body, arg, text, sizeof(text));

    assert_string_equal(text, "");
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

void child_dies(const char *env, void (*body)(void *arg), void *arg, const char *sentence)
{
    char text[4096], expected[512];
    int status = run(env, body, arg, text, sizeof(text));

    snprintf(expected, sizeof(expected), "sim: %s\n", sentence);
    assert_string_equal(text, expected);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
}

void child_is_killed(const char *env, void (*body)(void *arg), void *arg, int signal)
{
    char text[4096];
    int status = run(env, body, arg, text, sizeof(text));

    assert_string_equal(text, "");
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), signal);
}

void sleep_ms(unsigned ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

/* ---- for bodies ----------------------------------------------------------------------------------------- */

struct CUstream_st *new_stream(int device)
{
    cudaStream_t stream;

    CHECK(cudaSetDevice(device) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    return stream;
}

struct CUevent_st *new_event(int device, unsigned flags)
{
    cudaEvent_t event;

    CHECK(cudaSetDevice(device) == cudaSuccess);
    CHECK(cudaEventCreateWithFlags(&event, flags) == cudaSuccess);
    return event;
}

void *new_memory(int device, size_t n_bytes)
{
    void *memory;

    CHECK(cudaSetDevice(device) == cudaSuccess);
    CHECK(cudaMalloc(&memory, n_bytes) == cudaSuccess);
    return memory;
}

void *new_host(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED);
    CHECK(cudaHostRegister(memory, n_bytes, cudaHostRegisterPortable) == cudaSuccess);
    return memory;
}

void put(void *device_memory, const void *from, size_t n_bytes, struct CUstream_st *stream)
{
    void *host = new_host(n_bytes);

    memcpy(host, from, n_bytes);
    CHECK(cudaMemcpyAsync(device_memory, host, n_bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaHostUnregister(host) == cudaSuccess);
    munmap(host, n_bytes);
}

void get(void *to, const void *device_memory, size_t n_bytes, struct CUstream_st *stream)
{
    void *host = new_host(n_bytes);

    CHECK(cudaMemcpyAsync(host, device_memory, n_bytes, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    memcpy(to, host, n_bytes);
    CHECK(cudaHostUnregister(host) == cudaSuccess);
    munmap(host, n_bytes);
}

uint32_t poison_at(const void *at)
{
    unsigned shift = ((uintptr_t)at & 3) * 8;

    return shift ? SIM_POISON >> shift | SIM_POISON << (32 - shift) : SIM_POISON;
}
