# SPDX-License-Identifier: Apache-2.0
"""
Engines, daemons and trainers of a job on several nodes die or freeze, links break, and strangers connect to every port.
The run must continue and end with the bits of an undisturbed one. There is a run of each kind and stage with one or two
faults, while other tests run. scripts/soak node-faults runs many faults without other load, and measures how soon the
run continues.
"""

import pytest

import node_faults
from kills import References
from network import why_no_network
from tiers import each_once

ROUNDS = {1: 2, 2: 1, 3: 2}  # by stage; five faults of each kind


@pytest.fixture(scope="session")
def references(build, tmp_path_factory):
    if why := why_no_network():
        pytest.skip(why)
    return References(build, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("kind, stage", each_once(tuple(node_faults.KINDS), tuple(ROUNDS)))
def test_fault(build, references, tmp_path, kind, stage):
    times = node_faults.Times()
    node_faults.one_run(build, references, tmp_path, stage, kind, ROUNDS[stage], times, stage, slack=10)
    assert times.n == ROUNDS[stage]
