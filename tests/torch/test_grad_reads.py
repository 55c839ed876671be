# SPDX-License-Identifier: Apache-2.0
"""Programs that read or change .grad after the gradient was pushed."""

import gc
import sys
import warnings

import pytest
import torch
import torch.distributed
from tiers import full
from torch import nn

ONE = {"world": {"size": 1}}


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6))


def loss_of(model):
    return model(torch.tensor([1, 2, 5])).pow(2).mean()


def keep_only_new_tokens(model):
    """As in textual inversion, the rows of all other tokens must not be trained."""
    for param in model[0].parameters():
        if param.grad is not None:
            param.grad[:5] = 0


def texts(said):
    return [str(w.message) for w in said if "reads .grad" in str(w.message)]


def reading(how=None, registered=False):
    """Runs a loop that masks gradients. Return: warnings, their places, the trained rows, whether reads are plain."""
    import zerod

    model = make_model()
    before = model[0].weight.detach().clone()
    opt = zerod.Optimizer(model, lr=0.1, weight_decay=0.0, **({} if how is None else {"on_grad_read": how}))
    if registered:
        rows = torch.zeros(8, 1)
        rows[5:] = 1
        model[0].weight.register_hook(lambda grad: grad * rows)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            loss_of(model).backward()
            if not registered:
                keep_only_new_tokens(model)
            opt.step()
            opt.zero_grad()
    rows = [i for i in range(8) if not torch.equal(model[0].weight[i], before[i])]
    is_plain = "grad" not in nn.Parameter.__dict__
    opt.close()
    return texts(said), [(w.filename, w.lineno) for w in said if "reads .grad" in str(w.message)], rows, is_plain


def test_masked_rows(zerod, start):
    """There is one warning, at the line that reads, with a remedy that works."""
    said, places, rows, is_plain = start(zerod(ONE), reading).result()
    assert len(said) == 1 and rows == [1, 2, 5], (said, rows)
    line = keep_only_new_tokens.__code__.co_firstlineno + 3
    assert said[0].startswith("to log a norm, opt.grad_norm() before the step or opt.grad_norm('0.weight') after it")
    assert f" test_grad_reads.py:{line} reads .grad of 0.weight between backward() and step()" in said[0]
    assert "register_hook" in said[0] and places == [(__file__, line)]
    assert is_plain, "reads are watched although all has been said"
    assert start(zerod(ONE), reading, registered=True).result()[::2] == ([], [5])


def test_read_as_an_error(zerod, start):
    with pytest.raises(Exception, match=r"Error: to log .* test_grad_reads.py:\d+ reads .grad of 0.weight between"):
        start(zerod(ONE), reading, how="error").result()
    assert start(zerod(ONE), reading, how="ignore").result()[::2] == ([], [1, 2, 5])
    with pytest.raises(Exception, match="on_grad_read is 'no'; it may be 'warn', 'error' or 'ignore'"):
        start(zerod(ONE), reading, how="no").result()


def silent(kind):
    """Reads that do not edit gradients cause no warning, although every warning is an error."""
    import zerod

    model = make_model()
    model.append(nn.Linear(6, 1))  # not used
    opt = zerod.Optimizer(model, on_grad_read="error")
    other = nn.Linear(3, 3)
    ordinary = torch.optim.AdamW(other.parameters())
    for _ in range(2):
        assert all(p.grad is None for p in model.parameters())  # before the backward
        loss = model[:2](torch.tensor([1, 2, 5])).pow(2).mean()
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        assert model[2].weight.grad is None  # None in torch too
        other(torch.ones(3)).sum().backward()
        assert other.weight.grad is not None
        ordinary.step()
        ordinary.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind == "accumulation":
            loss_of(model[:2]).backward()
        opt.step()
        assert [p.grad for p in model.parameters()] == [None] * 5  # after the step
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()
        model.zero_grad()
        opt.zero_grad()
    other.weight.grad = torch.ones(3, 3)
    del other.weight.grad
    n_steps = opt.epoch
    del opt, loss
    gc.collect()
    return n_steps, other.weight.grad is None, all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["plain", *full("accumulation")])
def test_silent_reads(zerod, start, kind):
    assert start(zerod(ONE), silent, kind=kind).result() == (2, True, True)


def late_hook():
    """A hook of the program runs after zerod's hook and finds no gradient either."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    seen = []
    model[1].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss_of(model).backward()
    opt.step()
    opt.close()
    return seen, texts(said), "grad" in nn.Parameter.__dict__


def test_read_in_a_hook(zerod, start):
    seen, said, is_watched = start(zerod(ONE), late_hook).result()
    assert seen == [None] and len(said) == 1 and " reads .grad of 1.bias " in said[0] and not is_watched


# ---- exceptions caused by a read ----------------------------------------------------------------------------


def norm_of(param):
    return param.grad.norm()


def reads_through_a_variable(model):
    grad = model[1].bias.grad
    if model is not None:
        grad.mul_(2)


def reduces(model):
    torch.distributed.all_reduce(
        model[1].bias.grad,
    )


def scales(model):
    model[1].bias.grad *= 2


def compares(model):
    if model[1].bias.grad.abs().max() > 1:
        raise ValueError


def is_large(model):
    return model[1].bias.grad > 1


def prints(model):
    print(f"{model[1].bias.grad:.3f}")


def stacks(model):
    return torch.stack([model[1].bias.grad])


def raises_from(model):
    try:
        norm_of(model[1].bias)
    except AttributeError as error:
        raise RuntimeError("no norm") from error


def another_none(model):
    grad, scheduler = model[1].bias.grad, None
    return grad is None and scheduler.step()


def another_statement(model):
    assert model[1].bias.grad is None
    missing = None
    return missing.norm()


def another_none_in_that_line(model):
    scheduler = None
    return model[1].bias.grad is None and scheduler.step()


def another_none_as_an_argument(model):
    nothing = None
    return model[1].bias.grad is None and len(nothing)


def another_exception(model):
    return {}[model[1].bias.grad]


def explained(program):
    """Runs a program that ends with an exception after a backward. Return: the notes of the exception."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    loss_of(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program(model)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # like the interpreter
            notes = [*getattr(error, "__notes__", []), *getattr(error.__cause__, "__notes__", [])]
    opt.step()
    opt.close()
    return notes


def of_bias(model):
    norm_of(model[1].bias)


@pytest.mark.parametrize("program, name, offset", [
    (of_bias, norm_of, 1), (reads_through_a_variable, reads_through_a_variable, 1), (reduces, reduces, 2),
    *full((raises_from, norm_of, 1), (scales, scales, 1), (compares, compares, 1), (stacks, stacks, 1),
          (is_large, is_large, 1), (prints, prints, 1)),
], ids=lambda x: getattr(x, "__name__", None))
def test_note(zerod, start, program, name, offset):
    """The exception names zerod, the place of the read, and the alternatives."""
    (note,) = start(zerod(ONE), explained, program=program).result()
    cause, *remedies = note.splitlines()
    line = name.__code__.co_firstlineno + offset
    assert cause == (f"  cause          test_grad_reads.py:{line} reads .grad of 1.bias between backward() and step(): it is None, "
                     "because zerod has pushed the gradient")  # fmt: skip
    assert all(word in "\n".join(remedies) for word in ("opt.grad_norm()", "opt.grad_norm('1.bias')", "clip_grad_norm_",
                                                        "gradient_clipping", "the mean over all ranks"))  # fmt: skip


@pytest.mark.parametrize("program", [another_none_in_that_line, *full(
    another_statement, another_exception, another_none, another_none_as_an_argument)])  # fmt: skip
def test_no_note(zerod, start, program):
    """A read is close to an exception with another cause, which gets no note."""
    assert start(zerod(ONE), explained, program=program).result() == []
