# SPDX-License-Identifier: Apache-2.0
"""
Compares the messages of a run with the expectation.

Each run yields statements: exceptions of trainers, the last output of a process that died, the daemon's diagnostics,
and findings of its status. Exactly one fault must be as the scenario expects, to the last name and number. Echoes are
the messages for innocent ranks. Any other statement is a false alarm, and in a repaired program every statement is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quiet

from . import house
from .corpus import ALL, ANY, Expect, Found, Refused, Scenario

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 5e-6  # in units of max(|x|, rms of the tensor), against torch in fp32
MASKS = (
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"\bkill \d+"), "kill PID"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h)( \d+ (s|min))?\b"), "TIME"),
    (re.compile(r"(/[^\s:]*)?/tests/faults/"), "tests/faults/"),
    (re.compile(r"/[^\s:]*/site-packages/"), ""),
    # Of a stack, only the innermost frame without its line number is kept.
    (re.compile(r"(main thread:\n +\S+:)\d+( in \S+)(\n +\S+:\d+ in \S+)*"), r"\1LINE\2"),
)


def mask(text: str) -> str:
    """Return: the text without parts that differ from run to run."""
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return text


@dataclass
class Row:
    name: str
    expected: str
    said: str
    verdict: str  # right | wrong | silent | false_alarm; for a real system also skipped
    why: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)  # diagnostics of other tools, for a real system

    def data(self) -> dict[str, Any]:
        row = {"name": self.name, "expected": self.expected, "said": self.said, "verdict": self.verdict}
        return row | {key: lines for key, lines in (("why", self.why), ("peers", self.peers)) if lines}


# ---- statements ---------------------------------------------------------------------------------------------


def brief(f: dict[str, Any]) -> str:
    """E1001 D1 rank 0, step 1, micro-batch 0: h.0.fc.weight + 1"""
    place = ", ".join(f"{label} {f[key]}" for label, key in (("rank", "rank"), ("step", "step"),
                                                           ("micro-batch", "micro_batch")) if known(f[key]))
    words = [f"E{f['code']}", f["cause_class"] or "", place]
    text = " ".join(filter(None, words))
    if f["n_params"]:
        names = f["params"][:1]
        text += ": " + " + ".join([*names, *([str(f["n_params"] - 1)] if f["n_params"] > 1 else [])])
    return text


def known(value: Any) -> bool:
    return value is not None and value != -1


def from_daemon(d: dict[str, Any]) -> dict[str, Any]:
    return {"code": int(d["code"][1:]), "cause_class": d["cause_class"] or "", "params": d["params"],
            "n_params": d["n_params"], "rank": d["rank"], "step": d["step"], "micro_batch": d["micro_batch"],
            "fields": [[x["label"], x["text"]] for x in d["fields"]], "text": d["text"], "classes": [],
            "warning": d["warning"], "teller": None}


LAST_WORDS = re.compile(r"^E(\d{4}) .*(?:\n  .*)*", re.M)
FIELD = re.compile(r"^  (\S(?:.{0,11}\S)?) +(.*(?:\n {17}.*)*)", re.M)


def from_stderr(rank: house.Rank) -> list[dict[str, Any]]:
    """Reads faults from the last output of a dying process, because no other record of them exists."""
    found = []
    for match in LAST_WORDS.finditer(rank.err()):
        text, head = match.group(), match.group().splitlines()[0]
        fields = [[label, value] for label, value in FIELD.findall(text)]
        params = [value for label, value in fields if label == "parameter"]
        place = {key: int(m.group(1)) if (m := re.search(rf"\b{word} (\d+)", head)) else None
                 for key, word in (("rank", "rank"), ("step", "step"), ("micro_batch", "micro-batch"))}
        found.append({"code": int(match.group(1)), "cause_class": "", "params": params, "n_params": len(params),
                      "fields": fields, "text": text, "after": rank.err()[match.end():], "classes": [],
                      "warning": False, "teller": rank.order.rank} | place)
    return found


def statements(run: house.Run) -> list[dict[str, Any]]:
    found = []
    for rank in run.ranks:
        for fault in rank.outcome().get("faults", []):
            found.append(fault | {"teller": rank.order.rank})
        if (rank.poll() or 0) < 0:
            found += from_stderr(rank)
    return found + [from_daemon(d) for d in run.diagnostics]


# ---- one statement against one expectation ------------------------------------------------------------------


def differences(expect: Expect, f: dict[str, Any], rank: int | None) -> list[str]:
    """The differences from the expected fault; rank: the rank that the fault must name."""
    found = []

    def compare(what: str, want: Any, got: Any) -> None:
        if want != got:
            found.append(f"{what}: expected {want}, said {got}")

    compare("code", expect.code, f["code"])
    if found:
        return found
    compare("class", expect.cause_class, f["cause_class"])
    for what, want in (("rank", rank), ("step", expect.step), ("micro_batch", expect.micro_batch)):
        if want != ANY:
            compare(what, want, f[what] if known(f[what]) else None)
    compare("n_params", len(expect.params), f["n_params"])
    shown = set(f["params"])
    complete = f["teller"] is None or len(expect.params) <= 5
    if (shown != set(expect.params)) if complete else not (shown and shown <= set(expect.params)):
        found.append(f"params: expected {sorted(expect.params)}, said {f['params']}")
    return found + [f"text: {x}" for x in text_differences(expect, f)]


# The lines "fix" and "or" with their continuation lines, also of a reason inside another text.
REMEDY = re.compile(r"^ +(?:fix|or) {2,}(.*(?:\n {17}.*)*)", re.M)


def text_differences(expect: Expect, f: dict[str, Any]) -> list[str]:
    text = mask(f["text"] + f.get("after", ""))
    remedies = "\n".join(REMEDY.findall(text))
    return ([f"fix does not have {x!r}" for x in expect.fix if x not in remedies] +
            [f"does not say {x!r}" for x in expect.says if x not in text] +
            [f"says {x!r}" for x in expect.never_says if x in text])


def the_rank(expect: Expect, teller: int) -> int | None:
    return teller if expect.rank == ALL else expect.rank


# ---- the faulty run -----------------------------------------------------------------------------------------


@dataclass
class Verdict:
    verdict: str = "right"
    why: list[str] = field(default_factory=list)
    said: dict[str, Any] | None = None

    def worse(self, verdict: str, *why: str) -> None:
        if self.verdict == "right":
            self.verdict = verdict
        self.why += why


def judge_faulty(run: house.Run) -> Verdict:
    expect = run.scenario.expect
    judges = {Refused: judge_refused, Found: judge_found, Expect: judge_expected}
    verdict = judges[type(expect)](run, expect)
    if not isinstance(expect, Found):
        judge_findings(run, verdict)
    judge_asides(run, verdict)
    judge_ends(run, verdict)
    return verdict


def judge_findings(run: house.Run, verdict: Verdict) -> None:
    """Judges a run whose status must have no finding."""
    if run.findings:
        verdict.worse("false_alarm", *[f"the status should have no finding: {mask(quiet.brief(f))}" for f in run.findings])


def judge_asides(run: house.Run, verdict: Verdict) -> None:
    """
    Judges texts other than diagnostics and findings. They may contain the judged codes and the scenario's remarks.
    """
    for line in lines_of(run):
        if not quiet.CODE.search(line) and not any(words in line for words in run.scenario.remarks):
            verdict.worse("false_alarm", f"also said: {mask(line)}")


def judge_lines(run: house.Run, verdict: Verdict) -> None:
    """judge_asides() for a run without a fault."""
    for line in lines_of(run):
        code = quiet.CODE.search(line)
        if not code or int(code.group()[1:]) not in run.scenario.tolerates:
            verdict.worse("false_alarm", f"also said: {mask(line)}")


def lines_of(run: house.Run) -> list[str]:
    return run.logged + [line for rank in run.ranks for line in quiet.said_in(rank.err())]


def on_several_nodes() -> bool:
    return os.environ.get("ZEROD_NODES", "1") != "1"


def judge_found(run: house.Run, expect: Found) -> Verdict:
    """
    On several nodes each daemon reports the finding of the whole job, and names the parameters that it owns completely.
    """
    verdict = Verdict()
    if not run.findings:
        verdict.worse("silent", "the status has no finding")
        return verdict
    verdict.said = {"brief": quiet.brief(run.findings[0])}
    got = sorted((f["kind"], f["rank"], f["param"]) for f in run.findings)
    want = sorted((expect.kind, expect.rank, param) for param in expect.params or (None,))
    if not (got == want or (on_several_nodes() and set(got) <= set(want))):
        verdict.worse("wrong", f"findings: expected {want}, the status has {got}")
    for found in run.findings:
        verdict.why += [f"{found['kind']}: does not say {x!r}" for x in expect.says if x not in found["text"]]
    if verdict.why:
        verdict.worse("wrong")
    if said := statements(run):
        verdict.worse("false_alarm", *[f"also said: {mask(brief(f))}" for f in said])
    return verdict


def judge_refused(run: house.Run, expect: Refused) -> Verdict:
    verdict = Verdict()
    for number in expect.ranks(run.scenario.world):
        outcome = next(r.outcome() for r in run.ranks if r.order.rank == number)
        faults = outcome.get("faults") or []
        error = faults[0] if faults else outcome.get("error")
        if not error:
            verdict.worse("silent", f"rank {number} was not refused")
            continue
        verdict.said = verdict.said or {"text": error["text"], "brief": f"{error['classes'][0]}: {first_line(error)}"}
        if not set(error["classes"]) & set(expect.exceptions):
            verdict.worse("wrong", f"rank {number}: {error['classes'][0]}, expected {' or '.join(expect.exceptions)}")
        verdict.why += [f"rank {number}: does not say {x!r}" for x in expect.says if x not in error["text"]]
    if verdict.why:
        verdict.worse("wrong")
    return verdict


def first_line(error: dict[str, Any]) -> str:
    return (error["text"].splitlines() or [""])[0][:160]


def judge_expected(run: house.Run, expect: Expect) -> Verdict:
    verdict = Verdict()
    said = statements(run)
    found = [f for f in said if f["code"] == expect.code] or said
    if not found:
        verdict.worse("silent", *where_they_are(run))
        return verdict
    verdict.said = found[0]
    if expect.exception or expect.signal:
        for number in expect.ranks(run.scenario.world):
            judge_told(run, expect, number, verdict)
    else:
        judge_record(said, expect, verdict)
    for f in said:
        if f["teller"] not in (None, *expect.ranks(run.scenario.world)) and f["code"] == 1302 and known(expect.rank):
            names = f"rank {expect.rank}"
            if names not in f["text"]:
                verdict.worse("wrong", f"rank {f['teller']}, which did nothing wrong, is not told of {names}")
    strangers = [f for f in said if f["code"] not in (expect.code, *run.scenario.echoes, *innocent_codes(expect))]
    if strangers:
        verdict.worse("false_alarm", *[f"also said: {brief(f)}" for f in strangers])
    return verdict


def judge_record(said: list[dict[str, Any]], expect: Expect, verdict: Verdict) -> None:
    """Judges faults that only the daemon has recorded. If any rank may be named, rank 0 is expected."""
    records = [f for f in said if f["teller"] is None]
    if not records:
        return verdict.worse("wrong", "the daemon has said nothing")
    verdict.said = min(records, key=lambda f: len(differences(expect, f, the_rank(expect, 0))))
    if wrong := differences(expect, verdict.said, the_rank(expect, 0)):
        verdict.worse("wrong", *wrong)


def innocent_codes(expect: Expect) -> tuple[int, ...]:
    """Return: codes for innocent ranks, which get an abort, or the guilty rank's leave."""
    return (1302,) if expect.exception else ()


def judge_told(run: house.Run, expect: Expect, number: int, verdict: Verdict) -> None:
    """Judges the exception or last output of a rank that must get one."""
    ranks = [r for r in run.ranks if r.order.rank == number]
    told = [f for f in statements(run) if f["teller"] == number]
    if not told:
        verdict.worse("silent", f"rank {number} was not told", *where_they_are(run))
        return
    best = min(told, key=lambda f: len(differences(expect, unwrapped(f, expect), the_rank(expect, number))))
    verdict.said = best
    wrong = differences(expect, unwrapped(best, expect), the_rank(expect, number))
    if not wrong and best["code"] != expect.code:
        # The text of an abort has no room for the class of its reason, but the daemon's record of the reason has it.
        records = [f for f in statements(run) if f["teller"] is None and f["code"] == expect.code]
        wrong += min((differences(expect, f, the_rank(expect, number)) for f in records), key=len,
                     default=[f"the daemon has no record of E{expect.code}"])
    if expect.exception and expect.exception not in best["classes"]:
        wrong.append(f"class of the exception: expected {expect.exception}, raised {best['classes'][:1]}")
    if expect.signal and not any(r.poll() == -expect.signal for r in ranks):
        wrong.append(f"expected the end by signal {expect.signal}, got {[r.poll() for r in ranks]}")
    again = next((r.outcome().get("again") for r in ranks if r.outcome().get("faults")), None)
    if expect.sticky and again != expect.code:
        wrong.append(f"the next step() of rank {number} should say E{expect.code} again, it said {again}")
    if wrong:
        verdict.worse("wrong", *[f"rank {number}: {x}" for x in wrong])


def unwrapped(f: dict[str, Any], expect: Expect) -> dict[str, Any]:
    """If the step was aborted for all ranks, returns the complete original fault from the field cause."""
    cause = next((value for label, value in f["fields"] if label == "cause"), "")
    if f["code"] == expect.code or f["code"] != 1302 or not cause.startswith(f"E{expect.code} "):
        return f
    head = cause.splitlines()[0]
    place = {key: int(m.group(1)) if (m := re.search(rf"\b{word} (\d+)", head)) else None
             for key, word in (("rank", "rank"), ("step", "step"), ("micro_batch", "micro-batch"))}
    named = re.search(r"^ *parameter +(\S+)$", cause, re.M)
    params = [named.group(1)] if named else []
    return f | place | {"code": expect.code, "cause_class": expect.cause_class, "params": params,
                        "n_params": len(params)}


def judge_ends(run: house.Run, verdict: Verdict) -> None:
    """Every process must have ended, and in the expected way."""
    expect = run.scenario.expect
    if run.complaint:
        verdict.worse("wrong", run.complaint)
    told = isinstance(expect, (Expect, Refused))  # then a rank may end at its error
    for rank in run.ranks:
        status, outcome = rank.poll(), rank.outcome()
        if not outcome.get("ended") and status == 1:
            verdict.worse("silent", f"rank {rank.order.rank} did not end: {waiting_place(rank)}")
        elif outcome.get("error") and not isinstance(expect, Refused):
            verdict.worse("wrong", f"rank {rank.order.rank}: {first_line_of(outcome['error'])}")
        elif status and status > 0:
            verdict.worse("wrong", f"rank {rank.order.rank} ended with {status}: {rank.err()[-300:]}")
        elif not told and not outcome.get("done") and status == 0:
            verdict.worse("wrong", f"rank {rank.order.rank} did not come to the end")


def first_line_of(error: dict[str, Any]) -> str:
    return f"{error['classes'][0]}: {first_line(error)}"


FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


def waiting_place(rank: house.Rank) -> str:
    """Return: where the process was at the time-out."""
    frames = [f"{Path(f).name}:{line} {name}" for f, line, name in FRAME.findall(rank.err())]
    return "it was in " + " < ".join(frames[:4]) if frames else f"standard error: {rank.err()[-200:]!r}"


def where_they_are(run: house.Run) -> list[str]:
    return [f"rank {r.order.rank} ended with {r.poll()}" + ("" if r.outcome().get("ended") else ", " + waiting_place(r))
            for r in run.ranks]


# ---- runs that have to be clean -----------------------------------------------------------------------------


def judge_clean(run: house.Run) -> Verdict:
    """Judges a twin or a guard: every rank must train to the end, without a message."""
    verdict = Verdict()
    noise = [f for f in statements(run) if f["code"] not in run.scenario.tolerates or f["teller"] is not None]
    if noise:
        verdict.said = noise[0]
        verdict.worse("false_alarm", *[f"it should be silent: {mask(brief(f))}" for f in noise])
    judge_findings(run, verdict)
    judge_lines(run, verdict)
    if run.complaint:
        verdict.worse("wrong", run.complaint)
    last = {r.order.rank: r for r in run.ranks}  # the last process of each rank
    for rank in last.values():
        outcome = rank.outcome()
        if outcome.get("error"):
            verdict.worse("wrong", f"rank {rank.order.rank}: {first_line_of(outcome['error'])}")
        elif not outcome.get("done") and not outcome.get("faults"):
            verdict.worse("wrong", f"rank {rank.order.rank} did not end: {rank.poll()}, {waiting_place(rank)}")
        elif rank.poll() != 0:
            verdict.worse("wrong", f"rank {rank.order.rank} ended with {rank.poll()}: {rank.err()[-300:]}")
    return verdict


def judge_numbers(run: house.Run, alone: house.Rank) -> list[str]:
    """Compares the parameters of every rank that has reached the end with those of torch alone."""
    import numpy as np

    want = alone.parameters()
    if want is None:
        return [f"the reference failed: {alone.outcome().get('error', {}) or alone.err()[-500:]}"]
    found = []
    trained = {r.order.rank: got for r in run.ranks if (got := r.parameters()) is not None}  # each one's last process
    for number, got in trained.items():
        if set(got) != set(want):
            found.append(f"rank {number} has other parameters: {sorted(set(got) ^ set(want))}")
            continue
        worst = sorted(((float(np.max(distances(np, got[n], want[n]))), n) for n in want), reverse=True)
        if not worst[0][0] <= TOLERANCE:
            far, name = worst[0]
            off = distances(np, got[name], want[name])
            at = int(np.argmax(off))
            found.append(f"rank {number}: {name} is {far:.2g} from the reference, {TOLERANCE:g} allowed: "
                         f"{int(np.sum(off > TOLERANCE))} of {off.size} elements, element {at} is "
                         f"{got[name].flat[at]:.9g} instead of {want[name].flat[at]:.9g}; then "
                         + ", ".join(f"{n} {d:.2g}" for d, n in worst[1:]))
    return found or ([] if trained else ["no rank has parameters to compare"])


def distances(np: Any, got: Any, want: Any) -> Any:
    """Return: the distance of each element, in units of max(|x|, rms of the tensor)."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    unit = np.maximum(np.abs(want), max(float(np.sqrt(np.mean(want**2))), 1e-30))
    return np.where(np.isfinite(got), np.abs(got - want) / unit, np.inf)


# ---- whole texts --------------------------------------------------------------------------------------------


# The text says whether both pushes had the same bytes only if the first one is already reduced.
SOMETIMES = re.compile(r"^ +bytes .*\n", re.M)


def judge_text(scenario: Scenario, text: str) -> list[str]:
    """Compares with golden/NAME.txt; ZEROD_UPDATE_GOLDEN=1 writes it. Several nodes may have a separate text."""
    several = GOLDEN / f"{scenario.name}-on-{os.environ.get('ZEROD_NODES', '1')}-nodes.txt"
    path, text = several if several.exists() else GOLDEN / f"{scenario.name}.txt", SOMETIMES.sub("", mask(text).rstrip("\n") + "\n")
    if os.environ.get("ZEROD_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
        return []
    if not path.exists():
        return [f"there is no golden text {path.name}"]
    want = path.read_text().splitlines()
    got = text.splitlines()
    for i, (a, b) in enumerate(zip(want + [""] * len(got), got + [""] * len(want), strict=False)):
        if a != b and i < max(len(want), len(got)):
            return [f"{path.name}:{i + 1}: golden {a!r}, said {b!r}"]
    return []
