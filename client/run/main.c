/* SPDX-License-Identifier: Apache-2.0 */

/* The program zerodrun: it starts the ranks of a job on this node, and a daemon if none is running. */

#include <stdlib.h>

#include "client/run/process.h"
#include "client/run/options.h"
#include "client/run/run-place.h"
#include "client/run/run.h"

int main(int argc, char **argv)
{
    struct run_options options;
    struct place place;
    int r;

    process_wrapper(argc, argv);
    r = options_parse(&options, argc, argv);
    if (r != 0)
        return r < 0 ? -r : EXIT_SUCCESS;
    r = place_init(&place, &options);
    r = r < 0 ? -r : run(&options, &place);
    place_deinit(&place);
    return r;
}
