# SPDX-License-Identifier: Apache-2.0
"""
Selects the rows of a parametrized test for scripts/test; the other rows run only with scripts/test --full.
tests/README.md describes the tiers.

    @pytest.mark.parametrize("stage", [2, *full(1, 3)])
    @pytest.mark.parametrize("stage, world", each_once((1, 2, 3), (1, 4)))     # rows 1-1, 2-4, 3-1; the rest in full
    @pytest.mark.parametrize("kind, stage, offload", pairwise(KINDS, (1, 2, 3), ("none", "cpu")))
"""

import itertools
import os
import random

import pytest

FULL = os.environ.get("ZEROD_TESTS") == "full"


def param(row, *marks):
    return pytest.param(*(row if type(row) is tuple else (row,)), marks=marks)


def full(*rows):
    """Rows that only --full runs."""
    return [param(row, pytest.mark.full) for row in rows]


def each_once(*dimensions):
    """Return: the whole product. scripts/test runs a diagonal of it, in which each value of each dimension occurs."""
    diagonal = {tuple(values[i % len(values)] for values in dimensions) for i in range(max(map(len, dimensions)))}
    return [param(row, *([] if row in diagonal else [pytest.mark.full])) for row in itertools.product(*dimensions)]


def cover(dimensions, seed=1):
    """
    Return: a few rows, always the same, in which every value of a dimension occurs with every value of every other one.
    """
    rng, rows = random.Random(seed), []
    missing = {((i, a), (j, b)) for (i, x), (j, y) in itertools.combinations(enumerate(dimensions), 2)
               for a in x for b in y}

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    while missing:
        # Draws some rows that have a missing pair, and chooses the row with the most missing pairs.
        start = sorted(missing, key=str)
        drawn = [list(map(rng.choice, dimensions)) for _ in range(50)]
        for row in drawn:
            for i, value in rng.choice(start):
                row[i] = value
        rows.append(tuple(max(drawn, key=lambda row: len(pairs(row) & missing))))
        missing -= pairs(rows[-1])
    return rows


def pairwise(*dimensions, seed=1):
    """Return: the rows of cover(). scripts/test runs the first row for each value of the first dimension."""
    seen, rows = set(), []
    for row in cover(dimensions, seed):
        rows.append(param(row, *([pytest.mark.full] if row[0] in seen else [])))
        seen.add(row[0])
    return rows
