/* SPDX-License-Identifier: Apache-2.0 */

/* OpenBLAS, loaded at run time. */

#include "kernels/gemm.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FOR_POSIX_THREADS = 1 }; /* a result of openblas_get_parallel(); 0: no threads, 2: OpenMP */

/* In Debian, the build for POSIX threads has the first name, or the second name if another build has the first. */
static const char *const names[] = {"libopenblas.so.0", "libopenblasp.so.0"};

void gemm_one_thread(void)
{
    (void)setenv("OPENBLAS_NUM_THREADS", "1", true);
}

/* Return: true if the library has the symbol. address: the address of a pointer to a function, which is set. */
static bool find_symbol(void *library, const char *name, void *address)
{
    void *symbol = dlsym(library, name);

    memcpy(address, &symbol, sizeof(symbol));
    return symbol != NULL;
}

/* Return: NULL, or the reason why the library cannot be used. */
static const char *use(void *library, struct gemm *gemm)
{
    static const char *const builds[] = {"it is built without threads", NULL, "it is built for OpenMP"};
    void (*set_num_threads)(int n);
    int (*get_parallel)(void);
    int build;

    if (!find_symbol(library, "cblas_sgemm", &gemm->sgemm) || !find_symbol(library, "cblas_ssyrk", &gemm->ssyrk) ||
        !find_symbol(library, "openblas_set_num_threads", &set_num_threads) ||
        !find_symbol(library, "openblas_get_parallel", &get_parallel))
        return "it is another library";
    build = get_parallel();
    if (build != FOR_POSIX_THREADS)
        return builds[build == 0 ? 0 : 2];
    set_num_threads(1);
    return NULL;
}

int gemm_load(const struct gemm **out, char *err, size_t err_size)
{
    static struct gemm loaded;
    const char *why = NULL;
    struct gemm gemm;
    void *library;

    *out = &loaded;
    for (size_t i = 0; !loaded.sgemm && i < sizeof(names) / sizeof(names[0]); i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        why = library ? use(library, &gemm) : dlerror();
        if (!why)
            loaded = gemm;
        else if (i == 0)
            snprintf(err, err_size, "Muon needs OpenBLAS for POSIX threads (Debian: libopenblas0-pthread): %s%s%s",
                     library ? names[i] : "", library ? ": " : "", why);
        if (why && library)
            dlclose(library);
    }
    return loaded.sgemm ? 0 : -ENOENT;
}
