/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory: the regions, and the devices that may use them. Addresses are never reused. Freed memory stays reserved and
 * inaccessible, so that a late use is detected.
 */

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "inside.h"

enum { PAGE_BYTES = 4096, MALLOC_ALIGNMENT = 256, GRANULARITY = 2 << 20 };

enum region_kind { REGION_HOST, REGION_MALLOC, REGION_MAPPED };

/* Physical memory, a memfd. It exists as long as its handle or a mapping exists. */
struct allocation {
    CUmemGenericAllocationHandle handle; /* 0 after cuMemRelease() */
    int fd, device;
    size_t n_bytes;
    unsigned n_mappings;
    bool exportable, imported;
};

/* Memory that devices can access. The regions are not sorted, because there are few. */
struct region {
    enum region_kind kind;
    uint8_t *at;
    size_t n_bytes;
    int device;             /* owner of device memory; -1 for host memory */
    bool mapped;            /* host memory whose address devices may ask for */
    uint32_t reads, writes; /* bits of the devices that may read, write */
    struct allocation *allocation;
    int fd; /* REGION_MALLOC: counts as the memory on the machine; -1: not needed */
};

struct reservation {
    uint8_t *at;
    size_t n_bytes;
};

#define DEFINE_TABLE(type, name)                                                                                       \
    static struct {                                                                                                    \
        type *items;                                                                                                   \
        size_t n, n_alloc;                                                                                             \
    } name

DEFINE_TABLE(struct region, regions);
DEFINE_TABLE(struct reservation, reservations);
DEFINE_TABLE(struct allocation *, allocations);

#define table_add(table, item)                                                                                         \
    do {                                                                                                               \
        if ((table)->n == (table)->n_alloc) {                                                                          \
            (table)->n_alloc = (table)->n_alloc * 2 + 8;                                                               \
            (table)->items = reallocarray((table)->items, (table)->n_alloc, sizeof((table)->items[0]));                \
            if (!(table)->items)                                                                                       \
                sim_die("memory", "the process has none left");                                                        \
        }                                                                                                              \
        (table)->items[(table)->n++] = (item);                                                                         \
    } while (0)

#define table_remove(table, i) ((table)->items[i] = (table)->items[--(table)->n])

static CUmemGenericAllocationHandle last_handle;

/* ---- out of the host's reach ---------------------------------------------------------------------------- */

/*
 * A protection key that only the devices' threads can use. A new thread inherits the rights of its creator. Threads
 * that existed before the key have no rights, by the kernel's default.
 */
static int device_key = -1;
static struct sigaction former_action;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    static const char text[] = "sim: host code touches device memory\n";

    (void)signal;
    (void)context;
#ifdef SEGV_PKUERR
    if (info->si_code == SEGV_PKUERR && device_key >= 0) {
        ssize_t n = write(STDERR_FILENO, text, sizeof(text) - 1);

        (void)n;
        abort();
    }
#endif
    sigaction(SIGSEGV, &former_action, NULL); /* the instruction faults again, with the former handler */
}

static void on_fork(void)
{
    pthread_mutex_init(&sim.lock, NULL);
}

void memory_init(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

    pthread_atfork(NULL, NULL, on_fork);
    device_key = sim.open ? -1 : pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (device_key >= 0)
        sigaction(SIGSEGV, &action, &former_action);
}

void memory_admit_thread(void)
{
    if (device_key >= 0)
        pkey_set(device_key, 0);
}

/* pkey_mprotect(), or mprotect() if there is no key. */
static bool protect(void *at, size_t n_bytes, int prot)
{
    return (device_key >= 0 ? pkey_mprotect(at, n_bytes, prot, device_key) : mprotect(at, n_bytes, prot)) == 0;
}

/* ---- poison --------------------------------------------------------------------------------------------- */

/* The pattern depends on the address, so that overlapping pieces agree. */
static uint8_t poison_byte(const uint8_t *at)
{
    return SIM_POISON >> 8 * ((uintptr_t)at & 3);
}

void memory_fill(void *memory, size_t n_bytes)
{
    uint8_t *at = memory;
    const uint32_t pattern = SIM_POISON;

    for (; n_bytes > 0 && ((uintptr_t)at & 3) != 0; n_bytes--, at++)
        *at = poison_byte(at);
    for (; n_bytes >= 4; n_bytes -= 4, at += 4)
        memcpy(at, &pattern, 4);
    for (; n_bytes > 0; n_bytes--, at++)
        *at = poison_byte(at);
}

static bool is_filled(const uint8_t *at, size_t n_bytes)
{
    const uint32_t pattern = SIM_POISON;

    for (; n_bytes > 0 && ((uintptr_t)at & 3) != 0; n_bytes--, at++)
        if (*at != poison_byte(at))
            return false;
    for (; n_bytes >= 4; n_bytes -= 4, at += 4)
        if (memcmp(at, &pattern, 4) != 0)
            return false;
    for (; n_bytes > 0; n_bytes--, at++)
        if (*at != poison_byte(at))
            return false;
    return true;
}

static uint8_t *copy_of(const void *at, size_t n_bytes)
{
    uint8_t *copy = sim_calloc(1, n_bytes ? n_bytes : 1);

    memcpy(copy, at, n_bytes);
    return copy;
}

void spans_start(const char *entry, struct span *reads, size_t n_reads, struct span *writes, size_t n_writes)
{
    (void)entry;
    for (size_t i = 0; i < n_reads; i++)
        if (reads[i].n_bytes > 0)
            reads[i].data = reads[i].seen = copy_of(reads[i].at, reads[i].n_bytes);
    for (size_t k = 0; k < n_writes; k++)
        memory_fill(writes[k].at, writes[k].n_bytes);
    for (size_t i = 0; i < n_reads; i++)
        for (size_t k = 0; k < n_writes; k++)
            if (reads[i].data == reads[i].seen &&
                memory_overlap(reads[i].at, reads[i].n_bytes, writes[k].at, writes[k].n_bytes))
                reads[i].seen = copy_of(reads[i].at, reads[i].n_bytes);
}

void spans_check(const char *entry, const struct span *reads, size_t n_reads, const struct span *writes,
                 size_t n_writes)
{
    for (size_t i = 0; i < n_reads; i++)
        if (reads[i].n_bytes > 0 && memcmp(reads[i].at, reads[i].seen, reads[i].n_bytes) != 0)
            sim_die(entry, "what it reads was changed before it had ended");
    for (size_t k = 0; k < n_writes; k++)
        if (!is_filled(writes[k].at, writes[k].n_bytes))
            sim_die(entry, "what it writes was written by another before it had ended");
}

void span_drop(struct span *span)
{
    if (span->seen != span->data)
        free(span->seen);
    free(span->data);
    span->data = span->seen = NULL;
}

/* ---- what is where -------------------------------------------------------------------------------------- */

bool memory_overlap(const void *a, size_t n_bytes_a, const void *b, size_t n_bytes_b)
{
    uintptr_t a0 = (uintptr_t)a, b0 = (uintptr_t)b;

    return n_bytes_a > 0 && n_bytes_b > 0 && a0 < b0 + n_bytes_b && b0 < a0 + n_bytes_a;
}

static struct region *region_at(const void *at)
{
    for (size_t i = 0; i < regions.n; i++)
        if (memory_overlap(at, 1, regions.items[i].at, regions.items[i].n_bytes))
            return &regions.items[i];
    return NULL;
}

static void check_access(const char *entry, const char *which, const struct region *region, int device,
                         enum span_use use)
{
    uint32_t allowed = use == SPAN_WRITE ? region->writes : region->reads;

    if (allowed & UINT32_C(1) << device)
        return;
    if (region->kind == REGION_HOST)
        sim_die(entry, "%s is host memory that was registered for reading only", which);
    sim_die(entry, "%s is memory of device %d, which device %d may not %s", which, region->device, device,
            use == SPAN_WRITE ? "write" : "read");
}

enum memory_kind memory_check(const char *entry, const char *which, const void *at, size_t n_bytes, int device,
                              enum span_use use)
{
    enum memory_kind kind = MEMORY_NONE;
    const uint8_t *next = at;
    size_t left = n_bytes;

    while (left > 0) {
        const struct region *region = region_at(next);
        size_t here;

        if (!region && next == at)
            sim_die(entry, "%s (%zu bytes) is neither device memory nor registered host memory", which, n_bytes);
        if (!region)
            sim_die(entry, "%s (%zu bytes) goes %zu bytes beyond the end of its memory", which, n_bytes, left);
        check_access(entry, which, region, device, use);
        if (kind != MEMORY_NONE && kind != (region->kind == REGION_HOST ? MEMORY_HOST : MEMORY_DEVICE))
            sim_die(entry, "%s (%zu bytes) is partly host and partly device memory", which, n_bytes);
        kind = region->kind == REGION_HOST ? MEMORY_HOST : MEMORY_DEVICE;
        here = MIN(left, (size_t)(region->at + region->n_bytes - next));
        left -= here;
        next += here;
    }
    return kind;
}

static uint8_t *reserve(size_t n_bytes, size_t alignment)
{
    uint8_t *at = mmap(NULL, n_bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (at == MAP_FAILED)
        return NULL;
    return (uint8_t *)(((uintptr_t)at + alignment - 1) / alignment * alignment);
}

/* Unmaps the memory, but keeps the address range reserved, so that it is never reused. */
static void take_back(void *at, size_t n_bytes)
{
    if (mmap(at, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        sim_die("memory", "munmap: %m");
}

/* Fills the file through a separate mapping, which the host may access. */
static bool fill_file(int fd, size_t n_bytes)
{
    void *at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (at == MAP_FAILED)
        return false;
    memory_fill(at, n_bytes);
    munmap(at, n_bytes);
    return true;
}

/* ---- how much there is ---------------------------------------------------------------------------------- */

/*
 * The name of the memfds that hold the memory of a device of a machine. The memory exists as long as any process has a
 * descriptor of it.
 */
static void print_name(char name[64], int device)
{
    snprintf(name, 64, "sim-%s-device-%d", sim.machine, device);
}

struct seen {
    ino_t inodes[1024];
    size_t n, n_bytes;
};

static void see(struct seen *seen, const struct stat *st)
{
    for (size_t i = 0; i < seen->n; i++)
        if (seen->inodes[i] == st->st_ino)
            return;
    if (seen->n == ARRAY_SIZE(seen->inodes))
        sim_die("memory", "more than %zu pieces on the machine", ARRAY_SIZE(seen->inodes));
    seen->inodes[seen->n++] = st->st_ino;
    seen->n_bytes += st->st_size;
}

static void look_through(struct seen *seen, const char *pid, const char *wanted)
{
    char path[300], target[128];
    struct dirent *entry;
    struct stat st;
    ssize_t n;
    DIR *fds;

    snprintf(path, sizeof(path), "/proc/%s/fd", pid);
    fds = opendir(path);
    while (fds && (entry = readdir(fds))) {
        n = readlinkat(dirfd(fds), entry->d_name, target, sizeof(target) - 1);
        if (n <= 0)
            continue;
        target[n] = '\0';
        if (strcmp(target, wanted) == 0 && fstatat(dirfd(fds), entry->d_name, &st, 0) == 0)
            see(seen, &st);
    }
    if (fds)
        closedir(fds);
}

static size_t bytes_on_machine(int device)
{
    char name[64], wanted[96];
    struct seen seen = {.n = 0};
    struct dirent *entry;
    DIR *proc = opendir("/proc");

    if (!proc)
        sim_die("memory", "/proc: %m");
    print_name(name, device);
    snprintf(wanted, sizeof(wanted), "/memfd:%s (deleted)", name);
    while ((entry = readdir(proc)))
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9')
            look_through(&seen, entry->d_name, wanted);
    closedir(proc);
    return seen.n_bytes;
}

static size_t bytes_used(int device)
{
    return *sim.machine ? bytes_on_machine(device) : sim.devices[device].n_bytes_used;
}

static bool charge(int device, size_t n_bytes)
{
    size_t used = bytes_used(device);

    if (used > sim.n_bytes_memory || n_bytes > sim.n_bytes_memory - used)
        return false;
    sim.devices[device].n_bytes_used += n_bytes;
    return true;
}

/* Creates a sparse file. Return: the file's descriptor. */
static int make_file(int device, size_t n_bytes)
{
    char name[64];
    int fd;

    print_name(name, device);
    fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, n_bytes) < 0)
        sim_die("memory", "memfd: %m");
    return fd;
}

static uint32_t all_devices(void)
{
    return (uint32_t)((UINT64_C(1) << sim.n_devices) - 1);
}

/* ---- cudaMalloc ----------------------------------------------------------------------------------------- */

cudaError_t cudaMemGetInfo(size_t *n_free, size_t *total)
{
    int r = sim_enter("cudaMemGetInfo", NULL);

    if (r == 0) {
        device_need(device_current());
        *total = sim.n_bytes_memory;
        *n_free = sim.n_bytes_memory - MIN(bytes_used(device_current()), sim.n_bytes_memory);
    }
    return sim_leave(r);
}

/* Allocates memory that ends at the end of a page. The next page is inaccessible. */
static cudaError_t allocate(void **memory, size_t size)
{
    size_t n_bytes = (size + MALLOC_ALIGNMENT - 1) / MALLOC_ALIGNMENT * MALLOC_ALIGNMENT;
    size_t n_page_bytes = (n_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    int device = device_current();
    uint8_t *at;

    *memory = NULL;
    if (size == 0)
        return cudaSuccess;
    device_need(device);
    if (n_page_bytes < size || !charge(device, n_page_bytes))
        return cudaErrorMemoryAllocation;
    at = reserve(n_page_bytes + PAGE_BYTES, PAGE_BYTES);
    if (!at || mprotect(at, n_page_bytes, PROT_READ | PROT_WRITE) < 0)
        sim_die("cudaMalloc", "mmap: %m");
    memory_fill(at, n_page_bytes);
    if (!protect(at, n_page_bytes, PROT_READ | PROT_WRITE))
        sim_die("cudaMalloc", "mprotect: %m");
    *memory = at + (n_page_bytes - n_bytes);
    table_add(&regions, ((struct region){.kind = REGION_MALLOC,
                                         .at = *memory,
                                         .n_bytes = size,
                                         .device = device,
                                         .reads = all_devices(),
                                         .writes = all_devices(),
                                         .fd = *sim.machine ? make_file(device, n_page_bytes) : -1}));
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **devPtr, size_t size)
{
    int r = sim_enter("cudaMalloc", NULL);

    device_check_idle("cudaMalloc");
    if (r == 0)
        r = devPtr ? allocate(devPtr, size) : cudaErrorInvalidValue;
    return sim_leave(r);
}

static cudaError_t release(void *memory)
{
    struct region *region = region_at(memory);
    uint8_t *first = (uint8_t *)((uintptr_t)memory / PAGE_BYTES * PAGE_BYTES);
    size_t n_bytes;

    if (!memory)
        return cudaSuccess;
    if (!region || region->kind != REGION_MALLOC || region->at != memory)
        return cudaErrorInvalidValue;
    device_check_unused("cudaFree", region->at, region->n_bytes);
    n_bytes = (region->n_bytes + (region->at - first) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    sim.devices[region->device].n_bytes_used -= n_bytes;
    take_back(first, n_bytes);
    if (region->fd >= 0)
        close(region->fd);
    table_remove(&regions, region - regions.items);
    return cudaSuccess;
}

cudaError_t cudaFree(void *devPtr)
{
    int r = sim_enter("cudaFree", NULL);

    device_check_idle("cudaFree");
    return sim_leave(r == 0 ? release(devPtr) : (cudaError_t)r);
}

/* ---- host memory ---------------------------------------------------------------------------------------- */

/* Checks access as the kernel does: pinning pages for writing needs writable pages. */
static bool may_access(const void *memory, size_t n_bytes, bool write)
{
    uintptr_t at = (uintptr_t)memory, end = at + n_bytes, from, to;
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[5];

    if (!maps)
        sim_die("cudaHostRegister", "/proc/self/maps: %m");
    while (at < end && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3 && from <= at && at < to) {
            if (rights[0] != 'r' || (write && rights[1] != 'w'))
                break;
            at = to;
        }
    fclose(maps);
    return at >= end;
}

static cudaError_t add_host(void *memory, size_t size, unsigned flags)
{
    bool read_only = flags & cudaHostRegisterReadOnly;

    if (!memory || size == 0 ||
        flags & ~(unsigned)(cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly))
        return cudaErrorInvalidValue;
    for (size_t i = 0; i < regions.n; i++)
        if (memory_overlap(memory, size, regions.items[i].at, regions.items[i].n_bytes))
            return regions.items[i].kind == REGION_HOST ? cudaErrorHostMemoryAlreadyRegistered : cudaErrorInvalidValue;
    if (!may_access(memory, size, !read_only))
        return cudaErrorInvalidValue;
    device_need(device_current());
    table_add(&regions, ((struct region){.kind = REGION_HOST,
                                         .at = memory,
                                         .n_bytes = size,
                                         .device = -1,
                                         .mapped = flags & cudaHostRegisterMapped,
                                         .reads = all_devices(),
                                         .writes = read_only ? 0 : all_devices()}));
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned int flags)
{
    int r = sim_enter("cudaHostRegister", NULL);

    device_check_idle("cudaHostRegister");
    return sim_leave(r == 0 ? add_host(ptr, size, flags) : (cudaError_t)r);
}

static cudaError_t remove_host(void *memory)
{
    struct region *region = region_at(memory);

    if (!region || region->kind != REGION_HOST || region->at != memory)
        return cudaErrorHostMemoryNotRegistered;
    device_check_unused("cudaHostUnregister", region->at, region->n_bytes);
    table_remove(&regions, region - regions.items);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *ptr)
{
    int r = sim_enter("cudaHostUnregister", NULL);

    device_check_idle("cudaHostUnregister");
    return sim_leave(r == 0 ? remove_host(ptr) : (cudaError_t)r);
}

/* Host and device pointers are the same, as with a unified address space. */
cudaError_t cudaHostGetDevicePointer(void **pDevice, void *pHost, unsigned int flags)
{
    int r = sim_enter("cudaHostGetDevicePointer", NULL);
    const struct region *region = region_at(pHost);

    if (r == 0 && (!pDevice || flags != 0 || !region || region->kind != REGION_HOST || !region->mapped))
        r = cudaErrorInvalidValue;
    if (r == 0)
        *pDevice = pHost;
    return sim_leave(r);
}

/* ---- virtual memory: allocations ------------------------------------------------------------------------ */

static bool is_device(const CUmemLocation *location)
{
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0 && location->id < sim.n_devices;
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || prop->win32HandleMetaData)
        return CUDA_ERROR_INVALID_VALUE;
    return is_device(&prop->location) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* Driver calls fail unless the calling thread has a context. The runtime creates one by itself. */
static CUresult need_context(void)
{
    return device_is_bound() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static int enter_driver(const char *entry)
{
    int r = sim_enter(entry, NULL);

    return r == 0 ? (int)need_context() : r;
}

/* Unlike cudaHostRegister(), a failure does not become the runtime's last error. */
CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
    int r = enter_driver("cuMemHostRegister");

    device_check_idle("cuMemHostRegister");
    return sim_leave_driver(r == 0 ? (CUresult)add_host(p, bytesize, Flags) : (CUresult)r);
}

CUresult cuMemHostUnregister(void *p)
{
    int r = enter_driver("cuMemHostUnregister");

    device_check_idle("cuMemHostUnregister");
    return sim_leave_driver(r == 0 ? (CUresult)remove_host(p) : (CUresult)r);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    int r = enter_driver("cuMemHostGetDevicePointer");
    const struct region *region = r == 0 ? region_at(p) : NULL;

    if (r == 0 && (!pdptr || Flags != 0 || !region || region->kind != REGION_HOST))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        *pdptr = (uintptr_t)p;
    return sim_leave_driver(r);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option)
{
    int r = enter_driver("cuMemGetAllocationGranularity");

    (void)option;
    if (r == 0 && !granularity)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        r = check_prop(prop);
    if (r == 0)
        *granularity = GRANULARITY;
    return sim_leave_driver(r);
}

static struct allocation *add_allocation(int fd, int device, size_t n_bytes)
{
    struct allocation *allocation = sim_calloc(1, sizeof(*allocation));

    *allocation = (struct allocation){.handle = ++last_handle, .fd = fd, .device = device, .n_bytes = n_bytes};
    table_add(&allocations, allocation);
    return allocation;
}

static struct allocation *find_allocation(CUmemGenericAllocationHandle handle)
{
    for (size_t i = 0; i < allocations.n; i++)
        if (handle != 0 && allocations.items[i]->handle == handle)
            return allocations.items[i];
    return NULL;
}

/* Frees the allocation if it has neither a handle nor a mapping. Exported descriptors stay valid. */
static void drop_unused(struct allocation *allocation)
{
    size_t i = 0;

    if (allocation->handle != 0 || allocation->n_mappings > 0)
        return;
    while (allocations.items[i] != allocation)
        i++;
    table_remove(&allocations, i);
    if (!allocation->imported)
        sim.devices[allocation->device].n_bytes_used -= allocation->n_bytes;
    close(allocation->fd);
    free(allocation);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop)
{
    CUresult r = check_prop(prop);
    struct allocation *allocation;
    int fd;

    if (r != CUDA_SUCCESS)
        return r;
    if (!handle || size == 0 || size % GRANULARITY != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!charge(prop->location.id, size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    fd = make_file(prop->location.id, size);
    if (!fill_file(fd, size))
        sim_die("cuMemCreate", "memfd: %m");
    allocation = add_allocation(fd, prop->location.id, size);
    allocation->exportable = prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = allocation->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags)
{
    int r = enter_driver("cuMemCreate");

    device_check_idle("cuMemCreate");
    if (r == 0)
        r = flags == 0 ? create(handle, size, prop) : CUDA_ERROR_INVALID_VALUE;
    return sim_leave_driver(r);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    int r = enter_driver("cuMemRelease");
    struct allocation *allocation = r == 0 ? find_allocation(handle) : NULL;

    if (r == 0 && !allocation)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        allocation->handle = 0;
        drop_unused(allocation);
    }
    return sim_leave_driver(r);
}

CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType handleType, unsigned long long flags)
{
    int r = enter_driver("cuMemExportToShareableHandle"), fd;
    const struct allocation *allocation = r == 0 ? find_allocation(handle) : NULL;

    if (r == 0 && (!allocation || !allocation->exportable || !shareableHandle || flags != 0 ||
                   handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            r = CUDA_ERROR_OPERATING_SYSTEM;
        else
            memcpy(shareableHandle, &fd, sizeof(fd));
    }
    return sim_leave_driver(r);
}

/* Return: the device whose memory the file is, according to the file's name, or -1 if it is no device memory. */
static int device_of_file(int fd)
{
    static const char name[] = "/memfd:sim-", device[] = "-device-";
    char link[32], target[128], *number;
    ssize_t n;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    n = readlink(link, target, sizeof(target) - 1);
    if (n < (ssize_t)sizeof(name) || strncmp(target, name, sizeof(name) - 1) != 0)
        return -1;
    target[n] = '\0';
    number = strstr(target, device);
    return number ? atoi(number + sizeof(device) - 1) : -1;
}

/* The caller keeps fd. */
static CUresult import(CUmemGenericAllocationHandle *handle, int fd)
{
    int device = device_of_file(fd), own;
    struct allocation *allocation;
    struct stat st;

    if (!handle || device < 0 || device >= sim.n_devices || fstat(fd, &st) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    allocation = add_allocation(own, device, st.st_size);
    allocation->imported = allocation->exportable = true;
    *handle = allocation->handle;
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                        CUmemAllocationHandleType shHandleType)
{
    int r = enter_driver("cuMemImportFromShareableHandle");

    if (r == 0)
        r = shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? import(handle, (int)(intptr_t)osHandle)
                                                                     : CUDA_ERROR_INVALID_VALUE;
    return sim_leave_driver(r);
}

/* ---- virtual memory: addresses -------------------------------------------------------------------------- */

static struct reservation *reservation_of(const void *at, size_t n_bytes)
{
    for (size_t i = 0; i < reservations.n; i++) {
        struct reservation *r = &reservations.items[i];

        if (r->at <= (const uint8_t *)at && (const uint8_t *)at + n_bytes <= r->at + r->n_bytes)
            return r;
    }
    return NULL;
}

static bool is_mapped(const void *at, size_t n_bytes)
{
    for (size_t i = 0; i < regions.n; i++)
        if (memory_overlap(at, n_bytes, regions.items[i].at, regions.items[i].n_bytes))
            return true;
    return false;
}

static void *pointer(CUdeviceptr ptr)
{
    return (void *)(uintptr_t)ptr;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags)
{
    int r = enter_driver("cuMemAddressReserve");
    uint8_t *at;

    (void)addr; /* only a hint */
    if (r == 0 && (!ptr || size == 0 || size % GRANULARITY != 0 || (alignment & (alignment - 1)) != 0 || flags != 0))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        at = reserve(size, MAX(alignment, (size_t)GRANULARITY));
        if (at)
            table_add(&reservations, ((struct reservation){at, size}));
        else
            r = CUDA_ERROR_OUT_OF_MEMORY;
        *ptr = (uintptr_t)at;
    }
    return sim_leave_driver(r);
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    int r = enter_driver("cuMemAddressFree");
    struct reservation *reservation = r == 0 ? reservation_of(pointer(ptr), size) : NULL;

    if (r == 0 && (!reservation || reservation->at != pointer(ptr) || reservation->n_bytes != size ||
                   is_mapped(pointer(ptr), size)))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        table_remove(&reservations, reservation - reservations.items);
    return sim_leave_driver(r);
}

/* Maps the allocation. It is inaccessible until cuMemSetAccess(). */
static CUresult map(void *at, size_t size, size_t offset, struct allocation *allocation)
{
    if (!allocation || offset != 0 || size != allocation->n_bytes || !reservation_of(at, size) || is_mapped(at, size) ||
        (uintptr_t)at % GRANULARITY != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    allocation->n_mappings++;
    table_add(
        &regions,
        ((struct region){
            .kind = REGION_MAPPED, .at = at, .n_bytes = size, .device = allocation->device, .allocation = allocation}));
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    int r = enter_driver("cuMemMap");

    device_check_idle("cuMemMap");
    if (r == 0)
        r = flags == 0 ? map(pointer(ptr), size, offset, find_allocation(handle)) : CUDA_ERROR_INVALID_VALUE;
    return sim_leave_driver(r);
}

/* Return: whether the range consists of complete mappings without a gap. */
static bool is_whole(const uint8_t *at, size_t size)
{
    const struct region *region;

    for (; size > 0; size -= region->n_bytes, at += region->n_bytes) {
        region = region_at(at);
        if (!region || region->kind != REGION_MAPPED || region->at != at || region->n_bytes > size)
            return false;
    }
    return true;
}

static void unmap_one(struct region *region)
{
    struct allocation *allocation = region->allocation;

    take_back(region->at, region->n_bytes);
    table_remove(&regions, region - regions.items);
    allocation->n_mappings--;
    drop_unused(allocation);
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    int r = enter_driver("cuMemUnmap");
    uint8_t *at = pointer(ptr), *end = at + size;

    device_check_idle("cuMemUnmap");
    if (r == 0 && (size == 0 || !is_whole(at, size)))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        device_check_unused("cuMemUnmap", at, size);
    while (r == 0 && at < end) {
        struct region *region = region_at(at);

        at += region->n_bytes;
        unmap_one(region);
    }
    return sim_leave_driver(r);
}

static CUresult set_access(struct region *region, const CUmemAccessDesc *desc, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bit;

        if (!is_device(&desc[i].location) || (desc[i].location.id != region->device && !sim.peers))
            return CUDA_ERROR_INVALID_DEVICE;
        bit = UINT32_C(1) << desc[i].location.id;
        region->reads &= ~bit;
        region->writes &= ~bit;
        if (desc[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ)
            region->reads |= bit;
        if (desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            region->writes |= bit;
    }
    if (!protect(region->at, region->n_bytes,
                 (region->reads ? PROT_READ : PROT_NONE) | (region->writes ? PROT_WRITE : PROT_NONE)))
        return CUDA_ERROR_OPERATING_SYSTEM;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    int r = enter_driver("cuMemSetAccess");
    uint8_t *at = pointer(ptr), *end = at + size;

    device_check_idle("cuMemSetAccess");
    if (r == 0 && (size == 0 || !desc || count == 0 || !is_whole(at, size)))
        r = CUDA_ERROR_INVALID_VALUE;
    while (r == 0 && at < end) {
        struct region *region = region_at(at);

        r = set_access(region, desc, count);
        at += region->n_bytes;
    }
    return sim_leave_driver(r);
}
