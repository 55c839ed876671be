/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The stand-in for cuBLAS, a library that a program opens at run time. All other stand-ins are linked into the program.
 */

#include <stdlib.h>

#include "engine/cublas.h"
#include "inside.h"

#define HANDLE_MAGIC UINT64_C(0x73696d2d626c6173)

enum {
    STATUS_ALLOC_FAILED = 3,
    STATUS_INVALID_VALUE = 7,
    WORKSPACE_LEAST_BYTES = 16 << 10,
    WORKSPACE_ALIGNMENT = 256,
    VERSION = 130100,
};

struct cublasContext {
    struct cublasContext *next;
    uint64_t magic;
    int device, math_mode;
    bool dead;
    struct CUstream_st *stream;
    void *workspace; /* NULL: the default workspace */
    size_t n_workspace_bytes;
};

static struct cublasContext *all;

/* An operand of a product as the caller passed it: op(matrix) is rows x cols. */
struct operand {
    const char *name;
    bool trans;
    int rows, cols, ld;
    const float *at;
};

/* A product for the device's thread. It computes a and b from the copies of their elements in op. */
struct product {
    struct op *op;
    struct operand a, b;
    float alpha, beta;
    void *workspace;
};

/* The functions of the library that programs look up by name. */
#define ENTRY __attribute__((visibility("default")))

ENTRY int cublasCreate_v2(struct cublasContext **handle);
ENTRY int cublasDestroy_v2(struct cublasContext *handle);
ENTRY int cublasGetVersion_v2(struct cublasContext *handle, int *version);
ENTRY int cublasSetStream_v2(struct cublasContext *handle, struct CUstream_st *stream);
ENTRY int cublasSetWorkspace_v2(struct cublasContext *handle, void *workspace, size_t n_bytes);
ENTRY int cublasSetMathMode(struct cublasContext *handle, int mode);
ENTRY int cublasSetAtomicsMode(struct cublasContext *handle, int mode);
ENTRY int cublasSgemm_v2(struct cublasContext *handle, int trans_a, int trans_b, int m, int n, int k,
                         const float *alpha, const float *a, int lda, const float *b, int ldb, const float *beta,
                         float *c, int ldc);
ENTRY const char *cublasGetStatusString(int status);

/* ---- handles -------------------------------------------------------------------------------------------- */

static void check_handle(const char *entry, const struct cublasContext *handle)
{
    if (!handle || handle->magic != HANDLE_MAGIC)
        sim_die(entry, "this is no handle");
    if (handle->dead)
        sim_die(entry, "the handle was destroyed");
}

int cublasCreate_v2(struct cublasContext **handle)
{
    int r = sim_enter("cublasCreate_v2", NULL);

    if (r != 0)
        return sim_leave_cublas(r);
    device_need(device_current());
    device_check_idle("cublasCreate_v2");
    *handle = sim_calloc(1, sizeof(**handle));
    **handle = (struct cublasContext){.next = all, .magic = HANDLE_MAGIC, .device = device_current()};
    all = *handle;
    return sim_leave_cublas(CUBLAS_STATUS_SUCCESS);
}

int cublasDestroy_v2(struct cublasContext *handle)
{
    int r = sim_enter("cublasDestroy_v2", NULL);

    if (r == 0) {
        check_handle("cublasDestroy_v2", handle);
        device_check_idle("cublasDestroy_v2");
        handle->dead = true;
    }
    return sim_leave_cublas(r);
}

/* The handle may be NULL. */
int cublasGetVersion_v2(struct cublasContext *handle, int *version)
{
    int r = sim_enter("cublasGetVersion_v2", NULL);

    if (r == 0)
        *version = VERSION;
    return sim_leave_cublas(r);
}

int cublasSetStream_v2(struct cublasContext *handle, struct CUstream_st *stream)
{
    static const char entry[] = "cublasSetStream_v2";
    int r = sim_enter(entry, NULL);

    if (r != 0)
        return sim_leave_cublas(r);
    check_handle(entry, handle);
    stream_check(entry, stream);
    if (stream->device != handle->device)
        sim_die(entry, "the stream is of device %d, the handle of device %d", stream->device, handle->device);
    handle->stream = stream;
    handle->workspace = NULL;
    handle->n_workspace_bytes = 0;
    return sim_leave_cublas(CUBLAS_STATUS_SUCCESS);
}

int cublasSetWorkspace_v2(struct cublasContext *handle, void *workspace, size_t n_bytes)
{
    static const char entry[] = "cublasSetWorkspace_v2";
    int r = sim_enter(entry, NULL);

    if (r == 0)
        check_handle(entry, handle);
    if (r == 0 && (uintptr_t)workspace % WORKSPACE_ALIGNMENT != 0)
        r = STATUS_INVALID_VALUE;
    if (r != 0)
        return sim_leave_cublas(r);
    if (memory_check(entry, "the workspace", workspace, n_bytes, handle->device, SPAN_WRITE) != MEMORY_DEVICE)
        sim_die(entry, "the workspace is not device memory");
    handle->workspace = workspace;
    handle->n_workspace_bytes = n_bytes;
    return sim_leave_cublas(CUBLAS_STATUS_SUCCESS);
}

int cublasSetMathMode(struct cublasContext *handle, int mode)
{
    int r = sim_enter("cublasSetMathMode", NULL);

    if (r == 0) {
        check_handle("cublasSetMathMode", handle);
        handle->math_mode = mode;
    }
    return sim_leave_cublas(r);
}

int cublasSetAtomicsMode(struct cublasContext *handle, int mode)
{
    int r = sim_enter("cublasSetAtomicsMode", NULL);

    if (r == 0)
        check_handle("cublasSetAtomicsMode", handle);
    if (r == 0 && mode != CUBLAS_ATOMICS_NOT_ALLOWED)
        sim_die("cublasSetAtomicsMode", "with atomics the bits differ from run to run");
    return sim_leave_cublas(r);
}

const char *cublasGetStatusString(int status)
{
    return sim_cublas_text(status);
}

/* ---- products ------------------------------------------------------------------------------------------- */

/* Return: the size of the matrix as stored in memory. */
static size_t operand_bytes(const struct operand *o)
{
    size_t rows = o->trans ? o->cols : o->rows, cols = o->trans ? o->rows : o->cols;

    return ((cols - 1) * (size_t)o->ld + rows) * sizeof(float);
}

/* sums += op(A)'s column k times the element of op(B) at (k, col), for all k. */
static void add_products(const struct product *p, int col, double *sums)
{
    const size_t lda = p->a.ld, ldb = p->b.ld;

    for (int k = 0; k < p->a.cols; k++) {
        double b = p->b.trans ? p->b.at[k * ldb + col] : p->b.at[col * ldb + k];

        for (int row = 0; row < p->a.rows; row++)
            sums[row] += (double)(p->a.trans ? p->a.at[row * lda + k] : p->a.at[k * lda + row]) * b;
    }
}

/*
 * Computes the product. cuBLAS may write anywhere in its workspace; this function writes a piece, which is enough to
 * detect another use of the workspace.
 */
static void multiply(void *args)
{
    struct product *p = args;
    float *c = (float *)(void *)p->op->write.at;
    const float *old = (const float *)(const void *)p->op->reads[2].data;
    double *sums = sim_calloc(p->a.rows, sizeof(*sums));

    p->a.at = (const float *)(const void *)p->op->reads[0].data;
    p->b.at = (const float *)(const void *)p->op->reads[1].data;
    memory_fill(p->workspace, WORKSPACE_LEAST_BYTES);
    for (int col = 0; col < p->b.cols; col++) {
        for (int row = 0; row < p->a.rows; row++)
            sums[row] = 0;
        add_products(p, col, sums);
        for (int row = 0; row < p->a.rows; row++) {
            size_t at = (size_t)col * p->a.rows + row;

            c[at] = (float)(p->alpha * sums[row] + (p->beta != 0 ? (double)p->beta * old[at] : 0));
        }
    }
    free(sums);
}

static void check_handle_is_ready(const char *entry, const struct cublasContext *handle)
{
    check_handle(entry, handle);
    if (device_current() != handle->device)
        sim_die(entry, "the handle is of device %d, the current device is %d", handle->device, device_current());
    stream_check(entry, handle->stream);
    if (!handle->workspace)
        sim_die(entry, "there is no workspace: cuBLAS would allocate, and the bits could depend on other streams");
    if (handle->math_mode != CUBLAS_PEDANTIC_MATH)
        sim_die(entry, "the math mode is %d, and CUBLAS_PEDANTIC_MATH is %d", handle->math_mode, CUBLAS_PEDANTIC_MATH);
}

static void check_operand(const char *entry, const struct cublasContext *handle, const struct operand *o,
                          enum span_use use)
{
    int least = o->trans ? o->cols : o->rows;

    if (o->ld < least)
        sim_die(entry, "the leading dimension of %s is %d, and must be at least %d", o->name, o->ld, least);
    if (memory_check(entry, o->name, o->at, operand_bytes(o), handle->device, use) != MEMORY_DEVICE)
        sim_die(entry, "%s is not device memory", o->name);
}

static struct span span_of(const struct operand *o)
{
    return (struct span){.at = (uint8_t *)(uintptr_t)o->at, .n_bytes = operand_bytes(o)};
}

static void check_overlaps(const char *entry, const struct cublasContext *handle, const struct operand *sides[3])
{
    const struct operand *c = sides[2];

    for (unsigned i = 0; i < 3; i++) {
        if (i < 2 && memory_overlap(sides[i]->at, operand_bytes(sides[i]), c->at, operand_bytes(c)))
            sim_die(entry, "C overlaps %s", sides[i]->name);
        if (memory_overlap(sides[i]->at, operand_bytes(sides[i]), handle->workspace, handle->n_workspace_bytes))
            sim_die(entry, "%s overlaps the workspace", sides[i]->name);
    }
}

int cublasSgemm_v2(struct cublasContext *handle, int trans_a, int trans_b, int m, int n, int k, const float *alpha,
                   const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc)
{
    static const char entry[] = "cublasSgemm_v2";
    const struct operand sides[3] = {{"A", trans_a == CUBLAS_OP_T, m, k, lda, a},
                                     {"B", trans_b == CUBLAS_OP_T, k, n, ldb, b},
                                     {"C", false, m, n, ldc, c}};
    struct injected injected;
    int r = sim_enter(entry, &injected);
    struct product *p;

    if (r == 0 && (m < 0 || n < 0 || k < 0 || !alpha || !beta || trans_a < 0 || trans_a > CUBLAS_OP_T || trans_b < 0 ||
                   trans_b > CUBLAS_OP_T))
        r = STATUS_INVALID_VALUE;
    if (r != 0)
        return sim_leave_cublas(r);
    check_handle_is_ready(entry, handle);
    if (handle->n_workspace_bytes < WORKSPACE_LEAST_BYTES)
        return sim_leave_cublas(STATUS_ALLOC_FAILED);
    if (m == 0 || n == 0 || k == 0)
        sim_die(entry, "an empty product (%d x %d x %d)", m, n, k);
    for (unsigned i = 0; i < 3; i++)
        check_operand(entry, handle, &sides[i], i == 2 ? SPAN_WRITE : SPAN_READ);
    if (ldc > m)
        sim_die(entry, "the stand-in writes no columns with gaps between them");
    check_overlaps(entry, handle, (const struct operand *[]){&sides[0], &sides[1], &sides[2]});
    p = sim_calloc(1, sizeof(*p));
    *p = (struct product){.op = op_new(entry, OP_KERNEL, &injected),
                          .a = sides[0],
                          .b = sides[1],
                          .alpha = *alpha,
                          .beta = *beta,
                          .workspace = handle->workspace};
    p->op->reads[0] = span_of(&sides[0]);
    p->op->reads[1] = span_of(&sides[1]);
    if (*beta != 0)
        p->op->reads[2] = span_of(&sides[2]);
    p->op->write = span_of(&sides[2]);
    p->op->run = multiply;
    p->op->free_args = free;
    p->op->args = p;
    stream_push(handle->stream, p->op);
    return sim_leave_cublas(CUBLAS_STATUS_SUCCESS);
}
