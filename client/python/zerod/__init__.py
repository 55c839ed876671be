# SPDX-License-Identifier: Apache-2.0
"""
zerod for PyTorch: the optimizer of a data-parallel job, run as a service.

    import zerod

    opt = zerod.Optimizer(model)      # ZEROD_SOCKET and RANK are set by zerodrun
    for step in zerod.steps(opt, 1000):   # continues at the job's step; an aborted step begins again
        with step:
            loss = model(batch_of(step)).loss
            loss.backward()               # gradients are pushed as they become ready
            opt.step()
            opt.zero_grad()

See docs/pytorch.md.
"""

import sys


def _is_program() -> bool:
    """True for `python -m zerod`, which becomes zerodctl and reads logs where torch may be missing."""
    n_before = len(sys.orig_argv) - len(sys.argv)  # Python keeps "-m" as argv[0] while it looks for the module
    return sys.argv[:1] == ["-m"] and sys.orig_argv[n_before] in ("zerod", "-mzerod")


if not _is_program():
    import torch

    if tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2]) < (2, 6):
        raise ImportError(
            f"zerod needs torch 2.6 or newer, and this is {torch.__version__}; it is made with 2.13: "
            "pip install 'torch>=2.6'"
        )

    from .client import Position, StepResult
    from .errors import (
        BackwardAbandoned,
        BackwardRuns,
        BadMessage,
        CheckpointNotLoaded,
        CheckpointNotSaved,
        ConnectionLost,
        DuplicateGradient,
        Error,
        GradientFault,
        GraphChanged,
        LossScaleIgnored,
        ManifestMismatch,
        MissingGradient,
        NonFiniteGradient,
        NotAllowed,
        OtherRun,
        OverQuota,
        RankLost,
        RanksDrifted,
        RankTaken,
        ReducedTwice,
        ResumeIgnored,
        StaleGradient,
        Stalled,
        StepAborted,
        StepArgumentsDiffer,
        WeightsRepointed,
        WeightsWritten,
        WrongGradient,
        ZerodWarning,
    )
    from .integrations import resume_lightning
    from .loops.accelerator import epochs
    from .loops.steps import steps
    from .loops.trainer import checkpoint_callback, for_trainer, metrics_callback, observe_callback, resume
    from .observe import observe, unobserve
    from .optimizer import Optimizer
    from .overlap import wait
    from .stage3 import stage3
    from .userstate import buffers, user_state
    from .window import gathered, sync_buffers, writable

__version__ = "0.2.0"
_FUNCTIONS = (
    "buffers", "checkpoint_callback", "epochs", "for_trainer", "gathered", "metrics_callback", "observe", "observe_callback", "resume", "resume_lightning", "stage3", "steps",
    "sync_buffers", "unobserve", "user_state", "wait", "writable",
)  # fmt: skip
__all__ = [name for name in dir() if name[0].isupper() or name in _FUNCTIONS]
