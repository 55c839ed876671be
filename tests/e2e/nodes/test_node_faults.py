# SPDX-License-Identifier: Apache-2.0
"""
Engines, daemons and trainers of a job on several nodes that die or stand still, links that break, strangers at every port:
the run goes on, and the bits at the end are those of an undisturbed one. A run of each kind and stage, a fault or two in
each, beside other tests; how soon it goes on is measured by scripts/soak node-faults, which makes many, alone.
"""

import pytest

import node_faults
from kills import References
from network import why_no_network
from tiers import each_once

ROUNDS = {1: 2, 2: 1, 3: 2}  # by stage: five of each kind


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
