/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Shared by the files of bench-gpu. The program measures the kernels on a GPU, and tests zerod's assumptions about GPU
 * memory that several processes share. Each measurement or test is a command with its own process, because after some
 * errors a process can no longer use the GPU.
 *
 * No error can be handled: gpu_fail() prints the error and exits with status 1.
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
double gpu_median(double *values, size_t n); /* sorts the values; n > 0 */

/* ---- the GPU -------------------------------------------------------------------------------------------- */

/* Makes the first visible GPU the current one. */
void gpu_open(void);
/* Return: the driver's function of that name, or NULL if the driver does not have it. */
void *gpu_find(const char *name);
cudaStream_t gpu_stream(void); /* Return: a new stream */
void gpu_finish(cudaStream_t stream);

void *gpu_alloc(size_t n_bytes);      /* device memory, private to this process */
void *gpu_alloc_host(size_t n_bytes); /* registered host memory */
void *gpu_upload(const void *host, size_t n_bytes, cudaStream_t stream);

/* ---- memory with a descriptor; it exists while a descriptor or a mapping exists -------------------------- */

struct gpu_piece {
    uint8_t *at; /* device address */
    size_t n_bytes;
};

size_t gpu_round(size_t n_bytes); /* Return: n_bytes rounded up to a size that pieces can have */
/* n_bytes: from gpu_round(). Return: the descriptor, which the caller owns. The memory is not mapped yet. */
int gpu_piece_make(size_t n_bytes);
struct gpu_piece gpu_piece_map(int fd, size_t n_bytes); /* the caller keeps the descriptor */
void gpu_piece_unmap(struct gpu_piece *piece);

/* ---- other processes ------------------------------------------------------------------------------------ */

/* A process that runs another command of this program. It ends with its parent. Its standard input is a socket. */
struct gpu_child {
    pid_t pid;
    int fd;
    struct frame_buffer heard;
};

/* argv: the arguments from the command on, ended by NULL. host: the child's NCCL_HOSTID, or NULL. */
void gpu_child_start(struct gpu_child *child, const char *const *argv, const char *host);
int gpu_child_wait(struct gpu_child *child);  /* Return: the status of waitpid() */
void gpu_child_kill(struct gpu_child *child); /* waits for the end, too; fails if the child has already ended */

/* Sends one message of at least one byte. fd: a descriptor to send with the message, or -1. */
void gpu_say(int socket, const void *bytes, size_t n_bytes, int fd);
/* Waits for the next message. Return: the message, valid until the next call. */
const struct frame_buffer *gpu_hear(int socket, struct frame_buffer *heard);

/* ---- commands ------------------------------------------------------------------------------------------- */

struct gpu_options {
    uint64_t n_elems;  /* elements of all parameters; a multiple of n_params x 64 */
    unsigned n_params; /* all parameters have equal sizes */
    size_t n_bytes;    /* bytes of the memory that processes share */
};

/* Reads kernels' names from standard input, one per line, and prints a line of JSON for each. */
void gpu_kernels(const struct gpu_options *options);

/* These commands print a line for each result: its name, a tab, its value. */
void gpu_handles(const struct gpu_options *options);
void gpu_handles_legacy(const struct gpu_options *options);
void gpu_killed(const struct gpu_options *options);
void gpu_killed_legacy(const struct gpu_options *options);
void gpu_updates(const struct gpu_options *options);
void gpu_slices(const struct gpu_options *options);
void gpu_ranks(const struct gpu_options *options);

/* These commands are the child processes of the commands above. */
void gpu_owner(const struct gpu_options *options);
void gpu_owner_legacy(const struct gpu_options *options);
void gpu_copier(const struct gpu_options *options);
void gpu_updater(const struct gpu_options *options);
void gpu_rank(const struct gpu_options *options);
