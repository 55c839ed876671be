# SPDX-License-Identifier: Apache-2.0
"""
The dashboard and the alert rules use only existing metrics and labels, and the alerts fire when they should. promtool
of Debian's package prometheus checks expressions and alerts.
"""

import json
import re
import subprocess

import pytest
import yaml
from conftest import ROOT
from test_metrics import PROMTOOL, documented, emitted

pytestmark = pytest.mark.quick

DASHBOARD = ROOT / "config/grafana/zerod.json"
RULES = ROOT / "config/prometheus/zerod.rules.yml"
OURS = re.compile(r"\bzerod_\w+")
COMMON = {"job", "instance", "socket", "job_name"}  # labels of all metrics in Prometheus

with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool (scripts/test fetches it)")


def panels():
    return json.loads(DASHBOARD.read_text())["panels"]


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions():
    return [t["expr"] for p in panels() for t in p["targets"]] + [rule["expr"] for rule in rules()]


def labels_of():
    """Return: {metric: further labels}, as listed in docs/metrics.md."""
    rows = re.findall(r"^\| `(zerod_\w+)` \| \w+ \| (.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_metrics_that_are_used_exist(tmp_path):
    there = emitted(tmp_path)
    used = {name for expression in expressions() for name in OURS.findall(expression)}
    assert used and used <= set(there)
    for expression in expressions():
        for function, name in re.findall(r"\b(rate|increase|changes|delta)\((zerod_\w+)", expression):
            assert (there[name] == "counter") == (function in ("rate", "increase")), expression
    assert "zerod_info" in OURS.findall(DASHBOARD.read_text())


def test_labels_that_are_used_exist():
    labels = labels_of()
    assert set(labels) == set(documented())
    for expression in expressions():
        known = COMMON.union(*(labels[name] for name in OURS.findall(expression)))
        used = re.findall(r"(\w+)!?[=~]+\"", expression)
        for group in re.findall(r"\b(?:by|on|without|ignoring) ?\((.*?)\)", expression):
            used += re.findall(r"\w+", group)
        assert set(used) <= known, expression
    for rule in rules():
        known = COMMON.union(*(labels[name] for name in OURS.findall(rule["expr"])))
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= known, text


def test_rules_say_what_and_why():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 6
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert all(text.endswith(".") for text in rule["annotations"].values()), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_dashboard():
    board = json.loads(DASHBOARD.read_text())
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "job_name"}
    assert len({p["id"] for p in panels()}) == len({p["title"] for p in panels()}) == len(panels())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels()]
    assert len(set(places)) == len(places) and all(p["description"].endswith(".") for p in panels())


@with_promtool
def test_prometheus_reads_the_expressions(tmp_path):
    recorded = [{"record": f"x:{i}", "expr": e.replace("$__rate_interval", "5m")} for i, e in enumerate(expressions())]
    file = tmp_path / "expressions.yml"
    file.write_text(json.dumps({"groups": [{"name": "x", "rules": recorded}]}))
    for path in (file, RULES):
        result = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


# Values for every minute: the normal ones, and after the arrow those from minute 30 on that must make the alert fire.
QUIET = {
    "zerod_up{SOCKET}": "1", "zerod_formed{JOB}": "1", "zerod_held{JOB}": "0", "zerod_daemons{JOB}": "1",
    "zerod_ranks_attached{JOB}": "2", "zerod_step{JOB}": "+100", 'zerod_steps_total{JOB,result="applied"}': "+100",
    'zerod_steps_total{JOB,result="skipped"}': "+1", 'zerod_steps_total{JOB,result="aborted"}': "0",
    "zerod_missing_steps_total{JOB}": "0",
    'zerod_rank_attached{JOB,rank="1"}': "1", 'zerod_rank_silent_seconds{JOB,rank="1"}': "400",
    'zerod_rank_waiting_seconds{JOB,rank="1"}': "400", 'zerod_rank_behind_seconds_total{JOB,rank="1"}': "+6",
    'zerod_refused_total{JOB,code="E1302"}': "3", 'zerod_memory_bytes{JOB,class="ring",place="host"}': "40",
    'zerod_memory_bytes{JOB,class="state",place="host"}': "40", 'zerod_memory_bytes{JOB,class="state",place="gpu"}': "90",
    "zerod_memory_limit_bytes{JOB}": "100", "zerod_uptime_seconds{JOB}": "20000",
    "zerod_checkpoints_saved_total{JOB}": "1", "zerod_checkpoint_age_seconds{JOB}": "600",
    "zerod_checkpoints_failed_total{JOB}": "0", 'zerod_node_reached{JOB,node="1",address="b"}': "1",
}
TROUBLE = {
    "ZerodDown": {"zerod_up{SOCKET}": "0"},
    "ZerodStateHeld": {"zerod_held{JOB}": "1"},
    "ZerodNoProgress": {"zerod_step{JOB}": "3000"},
    "ZerodRankMissing": {'zerod_rank_attached{JOB,rank="1"}': "0"},
    "ZerodRankSilent": {'zerod_rank_waiting_seconds{JOB,rank="1"}': "0"},
    "ZerodRankRefused": {'zerod_rank_fault{JOB,rank="1",code="E1001"}': "1"},
    "ZerodRefused": {'zerod_refused_total{JOB,code="E1001"}': "1"},
    "ZerodSlowRank": {'zerod_rank_behind_seconds_total{JOB,rank="1"}': "+30"},
    "ZerodStepsSkipped": {'zerod_steps_total{JOB,result="skipped"}': "+20"},
    "ZerodStepsAborted": {'zerod_steps_total{JOB,result="aborted"}': "+1"},
    "ZerodGradientsMissing": {"zerod_missing_steps_total{JOB}": "+100"},
    "ZerodMemoryNearLimit": {'zerod_memory_bytes{JOB,class="ring",place="host"}': "59"},
    "ZerodCheckpointOld": {"zerod_checkpoint_age_seconds{JOB}": "15000"},
    "ZerodCheckpointFailed": {"zerod_checkpoints_failed_total{JOB}": "1"},
    "ZerodDaemonReplaced": {"zerod_daemons{JOB}": "2"},
    "ZerodNodeLost": {'zerod_node_reached{JOB,node="1",address="b"}': "0"},
}
# When the alert is checked. Some alerts end when their cause ends.
AFTER_MINUTES = {"ZerodNoProgress": 75, "ZerodRefused": 5, "ZerodStepsSkipped": 25, "ZerodDaemonReplaced": 5}


def series(metric, before, after):
    """Return: 30 minutes of one value or slope and 90 of the other, in promtool's notation."""
    metric = metric.replace("SOCKET", 'instance="a",socket="/s"').replace("JOB", 'instance="a",socket="/s",job_name="j"')

    def values(text, start, n):
        return f"{start}{text}x{n - 1}" if text.startswith("+") else f"{text}+0x{n - 1}"

    if before is None:
        return {"series": metric, "values": f"_x30 {values(after, 0, 90)}"}
    reached = int(before) * 30 if before.startswith("+") else before
    return {"series": metric, "values": f"{values(before, 0, 30)} {values(after, reached, 90)}"}


def firing(tmp_path, changes, minute):
    """Return: the names of the alerts that fire at this minute."""
    metrics = {m: (QUIET.get(m), changes.get(m, QUIET.get(m))) for m in QUIET | changes}
    test = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [{
        "interval": "1m", "input_series": [series(m, *values) for m, values in metrics.items()],
        "promql_expr_test": [{"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{minute}m",
                              "exp_samples": [{"labels": "{none=\"\"}", "value": -1}]}]}]}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(test))
    result = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert "got" in said, said
    return set(re.findall(r'alertname="(\w+)"', said))


@with_promtool
def test_quiet_when_all_is_well(tmp_path):
    for minute in (20, 60, 110):
        assert firing(tmp_path, {}, minute) == set()


@with_promtool
@pytest.mark.parametrize("alert", TROUBLE)
def test_alert_fires(tmp_path, alert):
    assert set(TROUBLE) == {rule["alert"] for rule in rules()}
    assert firing(tmp_path, TROUBLE[alert], 28) == set()
    assert firing(tmp_path, TROUBLE[alert], 30 + AFTER_MINUTES.get(alert, 20)) == {alert}
