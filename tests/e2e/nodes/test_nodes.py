# SPDX-License-Identifier: Apache-2.0
"""A job on several nodes gives the bits of one node: golden numbers through real daemons, links and engines."""

import json

import pytest

from golden_bits import golden_run, make_case, read_results
from nodes import Nodes
from golden_jobs import check_rank, make_config
from tiers import each_once, full


def run(zerod, build, folder, ranks, case, how=None, **config):
    nodes = Nodes(zerod, folder, ranks, make_config(case, **config))
    (folder / "case.json").write_text(json.dumps(case))
    (folder / "how.json").write_text(json.dumps({"order": "random", "seed": 1} | (how or {})))
    processes = [nodes.spawn(build.path("tests/golden-client"), folder / "case.json", folder / "how.json", rank,
                             folder / f"rank{rank}", rank=rank) for rank in range(sum(ranks))]
    nodes.wait(processes, 60 * build.patience)
    return nodes


@pytest.mark.parametrize("ranks, stage", each_once(((1, 1), (2, 2), (2, 1)), (1, 2, 3)))
def test_bits(zerod, build, tmp_path, ranks, stage):
    case = make_case(sum(ranks), "AdamW")
    run(zerod, build, tmp_path, ranks, case, stage=stage, bucket_elems=500)
    steps = golden_run(case)
    for rank in range(sum(ranks)):
        check_rank(case, steps, read_results(tmp_path / f"rank{rank}"))


@pytest.mark.parametrize("stage, ranks, moments", ((2, (2, 1), "8bit"), (3, (1, 1), "bf16-stochastic"), *full(
    (1, (1, 2), "bf16-stochastic"), (2, (2, 1), "bf16"), (3, (2, 2), "8bit"))))
def test_bits_of_narrow_moments(zerod, build, tmp_path, stage, ranks, moments):
    """Ranks read narrow moments from their owners in fp32."""
    case = make_case(sum(ranks), "AdamW", moments=moments)
    run(zerod, build, tmp_path, ranks, case, stage=stage, bucket_elems=500)
    for rank in range(sum(ranks)):
        check_rank(case, golden_run(case), read_results(tmp_path / f"rank{rank}"))


@pytest.mark.parametrize("stage, ranks", ((2, (2, 2, 1)), (3, (1, 2)), *full((1, (1, 1)), (2, (2, 1)))))
def test_bits_of_a_16_bit_wire(zerod, build, tmp_path, ranks, stage):
    case = make_case(sum(ranks), "AdamW")
    plain = golden_run(case)
    case["wire"] = {"nodes": list(ranks), "rounded_to": "bf16"}
    steps = golden_run(case)
    run(zerod, build, tmp_path, ranks, case, stage=stage, bucket_elems=500, communication_data_type="bf16")
    for rank in range(sum(ranks)):
        check_rank(case, steps, read_results(tmp_path / f"rank{rank}"))
    with pytest.raises(AssertionError):  # the sum differs from that of fp32
        check_rank(case, plain, read_results(tmp_path / "rank0"))
