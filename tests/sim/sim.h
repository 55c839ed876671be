/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stand-ins for libcudart, the driver's virtual memory calls and NCCL, for machines without a GPU: the library libsim
 * behind tests/sim/include. A program uses them like the real ones, but they work on host memory and threads. They show
 * no speed and prove nothing about a GPU; their purpose is to find wrong uses of an asynchronous machine, and to fail
 * where a test wants it.
 *
 * Devices. Each device has one thread. It takes streams as it likes (seeded), each in its order, and lets some time
 * pass between the start and the end of an operation. An operation that waits (for an event, for other ranks) does not
 * hold up other streams. Device memory cannot be touched by host code where the processor has protection keys: that is
 * a SIGSEGV, as on a GPU. Fresh device memory is full of signalling NaNs (SIM_POISON).
 *
 * While an operation is under way, the memory that it writes reads as SIM_POISON, and no other operation may write it;
 * the memory that it reads must be the same at its end as at its start. The stand-ins do not know the memory of a
 * kernel: it runs at once at the end of its time, and other unfinished operations notice its changes to their memory.
 *
 * Wrong uses end the process (abort) with one line on standard error: "sim: ", the entry point, what was wrong. Among
 * them are some that CUDA allows but an engine that never blocks must not do:
 *   - host memory in a copy that is not registered (CUDA would stage it and wait);
 *   - a kernel that is launched and was not loaded to the device: CUDA would load it, and may wait for the device;
 *   - CUDA_LAUNCH_BLOCKING in the environment;
 *   - the default stream; streams and events after their end; an event recorded on a stream of another device; a kernel
 *     on a stream that is not of the current device;
 *   - device or registered memory that is too small for the operation, of the wrong kind, of another device without
 *     access, or that goes (cudaFree, cuMemUnmap, cudaHostUnregister) while an operation uses it;
 *   - a communicator after abort or destroy, or while its last call is in progress;
 *   - a stream that gets work after a group of a non-blocking communicator and before ncclCommGetAsyncError() has
 *     returned ncclSuccess (until then NCCL has not put the group on the stream: later work would run before it);
 *   - ranks whose calls differ (kind, count, datatype, order), collectives of several local ranks outside of one
 *     group, buffers that overlap where they must not.
 * Where CUDA or NCCL itself returns an error, the stand-in returns the same error.
 *
 * cuMemcpyHtoD() returns before the device has the bytes, as it does with memory that is not registered: only streams
 * that wait for the default stream find them.
 *
 * Device memory of the virtual memory kind is a memfd, so it crosses processes and outlives them, as its real twin
 * does. What a process that dies had put on streams is never done. There are no events between processes.
 *
 * NCCL. Ranks talk through sockets in the file system, in a directory that ncclGetUniqueId() makes under $TMPDIR, named
 * in the id; it is removed when all ranks are connected. Reduce-scatter adds in the order of a ring, so its bits are
 * not those of the fixed tree. If a rank of another process dies, others get ncclRemoteError, as over the network; if
 * one of this process aborts, no rank is told, as over peer-to-peer memory. ncclSend() ends when the other side has
 * received.
 *
 * cuBLAS is a shared library, libcublas.so.13 (cublas.c), because the engine opens it at run time. Its products are
 * operations of their own kind: their memory is known, as a copy's is, and their sums are in double. Also wrong uses:
 *   - a product without a stream, without a workspace of at least 16 KiB, or in another math mode than
 *     CUBLAS_PEDANTIC_MATH; cublasSetStream() takes the workspace away, as cuBLAS does;
 *   - a handle after its end, or with a stream or a current device that is not of its device;
 *   - a leading dimension that is too small, a result that overlaps an operand, host memory;
 *   - never-blocks: cublasCreate() and cublasDestroy() while work is on any stream.
 *
 * The environment, read at the first call:
 *
 *     ZEROD_SIM=item[,item...]
 *
 *     devices=N       visible devices, 4 unless told
 *     memory=MIB      memory of each device, 1024 unless told
 *     machine=NAME    all processes with that name share the devices' memory, and so do descriptors that any process
 *                     holds of it; else each process has devices of its own
 *     seed=N          of the order of streams and of delays; 1 unless told
 *     delay-us=N      an operation takes up to so long, 200 unless told
 *     peers=0         no device can be given access to another's memory; else all can
 *     values=0        streams cannot write 64-bit values
 *     compute-mode=N  of all devices (0): 2 is PROHIBITED, 3 EXCLUSIVE_PROCESS; but processes do not exclude each other
 *     mps=1           all processes are clients of MPS, as far as they ask
 *     driver=N, runtime=N, nccl=N    what the version calls answer (13000, 13000, 22809)
 *     open            host code may touch device memory: for a program that computes on the host with what lies there
 *     silent          a peer's death is never reported, as over peer-to-peer memory
 *     never-blocks    wrong uses are also: waiting for a stream or event, and, while work is on any stream, to
 * allocate, free, map, unmap or register memory, for which CUDA may wait until the device is idle
 *
 *     ENTRY:error=NAME[@n]   the call returns it: cudaErrorX, CUDA_ERROR_X, ncclX, or CUBLAS_STATUS_X
 *     ENTRY:async=NAME[@n]   of cudaMemcpyAsync, cudaMemsetAsync, sim_launch, and of cublasSgemm_v2 with a cudaErrorX:
 *                            the operation fails when it runs, and the error sticks to the process, as after a kernel's
 *                            wild pointer; of the collectives, ncclSend, ncclRecv and ncclCommInitRankConfig: the
 *                            communicator's asynchronous error
 *     ENTRY:hang[@n]         the operation that the call starts never ends; if it starts none, the call never returns
 *     ENTRY:delay=MS[@n]     the operation, or the call if it starts none, takes so much longer
 *     ENTRY:kill[@n]         SIGKILL at the call
 *     sim_launch:die=TURNS[@n]   SIGKILL in the midst of the kernel, when its threads have had so many turns
 *
 * ENTRY is an entry point's name, sim_launch or sim_load; n counts the process's calls of it from 1, or is * for every
 * one; 1 unless told. An item that is not understood ends the process: a test that injects nothing must not pass.
 *
 * More lenient than the libraries, and why:
 *   - Which memory a kernel uses is known only when it runs, so nothing checks what its device may access, but for
 *     memory that no device may access at all. Kernels run one thread after the other: races in shared memory are for
 *     compute-sanitizer on a GPU.
 *   - All devices can use the memory of cudaMalloc(), because NCCL enables that for its own, and no other is shared.
 *   - Two processes that allocate at one moment may both get the last memory of a machine.
 *   - MPS and EXCLUSIVE_PROCESS are answers and no behaviour. Neither users nor namespaces keep processes apart: what
 *     processes share are descriptors, which only a socket hands over.
 *   - Registered memory has the host's address on devices, as with CUDA where all devices can use that.
 *   - cuBLAS may wait for the device when it loads the code of a product; no call of the stand-in's does.
 *   - Set-up calls take no longer beside a busy device; never-blocks says instead that they must not come there.
 *
 * Any thread. After fork() a child of a process that has used the stand-ins gets cudaErrorInitializationError.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* A signalling NaN as fp32; each of its halves is a NaN as fp16 and a signalling one as bf16. */
#define SIM_POISON UINT32_C(0x7fa7ffa7)

/*
 * Puts a kernel on a stream: run(args) on the device's thread, when the stream is there, then free_args(args), which
 * may be NULL. free_args() runs once in every case, also when the launch fails or the device is lost before. Return: 0,
 * or what CUDA would say (enum cudaError).
 */
int sim_launch(struct CUstream_st *stream, void (*run)(void *args), void (*free_args)(void *args), void *args);

/* How many more turns the threads of a running kernel get before it must call sim_stop(); 0: any number. */
extern __thread uint64_t sim_turns;
/* The process dies in the midst of a kernel, as ZEROD_SIM wants it. */
void sim_stop(void);

/* Loads a kernel to the current device. Return: as sim_launch(). */
int sim_load(const void *kernel);
/* Dies unless the kernel is loaded to the current device. */
void sim_check_loaded(const void *kernel);

#ifdef __cplusplus
}
#endif
