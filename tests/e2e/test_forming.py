# SPDX-License-Identifier: Apache-2.0
"""zerod_form() returns 0 to each rank of a new run, and ZEROD_RESUMED to a process that joins one under way."""

import pytest

WORLD_SIZE = 8
N_RUNS = 8

# All ranks in one process, a thread each; prints what zerod_form() returned to them, then again for a second life of rank 1.
PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <zerod/client.h>

static struct zerod *attach(int rank, int *formed)
{
    static const uint64_t shape[] = {3};
    struct zerod *c = NULL;

    if (zerod_connect(&c, &(struct zerod_options){.rank = rank}) ||
        zerod_declare(c, &(struct zerod_param){.name = "p", .ndim = 1, .shape = shape, .trainable = true}, 1)) {
        fprintf(stderr, "rank %d: %s\n", rank, zerod_error(c)->text);
        exit(1);
    }
    *formed = zerod_form(c);
    return c;
}

struct rank {
    pthread_t thread;
    int number, formed;
    struct zerod *c;
};

static void *run(void *arg)
{
    struct rank *rank = arg;

    rank->c = attach(rank->number, &rank->formed);
    return NULL;
}

int main(int argc, char **argv)
{
    int n = atoi(argv[1]), again;
    struct rank ranks[64] = {0};

    for (int i = 0; i < n; i++) {
        ranks[i].number = i;
        pthread_create(&ranks[i].thread, NULL, run, &ranks[i]);
    }
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
    zerod_close(ranks[1].c);
    ranks[1].c = attach(1, &again);
    for (int i = 0; i < n; i++)
        printf("%d ", ranks[i].formed);
    printf("then %d\n", again);
    for (int i = 0; i < n; i++)
        zerod_close(ranks[i].c);
}
"""


@pytest.fixture(scope="module")
def program(build, tmp_path_factory):
    return build.compile(PROGRAM, tmp_path_factory.mktemp("forming") / "form")


@pytest.mark.threads
def test_who_resumes(zerod, program):
    """Rank 0 may be ready before the others have their answer: to them the run is new all the same."""
    for _ in range(N_RUNS):
        daemon = zerod({"world": {"size": WORLD_SIZE}})
        ranks = daemon.spawn(program, WORLD_SIZE)
        assert ranks.wait() == 0, ranks.err()
        assert ranks.out() == "0 " * WORLD_SIZE + "then 1\n"
        daemon.stop()
