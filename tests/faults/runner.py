# SPDX-License-Identifier: Apache-2.0
"""
Runs the corpus, a few scenarios at a time, and prints the table.

    python -m faults.runner [NAME...] [--systems] [--json] [--list] [--keep FOLDER]

NAME is a scenario or NAME/stageN, and may contain *. --systems also runs the table of the real systems (tests/systems);
a NAME may then be of either table. The exit status is 1 unless every row is right. A skipped row is not right.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import conftest
from systems import run as table_of_systems

from . import corpus, house, judge
from .corpus import Expect, Expected, Found, Refused, Scenario


class Case(NamedTuple):
    """A scenario in one stage: a row of the table."""

    scenario: Scenario
    stage: int

    @property
    def name(self) -> str:
        several = len(self.scenario.stages) > 1
        return f"{self.scenario.name}/stage{self.stage}" if several else self.scenario.name


    def is_meant(self, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatch(n, p) for p in patterns for n in (self.name, self.scenario.name))


def cases() -> list[Case]:
    return [Case(s, stage) for s in corpus.load().values() for stage in s.stages]


def choose(patterns: list[str]) -> tuple[list[Case], list[str]]:
    """Return: the cases that the patterns match, and the patterns that match no case."""
    found = cases()
    unknown = [p for p in patterns if not any(c.is_meant([p]) for c in found)]
    return [c for c in found if not patterns or c.is_meant(patterns)], unknown


def expected(expect: Expected) -> str:
    if expect is None:
        return "nothing"
    if isinstance(expect, Refused):
        return " or ".join(expect.exceptions)
    if isinstance(expect, Found):
        rank = "" if expect.rank is None else f" rank {expect.rank}"
        return " ".join([expect.kind + rank, *expect.params[:1], *([f"+ {len(expect.params) - 1}"] if expect.params[1:] else [])])
    rank: Any = "each" if expect.rank == corpus.ALL else expect.rank
    micro_batch = None if expect.micro_batch == corpus.ANY else expect.micro_batch
    return judge.brief({"code": expect.code, "cause_class": expect.cause_class, "rank": rank, "step": expect.step,
                        "micro_batch": micro_batch, "params": list(expect.params),
                        "n_params": len(expect.params)})


def said(verdict: judge.Verdict) -> str:
    if verdict.said is None:
        return "nothing"
    return verdict.said.get("brief") or judge.brief(verdict.said)


def run_case(case: Case, folder: Path, build: Any) -> judge.Row:
    """Runs the faulty program, its twin, and the references of both."""
    scenario, stage = case
    row = judge.Row(case.name, expected(scenario.expect), "nothing", "right")
    if scenario.expect is not None:
        run = house.Run(scenario, stage, True, folder / "faulty", build)
        run.go()
        verdict = judge.judge_faulty(run)
        row.said = said(verdict)
        add(row, verdict)
        if verdict.said and verdict.verdict == "right" and isinstance(scenario.expect, Expect):
            add_numbers(row, judge.judge_text(scenario, verdict.said["text"]))
        if scenario.trains:
            alone = house.reference(scenario, True, stage, folder / "faulty-alone", build)
            add_numbers(row, [f"faulty: {x}" for x in judge.judge_numbers(run, alone)])
    if scenario.twin or scenario.expect is None:
        run = house.Run(scenario, stage, False, folder / "repaired", build)
        run.go()
        verdict = judge.judge_clean(run)
        if scenario.expect is None:
            row.said = said(verdict)
        add(row, verdict, "" if scenario.expect is None else "repaired: ")
        alone = house.reference(scenario, False, stage, folder / "alone", build)
        add_numbers(row, judge.judge_numbers(run, alone))
    return row


def add(row: judge.Row, verdict: judge.Verdict, prefix: str = "") -> None:
    if row.verdict == "right" or verdict.verdict == "false_alarm":
        row.verdict = verdict.verdict if verdict.verdict != "right" else row.verdict
    row.why += [prefix + w for w in verdict.why]


def add_numbers(row: judge.Row, why: list[str]) -> None:
    if why and row.verdict == "right":
        row.verdict = "wrong"
    row.why += why


def run_case_safely(case: Case, folder: Path, build: Any) -> judge.Row:
    """Runs a case. If the runner itself fails, the row is wrong."""
    try:
        return run_case(case, folder, build)
    except Exception as error:
        return judge.Row(case.name, expected(case.scenario.expect), "nothing", "wrong", [f"the runner: {error!r}"])


def table(rows: list[judge.Row]) -> str:
    heads = ("name", "expected", "said", "verdict")
    lines = [heads, *[(r.name, r.expected, r.said, r.verdict) for r in rows]]
    widths = [min(max(len(line[i]) for line in lines), (40, 74, 74, 11)[i]) for i in range(4)]
    text = []
    for i, line in enumerate(lines):
        text.append("  ".join(judge.mask(cell)[:w].ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
        if i:
            text += [f"    {judge.mask(why)}" for why in rows[i - 1].why]
            text += [f"    peer: {peer}" for peer in rows[i - 1].peers]
    counts = collections.Counter(r.verdict for r in rows)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    text.append("")
    text.append(f"{len(rows)} rows: {counts['right']} right, {counts['wrong']} wrong, {counts['silent']} silent"
                f"{skipped}; false alarms: {counts['false_alarm']}")
    return "\n".join(text)


def run_cases(chosen: list[Case], keep: str | None, quiet: bool, n_jobs: int) -> list[judge.Row]:
    build = conftest.Build(os.environ.get("ZEROD_BUILD", house.ROOT / "build"))
    folder = Path(keep or tempfile.mkdtemp(prefix="zerod-faults-"))
    house.forks(build)
    try:
        with ThreadPoolExecutor(max_workers=n_jobs) as pool:
            jobs = [pool.submit(run_case_safely, c, folder / c.name.replace("/", "-"), build) for c in chosen]
            return [progress(job.result(), quiet) for job in jobs]
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_systems(rows: list[table_of_systems.Row], keep: str | None) -> list[judge.Row]:
    """Return: the rows of the real systems, in their environments. A row that could not run is not right."""
    for environment in sorted({t.environment for row in rows for t in row.trials}):
        # If an environment cannot be built, its rows are skipped with the reason.
        subprocess.run([house.TESTS / "systems" / "environments", environment], stdout=sys.stderr, check=False)
    with tempfile.TemporaryDirectory(prefix="zerod-systems-") as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, house.TESTS / "systems" / "run.py", "--json", path, *(["--keep"] if keep else [])]
        result = subprocess.run([*command, *(word for row in rows for word in ("--only", row.name))],
                                stdout=sys.stderr, check=False)  # fmt: skip
        if not path.exists():
            sys.exit(f"tests/systems/run.py ended with {result.returncode} and left no table")
        return [row_of_system(found) for found in json.loads(path.read_text())]


def row_of_system(found: dict[str, Any]) -> judge.Row:
    peers = [f"{p['side']} {p['variant']}: {p['said']}"
             + (f", {p['difference']} from the reference" if "difference" in p else "")
             for p in found["peers"]] + found.get("recorded", [])  # fmt: skip
    why = [found["why"]] if found["why"] else []
    return judge.Row(found["name"], found["expected"], found["said"], found["verdict"], why, peers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Runs the corpus of faults.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios, or NAME/stageN; a * matches")
    parser.add_argument("--systems", action="store_true", help="the real systems of the reported faults too, 1a to 5c")
    parser.add_argument("--json", action="store_true", help="an array of {name, expected, said, verdict}")
    parser.add_argument("--list", action="store_true", help="names of scenarios, and what they are")
    parser.add_argument("--jobs", type=int, metavar="N", default=max(2, min(8, os.cpu_count() or 2)),
                        help="so many scenarios at a time (default: one for each processor)")
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="ranks are spread over N nodes (default: 1)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what daemons and trainers wrote")
    args = parser.parse_args()
    os.environ["ZEROD_NODES"] = str(args.nodes)  # see conftest.start_job
    chosen, unknown = choose(args.names)
    systems: list[table_of_systems.Row] = []
    if args.systems:
        systems, no_systems = table_of_systems.choose(args.names)
        unknown = [name for name in unknown if name in no_systems]
    if unknown:
        sys.exit(f"no such scenario: {', '.join(unknown)} (--list shows them)")
    if args.list:
        for name, what in [(c.name, c.scenario.doc) for c in chosen] + [(row.name, row.what) for row in systems]:
            print(f"{name:40} {what.splitlines()[0]}")
        return 0
    rows = run_cases(chosen, args.keep, args.json, args.jobs) if chosen else []
    rows += run_systems(systems, args.keep) if systems else []
    print(json.dumps([r.data() for r in rows], indent=2) if args.json else table(rows))
    return 0 if rows and all(r.verdict == "right" for r in rows) else 1


def progress(row: judge.Row, quiet: bool) -> judge.Row:
    if not quiet and row.verdict != "right" and sys.stderr.isatty():
        print(f"{row.name}: {row.verdict}", file=sys.stderr)
    return row


if __name__ == "__main__":
    sys.exit(main())
