/* SPDX-License-Identifier: Apache-2.0 */

/* The environment, ordered faults, and errors. */

#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "inside.h"

struct sim sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local cudaError_t last_error;

/* ---- names ---------------------------------------------------------------------------------------------- */

enum { FAMILY_RUNTIME, FAMILY_DRIVER, FAMILY_NCCL, FAMILY_CUBLAS };

enum { CUBLAS_EXECUTION_FAILED = 13 };

struct name {
    const char *name;
    int value;
    const char *text;
};

static const struct name runtime_errors[] = {
    {"cudaSuccess", cudaSuccess, "no error"},
    {"cudaErrorInvalidValue", cudaErrorInvalidValue, "invalid argument"},
    {"cudaErrorMemoryAllocation", cudaErrorMemoryAllocation, "out of memory"},
    {"cudaErrorInitializationError", cudaErrorInitializationError, "initialization error"},
    {"cudaErrorCudartUnloading", cudaErrorCudartUnloading, "driver shutting down"},
    {"cudaErrorInvalidMemcpyDirection", cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"},
    {"cudaErrorInsufficientDriver", cudaErrorInsufficientDriver,
     "CUDA driver version is insufficient for CUDA runtime version"},
    {"cudaErrorDevicesUnavailable", cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"},
    {"cudaErrorNoDevice", cudaErrorNoDevice, "no CUDA-capable device is detected"},
    {"cudaErrorInvalidDevice", cudaErrorInvalidDevice, "invalid device ordinal"},
    {"cudaErrorDeviceUninitialized", cudaErrorDeviceUninitialized, "invalid device context"},
    {"cudaErrorMapBufferObjectFailed", cudaErrorMapBufferObjectFailed, "mapping of buffer object failed"},
    {"cudaErrorNoKernelImageForDevice", cudaErrorNoKernelImageForDevice,
     "no kernel image is available for execution on the device"},
    {"cudaErrorECCUncorrectable", cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"},
    {"cudaErrorNvlinkUncorrectable", cudaErrorNvlinkUncorrectable,
     "uncorrectable NVLink error detected during the execution"},
    {"cudaErrorInvalidResourceHandle", cudaErrorInvalidResourceHandle, "invalid resource handle"},
    {"cudaErrorSymbolNotFound", cudaErrorSymbolNotFound, "named symbol not found"},
    {"cudaErrorNotReady", cudaErrorNotReady, "device not ready"},
    {"cudaErrorIllegalAddress", cudaErrorIllegalAddress, "an illegal memory access was encountered"},
    {"cudaErrorLaunchTimeout", cudaErrorLaunchTimeout, "the launch timed out and was terminated"},
    {"cudaErrorHostMemoryAlreadyRegistered", cudaErrorHostMemoryAlreadyRegistered,
     "part or all of the requested memory range is already mapped"},
    {"cudaErrorHostMemoryNotRegistered", cudaErrorHostMemoryNotRegistered,
     "pointer does not correspond to a registered memory region"},
    {"cudaErrorLaunchFailure", cudaErrorLaunchFailure, "unspecified launch failure"},
    {"cudaErrorNotPermitted", cudaErrorNotPermitted, "operation not permitted"},
    {"cudaErrorNotSupported", cudaErrorNotSupported, "operation not supported"},
    {"cudaErrorSystemDriverMismatch", cudaErrorSystemDriverMismatch,
     "system has unsupported display driver / cuda driver combination"},
    {"cudaErrorUnknown", cudaErrorUnknown, "unknown error"},
};

static const struct name driver_errors[] = {
    {"CUDA_ERROR_INVALID_VALUE", CUDA_ERROR_INVALID_VALUE, ""},
    {"CUDA_ERROR_OUT_OF_MEMORY", CUDA_ERROR_OUT_OF_MEMORY, ""},
    {"CUDA_ERROR_NOT_INITIALIZED", CUDA_ERROR_NOT_INITIALIZED, ""},
    {"CUDA_ERROR_DEINITIALIZED", CUDA_ERROR_DEINITIALIZED, ""},
    {"CUDA_ERROR_NO_DEVICE", CUDA_ERROR_NO_DEVICE, ""},
    {"CUDA_ERROR_INVALID_DEVICE", CUDA_ERROR_INVALID_DEVICE, ""},
    {"CUDA_ERROR_INVALID_CONTEXT", CUDA_ERROR_INVALID_CONTEXT, ""},
    {"CUDA_ERROR_OPERATING_SYSTEM", CUDA_ERROR_OPERATING_SYSTEM, ""},
    {"CUDA_ERROR_INVALID_HANDLE", CUDA_ERROR_INVALID_HANDLE, ""},
    {"CUDA_ERROR_NOT_FOUND", CUDA_ERROR_NOT_FOUND, ""},
    {"CUDA_ERROR_NOT_READY", CUDA_ERROR_NOT_READY, ""},
    {"CUDA_ERROR_ILLEGAL_ADDRESS", CUDA_ERROR_ILLEGAL_ADDRESS, ""},
    {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, ""},
    {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, ""},
    {"CUDA_ERROR_LAUNCH_FAILED", CUDA_ERROR_LAUNCH_FAILED, ""},
    {"CUDA_ERROR_NOT_PERMITTED", CUDA_ERROR_NOT_PERMITTED, ""},
    {"CUDA_ERROR_NOT_SUPPORTED", CUDA_ERROR_NOT_SUPPORTED, ""},
    {"CUDA_ERROR_UNKNOWN", CUDA_ERROR_UNKNOWN, ""},
};

static const struct name nccl_errors[] = {
    {"ncclSuccess", ncclSuccess, "no error"},
    {"ncclUnhandledCudaError", ncclUnhandledCudaError, "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"},
    {"ncclSystemError", ncclSystemError, "unhandled system error (run with NCCL_DEBUG=INFO for details)"},
    {"ncclInternalError", ncclInternalError, "internal error - please report this issue to the NCCL developers"},
    {"ncclInvalidArgument", ncclInvalidArgument, "invalid argument (run with NCCL_DEBUG=WARN for details)"},
    {"ncclInvalidUsage", ncclInvalidUsage, "invalid usage (run with NCCL_DEBUG=WARN for details)"},
    {"ncclRemoteError", ncclRemoteError, "remote process exited or there was a network error"},
    {"ncclInProgress", ncclInProgress, "NCCL operation in progress"},
};

static const struct name cublas_errors[] = {
    {"CUBLAS_STATUS_NOT_INITIALIZED", 1, "the library was not initialized"},
    {"CUBLAS_STATUS_ALLOC_FAILED", 3, "the resource allocation failed"},
    {"CUBLAS_STATUS_INVALID_VALUE", 7, "an unsupported value or parameter was passed to the function"},
    {"CUBLAS_STATUS_ARCH_MISMATCH", 8, "the function requires an architectural feature absent from the device"},
    {"CUBLAS_STATUS_EXECUTION_FAILED", CUBLAS_EXECUTION_FAILED, "the function failed to launch on the GPU"},
    {"CUBLAS_STATUS_INTERNAL_ERROR", 14, "an internal operation failed"},
    {"CUBLAS_STATUS_NOT_SUPPORTED", 15, "the requested functionality is not supported"},
};

/* The entry points in which a fault can be ordered. starts: the call starts an operation that ends later. */
static const struct entry {
    const char *name;
    int family;
    bool starts;
} entries[] = {
    {"cudaRuntimeGetVersion", FAMILY_RUNTIME, false},
    {"cudaDriverGetVersion", FAMILY_RUNTIME, false},
    {"cudaGetDeviceCount", FAMILY_RUNTIME, false},
    {"cudaSetDevice", FAMILY_RUNTIME, false},
    {"cudaGetDevice", FAMILY_RUNTIME, false},
    {"cudaDeviceGetAttribute", FAMILY_RUNTIME, false},
    {"cudaDeviceGetPCIBusId", FAMILY_RUNTIME, false},
    {"cudaDeviceCanAccessPeer", FAMILY_RUNTIME, false},
    {"cudaMemGetInfo", FAMILY_RUNTIME, false},
    {"cudaMalloc", FAMILY_RUNTIME, false},
    {"cudaFree", FAMILY_RUNTIME, false},
    {"cudaHostRegister", FAMILY_RUNTIME, false},
    {"cudaHostUnregister", FAMILY_RUNTIME, false},
    {"cudaHostGetDevicePointer", FAMILY_RUNTIME, false},
    {"cudaMemcpyAsync", FAMILY_RUNTIME, true},
    {"cudaMemsetAsync", FAMILY_RUNTIME, true},
    {"cudaStreamCreateWithFlags", FAMILY_RUNTIME, false},
    {"cudaStreamDestroy", FAMILY_RUNTIME, false},
    {"cudaStreamQuery", FAMILY_RUNTIME, false},
    {"cudaStreamSynchronize", FAMILY_RUNTIME, false},
    {"cudaStreamWaitEvent", FAMILY_RUNTIME, true},
    {"cudaEventCreateWithFlags", FAMILY_RUNTIME, false},
    {"cudaEventDestroy", FAMILY_RUNTIME, false},
    {"cudaEventRecord", FAMILY_RUNTIME, true},
    {"cudaEventQuery", FAMILY_RUNTIME, false},
    {"cudaEventSynchronize", FAMILY_RUNTIME, false},
    {"cudaGetDriverEntryPoint", FAMILY_RUNTIME, false},
    {"cudaGetDriverEntryPointByVersion", FAMILY_RUNTIME, false},
    {"sim_launch", FAMILY_RUNTIME, true},
    {"sim_load", FAMILY_RUNTIME, false},
    {"cuMemGetAllocationGranularity", FAMILY_DRIVER, false},
    {"cuMemCreate", FAMILY_DRIVER, false},
    {"cuMemRelease", FAMILY_DRIVER, false},
    {"cuMemExportToShareableHandle", FAMILY_DRIVER, false},
    {"cuMemImportFromShareableHandle", FAMILY_DRIVER, false},
    {"cuMemAddressReserve", FAMILY_DRIVER, false},
    {"cuMemAddressFree", FAMILY_DRIVER, false},
    {"cuMemMap", FAMILY_DRIVER, false},
    {"cuMemUnmap", FAMILY_DRIVER, false},
    {"cuMemSetAccess", FAMILY_DRIVER, false},
    {"cuMemHostRegister", FAMILY_DRIVER, false},
    {"cuMemHostUnregister", FAMILY_DRIVER, false},
    {"cuMemHostGetDevicePointer", FAMILY_DRIVER, false},
    {"cuStreamWriteValue64", FAMILY_DRIVER, true},
    {"cuInit", FAMILY_DRIVER, false},
    {"cuDeviceGetUuid", FAMILY_DRIVER, false},
    {"cuDeviceGetAttribute", FAMILY_DRIVER, false},
    {"cuDevicePrimaryCtxRetain", FAMILY_DRIVER, false},
    {"cuCtxGetCurrent", FAMILY_DRIVER, false},
    {"ncclGetVersion", FAMILY_NCCL, false},
    {"ncclGetUniqueId", FAMILY_NCCL, false},
    {"ncclCommInitRankConfig", FAMILY_NCCL, true},
    {"ncclCommGetAsyncError", FAMILY_NCCL, false},
    {"ncclCommFinalize", FAMILY_NCCL, false},
    {"ncclCommDestroy", FAMILY_NCCL, false},
    {"ncclCommAbort", FAMILY_NCCL, false},
    {"ncclGroupStart", FAMILY_NCCL, false},
    {"ncclGroupEnd", FAMILY_NCCL, false},
    {"ncclReduceScatter", FAMILY_NCCL, true},
    {"ncclAllGather", FAMILY_NCCL, true},
    {"ncclSend", FAMILY_NCCL, true},
    {"ncclRecv", FAMILY_NCCL, true},
    {"cublasCreate_v2", FAMILY_CUBLAS, false},
    {"cublasDestroy_v2", FAMILY_CUBLAS, false},
    {"cublasGetVersion_v2", FAMILY_CUBLAS, false},
    {"cublasSetStream_v2", FAMILY_CUBLAS, false},
    {"cublasSetWorkspace_v2", FAMILY_CUBLAS, false},
    {"cublasSetMathMode", FAMILY_CUBLAS, false},
    {"cublasSetAtomicsMode", FAMILY_CUBLAS, false},
    {"cublasSgemm_v2", FAMILY_CUBLAS, true},
};

static uint64_t n_calls[ARRAY_SIZE(entries)];

static const struct name *find_name(const struct name *names, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i].name, name) == 0)
            return &names[i];
    return NULL;
}

static int find_entry(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(entries); i++)
        if (strcmp(entries[i].name, name) == 0)
            return i;
    return -1;
}

static const struct name *find_value(const struct name *names, size_t n, int value)
{
    for (size_t i = 0; i < n; i++)
        if (names[i].value == value)
            return &names[i];
    return NULL;
}

const char *sim_error_name(int error, bool nccl)
{
    const struct name *name = nccl ? find_value(nccl_errors, ARRAY_SIZE(nccl_errors), error)
                                   : find_value(runtime_errors, ARRAY_SIZE(runtime_errors), error);

    return name ? name->name : "unrecognized error code";
}

CUresult cuGetErrorName(CUresult error, const char **pStr)
{
    const struct name *name = find_value(driver_errors, ARRAY_SIZE(driver_errors), error);

    *pStr = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : name ? name->name : NULL;
    return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return sim_error_name(error, false);
}

const char *cudaGetErrorString(cudaError_t error)
{
    const struct name *name = find_value(runtime_errors, ARRAY_SIZE(runtime_errors), error);

    return name ? name->text : "unrecognized error code";
}

const char *ncclGetErrorString(ncclResult_t result)
{
    const struct name *name = find_value(nccl_errors, ARRAY_SIZE(nccl_errors), result);

    return name ? name->text : "unknown result code";
}

const char *sim_cublas_text(int status)
{
    const struct name *name = find_value(cublas_errors, ARRAY_SIZE(cublas_errors), status);

    return name ? name->text : status == 0 ? "success" : "unknown status";
}

/* ---- the end -------------------------------------------------------------------------------------------- */

_Noreturn void sim_die(const char *entry, const char *format, ...)
{
    char text[400];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "sim: %s: %s\n", entry, text);
    abort();
}

/* ---- the environment ------------------------------------------------------------------------------------ */

static bool parse_number(const char *text, uint64_t max, uint64_t *number)
{
    char *end;

    if (*text < '0' || *text > '9')
        return false;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0' && *number <= max;
}

static bool parse_error(const struct entry *entry, bool async, const char *name, int *value)
{
    const struct name *found = NULL;

    if (entry->family == FAMILY_RUNTIME || (entry->family == FAMILY_CUBLAS && async))
        found = find_name(runtime_errors, ARRAY_SIZE(runtime_errors), name);
    else if (entry->family == FAMILY_DRIVER)
        found = find_name(driver_errors, ARRAY_SIZE(driver_errors), name);
    else if (entry->family == FAMILY_CUBLAS)
        found = find_name(cublas_errors, ARRAY_SIZE(cublas_errors), name);
    else
        found = find_name(nccl_errors, ARRAY_SIZE(nccl_errors), name);
    if (!found || found->value == 0 || (async && !entry->starts))
        return false;
    *value = found->value;
    return true;
}

/* Parses ACTION[=VALUE]; the caller has cut off the @. */
static bool parse_action(const struct entry *entry, char *action, struct injected *what)
{
    char *value = strchr(action, '=');
    uint64_t number;

    if (value)
        *value++ = '\0';
    if (strcmp(action, "hang") == 0)
        what->hang = true;
    else if (strcmp(action, "kill") == 0)
        what->kill = true;
    else if (value && strcmp(action, "error") == 0)
        return parse_error(entry, false, value, &what->error);
    else if (value && strcmp(action, "async") == 0)
        return parse_error(entry, true, value, &what->async);
    else if (value && strcmp(action, "die") == 0 && strcmp(entry->name, "sim_launch") == 0 &&
             parse_number(value, UINT64_MAX, &what->turns) && what->turns > 0)
        return true;
    else if (value && strcmp(action, "delay") == 0 && parse_number(value, 3600 * 1000, &number))
        what->delay_ns = number * SIM_NS_PER_MS;
    else
        return false;
    return !value || what->delay_ns > 0 || strcmp(action, "delay") == 0;
}

static bool parse_injection(char *item, struct injection *injection)
{
    char *action = strchr(item, ':'), *call = strchr(item, '@');

    *injection = (struct injection){.call = 1};
    if (!action)
        return false;
    *action++ = '\0';
    if (call) {
        *call++ = '\0';
        if (strcmp(call, "*") == 0)
            injection->call = 0;
        else if (!parse_number(call, UINT64_MAX, &injection->call) || injection->call == 0)
            return false;
    }
    injection->entry = find_entry(item);
    return injection->entry >= 0 && parse_action(&entries[injection->entry], action, &injection->what);
}

struct setting {
    const char *name;
    uint64_t min, max, value;
};

static bool parse_setting(char *item, struct setting *settings, size_t n)
{
    char *value = strchr(item, '=');

    if (!value)
        return false;
    *value++ = '\0';
    for (size_t i = 0; i < n; i++)
        if (strcmp(settings[i].name, item) == 0)
            return parse_number(value, settings[i].max, &settings[i].value) && settings[i].value >= settings[i].min;
    return false;
}

static bool parse_machine(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789");

    if (n == 0 || name[n] || n >= sizeof(sim.machine))
        return false;
    strcpy(sim.machine, name);
    return true;
}

static void read_items(char *items, struct setting *settings, size_t n)
{
    char *rest = NULL;

    for (char *item = strtok_r(items, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        _cleanup_free_ char *whole = strdup(item);
        bool ok;

        if (strcmp(item, "silent") == 0)
            ok = sim.silent = true;
        else if (strcmp(item, "never-blocks") == 0)
            ok = sim.never_blocks = true;
        else if (strcmp(item, "open") == 0)
            ok = sim.open = true;
        else if (strncmp(item, "machine=", strlen("machine=")) == 0)
            ok = parse_machine(item + strlen("machine="));
        else if (!strchr(item, ':'))
            ok = parse_setting(item, settings, n);
        else
            ok = sim.n_injections < SIM_MAX_INJECTIONS && parse_injection(item, &sim.injections[sim.n_injections++]);
        if (!ok)
            sim_die("ZEROD_SIM", "\"%s\" is not understood", whole ? whole : item);
    }
}

static void read_environment(void)
{
    enum { DEVICES, MEMORY, SEED, DELAY, PEERS, VALUES, COMPUTE_MODE, MPS, DRIVER, RUNTIME, NCCL };
    struct setting settings[] = {
        [DEVICES] = {"devices", 0, SIM_MAX_DEVICES, 4},
        [MEMORY] = {"memory", 1, 1 << 20, 1024},
        [SEED] = {"seed", 0, UINT64_MAX, 1},
        [DELAY] = {"delay-us", 0, 60 * 1000 * 1000, 200},
        [PEERS] = {"peers", 0, 1, 1},
        [VALUES] = {"values", 0, 1, 1},
        [COMPUTE_MODE] = {"compute-mode", 0, 3, 0},
        [MPS] = {"mps", 0, 1, 0},
        [DRIVER] = {"driver", 0, 1000000, 13000},
        [RUNTIME] = {"runtime", 0, 1000000, CUDART_VERSION},
        [NCCL] = {"nccl", 0, 1000000, NCCL_VERSION_CODE},
    };
    const char *text = getenv("ZEROD_SIM");
    _cleanup_free_ char *items = strdup(text ? text : "");

    if (!items)
        sim_die("ZEROD_SIM", "no memory");
    if (getenv("CUDA_LAUNCH_BLOCKING"))
        sim_die("CUDA_LAUNCH_BLOCKING", "every launch would wait until it has run");
    read_items(items, settings, ARRAY_SIZE(settings));
    sim.n_devices = settings[DEVICES].value;
    sim.n_bytes_memory = settings[MEMORY].value << 20;
    sim.max_delay_ns = settings[DELAY].value * SIM_NS_PER_US;
    sim.peers = settings[PEERS].value;
    sim.values = settings[VALUES].value;
    sim.compute_mode = settings[COMPUTE_MODE].value;
    sim.mps = settings[MPS].value;
    sim.driver_version = settings[DRIVER].value;
    sim.runtime_version = settings[RUNTIME].value;
    sim.nccl_version = settings[NCCL].value;
    for (int d = 0; d < SIM_MAX_DEVICES; d++)
        sim.devices[d] = (struct device){
            .index = d, .wake_fd = -1, .random = (settings[SEED].value + 1) * UINT64_C(0x9e3779b97f4a7c15) + d};
}

/* ---- in and out ----------------------------------------------------------------------------------------- */

static struct injected look_up(int entry)
{
    uint64_t call = ++n_calls[entry];

    for (unsigned i = 0; i < sim.n_injections; i++)
        if (sim.injections[i].entry == entry && (sim.injections[i].call == 0 || sim.injections[i].call == call))
            return sim.injections[i].what;
    return (struct injected){0};
}

static void sleep_ns(int64_t ns)
{
    struct timespec t = {ns / (1000 * SIM_NS_PER_MS), ns % (1000 * SIM_NS_PER_MS)};

    pthread_mutex_unlock(&sim.lock);
    while (nanosleep(&t, &t) < 0 && errno == EINTR)
        continue;
    pthread_mutex_lock(&sim.lock);
}

/* Carries out the fault of a call that starts no operation. */
static void go_wrong_here(const struct injected *what)
{
    if (what->delay_ns > 0)
        sleep_ns(what->delay_ns);
    while (what->hang)
        sleep_ns(INT64_C(3600) * 1000 * SIM_NS_PER_MS);
}

int sim_enter_anyway(const char *entry)
{
    pthread_mutex_lock(&sim.lock);
    if (sim.pid == 0) {
        sim.pid = getpid();
        read_environment();
        memory_init();
    }
    (void)entry;
    return sim.pid == getpid() ? 0 : cudaErrorInitializationError;
}

int sim_enter(const char *entry, struct injected *injected)
{
    int index = find_entry(entry), r = sim_enter_anyway(entry);
    struct injected what;

    assert(index >= 0);
    if (r != 0)
        return r;
    what = look_up(index);
    if (what.kill)
        (void)raise(SIGKILL);
    if (!injected)
        go_wrong_here(&what);
    else
        *injected = what;
    if (what.error != 0)
        return what.error;
    if (sim.sticky == cudaSuccess)
        return 0;
    if (entries[index].family == FAMILY_CUBLAS)
        return CUBLAS_EXECUTION_FAILED;
    return entries[index].family == FAMILY_NCCL ? (int)ncclUnhandledCudaError : (int)sim.sticky;
}

cudaError_t sim_leave(cudaError_t error)
{
    if (error != cudaSuccess)
        last_error = error;
    pthread_mutex_unlock(&sim.lock);
    return error;
}

CUresult sim_leave_driver(CUresult error)
{
    pthread_mutex_unlock(&sim.lock);
    return error;
}

ncclResult_t sim_leave_nccl(ncclResult_t result)
{
    pthread_mutex_unlock(&sim.lock);
    return result;
}

int sim_leave_cublas(int status)
{
    pthread_mutex_unlock(&sim.lock);
    return status;
}

cudaError_t cudaPeekAtLastError(void)
{
    cudaError_t error;

    (void)sim_enter_anyway("cudaPeekAtLastError");
    error = sim.sticky != cudaSuccess ? sim.sticky : last_error;
    pthread_mutex_unlock(&sim.lock);
    return error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();

    last_error = cudaSuccess;
    return error;
}

int64_t sim_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 * SIM_NS_PER_MS + t.tv_nsec;
}

/* xorshift64*: any seed but 0 */
uint64_t sim_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

void *sim_calloc(size_t n, size_t size)
{
    void *p = calloc(n, size);

    if (!p)
        sim_die("memory", "the process has none left");
    return p;
}
