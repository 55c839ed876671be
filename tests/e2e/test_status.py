# SPDX-License-Identifier: Apache-2.0
"""zerod_status(): the output of zerodctl, requested by a trainer in C over a separate connection."""

import json
import os
import signal

import pytest
from conftest import wait_for
from test_zerodctl import validator

ASKS = r"""
#include <stdio.h>
#include <stdlib.h>
#include "zerod/client.h"

static struct zerod *c;

/* Prints the answer in a line, or what it returned and why. */
static void ask(int timeout_ms)
{
    const char *json;
    int r = zerod_status(c, timeout_ms, &json);

    printf("%d %s\n", r, r == 0 ? json : zerod_error(c)->text);
    fflush(stdout);
}

static void check(int r)
{
    if (r == 0)
        return;
    fprintf(stderr, "%s\n", zerod_error(c)->text);
    exit(1);
}

/* Asks before the job is formed, inside a micro-batch, and after each line on stdin, which is followed by a step. */
int main(void)
{
    struct zerod_param param = {.name = "a", .trainable = true};
    struct zerod_step_result result;
    float grad = 1;
    int timeout_ms;

    check(zerod_connect(&c, &(struct zerod_options){.rank = -1}));
    ask(0);
    check(zerod_declare(c, &param, 1));
    check(zerod_form(c));
    check(zerod_begin_backward(c, NULL));
    check(zerod_push(c, &(struct zerod_push){.data = &grad}));
    ask(0);
    check(zerod_end_backward(c, NULL, 0));
    check(zerod_step(c, NULL, &result));
    printf("step %d\n", (int)result.epoch);
    fflush(stdout);
    while (scanf("%d", &timeout_ms) == 1) {
        ask(timeout_ms);
        check(zerod_begin_backward(c, NULL));
        check(zerod_push(c, &(struct zerod_push){.data = &grad}));
        check(zerod_end_backward(c, NULL, 0));
        check(zerod_step(c, NULL, &result));
        printf("step %d\n", (int)result.epoch);
        fflush(stdout);
    }
    check(zerod_leave(c));
    zerod_close(c);
}
"""


@pytest.fixture
def asks(zerod, build, tmp_path):
    """A job of one rank that asks for the status. asks.say(timeout_ms) makes it ask again."""
    job = zerod({"world": {"size": 1}})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = build.compile(ASKS, tmp_path / "asks")
    job.rank = job.spawn("/bin/sh", "-c", f"exec {program} <{fifo}", rank=0)
    line = open(fifo, "w", buffering=1)
    job.say = lambda timeout_ms: print(timeout_ms, file=line)
    job.end = line.close
    yield job
    line.close()


def lines(job, n):
    wait_for(lambda: f"{job.rank.out()}\n{job.rank.err()}", lambda: job.rank.out().count("\n") >= n)
    return job.rank.out().splitlines()


def test_the_answer_is_zerodctls(asks):
    lines(asks, 3)
    asks.say(1000)
    said = lines(asks, 5)
    answers = [json.loads(line.removeprefix("0 ")) for line in (said[0], said[1], said[3])]
    for answer in answers:
        validator("status").validate(answer)
    assert [a["formed"] for a in answers] == [False, True, True]
    assert [a["step"] for a in answers] == [0, 0, 1] and said[4] == "step 2"
    assert answers[1]["n_attached"] == 1 and answers[1]["counters"]["n_pushes_admitted"] in (0, 1)  # perhaps on its way
    for key, value in asks.status().items():
        if key not in ("uptime_ns", "step", "n_applied", "steps_per_s", "last_step_ns", "time", "counters", "overlap", "grad_norm", "memory"):
            assert answers[2][key] == value, key
    asks.end()
    assert asks.rank.wait() == 0, asks.rank.err()


def test_a_daemon_that_does_not_answer(asks):
    """
    If the daemon does not answer, the question fails after its timeout. The rank trains on when the daemon continues.
    """
    lines(asks, 3)
    asks.signal(signal.SIGSTOP)
    asks.say(300)
    said = lines(asks, 4)[3]
    asks.signal(signal.SIGCONT)
    assert said == f"-110 zerod_status: the daemon on {asks.socket} has not answered in time"
    assert lines(asks, 5)[4] == "step 2"
    asks.end()
    assert asks.rank.wait() == 0, asks.rank.err()


def test_no_daemon(asks):
    lines(asks, 3)
    asks.kill()
    asks.say(1000)
    said = lines(asks, 4)[3]
    assert said == f"-111 zerod_status: no daemon on {asks.socket}: connect: Connection refused"
    assert asks.rank.wait() == 1
