# SPDX-License-Identifier: Apache-2.0
"""
The corpus, one test for each row. zerod must give the right diagnostic for each fault, and none for correct programs.
"""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (scripts/faults installs it)")

from faults import corpus, plain, runner  # noqa: E402
from faults.corpus import ALL, Expect  # noqa: E402
from tiers import param  # noqa: E402

CASES = runner.cases()


def first_of_each(cases):
    """Return: each code and cause's first row, all rows of findings, some rows without a fault, in one stage each."""
    seen = set()
    for n, case in enumerate(cases):
        expect = case.scenario.expect
        key = (expect.code, expect.cause_class) if isinstance(expect, Expect) else case.scenario.name
        of_findings = case.scenario.pattern == "findings"
        if key not in seen and (isinstance(expect, Expect) or of_findings or n % 8 == 0):
            yield case
        seen.add(key)


SOME = list(first_of_each(CASES))
# scripts/faults --nodes 2 runs all rows on two nodes. These rows can end differently on several nodes.
OF_NODES = [c for c in CASES if c.name in ("too-large-for-its-limit", "backward-raises-too-late",
                                                "backward-raises-swallowed/stage2")]
COUNTED = [s for s in corpus.load().values() if s.hooks]


def rows(cases, chosen):
    return [param(case, *([] if case in chosen else [pytest.mark.full])) for case in cases]


@pytest.fixture(scope="session")
def fault_build(build):
    if build.sanitize:
        pytest.skip("a libzerod with a sanitizer cannot be loaded into Python")
    return build


@pytest.mark.faults
@pytest.mark.parametrize("case", rows(CASES, SOME), ids=[c.name for c in CASES])
def test_row(case, fault_build, tmp_path):
    row = runner.run_case(case, tmp_path, fault_build)
    assert row.verdict == "right", "\n".join([f"expected {row.expected}", f"said     {row.said}", *row.why])


@pytest.mark.faults
@pytest.mark.parametrize("case", rows(OF_NODES, OF_NODES[:1]), ids=[c.name for c in OF_NODES])
def test_row_on_two_nodes(case, fault_build, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROD_NODES", "2")
    test_row(case, fault_build, tmp_path)


@pytest.mark.faults
@pytest.mark.full
@pytest.mark.parametrize("scenario", COUNTED, ids=[s.name for s in COUNTED])
def test_torch_does_so(scenario):
    """
    In torch alone, exactly the parameters of the scenario's expectation have hooks that are called twice, or never.
    """
    expect = scenario.expect
    assert isinstance(expect, Expect)
    trials = plain.run(scenario, faulty=True)
    tellers = trials if expect.rank in (ALL, None) else [trials[expect.rank]]
    if expect.cause_class in ("D1", "D2"):
        for t in tellers:
            assert t.hooks.twice(expect.step, expect.micro_batch or 0) == set(expect.params)
            check_tasks(expect, t)
    else:
        for t in tellers:
            trainable = {n for n, p in t.trained.named_parameters() if p.requires_grad}
            assert trainable - t.hooks.seen(expect.step) == set(expect.params)
    if "on_duplicate" not in scenario.config(2, repaired=True)["diagnostics"]:
        for t in plain.run(scenario, faulty=False):
            assert not any(t.hooks.twice(*place) for place in t.hooks.fired)


def check_tasks(expect, trial):
    """No graph task may call a parameter's hook twice."""
    for tasks in trial.hooks.fired[expect.step, expect.micro_batch or 0].values():
        assert len(set(tasks)) == len(tasks), "one graph task fired a hook twice"
