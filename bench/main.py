# SPDX-License-Identifier: Apache-2.0
"""
scripts/bench: runs the benchmarks and prints their results.

exit status: 0, all goals hold; 1, one is missed, or a benchmark failed; 77, none is missed, and at least one row was not run
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

from harness import ROOT, Failure, available_bytes, n_cores, program, say

NOT_RUN = 77
DOCUMENT = ROOT / "docs" / "benchmark-tables.md"


def find_benchmarks(on_gpu):
    """name -> function. Listing GPU benchmarks does not need PyTorch, because not every machine with a GPU has it."""
    if on_gpu:
        import gpu
        import offload

        found = [gpu.gpu_kernels, gpu.gpu_facts, offload.gpu_offload, offload.gpu_peers, offload.gpu_device]
    else:
        import checkpoints
        import growth
        import latency
        import muon
        import narrow_state
        import nodes
        import overlap_update
        import questions
        import sleeping
        import speed
        import survival
        import torch_hook
        import traffic
        import training
        import whole_step

        found = [speed.kernels, whole_step.step, narrow_state.narrow_state, muon.muon, traffic.traffic, speed.overlap, speed.update, speed.recorder,
                 latency.push, questions.questions, growth.memory, growth.scaling, nodes.nodes, survival.survival,
                 checkpoints.checkpoints, training.torch, torch_hook.torch_hook,
                 overlap_update.overlap_update, sleeping.sleeping]
    return {function.__name__.replace("_", "-"): function for function in found}


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.split(": ", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="of a benchmark; all if none is given")
    parser.add_argument("--gpu", action="store_true", help="the benchmarks that run on a GPU, and no others")
    parser.add_argument("--json", action="store_true", help="print an array of objects instead of a table")
    parser.add_argument("--list", action="store_true", help="print the names and what they measure")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: for a look, not for the record")
    parser.add_argument("--markdown", action="store_true", help="also write the figures into docs/benchmark-tables.md")
    args = parser.parse_args()
    args.benchmarks = find_benchmarks(args.gpu)
    for name in args.name:
        if name not in args.benchmarks:
            parser.error(f"no benchmark is called {name}; there are {', '.join(args.benchmarks)}")
    return args


def run(name, benchmark, quick):
    """Runs a benchmark. Return: rows and details. If it fails, the other benchmarks still run."""
    started = time.monotonic()
    say(f"{name}: {benchmark.__doc__}")
    try:
        rows, details = benchmark(quick)
    except (Failure, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        say(f"{name}: failed: {error if isinstance(error, (Failure, OSError)) else repr(error)}")
        return None, {}
    say(f"  {time.monotonic() - started:.0f} s")
    return rows, details


# ---- output ----------------------------------------------------------------------------------------------------------


def number(value):
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


HEAD = ["benchmark", "zerod", "peer", "unit", "peer is", "ratio", "goal", "holds"]
REASON_HEAD = ["not run", "why"]
ALLOWANCE_HEAD = ["class", "plan", "held", "difference", "allowed", "unit", "holds"]


def verdict(row):
    return "yes" if row["holds"] else "NO"


def ratio_cells(row):
    if "not_run" in row:
        return [row["name"], "-", "-", row["unit"], row["peer_name"], "-", f"{row['goal']:.2f}", "not run"]
    goal = ["-", "-"] if row["goal"] is None else [f"{row['goal']:.2f}", verdict(row)]
    return [row["name"], number(row["zerod"]), number(row["peer"]), row["unit"], row["peer_name"],
            f"{row['ratio']:.2f}", *goal]


def allowance_cells(row):
    return [row["name"], *(number(row[key]) for key in ALLOWANCE_HEAD[1:5]), row["unit"], verdict(row)]


def tables_of(rows):
    """Return: tables of ratios, of reasons why rows were not run, and of allowances, without empty tables."""
    ratios = [ratio_cells(row) for row in rows if "allowed" not in row]
    reasons = [[f"{row['name']}, beside {row['peer_name']}", row["not_run"]] for row in rows if "not_run" in row]
    allowances = [allowance_cells(row) for row in rows if "allowed" in row]
    return [[head, *lines] for head, lines in ((HEAD, ratios), (REASON_HEAD, reasons), (ALLOWANCE_HEAD, allowances)) if lines]


def print_table(table):
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print(flush=True)


def print_results(rows, details):
    """Prints the results of a benchmark when it has ended, because other benchmarks may take long."""
    for table in tables_of(rows):
        print_table(table)
    for title, table in details.items():
        if title != "plot":
            print(f"{sentence(title)}:")
            print_table(table)


def sentence(title):
    return title[0].upper() + title[1:]


def markdown_table(table):
    lines = ["| " + " | ".join(line) + " |" for line in table]
    return "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]])


def machine():
    model = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read())
    version = subprocess.run([program("zerod"), "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    return (f"{datetime.date.today()}, {model.group(1) if model else platform.machine()}, {n_cores()} cores, "
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB, Linux {platform.release()}, "
            f"{version}, torch {torch_version()}{gpu_name()}.")


def gpu_name():
    """Return: the name of the first visible GPU, with its driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except OSError:
        return ""
    return f", {lines[0].replace(', ', ' with driver ')}" if lines else ""


def torch_version():
    from importlib import metadata

    return metadata.version("torch")


def write_section(text, name, rows, details):
    parts = [f"<!-- {name}: written by scripts/bench --markdown -->", machine()]
    for table in tables_of(rows):
        parts += ["", markdown_table(table)]
    for title, table in details.items():
        if title == "plot":
            draw, file, caption = table
            draw(DOCUMENT.with_name(file))
            parts += ["", f"![{caption}]({file})"]
        else:
            parts += ["", f"{sentence(title)}:", "", markdown_table(table)]
    parts.append(f"<!-- end of {name} -->")
    pattern = rf"<!-- {name}: written by .*?<!-- end of {name} -->"
    return re.sub(pattern, lambda _: "\n".join(parts), text, flags=re.DOTALL)


def main():
    args = arguments()
    if args.list:
        for name, function in args.benchmarks.items():
            print(f"{name:11}  {function.__doc__}")
        return 0
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"note: the load of this machine is {load:.1f}; figures are good only when nothing else runs")
    say(f"{n_cores()} cores, {available_bytes() / 2**30:.0f} GiB of memory available")
    everything, failed = [], []
    for name in args.name or args.benchmarks:
        rows, details = run(name, args.benchmarks[name], args.quick)
        if rows is None:
            failed.append(name)
            continue
        everything += rows
        if not args.json:
            print_results(rows, details)
        if args.markdown:
            DOCUMENT.write_text(write_section(DOCUMENT.read_text(), name, rows, details))
    if args.json:
        print(json.dumps(everything, indent=2))
    else:
        print("Ratio: above 1, zerod is better (of times: peer / zerod).")
    if failed:
        say(f"failed: {', '.join(failed)}")
    if failed or not all(row["holds"] or "not_run" in row for row in everything):
        return 1
    return NOT_RUN if any("not_run" in row for row in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
