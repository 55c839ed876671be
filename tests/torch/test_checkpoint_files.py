# SPDX-License-Identifier: Apache-2.0
"""Other programs read the daemon's checkpoints: transformers, torch, torch's DCP."""

import subprocess
import sys

import pytest
import torch
from test_bad_input import ONE, batch, caught
from test_bad_input import make_model as make_small_model
from test_for_trainer import Text, alone, arguments, make_model

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

# Runs without zerod on its path: reads the weights by from_pretrained, safetensors and DCP, the moments by AdamW.
OTHERS = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import GPT2LMHeadModel

folder = sys.argv[1]
try:
    import zerod
    sys.exit("zerod is here")
except ImportError:
    pass
model = GPT2LMHeadModel.from_pretrained(folder)
plain, saved = load_file(f"{folder}/model.safetensors"), load_file(f"{folder}/optimizer.safetensors")
params = dict(model.named_parameters())
assert params.keys() == plain.keys()
assert all(torch.equal(params[name], plain[name]) for name in params)

by_dcp = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
dcp.load(by_dcp, storage_reader=HuggingFaceStorageReader(folder))
assert all(torch.equal(by_dcp[name], plain[name]) for name in plain)

optimizer = torch.optim.AdamW(model.parameters())
state = {i: {key: saved[f"state.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
         for i, name in enumerate(params)}
optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
assert all(s["step"] == 3 for s in optimizer.state_dict()["state"].values())
torch.save({"weights": dict(plain), "moments": dict(zip(params, optimizer.state_dict()["state"].values()))}, f"{folder}/all.pt")
"""


def train(folder):
    """Trains with a Trainer; the daemon saves. Return: the saved steps, and the program's weights and moments."""
    import zerod
    from transformers import Trainer

    alone()
    model = make_model()
    args = arguments(folder / "trainer")
    args.save_strategy, args.save_steps = "steps", 2
    optimizer = zerod.for_trainer(model, args, rank=0)
    trainer = Trainer(model=model, args=args, train_dataset=Text(), optimizers=(optimizer, None))
    trainer.add_callback(zerod.checkpoint_callback())
    trainer.train()
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    moments = {order[i]: state for i, state in optimizer.full_state_dict()["state"].items()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.close()
    return sorted(p.name for p in folder.joinpath("trainer").glob("checkpoint*")), weights, moments


def test_others_open_it(zerod, start, tmp_path):
    """
    A Trainer asks for a checkpoint. from_pretrained, safetensors, DCP and torch.optim.AdamW read it without zerod.
    """
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    daemon = zerod(ONE | {"optimizer": adamw, "checkpoint": {"dir": str(tmp_path / "checkpoints")}})
    theirs, weights, moments = start(daemon, train, folder=tmp_path).result()
    assert theirs == []  # the Trainer itself has written no checkpoint
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-00000002", "step-00000003"]
    assert (folder.parent / "step-00000002" / "config.json").exists()  # of a save for which nobody waited
    assert daemon.ctl("checkpoint", "verify", str(folder)).returncode == 0
    result = subprocess.run([sys.executable, "-c", OTHERS, folder], capture_output=True, text=True,
                            env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    read = torch.load(folder / "all.pt")
    assert read["weights"].keys() == weights.keys() == moments.keys()
    for name, tensor in weights.items():
        assert torch.equal(read["weights"][name], tensor)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(read["moments"][name][key], moments[name][key])


def ask_in_vain():
    """Asks for a checkpoint of a daemon without a folder. Return: the error, and the number of steps after it."""
    import zerod

    model = make_small_model()
    optimizer = zerod.Optimizer(model, rank=0)
    said = caught(optimizer.save_checkpoint, wait=True)
    model(batch()).sum().backward()
    optimizer.step()
    steps = optimizer.epoch
    optimizer.close()
    return said, steps


def test_no_folder(zerod, start):
    """The caller gets an exception with the text, and its next step does not wait."""
    said, steps = start(zerod(ONE), ask_in_vain).result()
    assert said.startswith("CheckpointNotSaved: E1701 warning, checkpoint not saved: rank 0, step 0") and steps == 1
    assert "the configuration has no checkpoint.dir" in said
    assert "name a folder in the configuration: checkpoint: {dir: PATH}" in said


def train_with_callback(folder, strategy):
    """Return: the exception of trainer.train(), the number of steps, and the warnings."""
    import warnings

    import zerod
    from transformers import Trainer

    alone()
    model = make_model()
    args = arguments(folder / "trainer")
    args.save_strategy, args.save_steps = strategy, 2
    optimizer = zerod.for_trainer(model, args, rank=0)
    trainer = Trainer(model=model, args=args, train_dataset=Text(), optimizers=(optimizer, None),
                      callbacks=[zerod.checkpoint_callback()])
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        said = caught(trainer.train)
    steps = optimizer.epoch
    optimizer.close()
    return said, steps, [str(w.message) for w in caught_warnings if "checkpoint" in str(w.message)]


def test_callback_without_folder(zerod, start, tmp_path):
    """The callback is refused before the first step, unless the Trainer saves nothing."""
    said, steps, _ = start(zerod(ONE), train_with_callback, folder=tmp_path, strategy="steps").result()
    assert said == (
        "ValueError: DaemonCheckpoint: the daemon's configuration has no checkpoint.dir, so the daemon can write no checkpoint: "
        "add checkpoint: {dir: PATH} to the file that zerodrun --config or zerod --config reads, or leave this callback out")
    assert steps == 0
    said, steps, _ = start(zerod(ONE), train_with_callback, folder=tmp_path, strategy="no").result()
    assert (said, steps) == ("nothing was raised", 3)


def test_callback_on_a_full_disk(zerod, start, tmp_path):
    """The last checkpoint, for which the callback waits, cannot be written. There is a warning, and train() returns."""
    daemon = zerod(ONE | {"checkpoint": {"dir": str(tmp_path / "c"), "save_on_stop": False}}, env={"ZEROD_FAILPOINT": "disk.write:error@*"})
    said, steps, warned = start(daemon, train_with_callback, folder=tmp_path, strategy="steps").result()
    assert (said, steps) == ("nothing was raised", 3)
    assert len(warned) == 1 and warned[0].startswith("training goes on without this checkpoint: E1701 warning")
    assert "No space left on device" in warned[0] and "the daemon and the job go on" in warned[0]


def test_callback_may_not_write_config_json(zerod, start, tmp_path):
    """
    If config.json cannot be written, there is one warning. The checkpoints are written, and training is not disturbed.
    """
    daemon = zerod(ONE | {"checkpoint": {"dir": str(tmp_path / "c")}})
    said, steps, warned = start(daemon, train_without_permission, folder=tmp_path).result()
    assert (said, steps) == ("nothing was raised", 3)
    [text] = warned
    assert "from_pretrained needs config.json" in text and "model.config.save_pretrained()" in text


def train_without_permission(folder):
    """train_with_callback() by a user who may not write to the daemon's folder."""
    import transformers

    def refuse(_self, path):
        raise PermissionError(13, "Permission denied", str(path))

    transformers.PretrainedConfig.save_pretrained = refuse
    return train_with_callback(folder, "steps")
