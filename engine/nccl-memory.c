/* SPDX-License-Identifier: Apache-2.0 */

/* The engine's memory: pieces shared with trainers, lists and results of lanes, and undo copies of orders. */

#include "engine/nccl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/base/base.h"
#include "core/base/print-number.h"

static void restore_all(struct nccl_engine *engine);

/* ---- the driver's calls ---------------------------------------------------------------------------------- */

/* Virtual memory management exists only in the driver. The functions are found by name, so libcuda is not linked. */
static struct {
    __typeof__(&cuMemGetAllocationGranularity) granularity;
    __typeof__(&cuMemCreate) create;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemImportFromShareableHandle) import;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemSetAccess) set_access;
    __typeof__(&cuDeviceGet) get_device;
    __typeof__(&cuDeviceGetUuid) get_uuid;
} driver;

enum { DRIVER_VERSION = 12000 }; /* find_entry() asks for functions of CUDA 12.0; much older drivers have them */

static void *find_entry(struct nccl_engine *engine, const char *name)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *function = NULL;

    engine_check_cuda(engine, NULL,
                      cudaGetDriverEntryPointByVersion(name, &function, DRIVER_VERSION, cudaEnableDefault, &found),
                      "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess || !function)
        engine_fail(engine, "the GPU driver has no %s", name);
    return function;
}

static void find_driver(struct nccl_engine *engine)
{
    driver.granularity = (__typeof__(driver.granularity))find_entry(engine, "cuMemGetAllocationGranularity");
    driver.create = (__typeof__(driver.create))find_entry(engine, "cuMemCreate");
    driver.release = (__typeof__(driver.release))find_entry(engine, "cuMemRelease");
    driver.export = (__typeof__(driver.export))find_entry(engine, "cuMemExportToShareableHandle");
    driver.import = (__typeof__(driver.import))find_entry(engine, "cuMemImportFromShareableHandle");
    driver.reserve = (__typeof__(driver.reserve))find_entry(engine, "cuMemAddressReserve");
    driver.map = (__typeof__(driver.map))find_entry(engine, "cuMemMap");
    driver.set_access = (__typeof__(driver.set_access))find_entry(engine, "cuMemSetAccess");
    driver.get_device = (__typeof__(driver.get_device))find_entry(engine, "cuDeviceGet");
    driver.get_uuid = (__typeof__(driver.get_uuid))find_entry(engine, "cuDeviceGetUuid");
}

static void fail_for_room(struct nccl_engine *engine, const struct nccl_gpu *gpu, const char *what, uint64_t n_bytes)
{
    char free_text[PRINT_SIZE], total_text[PRINT_SIZE], needed_text[PRINT_SIZE];
    size_t n_free = 0, n_total = 0;

    engine_use(engine, gpu);
    engine_check_cuda(engine, gpu, cudaMemGetInfo(&n_free, &n_total), "cudaMemGetInfo");
    engine_fail(engine, "GPU %d is full: %s of %s are free, and %s more are needed (%s)", gpu->device,
                print_bytes(free_text, n_free), print_bytes(total_text, n_total), print_bytes(needed_text, n_bytes),
                what);
}

static void check_driver(struct nccl_engine *engine, const struct nccl_gpu *gpu, CUresult r, const char *what,
                         uint64_t n_bytes)
{
    if (r == CUDA_ERROR_OUT_OF_MEMORY)
        fail_for_room(engine, gpu, what, n_bytes);
    if (r != CUDA_SUCCESS)
        engine_fail(engine, "GPU %d: %s: driver error %d", gpu->device, what, (int)r);
}

/* ---- host memory ----------------------------------------------------------------------------------------- */

uint8_t *memory_map(struct nccl_engine *engine, int fd, uint64_t n_bytes)
{
    struct stat status;
    void *map;

    if (fstat(fd, &status) < 0 || status.st_size < 0 || (uint64_t)status.st_size < n_bytes)
        engine_fail(engine, "a segment is smaller than it is said to be");
    map = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED)
        engine_fail(engine, "a segment cannot be mapped: %s", strerror(errno));
    /* A core dump must not contain the state. */
    (void)madvise(map, n_bytes, MADV_DONTDUMP);
    return map;
}

/* Registers host memory that all devices read and write directly. */
static void pin(struct nccl_engine *engine, void *map, uint64_t n_bytes)
{
    engine_check_cuda(engine, NULL, cudaHostRegister(map, n_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                      "cudaHostRegister");
}

static uint8_t *make_pinned(struct nccl_engine *engine, uint64_t n_bytes)
{
    void *map = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (map == MAP_FAILED)
        engine_fail(engine, "no memory");
    pin(engine, map, n_bytes);
    return map;
}

void memory_share(struct nccl_engine *engine, const struct device_share *share, int fd)
{
    struct nccl_segment *segment = &engine->segments[share->number];

    if (segment->map) {
        engine_check_cuda(engine, NULL, cudaHostUnregister(segment->map), "cudaHostUnregister");
        munmap(segment->map, segment->n_bytes);
    }
    segment->map = memory_map(engine, fd, share->n_bytes);
    segment->n_bytes = share->n_bytes;
    pin(engine, segment->map, segment->n_bytes);
}

/* ---- lanes ----------------------------------------------------------------------------------------------- */

uint8_t *memory_scratch(struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t n_bytes)
{
    void *at = NULL;

    cudaError_t r = cudaMalloc(&at, n_bytes);

    if (r == cudaErrorMemoryAllocation)
        fail_for_room(engine, gpu, "cudaMalloc", n_bytes);
    engine_check_cuda(engine, gpu, r, "cudaMalloc");
    return at;
}

static void make_lane(struct nccl_engine *engine, struct nccl_gpu *gpu, struct nccl_lane *lane)
{
    const struct nccl_sizes *sizes = &engine->sizes;

    lane->lists = (struct nccl_lists){.host = make_pinned(engine, sizes->lists),
                                      .device = memory_scratch(engine, gpu, sizes->lists),
                                      .n_bytes = sizes->lists};
    lane->results_host = make_pinned(engine, sizes->results);
    lane->results = memory_scratch(engine, gpu, sizes->results);
    lane->staging = memory_scratch(engine, gpu, sizes->staging);
    lane->notes = calloc(sizes->n_notes + 1, sizeof(*lane->notes));
    lane->leaf_ranks = calloc(sizes->n_leaves + 1, sizeof(*lane->leaf_ranks));
    if (!lane->notes || !lane->leaf_ranks)
        engine_fail(engine, "no memory");
    engine_check_cuda(engine, gpu, cudaEventCreateWithFlags(&lane->received, cudaEventDisableTiming),
                      "cudaEventCreateWithFlags");
    engine_check_cuda(engine, gpu, cudaEventCreateWithFlags(&lane->done, cudaEventDisableTiming),
                      "cudaEventCreateWithFlags");
}

static void map_marks(struct nccl_engine *engine, struct nccl_gpu *gpu)
{
    void *marks = NULL;

    engine_check_cuda(engine, gpu, cudaHostGetDevicePointer(&marks, engine->results.marks, 0),
                      "cudaHostGetDevicePointer");
    gpu->marks = marks;
}

void memory_prepare(struct nccl_engine *engine)
{
    uint64_t marks_at, n_bytes = device_results_bytes(&engine->plan, &marks_at);

    find_driver(engine);
    for (unsigned i = 0; i < engine->n_gpus; i++)
        if (device_rank_places_init(&engine->gpus[i].places, &engine->plan, i) < 0)
            engine_fail(engine, "no memory");
    engine->undo = device_undo_places(&engine->plan);
    pin(engine, engine->results.marks, n_bytes - marks_at);
    sizes_find(engine);
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        engine_use(engine, &engine->gpus[i]);
        map_marks(engine, &engine->gpus[i]);
        for (unsigned lane = 0; lane < DEVICE_LANES; lane++)
            make_lane(engine, &engine->gpus[i], &engine->gpus[i].lanes[lane]);
    }
}

void *lists_take(struct nccl_engine *engine, struct nccl_lists *lists, size_t n_bytes, void **device)
{
    size_t at = lists->n_used;

    if (n_bytes > lists->n_bytes - at)
        engine_fail(engine, "an order needs more than the %zu bytes of lists that were set aside", lists->n_bytes);
    lists->n_used = MIN(round_up(at + n_bytes, NCCL_LIST_ALIGN), lists->n_bytes);
    *device = lists->device + at;
    return lists->host + at;
}

void lists_upload(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane)
{
    struct nccl_lists *lists = &gpu->lanes[lane].lists;
    size_t from = lists->n_uploaded;

    if (lists->n_used > from)
        engine_check_cuda(engine, gpu,
                          cudaMemcpyAsync(lists->device + from, lists->host + from, lists->n_used - from,
                                          cudaMemcpyHostToDevice, gpu->main),
                          "cudaMemcpyAsync");
    lists->n_uploaded = lists->n_used;
}

size_t results_take(struct nccl_engine *engine, struct nccl_lane *lane, size_t n_bytes)
{
    size_t at = lane->n_results_used;

    if (n_bytes > engine->sizes.results - at)
        engine_fail(engine, "an order has more than the %" PRIu64 " bytes of results that were set aside",
                    engine->sizes.results);
    lane->n_results_used = MIN(round_up(at + n_bytes, NCCL_LIST_ALIGN), engine->sizes.results);
    return at;
}

/* ---- pieces ---------------------------------------------------------------------------------------------- */

static CUmemAllocationProp make_properties(const struct nccl_gpu *gpu)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu->device},
    };
}

static uint64_t round_to_granularity(struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t n_bytes)
{
    CUmemAllocationProp properties = make_properties(gpu);
    size_t granularity = 0;

    check_driver(engine, gpu, driver.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "cuMemGetAllocationGranularity", 0);
    return round_up(n_bytes, granularity);
}

static CUmemGenericAllocationHandle allocate(struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t n_bytes,
                                             int *fd)
{
    CUmemAllocationProp properties = make_properties(gpu);
    CUmemGenericAllocationHandle handle = 0;

    check_driver(engine, gpu, driver.create(&handle, n_bytes, &properties, 0), "cuMemCreate", n_bytes);
    check_driver(engine, gpu, driver.export(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "cuMemExportToShareableHandle", n_bytes);
    return handle;
}

/* Finds the GPUs that may reach a piece: its own GPU, and for a pool also all other GPUs that can. Return: their
 * bits. */
static uint32_t find_users(struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t kind)
{
    uint32_t users = UINT32_C(1) << gpu->device;

    for (unsigned i = 0; kind == DEVICE_POOL && i < engine->n_gpus; i++) {
        int can = 0;

        if (engine->gpus[i].device != gpu->device)
            engine_check_cuda(engine, gpu, cudaDeviceCanAccessPeer(&can, engine->gpus[i].device, gpu->device),
                              "cudaDeviceCanAccessPeer");
        users |= (uint32_t) !!can << i;
    }
    return users;
}

static void give_access(struct nccl_engine *engine, const struct nccl_gpu *gpu, const struct nccl_piece *piece,
                        CUdeviceptr at, uint32_t users)
{
    CUmemAccessDesc access[DEVICE_MAX_LOCAL];
    size_t n = 0;

    for (unsigned i = 0; i < engine->n_gpus; i++)
        if (users >> i & 1)
            access[n++] = (CUmemAccessDesc){.location = make_properties(&engine->gpus[i]).location,
                                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    check_driver(engine, gpu, driver.set_access(at, piece->n_bytes, access, n), "cuMemSetAccess", piece->n_bytes);
}

static void map_piece(struct nccl_engine *engine, const struct nccl_gpu *gpu, struct nccl_piece *piece,
                      CUmemGenericAllocationHandle handle, uint32_t users)
{
    CUdeviceptr at = 0;

    check_driver(engine, gpu, driver.reserve(&at, piece->n_bytes, 0, 0, 0), "cuMemAddressReserve", piece->n_bytes);
    check_driver(engine, gpu, driver.map(at, piece->n_bytes, 0, handle, 0), "cuMemMap", piece->n_bytes);
    give_access(engine, gpu, piece, at, users);
    /* From here on the mapping keeps the memory allocated. */
    check_driver(engine, gpu, driver.release(handle), "cuMemRelease", piece->n_bytes);
    piece->at = (uint8_t *)(uintptr_t)at;
}

/* Maps one piece, or allocates it if zerod has sent no descriptor. Return: the descriptor of a new piece, or -1. */
static int take_piece(struct nccl_engine *engine, struct nccl_gpu *gpu, const struct device_piece *asked, int fd)
{
    struct nccl_piece *piece = &gpu->pieces[asked->kind];
    CUmemGenericAllocationHandle handle = 0;
    uint32_t users = find_users(engine, gpu, asked->kind);
    int new_fd = -1;

    if (asked->n_bytes < gpu->places.piece_bytes[asked->kind])
        engine_fail(engine, "piece %" PRIu32 " of local rank %d has %" PRIu64 " bytes, and needs %" PRIu64, asked->kind,
                    gpu->device, asked->n_bytes, gpu->places.piece_bytes[asked->kind]);
    piece->n_bytes = round_to_granularity(engine, gpu, asked->n_bytes);
    if (asked->has_fd)
        check_driver(engine, gpu,
                     driver.import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                     "cuMemImportFromShareableHandle", piece->n_bytes);
    else
        handle = allocate(engine, gpu, piece->n_bytes, &new_fd);
    map_piece(engine, gpu, piece, handle, users);
    if (asked->kind == DEVICE_UNDO && !asked->has_fd)
        engine->results.cleared[gpu->device] = 0;
    if (asked->kind == DEVICE_POOL)
        gpu->pool_writers = users;
    return new_fd;
}

static void report_memory(struct nccl_engine *engine, uint32_t local_rank, const struct device_piece *pieces, int *fds,
                          size_t n)
{
    const struct nccl_gpu *gpu = &engine->gpus[local_rank];
    CUdevice device; /* a handle, not an ordinal as in the runtime and in places of memory */
    CUuuid uuid;
    struct device_report report = {.type = DEVICE_REPORT_MEMORY,
                                   .memory = {.local_rank = local_rank,
                                              .pieces = pieces,
                                              .n_pieces = n,
                                              .gpu = (const uint8_t *)uuid.bytes,
                                              .n_gpu_bytes = sizeof(uuid.bytes)}};

    check_driver(engine, gpu, driver.get_device(&device, gpu->device), "cuDeviceGet", 0);
    check_driver(engine, gpu, driver.get_uuid(&uuid, device), "cuDeviceGetUuid", 0);
    engine_report(engine, &report, fds, n);
    for (size_t i = 0; i < n; i++)
        close(fds[i]);
}

void memory_take(struct nccl_engine *engine, const struct device_memory *memory, const int *fds, size_t n_fds)
{
    struct device_piece made[DEVICE_N_PIECES];
    int made_fds[DEVICE_N_PIECES], fd;
    struct nccl_gpu *gpu;
    size_t n = 1, n_made = 0; /* the first descriptor is that of the progress page */

    if (engine->phase != NCCL_AWAITS_MEMORY || memory->local_rank >= engine->n_gpus ||
        engine->gpus[memory->local_rank].has_memory || memory->n_pieces != DEVICE_N_PIECES ||
        device_memory_n_fds(memory) + 1 != n_fds)
        engine_fail(engine, "memory out of place");
    gpu = &engine->gpus[memory->local_rank];
    gpu->progress = (const struct progress_page *)(const void *)memory_map(engine, fds[0], sizeof(*gpu->progress));
    engine_use(engine, gpu);
    for (size_t i = 0; i < memory->n_pieces; i++) {
        const struct device_piece *piece = &memory->pieces[i];

        fd = take_piece(engine, gpu, piece, piece->has_fd ? fds[n++] : -1);
        if (fd < 0)
            continue;
        made[n_made] =
            (struct device_piece){.kind = piece->kind, .n_bytes = gpu->pieces[piece->kind].n_bytes, .has_fd = true};
        made_fds[n_made++] = fd;
    }
    gpu->has_memory = true;
    report_memory(engine, memory->local_rank, made, made_fds, n_made);
    if (++engine->n_with_memory == engine->n_gpus)
        restore_all(engine);
}

/* ---- trainers -------------------------------------------------------------------------------------------- */

void memory_release(struct nccl_engine *engine, const struct device_release *release)
{
    if (release->local_rank >= engine->n_gpus)
        engine_fail(engine, "points of local rank %" PRIu32 " of %u", release->local_rank, engine->n_gpus);
    engine->gpus[release->local_rank].released = MAX(engine->gpus[release->local_rank].released, release->point);
}

/* ---- undo ------------------------------------------------------------------------------------------------ */

static uint8_t *undo_place(const struct nccl_engine *engine, const struct nccl_gpu *gpu, unsigned lane)
{
    return gpu->pieces[DEVICE_UNDO].at + lane * engine->undo.lane_bytes;
}

static struct device_mark *mark_of(const struct nccl_engine *engine, const struct nccl_gpu *gpu, unsigned lane)
{
    return &engine->results.marks[(size_t)gpu->device * DEVICE_LANES + lane];
}

static void copy_on_gpu(struct nccl_engine *engine, struct nccl_gpu *gpu, void *dst, const void *src, size_t n_bytes,
                        enum cudaMemcpyKind kind)
{
    if (n_bytes > 0)
        engine_check_cuda(engine, gpu, cudaMemcpyAsync(dst, src, n_bytes, kind, gpu->main), "cudaMemcpyAsync");
}

static void words_add(struct nccl_engine *engine, struct nccl_gpu *gpu, const void *at, uint64_t value)
{
    size_t offset = (size_t)((const uint8_t *)at - (const uint8_t *)engine->results.marks);

    if (gpu->words.n == DEVICE_MAX_WORDS)
        engine_fail(engine, "more than %d words at once", DEVICE_MAX_WORDS);
    gpu->words.words[gpu->words.n].at = (uint64_t *)(void *)(gpu->marks + offset);
    gpu->words.words[gpu->words.n++].value = value;
}

static void words_write(struct nccl_engine *engine, struct nccl_gpu *gpu)
{
    engine_launch(engine, gpu, device_write_words(gpu->main, &gpu->words), "device_write_words");
    gpu->words.n = 0;
}

void undo_keep(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane, const struct device_mark *mark,
               const void *array, uint64_t n_bytes)
{
    struct device_mark *there = mark_of(engine, gpu, lane);
    uint64_t subject;

    memcpy(&subject, &mark->kind, sizeof(subject));
    /* First records that there is no copy, then the copy's subject, so that the copies of two subjects are never
     * confused. */
    words_add(engine, gpu, &there->copied, 0);
    words_add(engine, gpu, &there->kind, subject);
    words_add(engine, gpu, &there->op, mark->op);
    words_add(engine, gpu, &there->tag, mark->tag);
    words_write(engine, gpu);
    copy_on_gpu(engine, gpu, undo_place(engine, gpu, lane), array, n_bytes, cudaMemcpyDeviceToDevice);
    words_add(engine, gpu, &there->copied, mark->tag + 1);
    words_write(engine, gpu);
}

struct device_update_undo undo_of_update(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t step,
                                         uint32_t marks)
{
    uint8_t *piece = gpu->pieces[DEVICE_UNDO].at;

    return (struct device_update_undo){
        .marks = (uint64_t *)(void *)(piece + engine->undo.marks) + (size_t)marks * engine->undo.n_blocks,
        .slots = piece + engine->undo.slots,
        .tag = step,
        .slot_bytes = engine->undo.slot_bytes,
    };
}

void undo_forget(struct nccl_engine *engine, unsigned lane)
{
    for (unsigned i = 0; i < engine->n_gpus; i++)
        mark_of(engine, &engine->gpus[i], lane)->copied = 0;
}

static void restore_reduction(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane,
                              const struct device_mark *mark)
{
    uint32_t parcel = mark->index;
    uint64_t begin, end;

    if (parcel >= engine->plan.head->n_parcels)
        engine_fail(engine, "a mark of parcel %" PRIu32 ", which does not exist", parcel);
    if (reduce_is_done(engine, parcel, mark->op))
        return;
    device_parcel_slice(&engine->plan, parcel, gpu->rank, &begin, &end);
    copy_on_gpu(engine, gpu, nccl_acc(gpu, engine->plan.parcels[parcel].bucket, begin), undo_place(engine, gpu, lane),
                (end - begin) * sizeof(float), cudaMemcpyDeviceToDevice);
}

static void restore_slice(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane, uint32_t bucket)
{
    uint64_t n_bytes;
    uint8_t *slice = nccl_weights(engine, gpu, bucket, &n_bytes);

    copy_on_gpu(engine, gpu, slice, undo_place(engine, gpu, lane), n_bytes, cudaMemcpyDeviceToDevice);
}

static void restore_lane(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane)
{
    const struct device_mark *mark = mark_of(engine, gpu, lane);
    const struct device_plan_header *head = engine->plan.head;

    if (mark->copied != mark->tag + 1)
        return;
    if (mark->kind != DEVICE_MARK_REDUCE && mark->index >= head->n_buckets)
        engine_fail(engine, "a mark of bucket %" PRIu32 ", which does not exist", mark->index);
    if (mark->kind == DEVICE_MARK_GATHER && head->stage == 3)
        engine_fail(engine, "a mark of kind %" PRIu32 ", of which there are no orders here", mark->kind);
    switch (mark->kind) {
    case DEVICE_MARK_REDUCE:
        restore_reduction(engine, gpu, lane, mark);
        return;
    case DEVICE_MARK_GATHER:
        restore_slice(engine, gpu, lane, mark->index);
        return;
    default:
        engine_fail(engine, "a mark of kind %" PRIu32, mark->kind);
    }
}

/* Clears the marks of new memory, because an update could mistake its contents for marks. The previous engine may have
 * died before it cleared them. */
static void clear_marks(struct nccl_engine *engine, struct nccl_gpu *gpu)
{
    if (engine->results.cleared[gpu->device] != 1)
        engine_check_cuda(engine, gpu,
                          cudaMemsetAsync(gpu->pieces[DEVICE_UNDO].at + engine->undo.marks, 0,
                                          engine->undo.slots - engine->undo.marks, gpu->main),
                          "cudaMemsetAsync");
}

/* Restores all marked arrays. Call it when all memory is mapped. An interrupted update continues when its order is
 * repeated. */
static void restore_all(struct nccl_engine *engine)
{
    for (unsigned i = 0; i < engine->n_gpus; i++) {
        struct nccl_gpu *gpu = &engine->gpus[i];

        engine_use(engine, gpu);
        clear_marks(engine, gpu);
        for (unsigned lane = 0; lane < DEVICE_LANES; lane++)
            restore_lane(engine, gpu, lane);
        engine_check_cuda(engine, gpu, cudaEventRecord(gpu->main_event, gpu->main), "cudaEventRecord");
    }
    engine->phase = NCCL_RESTORES;
}

int memory_poll_restore(struct nccl_engine *engine)
{
    if (engine_poll(engine) != 0)
        return NCCL_AGAIN;
    for (unsigned i = 0; i < engine->n_gpus * DEVICE_LANES; i++)
        engine->results.marks[i].copied = 0;
    for (unsigned i = 0; i < engine->n_gpus; i++)
        engine->results.cleared[i] = 1;
    return 0;
}
