# SPDX-License-Identifier: Apache-2.0
"""zerod.for_trainer(): the optimizer that Hugging Face's Trainer would make for its arguments."""

import pytest
import torch
from lion import Lion
from tiers import full
from test_bad_input import ONE, all_same, caught

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

ARGS = {"learning_rate": 5e-3, "weight_decay": 0.3, "adam_beta1": 0.85, "adam_beta2": 0.95, "adam_epsilon": 1e-5}


def make_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False,
                                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def arguments(folder, **more):
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, use_cpu=True,
                             report_to="none", disable_tqdm=True, save_strategy="no", **(ARGS | more))


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.pieces = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def groups_of(model, optimizer, names):
    """Return: for each group the names of its parameters, and these hyperparameters."""
    called = {id(p): name for name, p in model.named_parameters()}
    return [([called[id(p)] for p in group["params"]], {name: group[name] for name in names})
            for group in optimizer.param_groups]


def alone():
    """Makes Trainers in this process work without zerod, by a process group of one rank."""
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def train_beside_trainer(folder, more, names):
    """
    Trains three steps with the Trainer's own optimizer, then with zerod's. An optimizer of bitsandbytes, which may not
    be installed, is replaced by one with the same step.
    """
    import zerod
    from transformers import Trainer

    alone()
    args, same = arguments(folder, **more), None
    if "lion" in more["optim"]:
        same = Lion, {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    elif "8bit" in more["optim"]:
        args = arguments(folder, **more | {"optim": "adamw_torch"})
    theirs = Trainer(model=make_model(), args=args, train_dataset=Text(), optimizer_cls_and_kwargs=same)
    theirs.train()
    model = make_model()
    args = arguments(folder, **more)
    optimizer = zerod.for_trainer(model, args, rank=0)
    ours = Trainer(model=model, args=args, train_dataset=Text(), optimizers=(optimizer, None))
    ours.train()
    assert groups_of(model, optimizer, names) == groups_of(theirs.model, theirs.optimizer, names)
    scale = max(p.abs().max().item() for p in theirs.model.parameters())
    pairs = zip(model.parameters(), theirs.model.parameters(), strict=True)
    distance = max((a - b).abs().max().item() for a, b in pairs)
    optimizer.close()
    return distance / scale, len(optimizer.param_groups)


@pytest.mark.parametrize(("type", "optim", "names"), [
    ("AdamW", "adamw_torch", ("lr", "betas", "eps", "weight_decay")),
    ("Lion", "lion_32bit", ("lr", "betas", "weight_decay")),
    *full(("AdamW", "adamw_8bit", ("lr", "betas", "eps", "weight_decay")),
          ("Lion", "paged_lion_8bit", ("lr", "betas", "weight_decay")),
          ("SGD", "sgd", ("lr", "momentum", "dampening", "nesterov", "weight_decay"))),
])
def test_it_is_the_trainers_optimizer(zerod, start, tmp_path, type, optim, names):
    params = {"lr": 1e-3, "weight_decay": 0.01, **({"betas": None} if type == "SGD" else {"betas": [0.9, 0.999]})}
    daemon = zerod(ONE | {"optimizer": {"type": type, "params": params}})
    beside = start(daemon, train_beside_trainer, folder=tmp_path, more={"optim": optim}, names=names)
    distance, n_groups = beside.result()
    assert n_groups == 2 and distance < 1e-5


def train_adapter(folder):
    """Trains with a trainer that makes the model itself, like SFTTrainer for peft_config."""
    import peft
    import zerod
    from transformers import Trainer

    class AdapterTrainer(Trainer):
        def __init__(self, model, peft_config, **kwargs):
            super().__init__(model=peft.get_peft_model(model, peft_config), **kwargs)

    alone()
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    trainer = AdapterTrainer(make_model(), config, args=arguments(folder), train_dataset=Text())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    optimizer = zerod.for_trainer(trainer, rank=0)
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    groups = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in optimizer.param_groups]
    optimizer.close()
    return changed, trained, groups


def test_a_trainer_that_makes_its_model(zerod, start, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    changed, trained, groups = start(zerod(ONE), train_adapter, folder=tmp_path).result()
    assert changed == trained and len(trained) == 2
    assert groups == [{"betas": (0.85, 0.95), "eps": 1e-5, "weight_decay": 0.3}]


def wrong_ways(folder):
    import zerod
    from transformers import Trainer

    alone()
    model, said = make_model(), {}
    lossy = Trainer(model=model, args=arguments(folder), train_dataset=Text(),
                    optimizer_cls_and_kwargs=(zerod.Optimizer, {"model": model, "rank": 0}))
    said["trainer-cls-and-kwargs"] = caught(lossy.train)
    said["trainer-has-an-optimizer"] = caught(zerod.for_trainer, lossy)
    said["trainer-optimizer-unknown"] = caught(zerod.for_trainer, model, arguments(folder, optim="rmsprop"))
    said["trainer-other-type"] = caught(zerod.for_trainer, model, arguments(folder, optim="sgd"), rank=0)
    said["trainer-no-args"] = caught(zerod.for_trainer, model)
    said["type-unknown"] = caught(zerod.Optimizer, model, type="adamw", rank=0)
    return said


def test_what_would_lose_settings_is_refused(zerod, start, tmp_path):
    all_same(start(zerod(ONE), wrong_ways, folder=tmp_path).result())


def other_conventions(folder, sockets):
    """Imitates create_optimizer() of other versions of transformers than the installed one."""
    import zerod
    from transformers import Trainer

    class Groups(Trainer):
        """4.57 and 5.0: the class is called with the groups, whatever it is."""

        def create_optimizer(self):
            if self.optimizer is not None:
                return self.optimizer
            kind, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind([{"params": list(self.model.parameters())}, {"params": []}], **kwargs)
            return self.optimizer

    class Factory(Trainer):
        """5.16: an object that is no torch class is a factory of a factory."""

        def create_optimizer(self, model=None):
            if self.optimizer is not None:
                return self.optimizer
            model = model or self.model
            kind, kwargs = self.get_optimizer_cls_and_kwargs(self.args, model)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                return Groups.create_optimizer(self)
            self.optimizer = kind()(model, **kwargs)
            return self.optimizer

    class Model(Trainer):
        """An imagined version: the class is called with the model."""

        def create_optimizer(self, model=None):
            kind, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            return kind(self.model, **kwargs)

    class Renamed(Trainer):
        get_optimizer_cls_and_kwargs = None

    alone()
    made = {}
    for kind, socket in zip((Groups, Factory, Model, Renamed), sockets, strict=True):
        trainer = kind(make_model(), args=arguments(folder), train_dataset=Text())
        said = caught(zerod.for_trainer, trainer, rank=0, socket=socket)
        made[kind.__name__] = (said, type(trainer.optimizer).__module__)
        if trainer.optimizer is not None:
            trainer.train()
    # for_trainer(model, args) makes a Trainer without further arguments.
    Trainer.create_optimizer = lambda self: self.accelerator.optimizer
    made["Needy"] = (caught(zerod.for_trainer, make_model(), arguments(folder), rank=0), "")
    return made


def test_versions_of_transformers(zerod, start, tmp_path):
    """Both ways in which Trainers make their optimizer work. An unknown way raises an explained error."""
    import transformers

    nothing = "nothing was raised"
    first, second = zerod(ONE), zerod(ONE)
    sockets = [str(daemon.socket) for daemon in (first, second, first, first)]
    made = start(first, other_conventions, folder=tmp_path, sockets=sockets).result()
    assert made["Groups"] == (nothing, "zerod.optimizer") and made["Factory"] == (nothing, "zerod.optimizer")
    for name, what in (("Model", "gives an optimizer GPT2LMHeadModel where zerod expects a list of parameter groups"),
                       ("Renamed", "has no get_optimizer_cls_and_kwargs()"),
                       ("Needy", "needs accelerator of a Trainer to make an optimizer")):
        assert made[name][0] == (
            f"TypeError: zerod cannot make the optimizer of the Trainer of transformers {transformers.__version__}, which "
            f"{what}: install a version that docs/compatibility.md names, or return a zerod.Optimizer from your Trainer's "
            "create_optimizer()"), name
