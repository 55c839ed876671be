# SPDX-License-Identifier: Apache-2.0
"""docs/scale.md has the tables of bench/scale.py, and its formulas give the bytes that real engines transfer."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from nodes import Nodes
sys.path.append(str(ROOT / "bench"))

import scale  # noqa: E402


def test_document():
    printed = subprocess.run([sys.executable, ROOT / "bench" / "scale.py"], capture_output=True, text=True, check=True)
    text = (ROOT / "docs" / "scale.md").read_text()
    shown = text.split("<!-- scale: printed by bench/scale.py -->\n")[1].split("<!-- end of scale -->\n")[0]
    assert shown == printed.stdout.rstrip("\n") + "\n"


PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <zerod/client.h>

static struct zerod *c;

static void check(int r)
{
    if (r < 0 || r == ZEROD_REFUSED || r == ZEROD_ABORTED) {
        fprintf(stderr, "%s\n", zerod_error(c)->text);
        exit(1);
    }
}

/* Elements, steps, micro-batches, stage. */
int main(int argc, char **argv)
{
    uint64_t n = strtoull(argv[1], NULL, 10);
    float *gradient = calloc(n, sizeof(*gradient));
    const unsigned param = 0;

    check(zerod_connect(&c, &(struct zerod_options){.rank = -1}));
    check(zerod_declare(c, &(struct zerod_param){.name = "p", .ndim = 1, .shape = &n, .trainable = true}, 1));
    check(zerod_form(c));
    for (int step = 0; step < atoi(argv[2]); step++) {
        for (int m = 0; m < atoi(argv[3]); m++) {
            for (int pass = 0; pass < 2 && atoi(argv[4]) == 3; pass++) { /* forward, backward */
                check(zerod_gather(c, &param, 1));
                check(zerod_release(c, &param, 1));
            }
            check(zerod_begin_backward(c, NULL));
            check(zerod_push(c, &(struct zerod_push){.param = 0, .data = gradient}));
            check(zerod_end_backward(c, NULL, 0));
        }
        check(zerod_step(c, NULL, NULL));
    }
    zerod_close(c);
    free(gradient);
    return argc != 5;
}
"""


@pytest.fixture(scope="module")
def program(build, tmp_path_factory):
    return build.compile(PROGRAM, tmp_path_factory.mktemp("scale") / "program")


# In stage 3 the pool has room for everything, so weights are transferred once in a step. Two ranks of a node share a
# gather only if it happens at the same time, which is not certain, so each node has one rank.
@pytest.mark.threads
@pytest.mark.parametrize("ranks, stage", [((1, 1), 1), ((1, 1), 2), ((1, 1), 3), ((2, 2), 1), ((2, 2), 2),
                                          ((1, 1, 1, 1), 1), ((1, 1, 1, 1), 2), ((1, 1, 1, 1), 3)])
def test_volume(zerod, program, tmp_path, ranks, stage):
    """The bytes that engines report for a run are exactly those of the formulas."""
    params, n_steps, micro_batches, n = 64 * 4 * 100, 3, 2, len(ranks)
    nodes = Nodes(zerod, tmp_path, ranks, {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6},
                                           "optimizer": {"params": {"lr": 1e-3}}})
    processes = [nodes.spawn(program, params, n_steps, micro_batches, stage, rank=r) for r in range(sum(ranks))]
    nodes.wait(processes, 60 * nodes.daemons[0].patience)
    trained = n_steps * scale.step_bytes(params, n, 4, micro_batches)
    room = 63 * 64  # room in the bucket for other numbers of ranks
    initial = 4 * params / n if stage == 3 else 4 * (params + room)  # to each other node: its own part, or everything
    for i, daemon in enumerate(nodes.daemons):
        seen = daemon.status()["nodes"]
        assert seen["sent_bytes"] == trained + (initial * (n - 1) if i == 0 else 0)
        assert seen["received_bytes"] == trained + (initial if i > 0 else 0)
