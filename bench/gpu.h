/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Shared by the files of bench-gpu. The program measures the kernels on a GPU, and tests zerod's assumptions about
 * memory that several processes share there. Each question is a command in a process of its own, because an answer may
 * be an error after which this process cannot use the GPU any more.
 *
 * Errors: the program cannot continue after any. gpu_fail() prints the error and exits with status 1.
 */

#include "core/wire/frame.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

_Noreturn void gpu_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gpu_check(cudaError_t r, const char *call);
void gpu_check_driver(CUresult r, const char *call);

uint64_t gpu_now_ns(void);
double gpu_median(double *values, size_t n); /* sorts them; n > 0 */

/* ---- the GPU -------------------------------------------------------------------------------------------- */

/* The first visible one becomes current. */
void gpu_open(void);
/* The driver's function of that name; NULL: it has none. */
void *gpu_find(const char *name);
cudaStream_t gpu_stream(void); /* a new one */
void gpu_finish(cudaStream_t stream);

void *gpu_alloc(size_t n_bytes);      /* on the device, of this process alone */
void *gpu_alloc_host(size_t n_bytes); /* registered */
void *gpu_upload(const void *host, size_t n_bytes, cudaStream_t stream);

/* ---- memory with a descriptor: it is there as long as somebody holds that, or maps it -------------------- */

struct gpu_piece {
    uint8_t *at; /* on the device */
    size_t n_bytes;
};

size_t gpu_round(size_t n_bytes); /* up to what pieces are multiples of */
/* n_bytes: gpu_round()'s. Return: the descriptor, the caller's; nothing maps it yet. */
int gpu_piece_make(size_t n_bytes);
struct gpu_piece gpu_piece_map(int fd, size_t n_bytes); /* does not take the descriptor */
void gpu_piece_unmap(struct gpu_piece *piece);

/* ---- other processes ------------------------------------------------------------------------------------ */

/* This program again, with another command; it ends with its parent. Its standard input is a socket. */
struct gpu_child {
    pid_t pid;
    int fd;
    struct frame_buffer heard;
};

/* argv: from the command on, ended by NULL. host: its NCCL_HOSTID, or NULL. */
void gpu_child_start(struct gpu_child *child, const char *const *argv, const char *host);
int gpu_child_wait(struct gpu_child *child);  /* until it has ended. Return: its status, as of waitpid() */
void gpu_child_kill(struct gpu_child *child); /* likewise; fails if it has ended before */

/* One message, of at least one byte; fd: -1, or a descriptor that goes with it. */
void gpu_say(int socket, const void *bytes, size_t n_bytes, int fd);
/* Waits for the next one. Return: it, until the next is heard. */
const struct frame_buffer *gpu_hear(int socket, struct frame_buffer *heard);

/* ---- commands ------------------------------------------------------------------------------------------- */

struct gpu_options {
    uint64_t n_elems;  /* of all parameters; a multiple of n_params x 64 */
    unsigned n_params; /* of one size */
    size_t n_bytes;    /* of memory that processes share */
};

/* Answers each line of standard input, a kernel's name, with a line of JSON. */
void gpu_kernels(const struct gpu_options *options);

/* These print a line for each answer: what it is, a tab, the answer. */
void gpu_handles(const struct gpu_options *options);
void gpu_handles_legacy(const struct gpu_options *options);
void gpu_killed(const struct gpu_options *options);
void gpu_killed_legacy(const struct gpu_options *options);
void gpu_updates(const struct gpu_options *options);
void gpu_slices(const struct gpu_options *options);
void gpu_ranks(const struct gpu_options *options);

/* The work of their child processes. */
void gpu_owner(const struct gpu_options *options);
void gpu_owner_legacy(const struct gpu_options *options);
void gpu_copier(const struct gpu_options *options);
void gpu_updater(const struct gpu_options *options);
void gpu_rank(const struct gpu_options *options);
