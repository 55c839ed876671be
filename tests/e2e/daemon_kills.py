# SPDX-License-Identifier: Apache-2.0
"""
Daemons that are killed at failpoints and at random moments, also while they take over, and started again by a service
manager; trainers go on, and the judge of kills.py says whether the run has the bits of an undisturbed one. Used by
test_daemon_kills.py; as a program (scripts/soak daemon-kills) the long campaign, 10,000 kills by default.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import Build, ROOT
from keeper import KeptDaemon
import kills

N_STEPS = 24
N_MICRO = kills.N_MICRO
PER_BATCH, PER_STEP = N_STEPS * N_MICRO, N_STEPS
N_CHUNKS, N_PARCELS = 15, 4  # about: they depend on the bucket size

# A failpoint of the daemon: how often it is passed in a run, for each rank (True) or in all.
POINTS = {
    "Push.log": (PER_BATCH * kills.N_PUSHES, True), "Push.judged": (PER_BATCH * kills.N_PUSHES, True),
    "BeginBackward.log": (PER_BATCH, True), "EndBackward.log": (PER_BATCH, True), "EndBackward.judged": (PER_BATCH, True),
    "Step.log": (PER_STEP, True), "Step.judged": (PER_STEP, True), "Ready.log": (1, True), "answer": (PER_STEP * 4, True),
    "posted": (PER_BATCH * N_PARCELS, False), "reduce": (PER_BATCH * N_CHUNKS, False),
    "stamp": (PER_BATCH * N_CHUNKS, False), "stamped": (PER_BATCH * N_CHUNKS, False),
    "reduced": (PER_BATCH * N_PARCELS, False), "summed": (PER_BATCH * N_PARCELS, False),
    "update": (PER_STEP * N_CHUNKS, False), "updated": (PER_STEP, False), "decided": (PER_STEP, False),
    "flip": (PER_STEP, False), "flipped": (PER_STEP, False), "committed": (PER_STEP, False),
    "transfer": (PER_STEP * 3, False), "forming": (2, False), "rewrite": (3, False), "writing": (3, False),
}
RECOVERY = ("adopt", "adopted")
MAX_LIFE_MS = 120  # of a daemon that is killed at a random moment: a run takes about so long


class Life:
    """How one daemon ends: at a failpoint, or so many seconds after its start."""

    def __init__(self, rng, world_size, first):
        self.point, self.seconds = None, None
        name = rng.choice([*POINTS, *([] if first else RECOVERY * 3), "random", "random"])
        if name == "random":
            self.seconds = rng.uniform(0, MAX_LIFE_MS / 1000)
        elif name in RECOVERY:
            self.point = f"{name}:kill"
        else:
            n, per_rank = POINTS[name]
            n = max(1, n * (world_size if per_rank else 1) * (9 if first else 3) // 10)
            self.point = f"{name}:kill@{rng.randint(1, n)}"

    def __repr__(self):
        return self.point or f"{self.seconds * 1000:.0f} ms"


def draw(seed):
    """Configuration, environment, arguments of the trainers, and lives of the daemon."""
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 2, 3, 4))
    accumulate = rng.random() < 0.25
    config, env = kills.options(rng, rng.choice(("mid-push", "pushed", "update", "gather")))
    config["world"] = {"size": world_size}
    config["limits"] = {"reattach_timeout": "20s"}
    lives = [Life(rng, world_size, first=i == 0) for i in range(rng.choice((1, 2, 3, 5, 8)))]
    victims = [[] for _ in range(world_size)]
    if rng.random() < 0.2:  # a trainer dies, too
        victims[rng.randrange(world_size)] = kills.kill_plan(rng, rng.choice(("mid-push", "waiting", "committed")), 1)
        victims = [[point for point in plan if int(point.rsplit("@", 1)[1]) <= N_STEPS] for plan in victims]
    return config, env, accumulate, lives, victims


def one_run(build, references, folder, seed, timeout=60):
    """Return: how often the daemon was killed. A failure raises AssertionError."""
    config, env, accumulate, lives, victims = draw(seed)
    world_size = config["world"]["size"]
    reference = references.get(world_size, accumulate, N_STEPS)
    daemon = KeptDaemon(build, folder, config, env, [life.point for life in lives] + [None])
    ranks = kills.start(daemon, victims, ["--accumulate"] if accumulate else [], N_STEPS)
    deadline = time.monotonic() + timeout * daemon.patience
    try:
        while any([rank.tend() for rank in ranks]):
            life = len(daemon.lives) - 1
            seconds = lives[life].seconds if life < len(lives) else None
            if seconds is not None and time.monotonic() - daemon.began > seconds:
                daemon.signal(signal.SIGKILL)
                daemon.popen.wait()
            daemon.tend()
            assert time.monotonic() < deadline, f"the run did not end\n{kills.describe(ranks, daemon)}"
            time.sleep(0.002)
        daemon.tend()
        kills.judge(ranks, daemon, reference)
        daemon.stop()
        for process in daemon.others:
            process.check_sanitizers()
    except BaseException as error:
        error.args = (f"seed {seed}: {config}, {env}, accumulate {accumulate}, lives {lives}, trainers {victims}\n{error}",)
        raise
    finally:
        for process in daemon.others:
            process.kill()
        daemon.kill()
    return len(daemon.lives) - 1


def campaign(n_kills, seed0, max_failures=3, say=print):
    """Runs until the daemons were killed so often. Return: how many runs failed."""
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    folder = Path(tempfile.mkdtemp(prefix="zerod-daemon-kills-"))
    references = kills.References(build, folder)
    began, n_killed, n_runs, n_failed = time.monotonic(), 0, 0, 0
    while n_killed < n_kills and n_failed < max_failures:
        where = folder / str(n_runs)
        where.mkdir()
        try:
            n_killed += one_run(build, references, where, seed0 + n_runs)
            shutil.rmtree(where)
        except AssertionError as error:
            n_failed += 1
            (where / "failure.txt").write_text(str(error))
            say(f"FAILED, see {where}/failure.txt\n{str(error)[:3000]}")
        n_runs += 1
        if n_runs % 100 == 0:
            say(f"{n_runs} runs, {n_killed} kills, {n_failed} failed, {time.monotonic() - began:.0f} s")
    say(f"seed {seed0}: {n_runs} runs of {N_STEPS} steps, {n_killed} kills of the daemon, {n_failed} runs failed, "
        f"{time.monotonic() - began:.0f} s")
    if n_failed == 0:
        shutil.rmtree(folder)
    return n_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak daemon-kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=10000, help="until the daemon was killed so often (10000)")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    sys.exit(1 if campaign(arguments.kills, seed) else 0)
