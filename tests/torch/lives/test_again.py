# SPDX-License-Identifier: Apache-2.0
"""
close() and a new attach in one process. With the same model the run continues, with another model the next run begins.
The results are compared with plain torch, or with an uninterrupted run.
"""

import os
import time
from pathlib import Path

import pytest
import torch
from conftest import wait_for
from keeper import KeptDaemon
from ranks import Crash
from tiers import full
from torch import nn

WORLD, N_STEPS = 2, 4
ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model, fold, step, rank):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * fold + 10 * step + rank))
    return (model(x) - x[:, :3]).square().mean()


def train(opt, model, fold=0, steps=range(N_STEPS)):
    for step in steps:
        loss_of(model, fold, step, opt.rank).backward()
        opt.step()
        opt.zero_grad()


def plain(model, steps, fold=0, opt=None, world=WORLD):
    """Does the same steps with torch, for all ranks."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = opt or torch.optim.AdamW(trainable, **ADAM)
    for step in steps:
        grads = []
        for rank in range(world):
            model.zero_grad()
            loss_of(model, fold, step, rank).backward()
            grads.append([p.grad.clone() for p in trainable])
        for p, *of_ranks in zip(trainable, *grads, strict=True):
            p.grad = sum(of_ranks) / world
        opt.step()
    return opt


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_near(model, wanted):
    for ours, theirs in zip(weights_of(model), weights_of(wanted), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), (ours - theirs).abs().max()


def config(stage=2, **more):
    zero = {"stage": stage, "stage3_on_one_node": "gathered"} if stage == 3 else {"stage": stage}
    return {"zero_optimization": zero, "optimizer": None, "gradient_clipping": None, "world": {"size": WORLD}} | more


@pytest.fixture(params=[1, 2], ids=["1 node", "2 nodes"])
def n_nodes(request, monkeypatch):
    monkeypatch.setenv("ZEROD_NODES", str(request.param))


# ---- another run ----------------------------------------------------------------------------------------


def folds(n_folds, named=False, resets=False):
    """Each fold has a new model, or the same model with new initial weights. One rank is slower."""
    import zerod

    model, starts = make_model(), []
    for fold in range(n_folds):
        if resets:
            torch.manual_seed(fold)
            model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
        else:
            model = make_model(fold)
        wanted = make_model(fold)
        if resets:
            wanted.load_state_dict(model.state_dict())
        opt = zerod.Optimizer(model, **ADAM, sync_buffers=False, **({"run_id": f"fold {fold}"} if named else {}))
        starts.append((opt.resumed, opt.epoch))
        train(opt, model, fold)
        time.sleep(0.2 * (opt.rank + fold) % 0.5)
        opt.close()
        plain(wanted, range(N_STEPS), fold)
        assert_near(model, wanted)
    return starts


@pytest.mark.parametrize("stage, how", [(2, {}), (3, {"named": True}), *full((1, {"resets": True}), (2, {"named": True}), (3, {}))])
def test_folds(zerod, run, n_nodes, stage, how):
    daemon = zerod(config(stage))
    assert run(daemon, folds, n_folds=3, **how) == [[(False, 0)] * 3] * WORLD
    assert daemon.json("diagnostics") == []
    assert "ends at step 4: its ranks have left it, and begin another run" in daemon.log()


def sweep(settings):
    import zerod

    for kind, hypers in settings:
        model, wanted = make_model(), make_model()
        opt = zerod.Optimizer(model, type=kind, sync_buffers=False, **hypers)
        assert opt.optimizer_type == kind
        train(opt, model)
        opt.close()
        plain(wanted, range(N_STEPS), opt=getattr(torch.optim, kind)(wanted.parameters(), **hypers))
        assert_near(model, wanted)


def test_sweep_over_optimizers(zerod, run):
    """The daemon configures no optimizer, so each run has its program's optimizer."""
    run(zerod(config()), sweep, settings=[("AdamW", ADAM), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.2, "momentum": 0.9})])


def thaw(keeps):
    import zerod

    model, wanted = make_model(), make_model()
    for m in (model, wanted):
        m[1].requires_grad_(False)
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    train(opt, model)
    theirs, state = plain(wanted, range(N_STEPS)), opt.full_state_dict() if keeps else None
    opt.close()
    for m in (model, wanted):
        m[1].requires_grad_(True)
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    assert not opt.resumed
    if keeps:
        opt.load_full_state_dict(state, strict=False)
        theirs.add_param_group({"params": list(wanted[1].parameters())})
        trainable = [p for g in theirs.param_groups for p in g["params"]]
        assert len(trainable) == len(list(wanted.parameters()))
    train(opt, model, steps=range(N_STEPS, 2 * N_STEPS))
    plain(wanted, range(N_STEPS, 2 * N_STEPS), opt=theirs if keeps else None)
    assert_near(model, wanted)
    opt.close()


@pytest.mark.parametrize("keeps", [False, True])
def test_thawed_in_mid_run(zerod, run, keeps):
    """A model with another layout is another run. Moments of the same names are kept if the program asks."""
    run(zerod(config()), thaw, keeps=keeps)


# ---- the same run ---------------------------------------------------------------------------------------


def two_halves(pauses):
    """pauses: closes the optimizer after each step except the last."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    for step in range(N_STEPS):
        assert opt.epoch == step and opt.resumed == (pauses and step > 0)
        train(opt, model, steps=[step])
        if pauses and step < N_STEPS - 1:
            time.sleep(0.1 * (opt.rank + step) % 0.3)
            opt.close()
            opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    buffers = [b.clone() for b in model.buffers()]
    opt.close()
    return weights_of(model), buffers


@pytest.mark.parametrize("stage", [2, *full(1, 3)])
def test_same_model_goes_on(zerod, run, n_nodes, stage):
    """Pauses change no bit: the moments stay in the daemon, the buffers in the process."""
    wanted = run(zerod(config(stage)), two_halves, pauses=False)
    daemon = zerod(config(stage))
    for ours, theirs in zip(run(daemon, two_halves, pauses=True), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True))
    assert daemon.status()["step"] == N_STEPS and daemon.json("diagnostics") == []


def test_same_model_goes_on_where_ranks_may_leave(zerod, run):
    """on_leave: continue. No rank does a step while another one is between close() and its next attach."""
    run(zerod(config(diagnostics={"on_leave": "continue"})), two_halves, pauses=True)


def names(steps):
    import zerod

    opt = zerod.Optimizer(make_model(), run_id="first", **ADAM, sync_buffers=False)
    train(opt, opt.model)
    opt.close()
    again = make_model(1)
    opt = zerod.Optimizer(again, run_id="first", **ADAM, sync_buffers=False)  # the name decides that it is the same run
    first = opt.resumed, opt.epoch
    opt.begin_anew()
    train(opt, again)
    opt.close()
    opt = zerod.Optimizer(again, run_id="second", **ADAM, sync_buffers=False)
    second = opt.resumed, opt.epoch
    opt.close()
    return first, second


def test_the_name_of_the_run_decides(zerod, run):
    assert run(zerod(config()), names, steps=N_STEPS) == [((True, N_STEPS), (False, 0))] * WORLD


def still_open():
    import zerod

    opt = zerod.Optimizer(make_model(), **ADAM, sync_buffers=False)
    try:
        zerod.Optimizer(make_model(1), **ADAM, sync_buffers=False)
    except zerod.RankTaken as e:
        assert e.field("or").startswith("close() the first one"), e
        return True
    finally:
        opt.close()


def test_an_open_one_is_refused(zerod, run):
    assert run(zerod(config()), still_open) == [True] * WORLD


# ---- faults -----------------------------------------------------------------------------------------------


def one_is_late(folder, late):
    import zerod

    model, rank = make_model(), int(os.environ["RANK"])
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    train(opt, model)
    if rank != late[0]:
        opt.close()
        (Path(folder) / "closed").touch()
    while rank == late[0] and not (Path(folder) / "go").exists():
        time.sleep(0.02)
    if rank == late[0]:
        opt.close()
        time.sleep(late[1])
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    at = opt.epoch
    train(opt, model)
    opt.close()
    return at


@pytest.mark.parametrize("late", [1, 0])
def test_stall_names_who_has_not_closed(zerod, start, tmp_path, late):
    """A rank that attaches again must wait. E1303 names the late rank and the correct calls."""
    daemon = zerod(config(diagnostics={"stall_warning": "300ms"}))
    ranks = [start(daemon, one_is_late, r, folder=str(tmp_path), late=(late, 0)) for r in range(WORLD)]
    wait_for("one has closed", (tmp_path / "closed").exists, 60 * daemon.patience)

    def find():
        return [d["text"] for d in daemon.json("diagnostics") if f"rank {1 - late}, to attach again" in d["text"]]

    wait_for("a stall is said", find, 60 * daemon.patience)
    assert find()[0].startswith("E1303 ") and f"on             rank {late} (pid" in find()[0], find()[0]
    assert "opt.close() on every rank" in find()[0]
    (tmp_path / "go").touch()
    assert [rank.result() for rank in ranks] == [N_STEPS] * WORLD


def killed(folder, life):
    import zerod

    model, rank = make_model(), int(os.environ["RANK"])
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    if life == 0:
        train(opt, model)
    if rank == 1 and life == 0:
        (Path(folder) / "dies").touch()
        os._exit(1)
    at = opt.epoch
    opt.close()
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    train(opt, model)
    opt.close()
    return at, opt.rank


def test_killed_while_another_waits_to_come_again(zerod, start, tmp_path):
    """
    A rank is killed while another one waits to attach again. Its successor leaves the run too, then both continue.
    """
    daemon = zerod(config())
    ranks = [start(daemon, killed, r, folder=str(tmp_path), life=0) for r in range(WORLD)]
    with pytest.raises(Crash):
        ranks[1].result()
    ranks[1] = start(daemon, killed, 1, folder=str(tmp_path), life=1)
    assert [rank.result() for rank in ranks] == [(N_STEPS, 0), (N_STEPS, 1)]
    assert daemon.status()["step"] == 2 * N_STEPS


def over_a_death(folder, anew):
    import zerod

    model, folder = make_model(), Path(folder)
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    train(opt, model)
    opt.close()
    (folder / f"closed{opt.rank}").touch()
    if opt.rank == 0:
        while not (folder / "killed").exists():
            time.sleep(0.02)
    if anew:
        model = make_model(1)
    opt = zerod.Optimizer(model, **ADAM, sync_buffers=False)
    at = opt.epoch
    train(opt, model)
    opt.close()
    return at, weights_of(model)


@pytest.mark.parametrize("anew", [False, True])
def test_daemon_dies_in_between(build, zerod, start, run, tmp_path, anew):
    """The daemon is killed while rank 1 waits for rank 0. The next daemon has the run, and both attach."""
    (tmp_path / "killed").touch()
    wanted = run(zerod(config()), over_a_death, folder=str(tmp_path), anew=anew)
    (tmp_path / "killed").unlink()
    [(tmp_path / f"closed{r}").unlink() for r in range(WORLD)]
    (tmp_path / "kept").mkdir()
    daemon = KeptDaemon(build, tmp_path / "kept", config(), plan=[None])
    try:
        ranks = [start(daemon, over_a_death, r, folder=str(tmp_path), anew=anew) for r in range(WORLD)]
        wait_for("both have closed", lambda: all((tmp_path / f"closed{r}").exists() for r in range(WORLD)), 60 * daemon.patience)
        time.sleep(0.5)
        os.kill(daemon.pid, 9)
        wait_for("the next daemon", daemon.tend)
        (tmp_path / "killed").touch()
        for (at, weights), (wanted_at, wanted_weights) in zip([r.result() for r in ranks], wanted, strict=True):
            assert at == wanted_at == (0 if anew else N_STEPS)
            assert all(torch.equal(a, b) for a, b in zip(weights, wanted_weights, strict=True))
    finally:
        daemon.kill()


def test_the_end_of_each_run_is_saved(zerod, run, n_nodes, tmp_path):
    """
    save_on_stop saves each run before it is dropped. load: latest applies to the first run only; the next one begins
    with its own weights. Each run overwrites the previous run's last step, and the log says so.
    """
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    daemon = zerod(config(checkpoint={"dir": str(folder), "save_on_stop": True, "load": "latest"}))
    assert run(daemon, folds, n_folds=3) == [[(False, 0)] * 3] * WORLD
    name = f"step-{N_STEPS:08}"
    assert daemon.log().count(f"saved {folder}/{name}") >= 2, daemon.log()
    assert daemon.log().count(f"{name} replaces that of another run: runs that share") == 1, daemon.log()
