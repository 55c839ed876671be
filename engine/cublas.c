/* SPDX-License-Identifier: Apache-2.0 */

/* cuBLAS, loaded at run time. */

#include "engine/cublas.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The library for the CUDA version of this build is tried first, because a driver may support that version but no later
 * one. Both libraries have the same functions. */
static const char *const names[] = {CUDART_VERSION < 13000 ? "libcublas.so.12" : "libcublas.so.13",
                                    CUDART_VERSION < 13000 ? "libcublas.so.13" : "libcublas.so.12"};

/* Return: true if the library has the symbol. address: the address of a pointer to a function, which is set. */
static bool find_symbol(void *library, const char *name, void *address)
{
    void *symbol = dlsym(library, name);

    memcpy(address, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static bool find_all(void *library, struct cublas *cublas)
{
    return find_symbol(library, "cublasCreate_v2", &cublas->create) &&
           find_symbol(library, "cublasDestroy_v2", &cublas->destroy) &&
           find_symbol(library, "cublasGetVersion_v2", &cublas->get_version) &&
           find_symbol(library, "cublasSetStream_v2", &cublas->set_stream) &&
           find_symbol(library, "cublasSetWorkspace_v2", &cublas->set_workspace) &&
           find_symbol(library, "cublasSetMathMode", &cublas->set_math_mode) &&
           find_symbol(library, "cublasSetAtomicsMode", &cublas->set_atomics_mode) &&
           find_symbol(library, "cublasSgemm_v2", &cublas->sgemm) &&
           find_symbol(library, "cublasGetStatusString", &cublas->get_status_string);
}

int cublas_load(const struct cublas **out, char *err, size_t err_size)
{
    static struct cublas loaded;
    struct cublas cublas;
    void *library;

    *out = &loaded;
    for (size_t i = 0; !loaded.create && i < sizeof(names) / sizeof(names[0]); i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library && find_all(library, &cublas)) {
            loaded = cublas;
            break;
        }
        if (i == 0)
            snprintf(err, err_size, "Muon on GPUs needs cuBLAS (libcublas.so.13 or .12; PyPI: nvidia-cublas): %s%s",
                     library ? names[i] : dlerror(), library ? " is another library" : "");
        if (library)
            dlclose(library);
    }
    return loaded.create ? 0 : -ENOENT;
}
