# SPDX-License-Identifier: Apache-2.0
"""
A model on a GPU with a daemon in host memory (ZeRO-Offload), without a GPU: tests/torch/programs/late_cuda.py stands in
for torch.cuda. The bits must be those of the same training in host memory.
"""

import gpu_kinds
import late_cuda
import pytest
import torch
from torch import nn
from tiers import full


def make_model(dtype=torch.float32):
    """A model with a large parameter (pushed in parts), other strides, a frozen one, buffers, an empty one."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Embedding(40, 24), nn.Linear(24, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Linear(96, 40, bias=False)
    ).to(dtype)
    model[1].weight.data = model[1].weight.data.t().contiguous().t()
    model[4].weight.requires_grad_(True)
    model.register_parameter("frozen", nn.Parameter(torch.randn(5).to(dtype), requires_grad=False))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3).to(dtype)))
    return model


def loss_of(model, step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    tokens = torch.randint(0, 40, (32,), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1, 0))
    return loss + model.empty.sum().float()


def train(late, n_steps=5, n_micro=2, dtype=torch.float32, refuse=False, window=False, max_norm=None):
    """Trains one rank. Return: weights, the stand-in's counts, and the norms."""
    if late:
        late_cuda.install()
        late_cuda.refuses_to_register = refuse
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(model)
    norms = []
    for step in range(n_steps):
        for micro_batch in range(n_micro):
            loss_of(model, step, micro_batch, opt.rank).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        opt.step()
        norms.append(opt.result.grad_norm)
        if window and step == 2:
            with zerod.writable(model), torch.no_grad():
                model[1].weight.mul_(0.5 if opt.rank == 0 else 7)
                model.frozen.add_(1)
            saved = {k: v.clone() for k, v in model.state_dict().items()}
        if window and step == 4:
            model.load_state_dict(saved)
    masters = [opt.master(name).clone() for name, p in model.named_parameters() if p.numel()]
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    again = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    return weights, masters, norms, dict(late_cuda.counts), list(late_cuda.problems), list(late_cuda.registered)


def check_equal(daemons, run, **how):
    """Trains in host memory and with the stand-in, each with its own daemon. Return: the stand-in's results."""
    plain, late = (run(daemon, train, late=late, **how) for daemon, late in zip(daemons, (False, True), strict=True))
    for a, b in zip(plain, late, strict=True):
        for x, y in zip(a[0] + a[1], b[0] + b[1], strict=True):
            assert torch.equal(x, y)
        assert a[2] == b[2]
        assert b[4] == []
    for x, y in zip(late[0][0], late[1][0], strict=True):
        assert torch.equal(x, y), "ranks differ"
    return late


@pytest.mark.parametrize("stage, dtype", [(2, torch.bfloat16), *full((1, torch.float32), (1, torch.bfloat16), (2, torch.float32))])
def test_same_bits(zerod, run, stage, dtype):
    config = {"zero_optimization": {"stage": stage}}
    late = check_equal([zerod(config), zerod(config)], run, dtype=dtype, max_norm=0.5)
    for rank in late:
        counts = rank[3]
        assert counts["late"] == 5 * 2 * 6, "each gradient is copied once"
        assert counts["waited"] == 0, "nothing waits for a copy into the ring"


def test_driver_takes_no_memory(zerod, run):
    """If memory cannot be registered, copies use memory of the program."""
    for rank in check_equal([zerod({}), zerod({})], run, refuse=True):
        assert rank[3]["waited"] == 0


@pytest.mark.parametrize("weights", ["shared", *full("private")])
def test_write_windows(zerod, run, weights):
    """A window's memory gets new pages, so the driver must not keep the old pages registered."""
    check_equal([zerod({"weights": weights}), zerod({"weights": weights})], run, window=True)


def test_large_parameters(zerod, run):
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 640}}
    check_equal([zerod(config), zerod(config)], run)


# ---- duplicates and accumulation ---------------------------------------------------------------------------


def train_twice(late, on_duplicate):
    if late:
        late_cuda.install()
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model, on_duplicate=on_duplicate)
    texts = []
    for step in range(3):
        loss = loss_of(model, step, 0, opt.rank)
        loss.backward(retain_graph=True)
        try:
            loss.backward()
        except zerod.DuplicateGradient as fault:
            # Whether the first push's bytes could be compared depends on timing.
            labels = [label for label, _ in fault.fields if label != "bytes"]
            texts.append([*labels, fault.cause_class, *fault.params])
            opt.clear_fault()
        opt.step()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return weights, texts, list(late_cuda.problems)


@pytest.mark.parametrize("on_duplicate", [*full("reject"), "accumulate"])
def test_second_backward(zerod, run, on_duplicate):
    plain = run(zerod({}), train_twice, late=False, on_duplicate=on_duplicate)
    late = run(zerod({}), train_twice, late=True, on_duplicate=on_duplicate)
    for a, b in zip(plain, late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        assert a[1] == b[1]
        assert len(a[1]) == (3 if on_duplicate == "reject" else 0)
        assert b[2] == []


def abandon(late):
    """A backward fails in the middle. Its copies are still running when the slots are withdrawn."""
    if late:
        late_cuda.install()
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    for step in range(4):
        fails = step % 2 == 1
        while opt.epoch == step:
            handle = model[1].bias.register_hook(lambda g: 1 / 0) if fails else None
            try:
                loss_of(model, step, 0, opt.rank).backward()
                opt.step()
            except ZeroDivisionError:
                handle.remove()
                fails = False
                opt.abort_step()
            except zerod.StepAborted:
                pass  # aborted by the other rank
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return weights, list(late_cuda.problems)


def test_abandoned_backward(zerod, run):
    plain, late = (run(zerod({}), abandon, late=late) for late in (False, True))
    for a, b in zip(plain, late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        assert b[1] == []


def keep_gradients(late):
    """A program keeps the gradients from its own hooks, and writes to them after the backward."""
    if late:
        late_cuda.install()
    import zerod

    model, kept = make_model(), []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    opt = zerod.Optimizer(model)
    for step in range(3):
        loss_of(model, step, 0, opt.rank).backward()
        for grad in kept:
            grad.fill_(1e9)
        kept.clear()
        opt.step()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return weights, list(late_cuda.problems)


def test_gradients_that_the_program_keeps(zerod, run):
    plain, late = (run(zerod({}), keep_gradients, late=late) for late in (False, True))
    for a, b in zip(plain, late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        assert b[1] == []


# ---- refusals ------------------------------------------------------------------------------------------------


def attach(where, index=None):
    late_cuda.install()
    import zerod

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if index is not None:
        late_cuda.elsewhere[list(model.parameters())[index].data_ptr()] = torch.device(where)
    try:
        zerod.Optimizer(model)
    except (TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_several_devices(zerod, run):
    daemon = zerod({"world": {"size": 1}})
    assert run(daemon, attach, where="cuda:1", index=2) == [
        "ValueError: 1.weight is on cuda:1, and 0.weight is on cpu: a rank's model lies on one device; "
        "model.to('cpu') before zerod.Optimizer(model)"
    ]


def test_stage3(zerod, run):
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": 3}})
    assert run(daemon, attach, where="") == [
        "ValueError: 0.weight is on cpu, and the daemon's job is of stage 3 in host memory, where weights are read as "
        "they are gathered: model.cpu() before zerod.Optimizer(model), or stage 1 or 2"
    ]


# ---- a job on GPUs -------------------------------------------------------------------------------------------


def train_on_gpu(is_sim, n_steps=4, n_micro=2, dtype=torch.float32, window=False, twice=False):
    """Trains one rank, with sim_cuda.py instead of torch.cuda, or in host memory."""
    if is_sim:
        import sim_cuda

        sim_cuda.install()
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(model)
    norms, faults = [], []
    for step in range(n_steps):
        for micro_batch in range(n_micro):
            loss = loss_of(model, step, micro_batch, opt.rank)
            loss.backward(retain_graph=twice)
            if twice:
                try:
                    loss.backward()
                except zerod.DuplicateGradient as fault:
                    faults.append(sorted(fault.params))
                    opt.clear_fault()
        opt.step()
        norms.append(opt.result.grad_norm)
        if window and step == 1:
            with zerod.writable(model), torch.no_grad():
                model[1].weight.mul_(0.5 if opt.rank == 0 else 7)
                model.frozen.add_(1)
                # In stage 3 these are copies, which stay valid after the window.
                saved = {k: v if opt.stage == 3 else v.clone() for k, v in model.state_dict().items()}
            with zerod.gathered(model.frozen):
                norms.append(model.frozen.sum().item())
            if opt.rank == 0 or opt.stage != 3:  # in stages 1 and 2 other ranks may already see rank 0's writes
                norms.append([float(value.double().sum()) for value in saved.values()])
            norms.append([float(value.double().sum()) for value in model.state_dict().values()])
    masters = [opt.master(name).clone() for name, p in model.named_parameters() if p.numel()]
    weights = []
    for p in model.parameters():
        with zerod.gathered(p):
            weights.append(p.detach().clone())
    opt.close()
    again = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    return weights + masters, norms, faults


@pytest.fixture
def gpus(zerod, build):
    """gpus(config) -> a daemon whose job is on GPUs, and the variables of its ranks."""

    def start(config=None, sim=""):
        daemon = zerod({"device": "cuda", "collective": "nccl"} | (config or {}),
                       gpu_kinds.of_daemon(build, *sim.split()))
        return daemon, gpu_kinds.of_trainer(build, "open", *sim.split())

    return start


NARROW = {"params": {"optim_bits": 8, "master_weight_bits": 24}}


@pytest.mark.parametrize("config, how", [
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 640}, "optimizer": NARROW}, {"dtype": torch.bfloat16}),
    ({}, {"window": True}),
    *full(({"zero_optimization": {"stage": 2}}, {}), ({}, {"twice": True})),
], ids=["bf16-in-parts", "window", "stage2", "duplicates"])  # fmt: skip
def test_job_on_gpus(zerod, gpus, run, config, how):
    """A job on GPUs has the same bits as in host memory."""
    plain = run(zerod(config), train_on_gpu, is_sim=False, **how)
    daemon, variables = gpus(config, "delay-us=2000")
    late = run(daemon, train_on_gpu, variables, is_sim=True, **how)
    for a, b in zip(plain, late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        assert a[1:] == b[1:]
        assert len(b[2]) == (8 if "twice" in how else 0)


@pytest.mark.parametrize("config, how", [
    ({"zero_optimization": {"stage3_max_live_parameters": 4000}}, {}),
    ({}, {"twice": True}),
    ({"zero_optimization": {"reduce_bucket_size": 640}, "optimizer": NARROW}, {"dtype": torch.bfloat16}),
    *full(({}, {}), ({}, {"window": True})),
], ids=["few-live", "duplicates", "bf16-in-parts", "fp32", "window"])  # fmt: skip
def test_stage3_on_gpus(zerod, gpus, run, config, how):
    """Stage 3 on GPUs has the same bits. Gathered weights are on the GPU."""
    zero = {"stage": 3} | config.get("zero_optimization", {})
    test_job_on_gpus(zerod, gpus, run, config | {"zero_optimization": zero}, how)


class Recorder:
    """Instead of a Client: records released weights, and the streams that read them."""

    def __init__(self):
        self.stream, self.released = 1, []

    def gather(self, ids, n):
        pass

    prefetch = gather

    def release(self, ids, n, stream=None):
        self.released.append((list(ids), self.stream if stream is None else stream))


def test_streams_of_released_weights():
    """A weight is released when the backward's next node unpacks its weights. That node may run on another stream."""
    from zerod.binding import bind
    from zerod.stage3 import Sharding

    client, model = Recorder(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    bound, _ = bind(model, [{"params": list(model.parameters())}])
    for b in bound:
        b.address = b.param.data_ptr()
    sharding = Sharding(client, model, bound)
    hidden = model[0](torch.ones(2, 3, requires_grad=True))
    hidden.register_hook(lambda grad: setattr(client, "stream", 2))
    output = model[1](hidden)
    assert client.released == [([0, 1], 1), ([2, 3], 1)]
    client.released.clear()
    sharding.backward_begins()
    output.sum().backward()
    client.stream = 3
    sharding.backward_ended()
    assert client.released == [([2, 3], 1), ([0, 1], 2)]
    sharding.close()


def attach_plainly():
    import zerod

    try:
        zerod.Optimizer(nn.Linear(4, 4))
    except ValueError as e:
        return str(e)
    return ""


def test_model_in_host_memory(gpus, run):
    daemon, variables = gpus({"world": {"size": 1}})
    assert run(daemon, attach_plainly, variables) == [
        "weight is in host memory, and the daemon's job is on GPUs (device: cuda): model.cuda(LOCAL_RANK) before "
        "zerod.Optimizer(model)"
    ]
