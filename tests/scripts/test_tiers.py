# SPDX-License-Identifier: Apache-2.0
"""Selection of tests: drawn rows, and the rules of tests/README.md for marks and folders."""

import configparser
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import cover, each_once, pairwise

pytestmark = pytest.mark.quick

TESTS = Path(__file__).resolve().parents[1]
README = (TESTS / "README.md").read_text()
DIMENSIONS = (("a", "b", "c", "d"), (1, 2, 3), (1, 2, 3), (False, True))


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def is_full(row):
    return any(mark.name == "full" for mark in row.marks)


def test_each_pair_is_in_a_row():
    rows = cover(DIMENSIONS)
    assert pairs(rows) == pairs(itertools.product(*DIMENSIONS))
    assert len(rows) < 20  # of 72


def test_rows_are_always_the_same():
    """The rows do not depend on Python's hashes, because pytest-xdist needs equal tests in all its processes."""
    program = f"from tiers import cover; print(cover({DIMENSIONS!r}))"
    said = {subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(TESTS), "PYTHONHASHSEED": seed},
                           check=True, capture_output=True, text=True).stdout for seed in ("1", "2", "3")}
    assert said == {f"{cover(DIMENSIONS)}\n"}


def test_each_value_is_in_the_default_tier():
    rows = each_once(*DIMENSIONS)
    assert len(rows) == 72
    for values, seen in zip(DIMENSIONS, zip(*(row.values for row in rows if not is_full(row)), strict=True), strict=True):
        assert set(values) == set(seen)
    assert [row.values[0] for row in pairwise(*DIMENSIONS) if not is_full(row)].count("a") == 1


def test_marks_and_names_are_in_the_readme():
    ini = configparser.ConfigParser()
    ini.read(TESTS / "pytest.ini")
    for line in ini["pytest"]["markers"].strip().splitlines():
        mark = line.split(":")[0].strip()
        assert mark == "faults" or f"`{mark}`" in README, f"tests/README.md does not mention the mark {mark}"
    for name in re.findall(r"`((?:e2e|core|daemon|client|torch|faults|systems|golden|fuzz|sim|kernels)/[\w./-]*)`", README):
        assert (TESTS / name).exists() or (TESTS.parent / name).exists(), f"tests/README.md: {name} is not there"


def test_folders_are_not_too_full():
    """Folders have a limited number of programs. Texts and corpora do not count."""
    for folder in [TESTS, *(path for path in TESTS.rglob("*") if path.is_dir())]:
        sources = [path for path in folder.iterdir() if path.suffix in (".py", ".c", ".h")]
        assert len(sources) <= 30, f"{folder} has {len(sources)} files"
