# SPDX-License-Identifier: Apache-2.0
"""
zerod_form() returns 0 to each rank of a new run, and ZEROD_RESUMED to a process that joins a running one. All nodes
form the same layout.
"""

import pytest

from conftest import wait_for
from nodes import Nodes

WORLD_SIZE = 8
N_RUNS = 8

# All ranks are threads of one process. Prints the results of zerod_form(), then again for a successor of rank 1.
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
    """Rank 0 may be ready before the other ranks have their answer. The run still counts as new for them."""
    for _ in range(N_RUNS):
        daemon = zerod({"world": {"size": WORLD_SIZE}})
        ranks = daemon.spawn(program, WORLD_SIZE)
        assert ranks.wait() == 0, ranks.err()
        assert ranks.out() == "0 " * WORLD_SIZE + "then 1\n"
        daemon.stop()


def test_another_node_begins_anew_with_other_models(zerod, build, tmp_path):
    """
    Two nodes whose models are on GPUs have a layout, and wait for rank 0's weights. Node 1's daemon dies, and the model
    of the next daemon's rank is in host memory, where buckets are smaller. Node 0 must not continue with another layout
    than node 1, so the job is formed again.
    """
    nodes = Nodes(zerod, tmp_path, (1, 1), {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    trainer = build.path("tests/kill-trainer")
    waits = nodes.spawn(trainer, "--steps", 3, "--from-gpu", rank=0, failpoint="Ready.send:sleep:600000")
    nodes.spawn(trainer, "--steps", 3, "--from-gpu", rank=1)
    wait_for("the layout", lambda: nodes.daemons[1].status()["state"] == "initialising")
    assert [daemon.status()["bucket_elems"] for daemon in nodes.daemons] == [50_000_000, 50_000_000]
    nodes.daemons[1].kill()
    nodes.start(1)
    nodes.spawn(trainer, "--steps", 3, rank=1)
    wait_for("node 0 gives its layout up", lambda: "its ranks need other buckets" in nodes.daemons[0].log())
    waits.kill()
    ranks = [nodes.spawn(trainer, "--steps", 3, *args, rank=rank) for rank, args in enumerate((["--from-gpu"], []))]
    for rank in ranks:
        assert rank.wait(60) == 0, rank.err() + nodes.log()
    assert [daemon.status()["bucket_elems"] for daemon in nodes.daemons] == [8_000_000, 8_000_000]
