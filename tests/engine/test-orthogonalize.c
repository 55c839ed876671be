/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Orthogonalising on devices, with simulated CUDA and cuBLAS, is compared with kernels/muon.c. Each body runs in a
 * process of its own. LD_LIBRARY_PATH names the folder of the simulated cuBLAS.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "engine/orthogonalize.h"
#include "tests/sim/sim-child.h"

enum { N_DEVICES = 2, GUARD_ELEMS = 16, WHY_BYTES = 256 };

extern bool emulated_backwards;

static const struct hyper usual = {.eps = 1e-8, .ns_coefficients = {3.4445, -4.775, 2.0315}, .ns_steps = 5};

/* ---- one device ----------------------------------------------------------------------------------------- */

struct device {
    struct orthogonalizer orthogonalizer;
    cudaStream_t stream;
    float *matrix, *scratch;
};

static const struct cublas *load(void)
{
    const struct cublas *cublas, *again;
    char why[WHY_BYTES];

    CHECK(cublas_load(&cublas, why, sizeof(why)) == 0);
    CHECK(cublas_load(&again, why, sizeof(why)) == 0 && again == cublas);
    return cublas;
}

static struct device open_device(int number)
{
    struct device device = {.stream = new_stream(number)};
    char why[WHY_BYTES] = "";

    CHECK(device_load_kernels() == 0);
    CHECK(orthogonalizer_open(&device.orthogonalizer, load(), device.stream, why, sizeof(why)));
    return device;
}

static void new_arrays(struct device *device, struct muon_shape shape, const float *matrix)
{
    const uint64_t n_scratch = muon_scratch_elems(shape) + GUARD_ELEMS;

    CHECK(cudaMalloc((void **)&device->matrix, shape.rows * shape.cols * sizeof(float)) == cudaSuccess);
    CHECK(cudaMalloc((void **)&device->scratch, n_scratch * sizeof(float)) == cudaSuccess);
    put(device->matrix, matrix, shape.rows * shape.cols * sizeof(float), device->stream);
}

static void free_arrays(struct device *device)
{
    CHECK(cudaFree(device->matrix) == cudaSuccess);
    CHECK(cudaFree(device->scratch) == cudaSuccess);
}

/* ---- results -------------------------------------------------------------------------------------------- */

static float *new_values(struct muon_shape shape, float scale)
{
    const size_t n = shape.rows * shape.cols;
    float *matrix = calloc(n, sizeof(float));
    uint64_t seed = shape.rows * 1000 + shape.cols;

    CHECK(matrix);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005 + 1442695040888963407;
        matrix[i] = (float)((int64_t)seed >> 40) * 0x1p-20f * scale;
    }
    return matrix;
}

/* Return: the result of kernels/muon.c, which the caller frees. */
static float *new_expected(struct muon_shape shape, const float *matrix, const struct hyper *hyper)
{
    const size_t n = shape.rows * shape.cols;
    float *scratch = aligned_alloc(64, muon_scratch_elems(shape) * sizeof(float)), *expected = calloc(n, sizeof(float));
    const struct gemm *gemm;
    char why[WHY_BYTES] = "";

    CHECK(scratch && expected);
    if (gemm_load(&gemm, why, sizeof(why)) < 0)
        fprintf(stderr, "%s\n", why);
    CHECK(!*why);
    memcpy(expected, muon_orthogonalize(gemm, shape, matrix, hyper, scratch, NULL), n * sizeof(float));
    free(scratch);
    return expected;
}

/* Orthogonalises the matrix on the device. Writes the result to got. */
static void orthogonalize_on(struct device *device, struct muon_shape shape, const float *matrix,
                             const struct hyper *hyper, float *got)
{
    const size_t n = shape.rows * shape.cols, n_scratch = muon_scratch_elems(shape);
    float *after = calloc(n, sizeof(float));
    uint32_t guard[GUARD_ELEMS];
    char why[WHY_BYTES] = "";
    const float *result =
        orthogonalize(&device->orthogonalizer, shape, device->matrix, hyper, device->scratch, why, sizeof(why));

    CHECK(after && result && !*why);
    CHECK(result >= device->scratch && result + n <= device->scratch + n_scratch);
    get(got, result, n * sizeof(float), device->stream);
    get(after, device->matrix, n * sizeof(float), device->stream);
    CHECK(memcmp(after, matrix, n * sizeof(float)) == 0);
    get(guard, device->scratch + n_scratch, sizeof(guard), device->stream);
    for (unsigned i = 0; i < GUARD_ELEMS; i++)
        CHECK(guard[i] == poison_at(device->scratch + n_scratch + i));
    free(after);
}

/* Asserts that results have equal bits on all devices, in each run, and in both orders of blocks. */
static void check_shape(struct device *devices, struct muon_shape shape, float scale, const struct hyper *hyper)
{
    const size_t n = shape.rows * shape.cols;
    _cleanup_free_ float *matrix = new_values(shape, scale), *expected = new_expected(shape, matrix, hyper);
    _cleanup_free_ float *first = calloc(n, sizeof(float)), *got = calloc(n, sizeof(float));

    CHECK(first && got);
    for (unsigned run = 0; run < 2 * N_DEVICES; run++) {
        struct device *device = &devices[run / 2];

        emulated_backwards = run % 2;
        CHECK(cudaSetDevice((int)run / 2) == cudaSuccess);
        if (run % 2 == 0)
            new_arrays(device, shape, matrix);
        orthogonalize_on(device, shape, matrix, hyper, run == 0 ? first : got);
        CHECK(run == 0 || memcmp(first, got, n * sizeof(float)) == 0);
        if (run % 2 == 1)
            free_arrays(device);
    }
    for (size_t i = 0; i < n; i++)
        CHECK(fabsf(first[i] - expected[i]) < 2e-4f);
}

static void all_shapes(void *unused)
{
    static const struct muon_shape shapes[] = {{1, 1},    {1, 7},    {7, 1},    {1, 300},  {300, 1},   {2, 3},
                                               {16, 16},  {17, 33},  {33, 17},  {64, 65},  {100, 100}, {130, 63},
                                               {63, 130}, {40, 300}, {300, 40}, {120, 200}};
    struct device devices[N_DEVICES] = {open_device(0), open_device(1)};
    struct hyper hyper = usual;

    (void)unused;
    for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
        for (unsigned scale = 0; scale < 3; scale++) /* the last scale makes the norm smaller than eps */
            check_shape(devices, shapes[i], (float[]){1, 1e-6f, 1e-20f}[scale], &usual);
        check_shape(devices, shapes[i], 0, &usual);
    }
    hyper.ns_steps = 0;
    check_shape(devices, (struct muon_shape){20, 30}, 1, &hyper);
    hyper = (struct hyper){.eps = 1e-8, .ns_coefficients = {1.5, -0.5, 0}, .ns_steps = 1};
    check_shape(devices, (struct muon_shape){20, 30}, 1, &hyper);
    hyper.ns_steps = 30; /* these coefficients converge, so many steps stay exact */
    check_shape(devices, (struct muon_shape){5, 30}, 1, &hyper);
}

/* The largest shape has a product every few milliseconds, and takes the longest. */
static void largest_shape(void *unused)
{
    struct device devices[N_DEVICES] = {open_device(0), open_device(1)};

    (void)unused;
    check_shape(devices, (struct muon_shape){200, 300}, 1, &usual);
    check_shape(devices, (struct muon_shape){300, 200}, 1, &usual);
}

static void test_results(void **state)
{
    (void)state;
    child_passes("delay-us=0", all_shapes, NULL);
    child_passes("seed=7,delay-us=500", largest_shape, NULL);
}

/* After the setup no call waits, so the test polls. */
static void nothing_waits(void *unused)
{
    const struct muon_shape shape = {20, 30};
    _cleanup_free_ float *matrix = new_values(shape, 1), *expected = new_expected(shape, matrix, &usual);
    struct device device = open_device(0);
    const size_t n_bytes = shape.rows * shape.cols * sizeof(float);
    float *host = new_host(n_bytes);
    char why[WHY_BYTES] = "";
    const float *result;

    (void)unused;
    CHECK(cudaMalloc((void **)&device.scratch, muon_scratch_elems(shape) * sizeof(float)) == cudaSuccess);
    CHECK(cudaMalloc((void **)&device.matrix, n_bytes) == cudaSuccess);
    CHECK(orthogonalizer_warm(&device.orthogonalizer, shape, device.scratch, why, sizeof(why)));
    memcpy(host, matrix, n_bytes);
    CHECK(cudaMemcpyAsync(device.matrix, host, n_bytes, cudaMemcpyHostToDevice, device.stream) == cudaSuccess);
    result = orthogonalize(&device.orthogonalizer, shape, device.matrix, &usual, device.scratch, why, sizeof(why));
    CHECK(result && !*why);
    while (cudaStreamQuery(device.stream) == cudaErrorNotReady)
        sleep_ms(1);
    CHECK(cudaMemcpyAsync(host, result, n_bytes, cudaMemcpyDeviceToHost, device.stream) == cudaSuccess);
    while (cudaStreamQuery(device.stream) == cudaErrorNotReady)
        sleep_ms(1);
    for (size_t i = 0; i < shape.rows * shape.cols; i++)
        CHECK(fabsf(host[i] - expected[i]) < 2e-4f);
}

static void test_nothing_waits(void **state)
{
    (void)state;
    child_passes("never-blocks", nothing_waits, NULL);
}

/* ---- errors --------------------------------------------------------------------------------------------- */

static void refused_open(void *sentence)
{
    struct device device = {.stream = new_stream(0)};
    char why[WHY_BYTES] = "";

    CHECK(!orthogonalizer_open(&device.orthogonalizer, load(), device.stream, why, sizeof(why)));
    CHECK(strcmp(why, sentence) == 0);
}

enum { ROWS = 20, COLS = 30 };

static struct device open_with_matrix(void)
{
    const struct muon_shape shape = {ROWS, COLS};
    _cleanup_free_ float *matrix = new_values(shape, 1);
    struct device device = open_device(0);

    new_arrays(&device, shape, matrix);
    return device;
}

static void refused_step(void *sentence)
{
    const struct muon_shape shape = {ROWS, COLS};
    struct device device = open_with_matrix();
    char why[WHY_BYTES] = "";

    CHECK(!orthogonalize(&device.orthogonalizer, shape, device.matrix, &usual, device.scratch, why, sizeof(why)));
    CHECK(strcmp(why, sentence) == 0);
    CHECK(cudaStreamSynchronize(device.stream) == cudaSuccess);
}

static void refused_warming(void *sentence)
{
    const struct muon_shape shape = {ROWS, COLS};
    struct device device = open_with_matrix();
    char why[WHY_BYTES] = "";

    CHECK(!orthogonalizer_warm(&device.orthogonalizer, shape, device.scratch, why, sizeof(why)));
    CHECK(strcmp(why, sentence) == 0);
}

/* Each body makes one copy before those of orthogonalize(). */
static void test_errors(void **state)
{
#define FAILED "the function failed to launch on the GPU (status 13)"
    static const struct {
        void (*body)(void *sentence);
        const char *env, *sentence;
    } cases[] = {
        {refused_open, "cublasCreate_v2:error=CUBLAS_STATUS_NOT_INITIALIZED",
         "cuBLAS: cublasCreate: the library was not initialized (status 1)"},
        {refused_open, "cudaMalloc:error=cudaErrorMemoryAllocation",
         "cudaMalloc: out of memory (cudaErrorMemoryAllocation)"},
        {refused_open, "memory=32", "cudaMalloc: out of memory (cudaErrorMemoryAllocation)"},
        {refused_open, "cublasSetStream_v2:error=CUBLAS_STATUS_NOT_INITIALIZED",
         "cuBLAS: cublasSetStream: the library was not initialized (status 1)"},
        {refused_open, "cublasSetWorkspace_v2:error=CUBLAS_STATUS_INVALID_VALUE",
         "cuBLAS: cublasSetWorkspace: an unsupported value or parameter was passed to the function (status 7)"},
        {refused_open, "cublasSetMathMode:error=CUBLAS_STATUS_INVALID_VALUE",
         "cuBLAS: cublasSetMathMode: an unsupported value or parameter was passed to the function (status 7)"},
        {refused_open, "cublasSetAtomicsMode:error=CUBLAS_STATUS_NOT_INITIALIZED",
         "cuBLAS: cublasSetAtomicsMode: the library was not initialized (status 1)"},
        {refused_step, "cublasSgemm_v2:error=CUBLAS_STATUS_EXECUTION_FAILED@1", "cuBLAS: cublasSgemm: " FAILED},
        {refused_step, "cublasSgemm_v2:error=CUBLAS_STATUS_EXECUTION_FAILED@2", "cuBLAS: cublasSgemm: " FAILED},
        {refused_step, "cublasSgemm_v2:error=CUBLAS_STATUS_EXECUTION_FAILED@15", "cuBLAS: cublasSgemm: " FAILED},
        {refused_step, "sim_launch:error=cudaErrorLaunchFailure@1",
         "device_normalize: unspecified launch failure (cudaErrorLaunchFailure)"},
        {refused_step, "sim_launch:error=cudaErrorLaunchFailure@2",
         "device_normalize: unspecified launch failure (cudaErrorLaunchFailure)"},
        {refused_step, "cudaMemcpyAsync:error=cudaErrorInvalidValue@2",
         "cudaMemcpyAsync: invalid argument (cudaErrorInvalidValue)"},
        {refused_step, "cudaMemcpyAsync:error=cudaErrorInvalidValue@11",
         "cudaMemcpyAsync: invalid argument (cudaErrorInvalidValue)"},
        {refused_warming, "cudaMemsetAsync:error=cudaErrorInvalidValue",
         "cudaMemsetAsync: invalid argument (cudaErrorInvalidValue)"},
        {refused_warming, "cublasSgemm_v2:error=CUBLAS_STATUS_EXECUTION_FAILED@3", "cuBLAS: cublasSgemm: " FAILED},
    };
#undef FAILED

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(cases); i++)
        child_passes(cases[i].env, cases[i].body, (void *)(uintptr_t)cases[i].sentence);
}

/* ---- loading -------------------------------------------------------------------------------------------- */

/* Starts this program again, which loads cuBLAS from the folder. Sets line to its output. */
static void load_from(const char *folder, char *line, size_t size)
{
    int fds[2], status;
    ssize_t n;
    pid_t pid;

    assert_int_equal(pipe(fds), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        setenv("LD_LIBRARY_PATH", folder, 1);
        execl("/proc/self/exe", "test-orthogonalize", "load", NULL);
        _exit(127);
    }
    close(fds[1]);
    n = read(fds[0], line, size - 1);
    line[MAX(n, (ssize_t)0)] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static int load_and_print(void)
{
    const struct cublas *cublas;
    char why[WHY_BYTES];

    printf("%s\n", cublas_load(&cublas, why, sizeof(why)) == 0 ? "loaded" : why);
    return 0;
}

static void put_library(const char *folder, const char *name, const char *target)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    (void)unlink(path);
    if (target)
        assert_int_equal(symlink(target, path), 0);
}

static void test_loading(void **state)
{
    static const char needs[] = "Muon on GPUs needs cuBLAS (libcublas.so.13 or .12; PyPI: nvidia-cublas): ";
    char folder[] = "/tmp/test-orthogonalize-XXXXXX", line[512], expected[512];
    const char *stand_in = getenv("ZEROD_LIBCUBLAS_SIM"), *other = getenv("ZEROD_LIBCUDA_SIM");

    (void)state;
    assert_true(stand_in && other);
    assert_non_null(mkdtemp(folder));
    put_library(folder, "libcublas.so.12", stand_in);
    load_from(folder, line, sizeof(line));
    assert_string_equal(line, "loaded\n");
    put_library(folder, "libcublas.so.13", other);
    load_from(folder, line, sizeof(line));
    assert_string_equal(line, "loaded\n");

    put_library(folder, "libcublas.so.12", NULL);
    load_from(folder, line, sizeof(line));
    if (strcmp(line, "loaded\n") != 0) { /* the machine may have a real cuBLAS */
        snprintf(expected, sizeof(expected), "%slibcublas.so.13 is another library\n", needs);
        assert_string_equal(line, expected);
    }
    put_library(folder, "libcublas.so.13", NULL);
    load_from(folder, line, sizeof(line));
    if (strcmp(line, "loaded\n") != 0) {
        snprintf(expected, sizeof(expected),
                 "%slibcublas.so.13: cannot open shared object file: No such file or directory\n", needs);
        assert_string_equal(line, expected);
    }
    rmdir(folder);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results),
        cmocka_unit_test(test_nothing_waits),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_loading),
    };

    (void)argv;
    gemm_one_thread();
    return argc > 1 ? load_and_print() : cmocka_run_group_tests(tests, NULL, NULL);
}
