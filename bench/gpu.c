/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a GPU does with zerod's kernels and with memory that several processes have. scripts/bench --gpu runs it and
 * writes the tables; gpu.h says how it is built.
 *
 *     bench-gpu kernels         answers lines: a kernel's name, its time in JSON
 *     bench-gpu handles         what it takes to give another process memory by a descriptor
 *     bench-gpu handles-legacy  the same by an IPC handle
 *     bench-gpu killed          what is left of memory with a descriptor whose owner was killed in the midst of work
 *     bench-gpu killed-legacy   the same of memory with an IPC handle
 *     bench-gpu slices          a process's copies beside another one's
 *     bench-gpu ranks           two ranks of NCCL on this one GPU
 *
 * Options: --elems N, --params P (kernels), --bytes N (the others).
 */

#include "bench/gpu.h"
#include "core/base/base.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

static const struct command {
    const char *name;
    void (*run)(const struct gpu_options *options);
} commands[] = {
    {"kernels", gpu_kernels},
    {"handles", gpu_handles},
    {"handles-legacy", gpu_handles_legacy},
    {"killed", gpu_killed},
    {"killed-legacy", gpu_killed_legacy},
    {"slices", gpu_slices},
    {"ranks", gpu_ranks},
    {"owner", gpu_owner},
    {"owner-legacy", gpu_owner_legacy},
    {"copier", gpu_copier},
    {"rank", gpu_rank},
};

/* What other commands start has no place here. */
static const char usage[] =
    "usage: bench-gpu kernels|handles|handles-legacy|killed|killed-legacy|slices|ranks [--elems N] [--params P] "
    "[--bytes N]\n";

static int parse(struct gpu_options *options, int argc, char **argv)
{
    static const struct option longs[] = {
        {"elems", 1, NULL, 'e'}, {"params", 1, NULL, 'p'}, {"bytes", 1, NULL, 'b'}, {0}};
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        uint64_t value = c == '?' ? 0 : strtoull(optarg, NULL, 0);

        if (value == 0)
            return -EINVAL;
        if (c == 'e')
            options->n_elems = value;
        else if (c == 'p')
            options->n_params = (unsigned)value;
        else
            options->n_bytes = value;
    }
    return options->n_elems % (64 * (uint64_t)options->n_params) == 0 ? 0 : -EINVAL;
}

int main(int argc, char **argv)
{
    struct gpu_options options = {.n_elems = UINT64_C(256) << 20, .n_params = 64, .n_bytes = (size_t)64 << 20};

    setvbuf(stdout, NULL, _IOLBF, 0); /* what was found out before an end that nobody asked for */
    if (parse(&options, argc, argv) < 0 || optind == argc) {
        fputs(usage, stderr);
        return 64;
    }
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        if (strcmp(argv[optind], commands[i].name) != 0)
            continue;
        gpu_open();
        commands[i].run(&options);
        return 0;
    }
    fputs(usage, stderr);
    return 64;
}
