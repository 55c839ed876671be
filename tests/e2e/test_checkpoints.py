# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved during training, and loaded by the next job."""

import json
import re
import time

import kills
import pytest
from conftest import Daemon, merge, wait_for
from keeper import KeptDaemon
from puppet import steps, trainers
from safetensors import deserialize
from tiers import full

N_STEPS = 40


def config(folder, world=2, stage=2, **checkpoint):
    return {"world": {"size": world}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
            "gradient_clipping": 1.0, "checkpoint": {"dir": str(folder), **checkpoint}}


@pytest.fixture(scope="module")
def references(build, tmp_path_factory):
    return kills.References(build, tmp_path_factory.mktemp("references"))


@pytest.fixture
def start(build, tmp_path):
    daemons = []

    def begin(settings, kind=Daemon, **more):
        folder = tmp_path / f"daemon{len(daemons)}"
        folder.mkdir()
        daemons.append(kind(build, folder, settings, **more))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.stop()


def saved(folder):
    return sorted(path.name for path in folder.iterdir())


def train(daemon, world, n_steps, args=()):
    ranks = kills.train(daemon, [[]] * world, args, n_steps)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    return ranks


@pytest.mark.parametrize("stage, device, state", [
    (1, "", "fp32"), (2, "", "24 bits"), (3, "", "24 bits"), (2, "cuda", "stochastic"), (3, "cuda", "24 bits"),
    *full((1, "cuda", "bf16 moments"), (2, "cuda", "fp32"), (3, "cuda", "fp32"), (3, "cuda", "stochastic"),
          (3, "", "fp32"), (2, "cuda", "24 bits"), (3, "cuda-offload", "24 bits"))])
def test_go_on_as_if_nothing_had_been(start, tmp_path, references, monkeypatch, stage, device, state):
    """A run ends, and another continues from its last checkpoint, with the bits of an uninterrupted run."""
    reference = references.get(2, False, N_STEPS, state=state)
    monkeypatch.setenv("ZEROD_DEVICE", device)
    folder = tmp_path / "checkpoints"
    how = merge(kills.STATES[state], {"zero_optimization": {"stage3_on_one_node": "gathered"}} if stage == 3 and not device else {})
    daemon = start(merge(config(folder, stage=stage, save_steps=5), how))
    train(daemon, 2, 21)
    daemon.ctl("checkpoint", "save")
    daemon.stop()
    assert [name for name in saved(folder) if name.startswith(".")] == []

    daemon = start(merge(config(folder, stage=stage), how))
    ranks = train(daemon, 2, N_STEPS)
    assert f"loaded {folder}/step-00000021" in daemon.log()
    found = kills.results(ranks)
    assert min(key[1] for key in found if key[0] == "norm") == 21
    assert {key: value for key, value in found.items() if key not in reference or reference[key] != value} == {}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def load_file(path):
    """Return: {name: {dtype, shape, data}}, as read by the format's library."""
    return dict(deserialize(path.read_bytes()))


def same_tensors(one, other):
    """Weights and optimizer state of two checkpoints must have the same bits."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = load_file(one / name), load_file(other / name)
        assert a.keys() == b.keys()
        assert [key for key in a if a[key] != b[key]] == []
    return True


def test_arrays_that_fill_their_memory(start, tmp_path, monkeypatch):
    """bf16 moments fill a piece of GPU memory to the last byte. A copy of more than the moments would be refused."""
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    n_elems = 1 << 19  # two arrays of 1 MiB; a GPU allocates 2 MiB
    settings = config(tmp_path / "c", world=1) | kills.STATES["bf16 moments"]
    settings["zero_optimization"]["reduce_bucket_size"] = n_elems
    daemon = start(settings)
    steps(trainers(daemon, declare=("param", "huge", n_elems)), 2)
    daemon.ctl("checkpoint", "save")
    assert daemon.status()["device"]["n_failures"] == 0, daemon.log()
    tensors = load_file(tmp_path / "c" / "step-00000002" / "optimizer.safetensors")
    moments = [tensor for name, tensor in tensors.items() if "exp_avg" in name]
    assert [(m["dtype"], len(m["data"]), any(m["data"])) for m in moments] == [("BF16", 2 * n_elems, True)] * 2


def test_into_any_job(start, tmp_path, monkeypatch):
    """Checkpoints of 8, 3, 5, 2 ranks, other stages, other buckets, GPUs: masters, moments, counts keep their bits."""
    folders = [tmp_path / str(i) for i in range(4)]
    daemon = start(config(folders[0], 8, 1))
    train(daemon, 8, 4, ["--window", 50])
    daemon.ctl("checkpoint", "save")
    for i, (world, stage, bucket, device) in enumerate([(3, 3, 1, "cuda"), (5, 2, 50000, ""), (2, 3, 300, "cuda-offload")]):
        monkeypatch.setenv("ZEROD_DEVICE", device)
        settings = config(folders[i + 1], world, stage, load=str(folders[i] / "step-00000004"))
        settings["zero_optimization"]["reduce_bucket_size"] = bucket
        daemon = start(settings)
        train(daemon, world, 4, ["--window", 50, "--any-blob"])
        assert "what ranks had stored (loader position, random state) is left out" in daemon.log()
        daemon.ctl("checkpoint", "save")
        assert same_tensors(folders[i] / "step-00000004", folders[i + 1] / "step-00000004")


def test_what_is_written(start, tmp_path):
    daemon = start(config(tmp_path / "c", save_steps=5, save_total_limit=2))
    for n_steps in (5, 12, 20):
        train(daemon, 2, n_steps)
        daemon.ctl("checkpoint", "save")
    assert saved(tmp_path / "c")[-1] == "step-00000020" and len(saved(tmp_path / "c")) == 2
    last = tmp_path / "c" / "step-00000020"
    assert saved(last) == ["model.safetensors", "optimizer.safetensors", "ranks.safetensors", "zerod.json"]
    facts = json.loads((last / "zerod.json").read_text())
    assert (facts["format"], facts["job"], facts["step"], facts["world_size"], facts["optimizer"]) == (1, "test", 20, 2, "AdamW")
    model, state = load_file(last / "model.safetensors"), load_file(last / "optimizer.safetensors")
    for param in facts["parameters"]:
        assert list(model[param["name"]]["shape"]) == param["shape"]
        keys = {key.rsplit(".", 1)[1] for key in state if key.rsplit(".", 1)[0] == f"state.{param['name']}"}
        assert keys == ({"exp_avg", "exp_avg_sq", "step"} | ({"master"} if param["dtype"] != "fp32" else set())
                        if param["trainable"] else set())


@pytest.mark.parametrize("stage", (2, 3))
def test_steps_go_on_meanwhile(start, tmp_path, references, stage):
    """With a slow disk and almost no memory for copies, updates wait, and the bits are the same."""
    settings = config(tmp_path / "c", stage=stage, save_steps=4, memory=65536)
    daemon = start(settings, env={"ZEROD_FAILPOINT": "disk.write:sleep:60@*"})
    ranks = train(daemon, 2, N_STEPS)
    kills.judge(ranks, daemon, references.get(2, False, N_STEPS))
    wait_for("the save", lambda: daemon.status()["checkpoint"]["saving"] is None)
    daemon.stop()
    waits = [float(text) for text in daemon.log().split("updates waited ")[1:] for text in [text.split(" s ")[0]]]
    assert max(waits) > 0
    newest = saved(tmp_path / "c")[-1]
    again = start(config(tmp_path / "c", stage=stage))
    ranks = train(again, 2, N_STEPS)
    assert f"loaded {tmp_path}/c/{newest}" in again.log()
    reference = references.get(2, False, N_STEPS)
    assert {key: value for key, value in kills.results(ranks).items() if reference.get(key) != value} == {}


def test_no_memory_for_the_copy(start, tmp_path, references, monkeypatch):
    """
    If there is no memory for a copy of the GPUs' data, nothing is saved and training continues. The next save succeeds.
    """
    reference = references.get(2, False, N_STEPS)
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    # The first two copies are for windows.
    daemon = start(config(tmp_path / "c", save_steps=9), env={"ZEROD_FAILPOINT": "mirror:error@3"})
    assert kills.results(train(daemon, 2, N_STEPS)) == reference
    wait_for("the save", lambda: daemon.status()["checkpoint"]["saving"] is None)
    assert daemon.log().count("E1701") == 1 and "no memory for a copy of what is on the GPUs" in daemon.log()
    assert saved(tmp_path / "c")[-1] == "step-00000036"


@pytest.mark.parametrize("call", ("make_folder", "create", "write", "truncate", "sync", "rename"))
def test_a_full_disk(start, tmp_path, references, call):
    """
    With a full disk training continues, the text names a remedy, no file is left, and the next checkpoint is complete.
    """
    daemon = start(config(tmp_path / "c", save_steps=10), env={"ZEROD_FAILPOINT": f"disk.{call}:error"})
    ranks = train(daemon, 2, N_STEPS)
    kills.judge(ranks, daemon, references.get(2, False, N_STEPS))
    wait_for("the save", lambda: daemon.status()["checkpoint"]["n_saved"] > 0)
    wait_for("the save", lambda: daemon.status()["checkpoint"]["saving"] is None)
    what = {"make_folder": f"{tmp_path}/c", "sync": f"{tmp_path}/c", "rename": "step-000000NN"}.get(call, "model.safetensors")
    assert f"""E1701 warning, checkpoint not saved: step NN
  what           checkpoint in {tmp_path}/c
  cause          {what}: No space left on device
  fix            free space there, or let the daemon's user write there; the next save tries again
                 (zerodctl checkpoint save does it at once)
  or             ReadWritePaths={tmp_path}/c   (in a drop-in of its unit, whose sandbox has only /var/lib/zerod)
  does not help  the trainers; the gradients
  state          the daemon and the job go on; checkpoints that were whole stay whole
""" in re.sub(r"(step-000000|: step )\d\d\b", r"\1NN", daemon.log())
    assert daemon.status()["checkpoint"]["n_failed"] == 1
    assert [name for name in saved(tmp_path / "c") if name.startswith(".")] == []
    assert daemon.ctl("checkpoint", "verify").returncode == 0


def test_a_wrong_byte(start, tmp_path, references):
    """A checkpoint with a wrong byte is skipped for the previous one. Without one, no rank gets wrong weights."""
    folder = tmp_path / "c"
    daemon = start(config(folder))
    for n_steps in (10, 20, 30):
        train(daemon, 2, n_steps)
        daemon.ctl("checkpoint", "save")
    flip(folder / "step-00000030" / "optimizer.safetensors")
    daemon.stop()
    daemon = start(config(folder, save_on_stop=False))
    ranks = train(daemon, 2, N_STEPS)
    assert f"{folder}/step-00000030 is not loaded, and the one before it is tried: optimizer.safetensors: the MiB from byte 0 " \
           "is not as it was written" in daemon.log()
    found, reference = kills.results(ranks), references.get(2, False, N_STEPS)
    assert min(key[1] for key in found if key[0] == "norm") == 20
    assert {key: value for key, value in found.items() if reference.get(key) != value} == {}
    daemon.stop()

    for name in saved(folder):
        if not name.endswith("30"):
            flip(folder / name / "model.safetensors")
    daemon = start(config(folder))
    ranks = kills.train(daemon, [[]] * 2, n_steps=N_STEPS)
    assert all(rank.last.poll() != 0 for rank in ranks)
    told = f"""E1702 checkpoint not loaded
  what           {folder}
  cause          no checkpoint of the 3 in {folder} is complete; step-00000030: its bytes are not those that were written
  fix            start the program that the checkpoint belongs to, or name another checkpoint: checkpoint.load
                 (zerodctl checkpoint list shows them)
  or             checkpoint.load: never   (begins anew, with the program's initial weights)
  does not help  the number of ranks, the stage, the size of buckets: they may differ
  state          no job was formed, and the checkpoint is unchanged"""
    assert told in daemon.log() and all(told.replace("\n", " | ") in rank.last.out() for rank in ranks)


def test_another_run_in_the_folder(start, build, tmp_path):
    """Another run's steps are overwritten, and the log says so. A run that saves a step again is not reported."""
    folder = tmp_path / "c"
    for run, replaced in (("one", None), ("two", "one"), ("two", None)):
        daemon = start(config(folder, load="never"))
        program = build.path("tests/kill-trainer")
        ranks = [daemon.spawn(program, "--steps", 3, rank=r, env={"ZEROD_RUN_ID": run}) for r in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
        daemon.ctl("checkpoint", "save")
        said = re.findall(r"step-00000003 replaces that of another run, (.*): runs that", daemon.log())
        assert said == [replaced] * bool(replaced)
        daemon.stop()


def test_a_file_in_place_of_the_folder(start, tmp_path):
    """If a file is in the place of the folder, the text gives advice about the folder, not about the program."""
    folder = tmp_path / "c"
    folder.write_text("no folder")
    daemon = start(config(folder))
    ranks = kills.train(daemon, [[]] * 2, n_steps=N_STEPS)
    assert all(rank.last.poll() != 0 for rank in ranks)
    told = f"""E1702 checkpoint not loaded
  what           {folder}, where checkpoints are written and looked for
  cause          {folder}: Not a directory
  fix            name a folder that the daemon's user can read and write: checkpoint: {{dir: PATH}}
                 (it is made if its parent exists)
  does not help  another program; checkpoint.load: nothing could be written there either
  state          no job was formed, and nothing was changed there"""
    assert told in daemon.log() and all(told.replace("\n", " | ") in rank.last.out() for rank in ranks)
    assert folder.read_text() == "no folder"


def test_by_time(start, tmp_path):
    """save_interval counts from the first step, then from one save to the next."""
    daemon = start(config(tmp_path / "c", save_interval="300ms"), env={"ZEROD_FAILPOINT": "update:sleep:2@*"})
    began = time.monotonic()
    train(daemon, 2, N_STEPS)
    seconds = time.monotonic() - began
    wait_for("the save", lambda: daemon.status()["checkpoint"]["n_saved"] > 0)
    assert daemon.status()["checkpoint"]["n_saved"] <= 1 + seconds / 0.3


@pytest.mark.parametrize("given, saves", (({}, True), ({"save_on_stop": "auto"}, True), ({"save_on_stop": False}, False)),
                         ids=str)
def test_save_on_stop(start, tmp_path, given, saves):
    """Only checkpoint.dir is needed for a save at the stop."""
    daemon = start(config(tmp_path / "c", **given))
    train(daemon, 2, 7)
    daemon.stop()
    assert [folder.name for folder in tmp_path.glob("c/*")] == ["step-00000007"] * saves
    assert ("SIGTERM: stopping when a checkpoint is written" in daemon.log()) == saves


def test_stopped_while_it_trains(start, tmp_path):
    """A stop during training: no step follows the saved one, and the ranks are told which step was saved."""
    daemon = start(config(tmp_path / "c"), env={"ZEROD_FAILPOINT": "disk.sync:sleep:300"})
    ranks = trainers(daemon)
    for rank in ranks:
        rank.tell("steps 1000000")
    wait_for("some steps", lambda: daemon.status()["step"] > 5)
    daemon.stop()
    texts = [rank.answer().text for rank in ranks]
    [name] = saved(tmp_path / "c")
    step = int(name.removeprefix("step-"))
    for text in texts:
        assert text.startswith(f"E1305 daemon stopped, the run ends: step {step}\n"), text
        assert f"the run begins with step {step}, from {tmp_path / 'c'}\n" in text


def test_killed_while_it_writes(build, tmp_path, references):
    """The daemon dies at each disk call. The next daemon removes the rest, saves again, and the bits are the same."""
    points = [f"disk.{call}:kill" for call in ("make_folder", "create", "write", "sync", "rename", "remove_folder")]
    daemon = KeptDaemon(build, tmp_path, config(tmp_path / "c", save_steps=3, save_total_limit=1), plan=[*points, None])
    ranks = kills.start(daemon, [[]] * 2, n_steps=N_STEPS)
    while any([rank.tend() for rank in ranks]):
        daemon.tend()
    kills.judge(ranks, daemon, references.get(2, False, N_STEPS))
    wait_for("the save", lambda: daemon.status()["checkpoint"]["saving"] is None)
    assert len(daemon.lives) > 4
    assert [name for name in saved(tmp_path / "c") if name.startswith(".")] == []
    assert daemon.ctl("checkpoint", "verify").returncode == 0
    daemon.stop()
