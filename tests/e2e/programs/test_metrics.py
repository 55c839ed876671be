# SPDX-License-Identifier: Apache-2.0
"""
zerodctl metrics: Prometheus' parsers can read it, its values are those of the daemon's answers, and docs/metrics.md
lists all metrics.
"""

import json
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, wait_for
from test_zerodctl import daemon, example, parts, path, zerodctl  # noqa: F401

pytest.importorskip("prometheus_client", reason="scripts/test installs prometheus-client into build/venv")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families as read_prometheus  # noqa: E402

pytestmark = pytest.mark.quick

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--steps", "1000000"]
TROUBLE = 'a"} 1\nzerod_up{b="\\'

PROMTOOL = shutil.which("promtool") or shutil.which(ROOT / "build/promtool")  # fetched by scripts/test


def metrics_of(path, answers):  # noqa: F811
    """Return: the text of `zerodctl metrics` for a daemon with these answers."""
    with daemon(path, lambda command: parts(json.dumps(answers[command]))):
        result = zerodctl("--socket", path, "metrics")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def answers(name="status"):
    return {"status": json.loads(example(name)), "ranks": json.loads(example("ranks"))}


FULL, NODES, MINIMAL = "full", "nodes", "minimal"  # together they have every key


def given(name):
    if name != FULL:
        return answers(f"status-{name}")
    full = answers()
    full["status"] |= {"replaced_ns": 5 * 10**9, "away_ns": 10**9}
    return full


def samples(text):
    """Return: {(name, further labels): value} by OpenMetrics' parser, without the two labels of all samples."""
    found = {}
    for family in read_openmetrics(text):
        for s in family.samples:
            labels = frozenset(item for item in s.labels.items() if item[0] not in ("socket", "job_name"))
            assert (s.name, labels) not in found
            found[s.name, labels] = s.value
    return found


def value(text, name, **labels):
    return samples(text)[name, frozenset(labels.items())]


def emitted(folder):
    """Return: {name of a sample: type} for all samples that zerodctl can emit."""
    families = [f for name in (FULL, NODES, MINIMAL) for f in read_openmetrics(metrics_of(folder / name, given(name)))]
    return {s.name: f.type for f in families for s in f.samples}


def documented():
    text = (ROOT / "docs/metrics.md").read_text()
    return dict(re.findall(r"^\| `(zerod_\w+)` \| (\w+) \|", text, re.MULTILINE))


# ---- the text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FULL, NODES, MINIMAL])
def test_both_parsers_read_it(path, name):  # noqa: F811
    text = metrics_of(path, given(name))
    assert text.endswith("\n# EOF\n")
    families = list(read_openmetrics(text))
    assert all(f.documentation and f.type in ("gauge", "counter") for f in families)
    for family in families:
        for unit in ("seconds", "bytes", "ratio"):
            assert (family.unit == unit) == family.name.endswith(f"_{unit}")
    older = {(s.name, frozenset(s.labels.items())): s.value for f in read_prometheus(text) for s in f.samples}
    assert older == {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    if PROMTOOL:
        lint = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
        # promtool does not match the names of OpenMetrics' counters with their help lines.
        assert re.fullmatch(r"(\w+_total no help text\n)*", lint.stderr), lint.stderr


def test_values(path):  # noqa: F811
    text = metrics_of(path, given(FULL))
    assert value(text, "zerod_up") == 1
    assert value(text, "zerod_step") == 42
    assert value(text, "zerod_steps_total", result="skipped") == 1
    assert value(text, "zerod_step_seconds_total", phase="update") == 3e-6
    assert value(text, "zerod_memory_bytes", **{"class": "ring"}, place="gpu") == 2 << 20
    assert value(text, "zerod_memory_limit_bytes") == 64 << 30
    assert value(text, "zerod_early_update_ratio") == 0.75
    assert value(text, "zerod_early_update_info", prevented_by="memory") == 1
    assert value(text, "zerod_early_updates_total", result="accepted") == 12
    assert value(text, "zerod_early_updates_total", result="dropped") == 5
    assert value(text, "zerod_refused_total", code="E1001") == 2
    assert value(text, "zerod_slowest_rank_behind_seconds", rank="3") == 0.0015
    assert value(text, "zerod_rank_behind_seconds_total", rank="2") == 5
    assert value(text, "zerod_rank_fault", rank="1", code="E1001") == 1
    assert value(text, "zerod_checkpoint_age_seconds") == 60
    assert value(text, "zerod_engine_sent_bytes_total", engine="nccl", collective="reduce-scatter") == 2 << 20
    assert {s.labels["socket"] for f in read_openmetrics(text) for s in f.samples} == {str(path)}


def test_labels_that_want_out(path):  # noqa: F811
    """Names of a job, run, node and engine that look like the end of a label are escaped correctly."""
    hostile = given(NODES)
    hostile["status"] |= {"job": TROUBLE, "run_id": TROUBLE, "state": TROUBLE, "version": TROUBLE}
    hostile["status"]["nodes"]["list"][1]["address"] = TROUBLE
    hostile["status"]["refused"] = [{"code": TROUBLE, "n": 1}]
    hostile["ranks"][1]["fault"]["code"] = TROUBLE
    text = metrics_of(path, hostile)
    assert {s.labels["job_name"] for f in read_openmetrics(text) for s in f.samples if s.name != "zerod_up"} == {TROUBLE}
    assert value(text, "zerod_run_info", run_id=TROUBLE) == 1
    assert value(text, "zerod_node_reached", node="1", address=TROUBLE) == 0
    assert value(text, "zerod_refused_total", code=TROUBLE) == 1
    assert value(text, "zerod_rank_fault", rank="1", code=TROUBLE) == 1
    assert value(text, "zerod_up") == 1


def test_no_daemon(path):  # noqa: F811
    """Without a daemon, the reason goes to stderr. The text, for a textfile collector, has zerod_up 0."""
    result = zerodctl("--socket", path, "metrics")
    assert result.returncode == 69 and result.stderr == f"zerodctl: no daemon on {path}: connect: No such file or directory\n"
    assert samples(result.stdout) == {("zerod_up", frozenset()): 0}


# ---- a real job --------------------------------------------------------------------------------------------------


def test_of_a_running_job(zerod, build):
    job = zerod({"limits": {"memory": "1GiB"}})
    trainer = build.path("tests/example/zerod-example")
    for rank in range(2):
        job.spawn(trainer, *SMALL, "--provoke-duplicate", "2:blocks.0.norm1.bias:1", rank=rank)
    wait_for("the job does not train", lambda: job.status()["step"] >= 5)
    before = job.status()
    text = job.ctl("metrics").stdout
    after = job.status()
    assert before["step"] <= value(text, "zerod_step") <= after["step"]
    assert before["n_applied"] <= value(text, "zerod_steps_total", result="applied") <= after["n_applied"]
    for phase in ("wait", "reduce", "update"):
        seconds = value(text, "zerod_step_seconds_total", phase=phase)
        assert before["time"][phase]["total_ns"] <= seconds * 1e9 * (1 + 1e-9) and seconds > 0
        assert seconds * 1e9 * (1 - 1e-9) <= after["time"][phase]["total_ns"]
    assert value(text, "zerod_refused_total", code="E1001") == 1
    assert value(text, "zerod_memory_limit_bytes") == 1 << 30
    assert [value(text, "zerod_rank_attached", rank=rank) for rank in "01"] == [1, 1]
    assert sum(v for (name, _), v in samples(text).items() if name == "zerod_memory_bytes") > 0
    assert {s.labels.get("job_name") for f in read_openmetrics(text) for s in f.samples} == {None, "test"}


FORGETS = r"""
#include <stdio.h>
#include <unistd.h>
#include "zerod/client.h"

/* Three parameters; each step has no gradient of the last two. */
int main(void)
{
    struct zerod_param params[3] = {{.name = "a", .trainable = true}, {.name = "b", .trainable = true}, {.name = "c", .trainable = true}};
    struct zerod_step_result result;
    struct zerod *c;
    float grad = 1;

    if (zerod_connect(&c, &(struct zerod_options){.rank = -1}) || zerod_declare(c, params, 3) || zerod_form(c))
        return 1;
    for (int i = 0; i < 5; i++)
        if (zerod_begin_backward(c, NULL) || zerod_push(c, &(struct zerod_push){.param = 0, .data = &grad}) ||
            zerod_end_backward(c, NULL, 0) || zerod_step(c, NULL, &result)) {
            fprintf(stderr, "%s\n", zerod_error(c)->text);
            return 2;
        }
    puts("done");
    fflush(stdout);
    pause();
}
"""


def test_of_a_job_with_missing_gradients(zerod, build, tmp_path):
    job = zerod({"world": {"size": 1}})
    rank = job.spawn(build.compile(FORGETS, tmp_path / "forgets"), rank=0)
    wait_for(lambda: f"no five steps\n{rank.err()}", lambda: "done" in rank.out())
    status, text = job.status(), job.ctl("metrics").stdout
    assert (status["n_missing_steps"], status["n_missing_params"]) == (5, 2)
    assert value(text, "zerod_missing_steps_total") == 5
    assert value(text, "zerod_missing_parameters") == 2


# ---- the document ------------------------------------------------------------------------------------------------


def test_every_metric_is_documented(tmp_path):
    assert documented() == emitted(tmp_path)
