/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Measures zerod's kernels, and memory that several processes share, on a GPU. scripts/bench --gpu runs this program
 * and writes the tables; gpu.h describes its structure.
 *
 *     bench-gpu kernels         reads kernels' names from standard input, prints the time of each in JSON
 *     bench-gpu handles         the cost of sharing memory with another process by a descriptor
 *     bench-gpu handles-legacy  the cost of sharing memory with another process by an IPC handle
 *     bench-gpu killed          memory with a descriptor, after its owner was killed at work
 *     bench-gpu killed-legacy   memory with an IPC handle, after its owner was killed at work
 *     bench-gpu updates         kills updates with undo slots, and launches them again
 *     bench-gpu slices          the time of a process's copies while another process copies
 *     bench-gpu ranks           two ranks of NCCL on one GPU
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
    {"updates", gpu_updates},
    {"slices", gpu_slices},
    {"ranks", gpu_ranks},
    {"owner", gpu_owner},
    {"owner-legacy", gpu_owner_legacy},
    {"copier", gpu_copier},
    {"updater", gpu_updater},
    {"rank", gpu_rank},
};

/* Does not list the commands that only other commands start. */
static const char usage[] = "usage: bench-gpu kernels|handles|handles-legacy|killed|killed-legacy|updates|slices|ranks "
                            "[--elems N] [--params P] "
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

    setvbuf(stdout, NULL, _IOLBF, 0); /* keeps all answers that are printed before an unexpected end */
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
