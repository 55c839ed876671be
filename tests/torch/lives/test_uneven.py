# SPDX-License-Identifier: Apache-2.0
"""
One rank's training ends while the other one continues. The finished rank leaves the job before it waits for the process
group, so that diagnostics.on_leave decides. If the other ranks cannot continue, all end, and a line says which rank was
done after which step.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, environment
from tiers import full

PROGRAM = Path(__file__).parents[1] / "programs" / "uneven.py"
DONE = "rank 0 is done after step 3, and rank 1 is in the next one"
LEAVES = f"zerod: {DONE}: rank 0 leaves the job"


@pytest.fixture
def train(build, zerod, tmp_path):
    """train(library, on_leave, more) -> the daemon; rank 1's exit status; the output; the duration in seconds."""

    def go(library, on_leave, more=None):
        pytest.importorskip({"trainer": "transformers"}.get(library, library), reason=f"{library} is not installed")
        daemon = zerod({"optimizer": None, "gradient_clipping": None, "diagnostics": {"on_leave": on_leave}, "world": {"size": 2}})
        variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1,
                     "PYTHONDONTWRITEBYTECODE": 1, "HF_HUB_OFFLINE": 1, "PYTHONWARNINGS": "ignore"}
        began = time.monotonic()
        result = subprocess.run([build.path("client/run/zerodrun"), "--socket", daemon.socket, "-n", "2", "--", sys.executable, PROGRAM,
                                 library, json.dumps(more or {})], env=environment(variables), text=True, timeout=300, cwd=tmp_path,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        ended = re.search(r"rank 1 \(pid \d+\) exited with (\d+)", result.stdout)
        return daemon, int(ended[1]) if ended else result.returncode, result.stdout, time.monotonic() - began

    return go


@pytest.mark.parametrize("library", ["trainer", *full("accelerate")])
def test_stop(train, library):
    daemon, status, said, _ = train(library, "stop")
    assert status == 1 and said.count(LEAVES) == 1, said
    assert daemon.log().count("E1302 a rank has left, the others stop: rank 0, step 3") == 1
    assert "zerod.errors.RankLost: E1302 a rank has left" in said and daemon.status()["step"] == 3


@pytest.mark.parametrize("library", ["accelerate"])
def test_continue(train, library):
    daemon, status, said, _ = train(library, "continue")
    assert status == 0 and said.count(LEAVES) == 1, said
    assert "rank 0 ends at 3" in said and "rank 1 ends at 6" in said
    assert daemon.status()["step"] == 6 and not daemon.json("diagnostics"), daemon.log()


def test_a_trainer_cannot_continue(train):
    """
    The Trainer's ranks exchange numbers of tokens in each step, so no rank can do a step without the finished one.
    """
    daemon, status, said, _ = train("trainer", "continue")
    assert status != 0 and f"{DONE}, which needs the data of all ranks: rank 0 ends as well" in said, said
    assert daemon.status()["step"] == 3


@pytest.mark.full
def test_done_and_saving(train):
    """Rank 0 does not reach the end of train(), because it saves, which needs all ranks of the process group."""
    daemon, status, said, _ = train("trainer", "stop", {"save_strategy": "epoch"})
    assert status == 1 and said.count(LEAVES) == 1, said
    assert daemon.log().count("E1302 a rank has left, the others stop: rank 0, step 3") == 1 and daemon.status()["step"] == 3


@pytest.mark.full
def test_lightning_ends(train):
    """Lightning's ranks wait for each other in the process group at the end of fit(), so all end."""
    daemon, status, said, seconds = train("lightning", "stop")
    assert status == 1 and re.search(r"rank 1, after step 3, waits in \w+\(\) of torch.distributed \(called at uneven.py:\d+\), and "
                                     "rank 0 was done after step 3", said), said
    assert daemon.status()["step"] == 3 and seconds < 120
