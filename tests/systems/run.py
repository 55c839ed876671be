#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
Runs the systems table: the five reported faults, in the real packages, under zerod and under what the reporter used.

    tests/systems/run.py [--list] [--only ROW]... [--json FILE] [--peers [--record]]

ROW is a name, or a name without its last part: 5a is 5a/stage1 to 5a/stage3; a * matches.

Every row runs its faulty program and wants the right refusal, then its repaired one and wants the parameters of a
single-process reference. What the reporter's system says of it stands in texts/, and --peers runs that again.
Environments are those of tests/systems/environments; a row whose environment is missing is
skipped, is printed as skipped, and does not hold. Needs a build (environment ZEROD_BUILD, default build/).
Exit status: 0 when every row holds, 1 when one does not, 77 when none failed but some were skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "systems"
TOLERANCE = 5e-6  # relative to max(|x|, rms of the tensor)
STEPS = 6
TIMEOUT = 300.0  # seconds for one run: imports take most of it on a busy machine
HANG = 90.0  # for a run that is expected to hang
RUN, DIFFERENCE = "--- ", "largest difference from the reference, relative: "  # lines of the files in texts/


@dataclass
class Trial:
    """One run of a program, with one side (shared.py) and one variant."""

    program: str
    side: str
    variant: str
    environment: str
    stage: int = 2
    optimizer: str = "AdamW"
    arguments: tuple[str, ...] = ()
    steps: int = STEPS
    on_missing: str = "error"
    hangs: bool = False


@dataclass
class Expected:
    """The expected refusal. params: names, or a name's beginning with a star for all names that begin so."""

    codes: tuple[int, ...]
    cause_class: str
    params: tuple[str, ...] = ()
    n_params: int | None = None
    rank: int | None = None
    step: int | None = None
    says: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = "" if self.rank is None else f", rank {self.rank}"
        return f"E{'/'.join(map(str, self.codes))} {self.cause_class}: {', '.join(self.params) or 'the rank'}{who}"


@dataclass
class Row:
    """
    A row of the table. fault: has to be refused as expected; trains: have to end like the reference; peers: what the
    reporter used; beside: rows whose peers' texts belong to this one, too.
    """

    name: str
    what: str
    fault: Trial | None = None
    expected: Expected | None = None
    trains: tuple[Trial, ...] = ()
    peers: tuple[Trial, ...] = ()
    substitute: str = ""
    beside: tuple[str, ...] = ()

    @property
    def trials(self) -> list[Trial]:
        return [t for t in (self.fault, *self.trains, *self.peers) if t]

    @property
    def record(self) -> Path:
        """Return: the file with zerod's and the peers' unchanged texts."""
        return HERE / "texts" / (self.name.replace("'", "-forward").replace("/", "-") + ".txt")

    def is_meant(self, pattern: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in (self.name, self.name.split("/")[0]))


def trial(environment: str, program: str, **common: Any) -> Any:
    """Return: a function that makes trials of one program."""
    return lambda side, variant, **more: Trial(program, side, variant, environment, **(common | more))


gliner = trial("e1", "case1_gliner.py")
old_gliner = trial("e1b", "case1_gliner.py")
fastnlp = trial("e3", "case2_fastnlp.py")
flag = trial("e1", "case3_flagembedding.py")
swift = trial("e2", "case4_swift.py")
qwen = trial("e2", "case4_qwen2vl.py")
minicpm = trial("e2", "case5_minicpm.py")

POOLER = "model.token_rep_layer.bert_layer.model.pooler.dense."
FASTNLP_UNUSED = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "unused.weight", "unused.bias")
# Were some gradients in the sums with rank 0's already? Then the step is aborted for both, else rank 1's is held.
ABANDONED = Expected((1302, 1005), "M4", rank=1, step=3, says=("CUDA out of memory (injected)", "training_step"))
REUSED = Expected((1001,), "D1", ("vpm.encoder.layers.*",), 48, step=0,
                  says=("use_reentrant", "case5_minicpm.py", "47 more under"))  # fmt: skip
PHANTOM = Expected((1001,), "D4", step=0, says=("find_unused_parameters", "use_reentrant", "exactly 1 gradient"))
REPLICA = "replica of MiniCPM-V 2.6: its code is on a hub only"

ROWS = [
    Row("1a", "GLiNER: exception in the backward of rank 1, swallowed", gliner("zerod", "backward"), ABANDONED,
        (gliner("zerod", "fixed"),), (gliner("ddp", "backward"),)),
    Row("1a/old", "the same with GLiNER 0.2.24, which swallows everything", old_gliner("zerod", "backward"), ABANDONED,
        (old_gliner("zerod", "fixed"),), (old_gliner("ddp", "backward", hangs=True),)),
    Row("1a'", "GLiNER: exception in the forward of rank 1, swallowed", gliner("zerod", "forward"),
        Expected((1005,), "M3", ("model.*",), 61, rank=1, step=3, says=("training_step",)), (gliner("zerod", "fixed"),),
        (gliner("ddp", "forward", hangs=True),)),
    Row("1b", "GLiNER: BERT's pooler is trainable", gliner("zerod", "pooler"),
        Expected((1005,), "M1", (POOLER + "weight", POOLER + "bias"), 2, step=0, says=("requires_grad_(False)",)),
        (gliner("zerod", "fixed"),), (gliner("ddp", "pooler"),)),
    Row("1c", "GLiNER under DDP, observed: 1a's error is translated", gliner("observe", "backward"),
        Expected((1005,), "M4", ("model.token_rep_layer.*",), 37, rank=1, step=3,
                 says=("CUDA out of memory (injected)", "training_step")), (), (),
        beside=("1a",)),
    Row("2", "fastNLP: a head and a pooler never used", fastnlp("zerod", "unused"),
        Expected((1005,), "M1", FASTNLP_UNUSED, 4, step=0, says=("requires_grad_(False)",)),
        (fastnlp("zerod", "frozen"),), (fastnlp("ddp", "unused"),)),
    Row("3a", "FlagEmbedding reranker under DDP, observed", flag("observe", "reentrant"), PHANTOM,
        (flag("ddp", "nonreentrant"), flag("ddp", "nofind")), (flag("ddp", "reentrant"),)),
    Row("3b", "FlagEmbedding reranker, reentrant: no fault, so none is reported", None, None,
        (flag("zerod", "reentrant"), flag("zerod", "nonreentrant")), (), beside=("3a",)),
    Row("3c", "FlagEmbedding embedder: two forwards, reentrant", flag("zerod", "embedder"),
        Expected((1001,), "D1", ("model.base_model.model.*",), 16, step=0,
                 says=("AbsModeling.py:261", "AbsModeling.py:262")),  # queries, passages
        (flag("zerod", "embedder-nonreentrant"),), (flag("ddp", "embedder"),)),
    Row("4a", "ms-swift, Qwen2-VL with LoRA under DDP, observed", swift("observe", "reentrant"), PHANTOM,
        (swift("ddp", "nonreentrant"), swift("zerod", "reentrant")), (swift("ddp", "reentrant"),)),
    Row("4b", "Qwen2-VL: an image and a video, reentrant", qwen("zerod", "reentrant"),
        Expected((1001,), "D1", ("model.visual.blocks.*",), 24, step=0,
                 says=("23 more under model.visual.blocks.*", "qwen2_vl.py:1163", "qwen2_vl.py:1171")),  # image, video
        (qwen("zerod", "nonreentrant"),), (qwen("ddp", "reentrant"),)),
    *(Row(f"5a/stage{stage}", f"MiniCPM-V 2.6, 20 slices, reentrant; zerod's stage {stage}",
          minicpm("zerod", "reentrant", stage=stage), REUSED,
          (minicpm("zerod", "nonreentrant", stage=stage), minicpm("zerod", "sixteen", stage=stage)),
          (minicpm("ddp", "reentrant"),) if stage == 1 else (), REPLICA,
          beside=("5c",) if stage == 1 else ("5a/stage1", "5c")) for stage in (1, 2, 3)),
    *(Row(f"5b/stage{stage}", f"the same with on_duplicate: accumulate, 10 steps of SGD; stage {stage}", None, None,
          (minicpm("zerod", "reentrant", stage=stage, optimizer="SGD", steps=10,
                   arguments=("--on-duplicate", "accumulate")),), (), REPLICA, beside=("5c",)) for stage in (1, 2, 3)),
    Row("5c", "the same under DeepSpeed", None, None, (), tuple(
        minicpm("deepspeed", variant, stage=stage, optimizer="SGD", arguments=("--bucket", bucket))
        for stage in (2, 3) for variant, bucket in
        (("reentrant", "1e3"), ("reentrant", "5e8"), ("nonreentrant", "5e8"))), REPLICA),
]  # fmt: skip


def choose(patterns: list[str]) -> tuple[list[Row], list[str]]:
    """Return: the rows that the patterns match (all if there are no patterns), and the patterns that match no row."""
    unknown = [p for p in patterns if not any(row.is_meant(p) for row in ROWS)]
    return [row for row in ROWS if not patterns or any(row.is_meant(p) for p in patterns)], unknown


@dataclass
class Outcome:
    """The results of a trial."""

    folder: Path
    ranks: list[dict[str, Any]]
    log: str
    hung: bool
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        return len(self.ranks) == 2 and all(r["outcome"] == "trained" for r in self.ranks)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Return: failed ranks. Those that failed first come before those that only got another rank's fault."""
        found = [r for r in self.ranks if r["outcome"] == "failed"]
        return sorted(found, key=lambda r: (is_echo(r), "onnection closed by peer" in r["text"]))


def is_echo(failure: dict[str, Any]) -> bool:
    """Return: whether the failure is another rank's: an abort that names it, or a lost connection."""
    return failure["type"] == "ConnectionLost" or (
        failure["type"] == "StepAborted" and failure["fault_rank"] != failure["rank"])  # fmt: skip


class Bench:
    """The build, the environments and a temporary folder, for running trials."""

    def __init__(self, build: Path, folder: Path) -> None:
        self.build, self.folder, self.n = build, folder, 0

    def missing(self, environment: str) -> str:
        """Return: why trials of an environment cannot run, or ""."""
        interpreter = ENVIRONMENTS / ("e1" if environment == "e1b" else environment) / "bin" / "python"
        if not interpreter.exists() or not (ENVIRONMENTS / environment).exists():
            return f"{environment} is not built: tests/systems/environments {environment}"
        if not (self.build / "client" / "run" / "zerodrun").exists():
            return "zerod is not built: scripts/build"
        return ""

    def environ(self, environment: str) -> dict[str, str]:
        path = [str(ROOT / "client" / "python")]
        if environment == "e1b":
            path.insert(0, str(ENVIRONMENTS / "e1b"))
        return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                             "PYTHONHASHSEED": "0",  # GLiNER orders the types of entities by hash
                             "ZEROD_LIBRARY": str(self.build / "client" / "libzerod.so")}  # fmt: skip

    def run(self, t: Trial) -> Outcome:
        self.n += 1
        folder = self.folder / str(self.n)
        folder.mkdir()
        python = str(ENVIRONMENTS / ("e1" if t.environment == "e1b" else t.environment) / "bin" / "python")
        program = [str(HERE / t.program), "--side", t.side, "--variant", t.variant, "--folder", str(folder), "--steps",
                   str(t.steps), "--stage", str(t.stage), "--optimizer", t.optimizer, *t.arguments]  # fmt: skip
        if t.side == "zerod":
            launcher = self.zerodrun(t, folder, python)
        else:
            launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        log, hung = self.call([*launcher, *program], t, HANG if t.hangs else TIMEOUT)
        ranks = [json.loads(p.read_text()) for p in sorted(folder.glob("rank*.json"))]
        return Outcome(folder, ranks, log, hung)

    def zerodrun(self, t: Trial, folder: Path, python: str) -> list[str]:
        params = {"lr": 0.001} | ({"weight_decay": 0.01} if t.optimizer == "AdamW" else {})
        config = {
            "job": "systems", "listen": {"socket": str(folder / "s")}, "world": {"size": 2}, "threads": 1,
            "zero_optimization": {"stage": t.stage, "reduce_bucket_size": 2000},
            "optimizer": {"type": t.optimizer, "params": params}, "diagnostics": {"on_missing": t.on_missing},
            "gradient_clipping": 0,  # the reference does not clip
        }  # fmt: skip
        (folder / "job.yaml").write_text(json.dumps(config))  # JSON is YAML
        return [str(self.build / "client" / "run" / "zerodrun"), "--config", str(folder / "job.yaml"), "-n", "2",
                "--zerod", str(self.build / "daemon" / "zerod"), "--grace", "20", "--", python]  # fmt: skip

    def call(self, command: list[str], t: Trial, timeout: float) -> tuple[str, bool]:
        """Runs it in a new process group, which is ended too. Returns the output and whether it hung."""
        path = self.folder / f"{self.n}.log"
        with path.open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                       env=self.environ(t.environment), start_new_session=True)  # fmt: skip
            try:
                process.wait(timeout)
                hung = False
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                end_group(process)
        return path.read_text(errors="replace"), hung

    def difference(self, t: Trial, outcome: Outcome) -> float | str:
        """Return: the largest difference of a trial's parameters from the reference's, or why there is none."""
        python = str(ENVIRONMENTS / ("e1" if t.environment == "e1b" else t.environment) / "bin" / "python")
        program = [python, str(HERE / t.program), "--side", "reference", "--variant", t.variant, "--folder",
                   str(outcome.folder), "--steps", str(t.steps), "--optimizer", t.optimizer]  # fmt: skip
        log, hung = self.call(program, t, TIMEOUT)
        if hung or not (outcome.folder / "reference.pt").exists():
            return "no reference: " + (log.strip().splitlines() or ["it hung"])[-1]
        said = subprocess.run([python, str(HERE / "compare.py"), str(outcome.folder)], capture_output=True, text=True)
        return float(said.stdout) if said.returncode == 0 else "not compared: " + said.stderr.strip()[-200:]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the rest of a session. torchrun's workers have their own sessions; torchrun passes the signal to them."""
    for number, patience in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def first_line(outcome: Outcome) -> str:
    if outcome.hung:
        return "(hangs, says nothing)"
    if not outcome.failures:
        return "(trains, says nothing)" if outcome.trained else "(ended without a word)"
    worst = outcome.failures[0]
    return f"{worst['type']}: {worst['text'].splitlines()[0] if worst['text'] else '(no text)'}"


def matches(names: list[str], wanted: tuple[str, ...]) -> bool:
    """Return: whether all names are wanted. Without a star in `wanted`, all wanted names must be there too."""
    prefixes = tuple(w[:-1] for w in wanted if w.endswith("*"))
    exact = {w for w in wanted if not w.endswith("*")}
    return all(n in exact or n.startswith(prefixes) for n in names) if prefixes else set(names) == exact


def judge_fault(outcome: Outcome, e: Expected) -> tuple[str, str]:
    """Return: (verdict, why) for a run that must be refused."""
    if outcome.trained:
        return "silent", "trained as if nothing had been wrong"
    faults = [r for r in outcome.failures if "fault_code" in r and not is_echo(r)]
    if not faults:
        return "silent" if outcome.hung else "wrong", first_line(outcome)
    problems = [problem for f in faults if (problem := problem_with(f, e))]
    return ("wrong", problems[0]) if problems else ("right", "")


def problem_with(fault: dict[str, Any], e: Expected) -> str:
    checks = [
        ("code", fault["fault_code"], fault["fault_code"] in e.codes),
        ("class", fault["fault_cause_class"], fault["fault_cause_class"] == e.cause_class),
        ("params", fault["fault_params"], not e.params or matches(fault["fault_params"] or [], e.params)),
        ("count", fault["fault_n_params"], e.n_params in (None, fault["fault_n_params"])),
        ("rank", fault["fault_rank"], e.rank in (None, fault["fault_rank"])),
        ("step", fault["fault_step"], e.step in (None, fault["fault_step"])),
        ("text", fault["text"][:300], all(s in fault["text"] for s in e.says)),
    ]
    return "; ".join(f"{name} is {said}" for name, said, good in checks if not good)


def expected(row: Row) -> str:
    trains = "; ".join(f"{t.side} {t.variant} trains" for t in row.trains)
    return "; ".join(filter(None, (str(row.expected or ""), trains))) or "the repaired runs train"


def judge(bench: Bench, row: Row, peers: bool) -> dict[str, Any]:
    """Runs a row. The result has the fields that scripts/faults prints: name, expected, said, verdict."""
    result: dict[str, Any] = {"name": row.name, "what": row.what, "expected": expected(row), "said": "",
                              "verdict": "right", "why": "", "substitute": row.substitute, "peers": []}  # fmt: skip
    for environment in sorted({t.environment for t in row.trials}):
        if why := bench.missing(environment):
            return result | {"verdict": "skipped", "why": why}
    if row.fault and row.expected:
        outcome = bench.run(row.fault)
        result["said"], result["text"] = first_line(outcome), outcome.failures[0]["text"] if outcome.failures else ""
        result["verdict"], result["why"] = judge_fault(outcome, row.expected)
        if result["verdict"] != "right":
            result["log"] = outcome.log[-4000:]
    for t in row.trains:
        judge_training(bench, t, result)
    if row.peers and (peers or not row.fault):
        result["peers"] = [peer_of(bench, t) for t in row.peers]
    else:
        result["recorded"] = recorded(row)
    if row.name == "5c" and result["verdict"] == "right":
        judge_deepspeed(result)
    return result


def judge_training(bench: Bench, t: Trial, result: dict[str, Any]) -> None:
    outcome = bench.run(t)
    name = f"{t.side} {t.variant}"
    if not outcome.trained:
        verdict = "false_alarm" if any("fault_code" in r for r in outcome.failures) else "wrong"
        result |= {"verdict": verdict, "why": f"{name}: {first_line(outcome)}", "log": outcome.log[-4000:]}
        return
    difference = bench.difference(t, outcome)
    distance = difference if isinstance(difference, str) else f"{difference:.2e}"
    result["said"] = "; ".join(filter(None, (result["said"], f"{name} trains, {distance} from the reference")))
    if isinstance(difference, str) or not difference <= TOLERANCE:
        result |= {"verdict": "wrong", "why": f"{name}: {difference} from the reference"}


def peer_of(bench: Bench, t: Trial) -> dict[str, Any]:
    outcome = bench.run(t)
    peer = {"side": t.side, "variant": t.variant, "stage": t.stage, "arguments": t.arguments, "hung": outcome.hung,
            "said": masked(first_line(outcome)), "texts": [masked(r["text"]) for r in outcome.failures]}  # fmt: skip
    if outcome.trained:
        peer["difference"] = bench.difference(t, outcome)
    return peer


def judge_deepspeed(result: dict[str, Any]) -> None:
    """Row 5c is right if DeepSpeed's own repaired runs are right. Then its faulty runs are recorded."""
    repaired = [p for p in result["peers"] if p["variant"] == "nonreentrant"]
    wrong = [p for p in repaired if not isinstance(p.get("difference"), float) or p["difference"] > TOLERANCE]
    result["said"] = "; ".join(
        f"stage {p['stage']} {p['variant']} bucket {p['arguments'][-1]}: "
        + (f"trains, {p['difference']:.1e} from the reference" if isinstance(p.get("difference"), float) else p["said"])
        for p in result["peers"])  # fmt: skip
    if wrong:
        why = wrong[0].get("difference", wrong[0]["said"])
        result |= {"verdict": "wrong", "why": f"DeepSpeed's repaired run: {why}"}


def masked(text: str) -> str:
    """Return: the text without parts that differ from run to run."""
    text = re.sub(r"(/[\w.+-]+)+/(site-packages|tests/systems|third_party)/", r".../\2/", text)
    text = re.sub(r"\[[\d.:a-f]+\]:\d+", "[address]", text)
    text = re.sub(r" This is typically caused by a remote worker crashing\..*", "", text)  # gloo's advice
    return re.sub(r"\bpid[ :=]+\d+", "pid N", text)


def versions(environment: str) -> str:
    """Return: the pinned versions of the important packages of an environment."""
    matter = ("torch", "transformers", "accelerate", "peft", "gliner", "FlagEmbedding", "FastNLP", "ms_swift",
              "deepspeed")  # fmt: skip
    pins = (HERE / f"{environment[:2]}.txt").read_text().splitlines()
    named = [pin.replace("==", " ") for pin in pins if pin.split("==")[0] in matter]
    if environment == "e1b":
        named = ["gliner 0.2.24" if pin.startswith("gliner ") else pin for pin in named]
    return ", ".join(named)


def recorded(row: Row) -> list[str]:
    """Return: from texts/, how each peer of a row was run, and the first line of its text."""
    files = [row.record, *(other.record for other in ROWS if other.name in row.beside)]
    said: list[str] = []
    for line in (line for path in files if path.exists() for line in path.read_text().splitlines()):
        if line.startswith(RUN + "zerod"):
            continue
        if line.startswith(RUN):
            said.append(line.removeprefix(RUN))
        elif line.startswith(DIFFERENCE):
            said[-1] += f", {line.removeprefix(DIFFERENCE)} from the reference"
    return said


def record(row: Row, result: dict[str, Any]) -> None:
    """Writes texts/ROW.txt: zerod's text, and the unchanged texts of all ranks of the reporter's system."""
    lines = [f"{row.name}: {row.what}", versions(row.trials[0].environment), ""]
    if row.fault and result.get("text"):
        lines += [f"{RUN}zerod, variant {row.fault.variant}:", masked(result["text"]), ""]
    for t, peer in zip(row.peers, result["peers"], strict=True):
        how = f"ZeRO-{t.stage}, reduce_bucket_size {t.arguments[-1]}" if t.side == "deepspeed" else "DDP over gloo"
        lines.append(f"{RUN}{how}, variant {t.variant}: {peer['said'].splitlines()[0][:100]}")
        if "difference" in peer:
            lines.append(f"{DIFFERENCE}{peer['difference']}")
        lines += [*peer["texts"], ""]
    if len(lines) > 3:
        row.record.parent.mkdir(exist_ok=True)
        row.record.write_text("\n".join(lines))


def print_row(result: dict[str, Any]) -> None:
    print(f"{result['name']:<11} {result['verdict']:<11} {result['what']}"
          + (f" ({result['substitute']})" if result["substitute"] else ""))  # fmt: skip
    if result["verdict"] == "skipped":
        print(f"            skipped: {result['why']}")
        return
    print(f"            said: {result['said'][:600]}")
    for peer in result["peers"]:
        said = f"trains, {peer['difference']} from the reference" if "difference" in peer else peer["said"][:200]
        print(f"            {peer['side']} {peer['variant']}: {said}")
    for line in result.get("recorded", ()):
        print(f"            on record: {line}")
    if result["verdict"] != "right":
        print(f"            wanted: {result['expected']}\n            but: {result['why'][:600]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--only", action="append", metavar="ROW", help="run this row only; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, with all texts")
    parser.add_argument("--peers", action="store_true", help="run what the reporters used beside each row, too")
    parser.add_argument("--record", action="store_true", help="with --peers: write what was said to texts/")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    options = parser.parse_args()
    rows, unknown = choose(options.only or [])
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)} (--list shows them)")
    if options.list:
        print("\n".join(f"{row.name:<11} {row.what}" for row in rows))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="zerod-systems-"))
    bench = Bench(Path(os.environ.get("ZEROD_BUILD", ROOT / "build")).resolve(), folder)
    results = []
    for row in rows:
        results.append(judge(bench, row, options.peers))
        print_row(results[-1])
        if options.record:
            record(row, results[-1])
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    if options.keep:
        print(f"runs are in {folder}")
    else:
        shutil.rmtree(folder)
    verdicts = ("right", "wrong", "silent", "false_alarm", "skipped")
    counts = {v: sum(r["verdict"] == v for r in results) for v in verdicts}
    failed = counts["wrong"] + counts["silent"] + counts["false_alarm"]
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return 1 if failed else 77 if counts["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
