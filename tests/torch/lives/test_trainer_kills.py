# SPDX-License-Identifier: Apache-2.0
"""
A torch trainer with user state is killed at random moments and ends with equal bits. scripts/soak torch-kills does 50
runs.
"""

import pytest
import trainer_kills
from tiers import full

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("n_kills", [1, *full(3)])
def test_killed_trainers_end_bit_equal(build, tmp_path, n_kills):
    n_steps = trainer_kills.n_steps_of(n_kills)
    expected = trainer_kills.reference(build.folder, tmp_path / "reference", n_steps)
    trainer_kills.killed(build.folder, tmp_path / "killed", 11, n_kills, expected, n_steps)
