/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stand-ins for libcudart, the driver's virtual memory calls and NCCL, for machines without a GPU: the library libsim
 * behind tests/sim/include. A program uses them like the real libraries, but they work on host memory and threads. They
 * show no speed and prove nothing about a GPU. Their purpose is to detect wrong uses of an asynchronous machine, and to
 * fail where a test wants it.
 *
 * Devices. Each device has one thread. It runs streams in a random order (seeded), and the operations of each stream in
 * their order. Some time passes between the start and the end of an operation. An operation that waits (for an event,
 * for other ranks) does not hold up other streams. If the processor has protection keys, host code cannot access device
 * memory: it gets a SIGSEGV, as with a GPU. Fresh device memory is full of signalling NaNs (SIM_POISON).
 *
 * While an operation runs, the memory that it writes reads as SIM_POISON, and no other operation may write it. The
 * memory that it reads must be the same at its end as at its start. The stand-ins do not know which memory a kernel
 * uses. The kernel's function runs at the end of the kernel's time, and a change to the memory of another unfinished
 * operation is detected when that operation ends.
 *
 * Wrong uses end the process (abort) with one line on standard error: "sim: ", the entry point, what was wrong. CUDA
 * allows some of them, but an engine that never blocks must not do them:
 *   - a copy from or to host memory that is not registered (CUDA would stage it and wait);
 *   - a launch of a kernel that is not loaded to the device (CUDA would load it, and may wait for the device);
 *   - CUDA_LAUNCH_BLOCKING in the environment;
 *   - the default stream; streams and events after their end; an event recorded on a stream of another device; a kernel
 *     on a stream that is not of the current device;
 *   - device or registered memory that is too small for the operation, of the wrong kind, of another device without
 *     access, or that is freed (cudaFree, cuMemUnmap, cudaHostUnregister) while an operation uses it;
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
 * Device memory of the virtual memory kind is a memfd, so it crosses processes and outlives them, as real device memory
 * does. When a process dies, its unfinished work on streams is never done. There are no events between processes.
 *
 * NCCL. Ranks talk through sockets in the file system, in a directory under $TMPDIR. ncclGetUniqueId() makes the
 * directory and puts its name into the id; the directory is removed when all ranks are connected. Reduce-scatter adds
 * in the order of a ring, so its bits are not those of the fixed tree. If a rank of another process dies, its peers get
 * ncclRemoteError, as over the network. If a rank of the same process aborts, its peers get no error, as over
 * peer-to-peer memory. ncclSend() ends when the peer has received the data.
 *
 * cuBLAS is a shared library, libcublas.so.13 (cublas.c), because the engine opens it at run time. A product is an
 * operation like a copy: its memory is known. Sums are in double. These are wrong uses too:
 *   - a product without a stream, without a workspace of at least 16 KiB, or in another math mode than
 *     CUBLAS_PEDANTIC_MATH; cublasSetStream() resets the workspace, as in cuBLAS;
 *   - a handle after its end, or with a stream or a current device that is not of its device;
 *   - a leading dimension that is too small, a result that overlaps an operand, host memory;
 *   - never-blocks: cublasCreate() and cublasDestroy() while work is on any stream.
 *
 * The environment, read at the first call:
 *
 *     ZEROD_SIM=item[,item...]
 *
 *     devices=N       visible devices, 4 by default
 *     memory=MIB      memory of each device, 1024 by default
 *     machine=NAME    all processes with that name share the devices' memory, and a descriptor of it in any process
 *                     keeps it; without it each process has its own devices
 *     seed=N          for the order of streams and for delays; 1 by default
 *     delay-us=N      an operation takes up to N microseconds, 200 by default
 *     peers=0         no device can be given access to another device's memory; by default all can
 *     values=0        streams cannot write 64-bit values
 *     compute-mode=N  compute mode of all devices (0): 2 is PROHIBITED, 3 EXCLUSIVE_PROCESS, but without any effect
 *     mps=1           the stand-ins answer that all processes are clients of MPS
 *     driver=N, runtime=N, nccl=N    results of the version calls (13000, 13000, 22809)
 *     open            host code may access device memory, for a program that computes on the host with it
 *     silent          a peer's death is never reported, as over peer-to-peer memory
 *     never-blocks    it is also a wrong use to wait for a stream or event, or, while work is on any stream, to
 *                     allocate, free, map, unmap or register memory, because CUDA may then wait until the device is
 *                     idle
 *
 *     ENTRY:error=NAME[@n]   the call returns this error: cudaErrorX, CUDA_ERROR_X, ncclX, or CUBLAS_STATUS_X
 *     ENTRY:async=NAME[@n]   of cudaMemcpyAsync, cudaMemsetAsync, sim_launch, and of cublasSgemm_v2 with a cudaErrorX:
 *                            the operation fails when it runs, and the error sticks to the process, as after a kernel's
 *                            wild pointer; of the collectives, ncclSend, ncclRecv and ncclCommInitRankConfig: the
 *                            communicator's asynchronous error
 *     ENTRY:hang[@n]         the operation that the call starts never ends; if it starts none, the call never returns
 *     ENTRY:delay=MS[@n]     the operation, or the call if it starts none, takes MS milliseconds longer
 *     ENTRY:kill[@n]         SIGKILL at the call
 *     sim_launch:die=TURNS[@n]   SIGKILL during the kernel, after TURNS turns of its threads
 *
 * ENTRY is an entry point's name, sim_launch or sim_load; n is the number of the call in the process, from 1, or * for
 * every call; 1 by default. An unknown item ends the process, because a test that injects nothing must not pass.
 *
 * The stand-ins are more lenient than the libraries in these points:
 *   - Which memory a kernel uses is known only when it runs, so the only check is that some device may access it.
 *     Kernels run one thread after the other: races in shared memory are for compute-sanitizer on a GPU.
 *   - All devices can use the memory of cudaMalloc(), because NCCL allows this for its own memory, and no other is
 *     shared.
 *   - Two processes that allocate at the same time may both get the last free memory of a machine.
 *   - MPS and EXCLUSIVE_PROCESS change only answers, not behaviour. Neither users nor namespaces separate processes:
 *     processes share memory only by descriptors, which only a socket passes.
 *   - Registered memory has the host's address on devices, as with CUDA where all devices can use that.
 *   - cuBLAS may wait for the device when it loads the code of a product; the stand-in never waits.
 *   - Set-up calls are not slower while the device is busy; with never-blocks they are wrong uses then.
 *
 * Call the functions from any thread. After fork() a child of a process that has used the stand-ins gets
 * cudaErrorInitializationError.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* A signalling NaN as fp32; each of its halves is a NaN as fp16 and a signalling one as bf16. */
#define SIM_POISON UINT32_C(0x7fa7ffa7)

/*
 * Puts a kernel on a stream. The device's thread calls run(args) when the stream has reached it, then free_args(args),
 * which may be NULL. free_args() runs exactly once, also when the launch fails or the device is lost first. Return: 0,
 * or the error that CUDA would return (enum cudaError).
 */
int sim_launch(struct CUstream_st *stream, void (*run)(void *args), void (*free_args)(void *args), void *args);

/* Remaining turns of the running kernel's threads until it must call sim_stop(); 0: no limit. */
extern __thread uint64_t sim_turns;
/* Kills the process during a kernel, for sim_launch:die. */
void sim_stop(void);

/* Loads a kernel to the current device. Return: 0 or an enum cudaError. */
int sim_load(const void *kernel);
/* Dies unless the kernel is loaded to the current device. */
void sim_check_loaded(const void *kernel);

#ifdef __cplusplus
}
#endif
