# SPDX-License-Identifier: Apache-2.0
"""
The exceptions of zerod, and the category of its warnings.

    Error
      ConnectionLost          the connection to the daemon is lost, or there is no daemon
      ResumeIgnored           the program was started again and does not read the job's position
      LossScaleIgnored        fp16 is enabled, and the loss is multiplied by no loss scale, or by two
      BackwardRuns            a backward runs in another thread
      GradientFault           a diagnostic of the daemon: code, cause, fix
        DuplicateGradient ... one class for each kind, see CLASSES
        StepAborted           any of these faults, if it aborted the step for all ranks

fault.text is the whole text, as in the daemon's log. str() of a fault does not quote the program's own exceptions,
because a handler that looks for their words ("out of memory") would swallow the fault too. A note has the quotes, so
that a traceback shows them.
"""

from __future__ import annotations

import re
from typing import Any


_QUOTE = re.compile(r"^( +(?:exception|reason) +)(\S.*)$", re.MULTILINE)
_TYPE = re.compile(r"([A-Za-z_][\w.]*): ")


class Error(RuntimeError):
    """The base of all exceptions of zerod, except for wrong arguments (ValueError, TypeError)."""


class ZerodWarning(UserWarning):
    """The category of all warnings of this package, for the program's warnings.filterwarnings()."""


class ConnectionLost(Error):
    """The connection to the daemon is lost. Only close() can be called."""


class ResumeIgnored(Error):
    """The job has committed steps, and this program, which was started again, trains without having read opt.position,
    opt.epoch or opt.resumed. None of its gradients was pushed. To begin anew on purpose, call opt.begin_anew()."""


class LossScaleIgnored(Error):
    """fp16 is enabled in the daemon's configuration, and the loss was multiplied by no loss scale, or by two. The step
    was not requested."""


class BackwardRuns(Error):
    """
    A backward runs in another thread. opt.step() and similar calls have done nothing. If two backwards ran at once,
    neither counts.
    """


class GradientFault(Error):
    """
    A diagnostic. The attributes are those of its structured form; unknown values are None, "" or [].

    text         the whole text
    code         1001 for E1001
    cause_class  "D1", "M4", ... (docs/diagnostics.md)
    params       names of parameters, at most five; n_params is the number of all of them
    rank, step, micro_batch
    fields       the labelled lines of the text, in order: [("cause", "..."), ...]
    first, second, cause, fix, state   the fields that programs read most
    """

    code: int = 0
    cause_class: str = ""
    rank: int | None = None
    step: int | None = None
    micro_batch: int | None = None

    def __init__(self, text: str, **what: Any) -> None:
        quotes: list[str] = []
        super().__init__(_QUOTE.sub(lambda line: line[1] + _unquoted(line[2], quotes), text))
        for quote in quotes:
            self.add_note(f"  quoted         {quote}")
        self.text = text
        self.params: list[str] = []
        self.n_params = 0
        self.fields: list[tuple[str, str]] = []
        for name, value in what.items():
            setattr(self, name, value)

    def field(self, label: str) -> str:
        """The first line with that label, or ""."""
        return next((text for name, text in self.fields if name == label), "")

    first = property(lambda self: self.field("1st push"))
    second = property(lambda self: self.field("2nd push"))
    cause = property(lambda self: self.field("cause"))
    fix = property(lambda self: self.field("fix"))
    state = property(lambda self: self.field("state"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.text, self.__dict__)


def _unquoted(quote: str, quotes: list[str]) -> str:
    quotes.append(quote)
    kind = _TYPE.match(quote)
    return f"{kind[1]}, quoted below" if kind else "quoted below"


def _rebuild(cls: type[GradientFault], text: str, attributes: dict[str, Any]) -> GradientFault:
    fault = cls(text)
    vars(fault).update(attributes)
    return fault


class DuplicateGradient(GradientFault):
    """E1001"""


class StaleGradient(GradientFault):
    """E1002, E1003, E1004: a gradient of a step or micro-batch that is not open."""


class MissingGradient(GradientFault):
    """E1005"""


class GraphChanged(GradientFault):
    """E1006"""


class BackwardAbandoned(GradientFault):
    """E1007"""


class ManifestMismatch(GradientFault):
    """E1101"""


class WrongGradient(GradientFault):
    """E1102, E1103"""


class WeightsRepointed(GradientFault):
    """E1104"""


class RanksDrifted(GradientFault):
    """E1105"""


class WeightsWritten(GradientFault):
    """E1106"""


class ReducedTwice(GradientFault):
    """E1107"""


class StepArgumentsDiffer(GradientFault):
    """E1108"""


class OtherRun(GradientFault):
    """E1109"""


class NonFiniteGradient(GradientFault):
    """E1201, E1202"""


class RankTaken(GradientFault):
    """E1301"""


class RankLost(GradientFault):
    """E1302"""


class Stalled(GradientFault):
    """E1303"""


class OverQuota(GradientFault):
    """E1401"""


class NotAllowed(GradientFault):
    """E1402"""


class BadMessage(GradientFault):
    """E1403"""


class CheckpointNotSaved(GradientFault):
    """E1701"""


class CheckpointNotLoaded(GradientFault):
    """E1702"""


class StepAborted(GradientFault):
    """The step was aborted for all ranks: weights and state are those before the step. Begin the step again with its
    first micro-batch (opt.position)."""


CLASSES: dict[int, type[GradientFault]] = {
    1001: DuplicateGradient, 1002: StaleGradient, 1003: StaleGradient, 1004: StaleGradient, 1005: MissingGradient,
    1006: GraphChanged, 1007: BackwardAbandoned, 1101: ManifestMismatch, 1102: WrongGradient, 1103: WrongGradient,
    1104: WeightsRepointed, 1105: RanksDrifted, 1106: WeightsWritten, 1107: ReducedTwice, 1108: StepArgumentsDiffer,
    1109: OtherRun, 1201: NonFiniteGradient, 1202: NonFiniteGradient, 1301: RankTaken, 1302: RankLost, 1303: Stalled,
    1401: OverQuota, 1402: NotAllowed, 1403: BadMessage, 1701: CheckpointNotSaved, 1702: CheckpointNotLoaded,
}  # fmt: skip
