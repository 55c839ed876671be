# SPDX-License-Identifier: Apache-2.0
"""
Jobs whose gradients, state and weights are on GPUs: the daemon with the engine over the stand-ins of tests/sim, all in
real processes. Engines and trainers may die at any moment, and engines may fail or hang. The run must have the bits of
an undisturbed run in host memory.

Other test files can run on GPUs too: ZEROD_DEVICE=cuda or cuda-offload, see conftest.py.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import time

import pytest

import kills
from conftest import wait_for
from kills import References, judge, start, train
from puppet import N_PARAMS, REFUSED, RESUMED, Puppet, all_do, form, state, steps, trainers
from tiers import each_once, full, param

pytestmark = pytest.mark.threads

SHORT = 24


@pytest.fixture(scope="session")
def references(build, tmp_path_factory):
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    return References(build, tmp_path_factory.mktemp("references"))


@pytest.fixture
def reference(references, monkeypatch):
    """reference(world) -> the bits of a run in host memory. Daemons that are started after the call use GPUs."""

    def get(world=2, n_steps=SHORT, accumulate=False):
        monkeypatch.delenv("ZEROD_DEVICE", raising=False)
        found = references.get(world, accumulate, n_steps)
        monkeypatch.setenv("ZEROD_DEVICE", "cuda")
        return found

    return get


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")


def configure(world=2, stage=2, offload="none", **config):
    """Return: a configuration. offload="cpu" keeps master weights and moments in host memory."""
    return {"world": {"size": world}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000,
                                                            "offload_optimizer": {"device": offload}},
            "gradient_clipping": 1.0} | config


def sim(*items):
    return {"ZEROD_SIM": ",".join(("devices=16", *items))}


# ---- an engine that ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, stage, seed, offload", [
    (2, 2, 2, "none"), param((1, 1, 5, "cpu"), pytest.mark.gpu), (3, 3, 10, "cpu"),
    param((1, 1, 1, "none"), pytest.mark.full, pytest.mark.gpu),
    *full((3, 1, 3, "none"), (4, 2, 4, "none"), (2, 1, 6, "cpu"), (3, 2, 7, "cpu"), (4, 1, 8, "cpu"),
          (2, 3, 9, "none"))])
def test_engine_killed(zerod, reference, world, stage, seed, offload):
    """The engine is killed again and again at random moments. The run keeps its bits."""
    wanted = reference(world)
    daemon = zerod(configure(world, stage, offload))
    ranks, rng, killed = start(daemon, [[]] * world, n_steps=SHORT), random.Random(seed), set()
    while any([rank.tend() for rank in ranks]):
        time.sleep(rng.uniform(0, 0.3))
        status = daemon.status()["device"]
        # The status may show a killed engine as ready for a moment.
        if status and status["ready"] and status["generation"] not in killed and len(killed) < 12:
            killed.add(status["generation"])
            os.kill(status["pid"], signal.SIGKILL)
    judge(ranks, daemon, wanted)
    assert len(killed) >= 3, "it trained too fast to be disturbed"
    # The last engine may have died after the run's end.
    wait_for("all deaths", lambda: daemon.status()["device"]["n_failures"] == len(killed), 60)
    assert daemon.status()["device"]["generation"] >= len(killed)
    assert daemon.log().count("E1502 warning, engine of the GPUs failed, replaced") == len(killed)
    assert daemon.status()["counters"]["n_aborts"] == 0


FAULTS = [
    ("cudaMemcpyAsync:async=cudaErrorIllegalAddress@700", "an illegal memory access"),
    ("sim_launch:async=cudaErrorLaunchFailure@300", "unspecified launch failure"),
    ("ncclSend:async=ncclRemoteError@150", "NCCL:"),
    ("cudaEventRecord:kill@900", "killed by signal 9"),
    # During the first of these kernels that is long enough, an update or a reduction.
    (",".join(f"sim_launch:die={600 + 67 * i}@{40 + 5 * i}" for i in range(30)), "killed by signal 9"),
]


@pytest.mark.plenty
@pytest.mark.parametrize("fault, offload", each_once(FAULTS, ("none", "cpu")))
def test_engine_fails(zerod, reference, fault, offload):
    """Every engine fails in this way after some time. The next engine need not repeat the work that is done."""
    fault, said = fault
    wanted = reference(3)
    daemon = zerod(configure(3, offload=offload), sim(fault))
    judge(train(daemon, [[]] * 3, n_steps=SHORT), daemon, wanted)
    texts = [d["text"] for d in daemon.json("diagnostics") if d["code"] == "E1502"]
    assert texts and all(said in text for text in texts), daemon.log()


@pytest.mark.parametrize("entry", ["sim_launch:hang@400", *full("ncclRecv:hang@200")])
def test_engine_hangs(zerod, reference, entry):
    """A hanging engine is replaced when an order misses its deadline."""
    wanted = reference(2, n_steps=8)
    daemon = zerod(configure(2), sim(entry))
    judge(train(daemon, [[]] * 2, n_steps=8, timeout=150), daemon, wanted)
    assert re.search(r"E1502 warning.*\n.*\n.*took more than \d+ ms", daemon.log()), daemon.log()


# ---- an engine that never begins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("env, said", [
    ({"ZEROD_SIM": "memory=9"}, "GPU 0 is full: 952 KiB of 9.00 MiB are free, and 2.00 MiB more are needed (cuMemCreate)"),
    ({"ZEROD_SIM": "devices=1"}, "this node has 2 ranks, and 1 of its GPUs can be seen"),
    ({"ZEROD_DEVICE_ENGINE": "/nowhere/zerod-engine-nccl"}, "/nowhere/zerod-engine-nccl"),
    ({"ZEROD_DEVICE_ENGINE": "/bin/true"}, "exited with status 0"),
], ids=["memory", "too-few", "missing", "another-program"])
def test_not_formed(zerod, gpus, env, said):
    """Every rank gets an error, nothing is left allocated, and the ranks may try again."""
    daemon = zerod(configure(2), env)
    ranks = [Puppet(daemon, r).attach() for r in range(2)]
    for _ in range(2):
        answers = all_do(ranks, "form")
        for answer in answers:
            assert answer.r == REFUSED and answer["error"]["code"] == 1502, answer
            assert "E1502 job not formed: no engine for the GPUs" in answer.text and said in answer.text
        assert daemon.status()["device"] is None and not daemon.status()["formed"]
        for rank in ranks:
            rank.ok("clear")


def test_engine_whose_library_is_missing(zerod, gpus, tmp_path):
    """If NCCL is not found, the rank's error has the loader's line, and the daemon's log has it too."""
    engine, library = tmp_path / "zerod-engine-nccl", tmp_path / "libmissing.so.2"
    for command in ([*"-shared -Wl,-soname,libmissing.so.2 -x c /dev/null -o".split(), library],
                    ["-x", "c", "-", "-Wl,--no-as-needed", "-x", "none", library, "-o", engine]):
        subprocess.run(["cc", *command], input="int main(void) { return 0; }", text=True, check=True)
    library.unlink()
    daemon = zerod(configure(1), {"ZEROD_DEVICE_ENGINE": engine})
    rank = Puppet(daemon, 0).attach()
    answer = rank("form")
    assert answer.r == REFUSED and answer["error"]["code"] == 1502, answer
    line = f"{engine}: error while loading shared libraries: libmissing.so.2: cannot open shared object file: No such file or directory"
    text = " ".join(answer.text.split())
    assert f"the engine of the GPUs could not be loaded ({line}): if a library is not found" in text, answer.text
    assert "set LD_LIBRARY_PATH of zerod to its folder" in text
    assert f": engine: {line}\n" in daemon.err()


def test_engine_that_floods_standard_error(zerod, gpus, tmp_path):
    """Nobody reads the daemon's standard error, and the engine floods it: the daemon still serves."""
    engine, pipe = tmp_path / "zerod-engine-nccl", tmp_path / "stderr"
    engine.write_text("#!/bin/sh\nyes 'a line of the engine' | head -c 4000000 >&2\nexit 3\n")
    engine.chmod(0o755)
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        daemon = zerod(configure(1), {"ZEROD_DEVICE_ENGINE": engine}, prefix=("sh", "-c", f'exec "$0" "$@" 2>"{pipe}"'))
        answer = Puppet(daemon, 0).attach()("form")
        assert answer.r == REFUSED and "exited with status 3" in answer.text, answer.text
        assert not daemon.status()["formed"]
    finally:
        os.close(fd)


# ---- trainers --------------------------------------------------------------------------------------------------------


@pytest.mark.plenty
@pytest.mark.parametrize("kind, offload", [
    *each_once(("mid-push", "window"), ("none", "cpu")),
    *full(*itertools.product(("form", "pushed", "waiting", "update", "committed", "gather", kills.ABORTS),
                             ("none", "cpu")))])
def test_trainer_killed(build, references, reference, tmp_path, monkeypatch, kind, offload):
    """
    The pushes of the killed trainer stay valid, and its successor's pushes are compared with them. Work that its GPU
    has not done at its death is never done. If that work is part of a sum already, the step is aborted.
    """
    judge_here = lambda *run: judge(*run[:3], run[3] if run[3:] and run[3] else "E1302 step aborted.*differ")
    monkeypatch.setattr(kills, "judge", judge_here)
    draw = lambda rng, kind: (configure(stage=3 if kind == "gather" else rng.choice((1, 2, 3)), offload=offload), {})
    monkeypatch.setattr(kills, "options", draw)
    for world in (2, 3):
        reference(world, kills.N_STEPS)
        reference(world, kills.N_STEPS, accumulate=True)
    kills.one_run(build, references, tmp_path, 5, kind)


@pytest.mark.parametrize("stage", [*full(2), 3])
def test_every_rank_killed_in_turn(zerod, reference, stage):
    """While engines are informed of lost ranks, other successors have attached, and push with their own points."""
    wanted = reference(3)
    daemon = zerod(configure(3, stage))
    plans = [[f"Push.sent:kill@{37 + 50 * i}" for i in range(3)],
             [f"Step.wait:kill@{3 + i}" for i in range(3)],
             [f"EndBackward.wait:kill@{5 + i}" for i in range(3)]]
    judge(train(daemon, plans, n_steps=SHORT), daemon, wanted, "E1302 step aborted.*differ")
    assert daemon.status()["counters"]["n_reattaches"] == 9


@pytest.mark.gpu
def test_successor_differs(zerod, reference):
    """The successor's gradient differs from its predecessor's: the step is aborted for all ranks, and begins again."""
    wanted = reference(2)
    daemon = zerod(configure(2, zero_optimization={"stage": 2, "reduce_bucket_size": 1}))
    ranks = train(daemon, [[], [["--at", "5.1.12:sleep=1000", "--at", "5.1.12:die"], ["--at", "5.1.0:differ"]]],
                  n_steps=SHORT)
    judge(ranks, daemon, wanted, "E1302 step aborted.*rank 1.*differ")
    assert daemon.status()["counters"]["n_aborts"] == 1


@pytest.mark.parametrize("offload", ["none", *full("cpu")])
def test_trainer_and_engine_killed(zerod, reference, offload):
    """A trainer and the engine are killed at the same moment: the next engine sums the trainer's gradients."""
    wanted = reference(2)
    daemon = zerod(configure(2, offload=offload))
    ranks = start(daemon, [[], [f"Push.sent:kill@{37 + 50 * i}" for i in range(3)]], n_steps=SHORT)
    seen = 1
    while any([rank.tend() for rank in ranks]):
        if len(ranks[1].processes) > seen:
            seen = len(ranks[1].processes)
            if pid := daemon.status()["device"]["pid"]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    judge(ranks, daemon, wanted)
    assert daemon.status()["counters"]["n_reattaches"] == 3


@pytest.mark.full
def test_slow_trainer(zerod, reference, monkeypatch):
    """Pushes are queued on the trainer's GPU and finish after any order's deadline. The engine is not blamed."""
    wanted = reference(2, n_steps=8)
    daemon = zerod(configure(2))
    spawn, slow = daemon.spawn, sim("cudaMemcpyAsync:delay=13000@60")
    monkeypatch.setattr(daemon, "spawn", lambda *args, rank, failpoint: spawn(
        *args, rank=rank, failpoint=failpoint, env=slow if rank == 1 else None))
    began = time.monotonic()
    judge(train(daemon, [[], []], n_steps=8), daemon, wanted)
    assert time.monotonic() - began > 13
    assert daemon.status()["device"]["n_failures"] == 0


# ---- points that GPUs reach late, or never ---------------------------------------------------------------------------

SLOW = sim("cudaMemcpyAsync:delay=20@*")  # a trainer's gradients are written long after the push is announced


def pair(zerod, env, *, offload="none"):
    daemon = zerod(configure(2, offload=offload))
    ranks = [Puppet(daemon, r, env=env if r == 1 else SLOW).attach() for r in range(2)]
    form(ranks)
    return daemon, ranks


@pytest.mark.parametrize("offload", ["none", *full("cpu")])
def test_gradients_that_are_written_late(zerod, gpus, offload):
    """A gradient is not summed before the GPU has written it."""
    late, ranks = pair(zerod, SLOW, offload=offload)
    steps(ranks, 2)
    after = state(ranks)
    at_once, ranks = pair(zerod, None, offload=offload)
    steps(ranks, 2)
    assert state(ranks) == after


def test_comparison_with_what_is_never_written(zerod, gpus):
    """A successor dies before its GPU has written a repeated push. The orders of other ranks do not wait for it."""
    daemon = zerod(configure(2))
    ranks = trainers(daemon, declare=("many", 1))
    all_do(ranks, "begin"), all_do(ranks, "push 0"), all_do(ranks, "flush")
    wait_for("it is reduced", lambda: daemon.status()["counters"]["n_pushes_admitted"] == 2)
    ranks[1].kill()
    second = Puppet(daemon, 1, env=sim("cuStreamWriteValue64:delay=600000@*")).attach(declare=("many", 1))
    assert second("form").r == RESUMED
    second.ok("begin"), second.ok("push 0"), second.ok("flush")
    wait_for("it is to be compared", lambda: daemon.status()["counters"]["n_pushes_redone"] == 1)
    second.kill()
    ranks[0].tell("read 0 0")
    assert ranks[0].answer().r == 0
    assert daemon.status()["device"]["n_failures"] == 0


def test_no_values_from_streams(zerod, gpus):
    """A GPU that cannot write values from streams is reported when the job is formed, not at a push."""
    daemon = zerod(configure(1))
    rank = Puppet(daemon, 0, env=sim("values=0")).attach()
    answer = rank("form")
    assert answer.r < 0 and "cannot write 64-bit values from a stream (cuStreamWriteValue64)" in answer.text, answer


# ---- one memory for all processes of a GPU -----------------------------------------------------------------------------

ENOUGH = 142  # MiB of each GPU: 128 of a puppet, 14 of the engine with all of this job's memory


def on_one_machine(zerod, mib):
    env = sim(f"memory={mib}", f"machine=m{os.getpid()}n{mib}")
    daemon = zerod(configure(2), env)
    return daemon, [Puppet(daemon, r, env=env).attach() for r in range(2)]


def test_next_engine_and_successor_fit(zerod, gpus):
    """The next engine and a trainer's successor need no more memory than their predecessors had."""
    daemon, ranks = on_one_machine(zerod, ENOUGH)
    form(ranks)
    steps(ranks, 2)
    for generation in (2, 3):
        os.kill(daemon.status()["device"]["pid"], signal.SIGKILL)
        wait_for("the next engine", lambda: daemon.status()["device"]["generation"] == generation
                 and daemon.status()["device"]["ready"])
        ranks[1].kill()
        ranks[1] = Puppet(daemon, 1, env=sim(f"memory={ENOUGH}", f"machine=m{os.getpid()}n{ENOUGH}")).attach()
        assert ranks[1]("form").r == RESUMED
        steps(ranks, 2)
    after = state(ranks)
    undisturbed = zerod(configure(2))
    ranks = trainers(undisturbed)
    steps(ranks, 6)
    assert state(ranks) == after


def test_less_memory_does_not_suffice(zerod, gpus):
    daemon, ranks = on_one_machine(zerod, ENOUGH - 2)
    answers = all_do(ranks, "form")
    assert all(a.r == REFUSED and "is full" in a.text or "OUT_OF_MEMORY" in a.text for a in answers), answers


# ---- what is said is the same -----------------------------------------------------------------------------------------


def test_duplicate_is_refused_alike(zerod, gpus):
    """A duplicate on GPUs is refused with exactly the text of host memory."""
    daemon = zerod(configure(2))
    ranks = trainers(daemon)
    steps(ranks, 2)
    before = state(ranks)
    all_do(ranks, "begin")
    ranks[1].ok("push 3")
    ranks[1]("push 3")
    answer = ranks[1]("end")
    assert answer.r == REFUSED and answer["error"]["code"] == 1001, answer
    assert "E1001" in answer.text
    ranks[1].ok("clear")
    assert state(ranks) == before


# ---- seen from outside ------------------------------------------------------------------------------------------------


def test_status(zerod, gpus):
    daemon = zerod(configure(2))
    assert daemon.status()["device"] is None
    ranks = trainers(daemon)
    steps(ranks, 1)
    status = daemon.status()
    device, memory = status["device"], status["memory"]
    assert device["ready"] and device["generation"] == 1 and device["n_failures"] == 0
    assert device["versions"].startswith("sim, CUDA ")
    for kind in ("state", "gradient", "ring", "weights"):
        assert memory[kind]["on_device"] and memory[kind]["held_bytes"] >= memory[kind]["planned_bytes"] > 0
    assert memory["device_total"]["held_bytes"] == sum(m["held_bytes"] for k, m in memory.items()
                                                       if m["on_device"] and k != "device_total")
    assert not any(memory[kind]["on_device"] for kind in ("overflow", "staging", "fixed", "total"))
    moved = {c["name"]: c for c in device["collectives"]}
    for name in ("reduce-scatter", "all-gather"):
        assert min(moved[name][k] for k in ("n_orders", "sent_bytes", "received_bytes", "busy_ns")) > 0
    assert device["sent_bytes"] == sum(c["sent_bytes"] for c in moved.values())
    text = daemon.ctl("status").stdout
    assert re.search(r"^          reduce-scatter: \S+ \S+ sent, .* received in \d+ orders, \S+ \S+/s$", text, flags=re.M), text
    assert re.search(r"^engine    nccl, generation 1, ready, pid \d+: sim, CUDA", text, flags=re.M), text
    assert re.search(r"^on GPUs   .*state .*gradient .*ring .*weights", text, flags=re.M), text


MAPPED_BY_TRAINER = 2  # ring and weights


def two_with_handles(zerod, n_registered):
    """Starts two ranks. Their driver kills them when they map more than planned, or register more than n_registered."""
    daemon = zerod(configure(2), sim("cuMemImportFromShareableHandle:kill@1"))
    trainer = sim(f"cuMemImportFromShareableHandle:kill@{MAPPED_BY_TRAINER + 1}",
                  f"cuMemHostRegister:kill@{n_registered + 1}")
    return daemon, [Puppet(daemon, r, env=trainer).attach() for r in range(2)]


def test_handles_are_opened_once(zerod, gpus):
    """Trainers open memory handles and register a page only when the job is formed, not in any step."""
    daemon, ranks = two_with_handles(zerod, 1)
    form(ranks)
    steps(ranks, 20)
    assert daemon.status()["device"]["generation"] == 1, daemon.log()


def test_that_would_be_seen(zerod, gpus):
    """Proves that the previous test can fail: with one page less, the ranks are killed."""
    daemon, ranks = two_with_handles(zerod, 0)
    for rank in ranks:
        rank.tell("form")
    wait_for("a killed rank", lambda: any(rank.popen.poll() is not None for rank in ranks))


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_stage3_is_in_the_pools(zerod, gpus, offload):
    """Stage 3 has no copy of the weights. Each rank has a pool, in GPU memory only."""
    daemon = zerod(configure(2, 3, offload))
    steps(trainers(daemon), 1)
    memory = daemon.status()["memory"]
    assert memory["pool"]["on_device"] and memory["pool"]["held_bytes"] >= memory["pool"]["planned_bytes"] > 0
    assert memory["weights"]["planned_bytes"] == 0
    plan = daemon.json("plan", "--params", "1e9", "--config", daemon.config_path)
    by_class, on_host = plan["bytes_by_class"], {"state", "staging", "fixed"} if offload == "cpu" else {"staging", "fixed"}
    assert plan["needed_bytes"] == sum(by_class[kind] for kind in on_host)
    assert plan["device_bytes"] == sum(by_class[kind] for kind in set(by_class) - on_host - {"overflow"})
    text = daemon.ctl("plan", "--params", "1e9", "--config", daemon.config_path).stdout
    assert re.search(r"^ *pool .*, on the GPUs$", text, flags=re.M), text


def test_device_memory_is_not_limited_by_limits_memory(zerod, gpus):
    """Memory of GPUs does not count for limits.memory, so a lower limit suffices."""
    daemon = zerod(configure(2, limits={"memory": "24MiB"}))
    steps(trainers(daemon), 1)


def test_offloaded_state_is_the_hosts(zerod, gpus):
    """status and plan show offloaded state as host memory. If a limit has no room for it, the error gives the sum."""
    offload = configure(2, offload="cpu")
    daemon = zerod(offload)
    steps(trainers(daemon), 1)
    memory = daemon.status()["memory"]
    assert {kind for kind, m in memory.items() if m["on_device"]} == {"gradient", "ring", "weights", "device_total"}
    assert memory["state"]["held_bytes"] == memory["state"]["planned_bytes"] > 0
    text = daemon.ctl("plan", "--params", "1e9", "--config", daemon.config_path).stdout
    assert [line.split()[0] for line in text.splitlines() if line.endswith(", on the GPUs")] == ["gradient", "ring",
                                                                                                 "weights", "pool"], text
    plan = daemon.json("plan", "--params", "1e9", "--config", daemon.config_path)
    by_class = plan["bytes_by_class"]
    assert plan["needed_bytes"] == sum(by_class[kind] for kind in ("state", "staging", "fixed"))
    assert plan["device_bytes"] == sum(by_class[kind] for kind in ("gradient", "ring", "weights"))


def test_offloaded_state_is_limited(zerod, gpus):
    daemon = zerod(configure(2, offload="cpu", limits={"memory": "16MiB"}))
    for answer in all_do([Puppet(daemon, r).attach() for r in range(2)], "form"):
        assert answer.r == REFUSED and answer["error"]["code"] == 1401, answer
        assert re.search(r"state \d+ \+ staging \d+ \+ fixed \d+ = \d+ bytes", answer.text), answer.text


def test_offloaded_update_is_slow(zerod, reference):
    """The engine is killed while portions of the state are copied to the host, updated and copied back."""
    wanted = reference(2)
    daemon = zerod(configure(2, offload="cpu", threads=1), sim() | {"ZEROD_FAILPOINT": "update:sleep:3@*"})
    ranks, killed = start(daemon, [[]] * 2, n_steps=SHORT), set()
    while any([rank.tend() for rank in ranks]):
        status = daemon.status()
        device = status["device"]
        if status["state"] == "updating" and device["ready"] and device["generation"] not in killed:
            killed.add(device["generation"])
            os.kill(device["pid"], signal.SIGKILL)
        time.sleep(0.005)
    judge(ranks, daemon, wanted)
    assert killed, "no update was seen"
    assert daemon.status()["counters"]["n_aborts"] == 0


# ---- findings ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", *full("cpu")])
def test_findings(zerod, gpus, offload):
    """The sums of squares come from GPUs: no finding reports a zero gradient wrongly, and a rate of 0 is reported."""
    optimizer = {"type": "AdamW", "params": {"lr": 0}}
    daemon = zerod(configure(offload=offload, optimizer=optimizer))
    train(daemon, [[]] * 2, n_steps=120)
    assert daemon.status()["n_applied"] >= 104  # some steps of this program are skipped
    assert [f["kind"] for f in daemon.status()["findings"]] == ["zero-lr"]
