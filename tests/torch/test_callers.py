# SPDX-License-Identifier: Apache-2.0
"""
Popular trainers with zerod.Optimizer, as documented in docs/pytorch.md and started as users start them, compared with
the same training with DDP and torch's AdamW.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment, free_ports
from tiers import full

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORLD = 2
# DDP sums micro-batches on each rank and then over ranks, zerod sums all ranks of each micro-batch. The sums differ in
# their last bits, and Adam's first steps amplify this. Relative to max(|x|, rms), after 6 steps.
TOLERANCE = 1e-5
# A weight whose last bits differ may be rounded to another 16-bit weight, which is 1/256 off. DDP compared with DDP,
# with other last bits in a third of the weights, differed by 0.003 to 0.02, depending on the processor's kernels and on
# chance.
TOLERANCE_BF16 = 0.03
QUIET = re.compile(r".*\b(ready|stopping|stopped)\b")


# A power of two changes no bit of fp32 gradients. The caller's backward multiplies by the scale.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def needs(name):
    return pytest.importorskip(name, reason=f"{name} is not installed (ZEROD_TORCH_MODULES in scripts/common.sh)")


@pytest.fixture
def launch(build, tmp_path):
    """launch(launcher, program, runs) starts two ranks. outcome() reads their results from files."""

    def go(launcher, program, runs, socket=None):
        file = tmp_path / "runs.json"
        file.write_text(json.dumps(runs))
        start = {
            "zerodrun": [build.path("client/run/zerodrun"), "--socket", socket, "-n", WORLD, "--", sys.executable],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORLD],
        }[launcher]
        variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"),
                     "OMP_NUM_THREADS": 1, "PYTHONDONTWRITEBYTECODE": 1, "HF_HUB_OFFLINE": 1}
        result = subprocess.run([str(word) for word in [*start, HERE / "programs" / program, file]], env=environment(variables),
                                text=True, timeout=900, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)
        assert result.returncode == 0, result.stdout[-8000:]
        return {name: [torch.load(tmp_path / f"{name}.rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
                for name in runs}

    return go


def distance(ours, theirs):
    def of(a, b):
        scale = torch.maximum(b.abs(), b.pow(2).mean().sqrt())
        return ((a - b).abs() / scale).max().item()

    assert ours.keys() == theirs.keys()
    return max(of(ours[name], theirs[name]) for name in ours if ours[name].is_floating_point())


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_quiet(daemon):
    """The daemon must have reported only that it was ready."""
    strange = [line for line in daemon.log().splitlines() if not QUIET.match(line)]
    assert not strange, strange
    assert daemon.json("diagnostics") == []


# ---- Hugging Face Trainer -------------------------------------------------------------------------------

WAYS = {
    "plain": {},
    "accumulation": {"args": {"gradient_accumulation_steps": 2}},
    "bf16": {"args": {"bf16": True}},
    "evaluation": {"args": {"eval_strategy": "steps", "eval_steps": 2}},
    "reentrant": {"reentrant": True},
    "non-reentrant": {"reentrant": False},
    "clipping": {"args": {"max_grad_norm": 0.05}},
}
STAGES = dict(zip(WAYS, [2, 1, 2, 3, 2, 3, 1], strict=True))


def check_trainer(name, ours, theirs):
    """Compares both ranks of a run with zerod with the same run with DDP."""
    assert theirs[0]["wrapped"], name
    for rank, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert not our["wrapped"] and our["backend"] == "gloo" and our["rank"] == rank, name
        assert our["environment"] == str(rank) and our["step"] == 6, name
        assert same(our["weights"], ours[0]["weights"]), f"{name}: ranks differ"
        assert distance(our["weights"], their["weights"]) < (TOLERANCE_BF16 if name == "bf16" else TOLERANCE), name
    a, b = ours[0]["log"], theirs[0]["log"]
    assert [line.keys() for line in a] == [line.keys() for line in b], name
    for mine, other in zip(a, b, strict=True):
        for key in mine.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert mine[key] == pytest.approx(other[key], rel=2e-2 if name == "bf16" else 1e-3), (name, key)
        assert mine.get("learning_rate") == other.get("learning_rate"), name


def daemon_config(stage, **more):
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": 0, **more}


@pytest.mark.parametrize("ways", [("plain", "accumulation", "reentrant", "clipping"), *full(
    (("bf16", "evaluation", "non-reentrant"),))], ids=" ".join)
def test_trainer_is_ddp(zerod, launch, ways):
    needs("transformers")
    needs("accelerate")
    daemons = {name: zerod(daemon_config(STAGES[name])) for name in ways}
    runs = {f"zerod-{name}": WAYS[name] | {"socket": str(daemon.socket)} for name, daemon in daemons.items()}
    results = launch("torchrun", "run_trainer.py", runs | {f"ddp-{name}": WAYS[name] for name in ways})
    for name, daemon in daemons.items():
        check_trainer(name, results[f"zerod-{name}"], results[f"ddp-{name}"])
        check_quiet(daemon)
    if "clipping" in ways:
        norms = [line["grad_norm"] for line in results["zerod-plain"][0]["log"] if "grad_norm" in line]
        assert max(norms) > 0.05, "nothing to clip"


def test_trainer_saves_and_resumes(zerod, launch, tmp_path):
    """Under zerodrun: a new daemon in another stage, with a loss scale, ends with the bits of an uninterrupted run."""
    needs("transformers")
    needs("accelerate")
    folder = tmp_path / "checkpoints"
    saving = {"save_strategy": "steps", "save_steps": 3}
    daemons = [zerod(daemon_config(2)), zerod(daemon_config(3, **FP16)), zerod(daemon_config(1, **FP16))]
    whole, resumed, each = (str(daemon.socket) for daemon in daemons)
    results = launch("zerodrun", "run_trainer.py", {
        "whole": {"socket": whole, "args": saving | {"output_dir": str(folder)}, "save": str(tmp_path / "model")},
        "resumed": {"socket": resumed, "resume": str(folder / "checkpoint-3")},
        "each": {"socket": each, "args": saving},  # a folder for each rank shows which rank writes
    }, socket=whole)
    for run in ("resumed", "each"):
        for result in results[run]:
            assert same(result["weights"], results["whole"][0]["weights"]), run
    for result in results["whole"]:
        assert distance(result["again"], result["weights"]) == 0
    zero, one = (result["files"] for result in results["each"])
    assert {"checkpoint-3/optimizer.pt", "checkpoint-3/scheduler.pt", "checkpoint-3/model.safetensors"} <= set(zero)
    assert {Path(name).name for name in one} <= {"rng_state_1.pth"}, one
    state = torch.load(folder / "checkpoint-3/optimizer.pt", weights_only=True)
    assert {float(entry["step"]) for entry in state["state"].values()} == {3.0}
    assert all(entry["exp_avg"].shape == entry["exp_avg_sq"].shape for entry in state["state"].values())
    assert len(state["state"]) == len(state["names"]) == len(state["param_groups"][0]["params"])
    for daemon in daemons:
        check_quiet(daemon)


# ---- accelerate by hand ---------------------------------------------------------------------------------

PIECES = 32  # of text, per epoch


def accelerated(runs, address):
    """Runs one rank: several trainings one after the other. Return: {name: result}."""
    import os

    os.environ.update(address)
    torch.manual_seed(1)
    return {name: one_accelerated(**how) for name, how in runs.items()}


def one_accelerated(socket=None, precision="no", save=None, load=None, spoil=None):
    import os

    import accelerate
    import zerod
    from test_optimizer import make_model
    from torch.utils.data import DataLoader, TensorDataset

    accelerate.state.AcceleratorState._reset_state()  # because the precision is a setting of the process
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = make_model()
    adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}
    plain = zerod.Optimizer(model, socket, **adam) if socket else torch.optim.AdamW(model.parameters(), **adam)
    tokens = torch.randint(0, 40, (PIECES, 12), generator=torch.Generator().manual_seed(2))
    model, opt, loader, scheduler = accelerator.prepare(
        model, plain, DataLoader(TensorDataset(tokens), batch_size=4), torch.optim.lr_scheduler.StepLR(plain, 3, 0.7))
    result = {"norms": [], "rates": [], "skipped": []}
    if load:
        accelerator.load_state(load)
    for epoch in range(1 if load else 0, 2):
        for n, (batch,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch).float().view(-1, 40), batch.roll(1, 1).view(-1))
                if [epoch, n] == spoil:
                    loss = loss * float("nan")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    result["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.4)))
                opt.step()
                scheduler.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                result["rates"].append(scheduler.get_last_lr()[0])
                result["skipped"].append(accelerator.optimizer_step_was_skipped)
        if save and epoch == 0:
            accelerator.save_state(save)
    result["weights"] = {k: v.clone() for k, v in accelerator.unwrap_model(model).state_dict().items()}
    result["rank"], result["processes"] = accelerator.process_index, accelerator.num_processes
    if socket:
        plain.close()
        result["files"] = sorted(os.listdir(save)) if save else []
    return result


def test_accelerate(zerod, run, tmp_path):
    needs("accelerate")
    daemons = [zerod(daemon_config(2)), zerod(daemon_config(3)), zerod(daemon_config(1, **FP16)), zerod(daemon_config(2))]
    whole, bf16, resumed, skipping = (str(daemon.socket) for daemon in daemons)
    folder = str(tmp_path / "state")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    results = run(daemons[0], accelerated, address=address, runs={
        "ddp": {}, "zerod": {"socket": whole, "save": folder},
        "ddp-bf16": {"precision": "bf16"}, "zerod-bf16": {"socket": bf16, "precision": "bf16"},
        "resumed": {"socket": resumed, "load": folder},
        "skipping": {"socket": skipping, "spoil": [0, 3]},
    })
    for rank, result in enumerate(results):
        for end in ("", "-bf16"):
            ours, theirs = result[f"zerod{end}"], result[f"ddp{end}"]
            assert (ours["rank"], ours["processes"]) == (rank, WORLD)
            assert distance(ours["weights"], theirs["weights"]) < TOLERANCE
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4) and max(ours["norms"]) > 0.4
            assert ours["rates"] == theirs["rates"] and len(set(ours["rates"])) > 1
            assert not any(ours["skipped"])
        assert same(result["resumed"]["weights"], result["zerod"]["weights"])
        skipped, rates = result["skipping"]["skipped"], result["skipping"]["rates"]
        assert skipped == [False, True, False, False]
        assert rates[0] == rates[1] != rates[2], "accelerate leaves the scheduler alone after a skipped step"
        assert "optimizer.bin" in result["zerod"]["files"]
    for daemon in daemons[:3]:
        check_quiet(daemon)


# ---- Lightning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["zerodrun", *full("torchrun")])
def test_lightning(zerod, launch, tmp_path, launcher):
    needs("lightning")
    daemons = [zerod(daemon_config(2)), zerod(daemon_config(3)), zerod(daemon_config(1)), zerod(daemon_config(2, **FP16))]
    whole, both, resumed, wrapper = (str(daemon.socket) for daemon in daemons)
    args = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    runs = {"whole": {"socket": whole}, "ddp": {}, "both": {"socket": both, "args": args}, "ddp-both": {"args": args},
            "wrapper": {"socket": wrapper, "clip": 0.1, "args": {"accumulate_grad_batches": 2}},
            "resumed": {"socket": resumed, "resume": str(tmp_path / "whole.checkpoints/step=8.ckpt")}}
    results = launch(launcher, "run_lightning.py", runs, socket=whole)
    for ours, theirs in (("whole", "ddp"), ("both", "ddp-both")):
        for rank in range(WORLD):
            mine, other = results[ours][rank], results[theirs][rank]
            assert not mine["wrapped"] and mine["rank"] == rank and mine["sampler"] == "DistributedSampler"
            assert mine["n_steps"] == other["n_steps"] == mine["step"] == (16 if ours == "whole" else 8)
            assert mine["rates"] == other["rates"]
            assert distance(mine["weights"], other["weights"]) < TOLERANCE, ours
            for key in ("loss", "val_loss", "validated"):
                assert mine[key] == pytest.approx(other[key], rel=1e-3), (ours, key)
    assert results["both"][0]["norm"] > 0.1, "nothing was clipped"
    for rank in range(WORLD):
        assert same(results["resumed"][rank]["weights"], results["whole"][0]["weights"])
        assert results["resumed"][rank]["step"] == 8
        assert same(results["wrapper"][rank]["weights"], results["both"][0]["weights"])
    for daemon in daemons:
        check_quiet(daemon)


# ---- a model inside DDP ----------------------------------------------------------------------------------


def inside_ddp(address):
    import os

    import zerod
    from test_optimizer import loss_of, make_model

    os.environ.update(address)
    torch.distributed.init_process_group("gloo")
    model = make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    try:
        zerod.Optimizer(model)
        text = "accepted"
    except zerod.ReducedTwice as e:
        text = str(e)
    del ddp
    opt = zerod.Optimizer(model)
    loss_of(model, 0, 0, opt.rank).backward()
    opt.step()
    torch.distributed.destroy_process_group()
    return text, opt.epoch


def test_model_inside_ddp_is_refused(zerod, run):
    """
    A model inside DDP is refused, as in Lightning without the documented lines, although the model itself does not show
    it. A DDP object that was deleted does no harm.
    """
    for text, epoch in run(zerod(daemon_config(2)), inside_ddp,
                           address={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}):
        assert "E1107" in text and "inside a DistributedDataParallel" in text
        assert epoch == 1


# ---- imported after the optimizer was made ------------------------------------------------------------------


def imported_late():
    """
    accelerate is imported when the model is already attached, as by `from transformers import Trainer` in a function.
    """
    import importlib.util

    import zerod

    model = torch.nn.Linear(4, 2)
    opt = zerod.Optimizer(model)
    assert "accelerate" not in sys.modules and importlib.util.find_spec("accelerate") is not None
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == opt.world_size == WORLD
    prepared, optimizer = accelerator.prepare(model, opt)
    accelerator.backward(prepared(torch.ones(3, 4)).mean())
    optimizer.step()
    optimizer.zero_grad()
    name, n_steps = type(prepared).__name__, opt.epoch
    opt.close()
    torch.distributed.destroy_process_group()
    return name, n_steps


def test_accelerate_is_imported_late(zerod, run):
    needs("accelerate")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    assert run(zerod(), imported_late, group) == [("Linear", 1)] * WORLD


ALONE = """
import torch, zerod
opt = zerod.Optimizer(torch.nn.Linear(4, 2), lr=1e-3)
torch.nn.Module.__call__(opt.model, torch.ones(3, 4)).mean().backward()
opt.step()
print("rank", opt.rank, "of", opt.world_size, "step", opt.epoch)
opt.close()
"""


@pytest.mark.parametrize("start", [
    pytest.param([], id="python"),
    pytest.param(["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"], id="accelerate launch", marks=pytest.mark.full),
])  # fmt: skip
def test_process_that_is_alone(zerod, build, tmp_path, start):
    """A process without a rank number is rank 0 of a job of one rank. If the job has more ranks, it gets an error."""
    needs("accelerate")
    (tmp_path / "train.py").write_text(ALONE)

    def launch(size):
        variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1,
                     "ZEROD_SOCKET": zerod({"world": {"size": size}}).socket}  # fmt: skip
        return subprocess.run([sys.executable, *start, tmp_path / "train.py"], env=environment(variables), text=True, timeout=120,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    result = launch(1)
    assert result.returncode == 0 and "rank 0 of 1 step 1" in result.stdout, result.stdout
    result = launch(2)
    assert result.returncode != 0 and "RANK is not set, so this process is alone" in result.stdout, result.stdout
    assert "zerodrun -n 2 -- python train.py" in result.stdout


ENDS_ITS_GROUP = """
import os, time
from torch import distributed
from zerod.loops.progress import watch_group

distributed.init_process_group("gloo")
watch_group()  # as each integration does
distributed.destroy_process_group()
time.sleep(int(os.environ["RANK"]))
print("rank", os.environ["RANK"], "is done")
"""


def test_program_that_ends_its_process_group(zerod, build, tmp_path):
    """A program destroys its process group, as torch requires, and ends well, even while another rank works."""
    (tmp_path / "train.py").write_text(ENDS_ITS_GROUP)
    variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1}
    result = subprocess.run([build.path("client/run/zerodrun"), "--socket", zerod(daemon_config(2)).socket, "-n", "2", "--",
                             sys.executable, tmp_path / "train.py"], env=environment(variables), text=True, timeout=120,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("[")) == [
        "[0] rank 0 is done", "[1] rank 1 is done"]  # fmt: skip


UNUSED = """
import sys, torch, zerod
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.used(x).square().mean()}

args = TrainingArguments(output_dir=sys.argv[1], max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
                         ddp_find_unused_parameters=False, torch_compile_backend=(sys.argv[2:] or [None])[0])
data = [{"x": torch.ones(4)} for _ in range(64)]
trainer = Trainer(model=Net(), args=args, train_dataset=data)
trainer.add_callback(zerod.observe_callback(trainer))
trainer.train()
"""


@pytest.mark.parametrize("backend", [None, *full("eager")])
def test_trainer_is_observed(build, tmp_path, backend):
    """The Trainer wraps its model and compiles the wrapper. The callback finds it. There is no daemon."""
    needs("transformers")
    needs("accelerate")
    (tmp_path / "train.py").write_text(UNUSED)
    variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1}
    result = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                             tmp_path / "train.py", tmp_path / "out", *filter(None, [backend])], env=environment(variables),
                            text=True, timeout=200, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert result.returncode != 0
    assert "E1005" in result.stdout and "unused.weight, unused.bias" in result.stdout, result.stdout[-4000:]
    assert ("never called: unused.*" in result.stdout) == (backend is None)  # calls in a graph are not counted
