/* SPDX-License-Identifier: Apache-2.0 */

/* The stand-in for cuBLAS, opened as the engine opens it: products, late results, wrong uses, ordered failures. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "engine/cublas.h"
#include "sim-child.h"

enum { M = 3, N = 4, K = 5, LARGEST = K * N, STATUS_ALLOC_FAILED = 3, STATUS_INVALID_VALUE = 7, STATUS_FAILED = 13 };

/* A handle on device 0 that is ready for use, and operands with whole numbers. */
struct setup {
    const struct cublas *cublas;
    struct cublasContext *handle;
    cudaStream_t stream;
    void *workspace;
    float *a, *b, *c;
};

static float *new_matrix(cudaStream_t stream, float first)
{
    float *matrix = new_memory(0, LARGEST * sizeof(float)), numbers[LARGEST];

    for (int i = 0; i < LARGEST; i++)
        numbers[i] = first + (float)(i * i % 7);
    put(matrix, numbers, sizeof(numbers), stream);
    return matrix;
}

static struct setup set_up(void)
{
    struct setup s = {.stream = new_stream(0), .workspace = new_memory(0, CUBLAS_WORKSPACE_BYTES)};
    char why[256];

    CHECK(cublas_load(&s.cublas, why, sizeof(why)) == 0);
    CHECK(s.cublas->create(&s.handle) == CUBLAS_STATUS_SUCCESS);
    CHECK(s.cublas->set_stream(s.handle, s.stream) == CUBLAS_STATUS_SUCCESS);
    CHECK(s.cublas->set_workspace(s.handle, s.workspace, CUBLAS_WORKSPACE_BYTES) == CUBLAS_STATUS_SUCCESS);
    CHECK(s.cublas->set_math_mode(s.handle, CUBLAS_PEDANTIC_MATH) == CUBLAS_STATUS_SUCCESS);
    CHECK(s.cublas->set_atomics_mode(s.handle, CUBLAS_ATOMICS_NOT_ALLOWED) == CUBLAS_STATUS_SUCCESS);
    s.a = new_matrix(s.stream, 1);
    s.b = new_matrix(s.stream, -2);
    s.c = new_matrix(s.stream, 3);
    return s;
}

/* c = 2 a b + beta c */
static int multiply(const struct setup *s, int trans_a, int trans_b, float beta)
{
    const float alpha = 2;

    return s->cublas->sgemm(s->handle, trans_a, trans_b, M, N, K, &alpha, s->a, trans_a ? K : M, s->b, trans_b ? N : K,
                            &beta, s->c, M);
}

/* ---- products ------------------------------------------------------------------------------------------- */

static float expected_of(const float *a, const float *b, float old, int trans_a, int trans_b, int row, int col)
{
    float sum = 0;

    for (int k = 0; k < K; k++)
        sum += (trans_a ? a[row * K + k] : a[k * M + row]) * (trans_b ? b[k * N + col] : b[col * K + k]);
    return 2 * sum + old;
}

static void products(void *unused)
{
    struct setup s = set_up();
    float a[LARGEST], b[LARGEST], c[LARGEST], got[LARGEST];
    int version = 0;

    (void)unused;
    get(a, s.a, sizeof(a), s.stream);
    get(b, s.b, sizeof(b), s.stream);
    for (int way = 0; way < 8; way++) {
        const int trans_a = way & 1, trans_b = way >> 1 & 1, beta = way >> 2 & 1;

        if (beta == 0)
            s.c = new_memory(0, LARGEST * sizeof(float)); /* NaNs, which beta = 0 must not read */
        get(c, s.c, sizeof(c), s.stream);
        CHECK(multiply(&s, trans_a, trans_b, (float)beta) == CUBLAS_STATUS_SUCCESS);
        get(got, s.c, sizeof(got), s.stream);
        for (int at = 0; at < M * N; at++)
            CHECK(got[at] == expected_of(a, b, beta ? c[at] : 0, trans_a, trans_b, at % M, at / M));
        CHECK(memcmp(got + M * N, c + M * N, sizeof(float) * (LARGEST - M * N)) == 0);
    }
    CHECK(s.cublas->get_version(NULL, &version) == CUBLAS_STATUS_SUCCESS && version == 130100);
    CHECK(s.cublas->destroy(s.handle) == CUBLAS_STATUS_SUCCESS);
}

static void late_product(void *unused)
{
    struct setup s = set_up();
    cudaStream_t other = new_stream(0);
    float got[LARGEST];
    uint32_t first;

    (void)unused;
    CHECK(multiply(&s, CUBLAS_OP_N, CUBLAS_OP_N, 0) == CUBLAS_STATUS_SUCCESS);
    do {
        get(got, s.c, sizeof(got), other);
        memcpy(&first, got, sizeof(first));
    } while (first != SIM_POISON);
}

static void test_products(void **state)
{
    (void)state;
    child_passes("", products, NULL);
    child_passes("seed=3,delay-us=0", products, NULL);
    child_passes("cublasSgemm_v2:hang", late_product, NULL);
}

/* ---- wrong uses ----------------------------------------------------------------------------------------- */

static void without_stream(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(s.cublas->create(&s.handle) == CUBLAS_STATUS_SUCCESS);
    (void)multiply(&s, 0, 0, 0);
}

static void without_workspace(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(s.cublas->set_stream(s.handle, s.stream) == CUBLAS_STATUS_SUCCESS);
    (void)multiply(&s, 0, 0, 0);
}

static void other_math(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(s.cublas->set_math_mode(s.handle, 0) == CUBLAS_STATUS_SUCCESS);
    (void)multiply(&s, 0, 0, 0);
}

static void atomics(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    (void)s.cublas->set_atomics_mode(s.handle, 1);
}

static void dead_handle(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(s.cublas->destroy(s.handle) == CUBLAS_STATUS_SUCCESS);
    (void)multiply(&s, 0, 0, 0);
}

static void no_handle(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    s.handle = (struct cublasContext *)(void *)s.stream;
    (void)multiply(&s, 0, 0, 0);
}

static void stream_elsewhere(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    (void)s.cublas->set_stream(s.handle, new_stream(1));
}

static void other_device(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(cudaSetDevice(1) == cudaSuccess);
    (void)multiply(&s, 0, 0, 0);
}

static void leading_dimension(void *unused)
{
    struct setup s = set_up();
    const float one = 1;

    (void)unused;
    (void)s.cublas->sgemm(s.handle, CUBLAS_OP_T, CUBLAS_OP_N, M, N, K, &one, s.a, M, s.b, K, &one, s.c, M);
}

static void result_with_gaps(void *unused)
{
    struct setup s = set_up();
    const float one = 1;

    (void)unused;
    (void)s.cublas->sgemm(s.handle, CUBLAS_OP_N, CUBLAS_OP_N, M, N, K, &one, s.a, M, s.b, K, &one, s.c, M + 1);
}

static void overlap(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    s.c = s.b;
    (void)multiply(&s, 0, 0, 0);
}

static void operand_in_workspace(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    s.a = s.workspace;
    (void)multiply(&s, 0, 0, 0);
}

static void host_operand(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    s.a = new_host(4096);
    (void)multiply(&s, 0, 0, 0);
}

static void short_result(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    s.c = new_memory(0, sizeof(float) * (M * N - 1));
    (void)multiply(&s, 0, 0, 0);
}

/* Another stream writes an operand or the result while the product runs. */
static void changed(float *matrix, const struct setup *s)
{
    cudaStream_t other = new_stream(0);

    CHECK(multiply(s, 0, 0, 0) == CUBLAS_STATUS_SUCCESS);
    sleep_ms(500);
    CHECK(cudaMemsetAsync(matrix, 1, sizeof(float), other) == cudaSuccess);
    sleep_ms(20000);
}

static void changed_operand(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    changed(s.b, &s);
}

static void changed_result(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    changed(s.c, &s);
}

static void freed_operand(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(multiply(&s, 0, 0, 0) == CUBLAS_STATUS_SUCCESS);
    (void)cudaFree(s.b);
}

static void late_handle(void *unused)
{
    const struct cublas *cublas;
    struct cublasContext *handle;
    char why[256];
    void *memory = new_memory(0, 4);

    (void)unused;
    CHECK(cublas_load(&cublas, why, sizeof(why)) == 0);
    CHECK(cudaMemsetAsync(memory, 0, 4, new_stream(0)) == cudaSuccess);
    (void)cublas->create(&handle);
}

static void test_wrong_uses(void **state)
{
    static const struct {
        void (*body)(void *unused);
        const char *env, *sentence;
    } uses[] = {
        {without_stream, "", "cublasSgemm_v2: the default stream is not for an engine: it waits for all others"},
        {without_workspace, "",
         "cublasSgemm_v2: there is no workspace: cuBLAS would allocate, and the bits could depend on other streams"},
        {other_math, "", "cublasSgemm_v2: the math mode is 0, and CUBLAS_PEDANTIC_MATH is 2"},
        {atomics, "", "cublasSetAtomicsMode: with atomics the bits differ from run to run"},
        {dead_handle, "", "cublasSgemm_v2: the handle was destroyed"},
        {no_handle, "", "cublasSgemm_v2: this is no handle"},
        {stream_elsewhere, "", "cublasSetStream_v2: the stream is of device 1, the handle of device 0"},
        {other_device, "", "cublasSgemm_v2: the handle is of device 0, the current device is 1"},
        {leading_dimension, "", "cublasSgemm_v2: the leading dimension of A is 3, and must be at least 5"},
        {result_with_gaps, "", "cublasSgemm_v2: the stand-in writes no columns with gaps between them"},
        {overlap, "", "cublasSgemm_v2: C overlaps B"},
        {operand_in_workspace, "", "cublasSgemm_v2: A overlaps the workspace"},
        {host_operand, "", "cublasSgemm_v2: A is not device memory"},
        {short_result, "", "cublasSgemm_v2: C (48 bytes) goes 4 bytes beyond the end of its memory"},
        {changed_operand, "cublasSgemm_v2:delay=3000", "cublasSgemm_v2: what it reads was changed before it had ended"},
        {changed_result, "cublasSgemm_v2:delay=3000",
         "cublasSgemm_v2: what it writes was written by another before it had ended"},
        {freed_operand, "cublasSgemm_v2:hang", "cudaFree: cublasSgemm_v2 on a stream still uses this memory"},
        {late_handle, "never-blocks,cudaMemsetAsync:hang",
         "cublasCreate_v2: it may wait for cudaMemsetAsync on a stream, and this process never blocks"},
    };

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(uses); i++)
        child_dies(uses[i].env, uses[i].body, NULL, uses[i].sentence);
}

/* ---- errors --------------------------------------------------------------------------------------------- */

static void returned_error(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(multiply(&s, 0, 0, 0) == CUBLAS_STATUS_SUCCESS);
    CHECK(multiply(&s, 0, 0, 0) == STATUS_FAILED);
    CHECK(multiply(&s, 0, 0, 0) == CUBLAS_STATUS_SUCCESS);
    CHECK(strcmp(s.cublas->get_status_string(STATUS_FAILED), "the function failed to launch on the GPU") == 0);
    CHECK(cudaStreamSynchronize(s.stream) == cudaSuccess);
}

static void lost_device(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(multiply(&s, 0, 0, 0) == CUBLAS_STATUS_SUCCESS);
    CHECK(cudaStreamSynchronize(s.stream) == cudaErrorIllegalAddress);
    CHECK(multiply(&s, 0, 0, 0) == STATUS_FAILED);
    CHECK(s.cublas->create(&s.handle) == STATUS_FAILED);
}

static void workspaces(void *unused)
{
    struct setup s = set_up();

    (void)unused;
    CHECK(s.cublas->set_workspace(s.handle, (char *)s.workspace + 16, 1 << 20) == STATUS_INVALID_VALUE);
    CHECK(s.cublas->set_workspace(s.handle, s.workspace, 256) == CUBLAS_STATUS_SUCCESS);
    CHECK(multiply(&s, 0, 0, 0) == STATUS_ALLOC_FAILED);
}

static void test_errors(void **state)
{
    (void)state;
    child_passes("cublasSgemm_v2:error=CUBLAS_STATUS_EXECUTION_FAILED@2", returned_error, NULL);
    child_passes("cublasSgemm_v2:async=cudaErrorIllegalAddress", lost_device, NULL);
    child_passes("", workspaces, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_wrong_uses),
        cmocka_unit_test(test_errors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
