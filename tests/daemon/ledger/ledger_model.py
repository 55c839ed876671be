# SPDX-License-Identifier: Apache-2.0
"""
A second ledger, written only from the rules at the top of daemon/ledger/ledger.h, and a campaign that compares the C
ledger (through ledger-driver) with it. The campaign's operations are random. They are chosen by the model's state, so
that every verdict is frequent. A script that shows a difference is shrunk. A script is a list of the driver's lines as
tuples.
"""

import argparse
import itertools
import random
import subprocess
from collections import Counter
from operator import attrgetter
from types import SimpleNamespace

PUSHED, POSTED, SUMMED, U16, U32, U64 = 0, 1, 2, 2**16 - 1, 2**32 - 1, 2**64 - 1
is_open, asked, owed, stage = map(attrgetter, ("is_open", "asked", "owed", "stage"))


class Rank:  # each operation is a method of the same name and returns the verdict as the driver prints it
    def __init__(self, job):
        self.job, self.incarnation, self.last_sequence = job, None, 0
        self.ended = [(-1, 0)]  # ended positions in order; the first is before all others
        self.close_step()

    def close_step(self):
        self.is_open = self.asked = False
        self.pushed = set()  # (micro-batch, parameter) in this step
        self.passes = {}     # parameter: its passes in order; owed: must be pushed again
        self.home = None     # position of the passes: open, next or last ended
        self.ended = [position for position in self.ended if position[0] < self.job.step]

    def following(self):
        return self.job.step, sum(step == self.job.step for step, _ in self.ended)

    def classify(self, position, reachable):
        if position == self.ended[-1]:
            return "E1004"
        if position[0] < self.job.step or position < self.ended[-1]:
            return "E1002"
        return "ok" if position == reachable else "E1003"

    def some(self, wanted):
        return any(wanted(x) for x in itertools.chain(*self.passes.values()))

    def withdraw(self):
        """Removes the passes that are not posted. Afterwards no micro-batch is open."""
        self.passes = {p: [x for x in found if x.stage] for p, found in self.passes.items() if found[0].stage}
        self.pushed = {(m, p) for m, p in self.pushed if m != self.home[1] or p in self.passes}
        self.is_open = False

    def attach(self, incarnation):
        if incarnation == self.incarnation:
            return "same"
        self.incarnation, self.last_sequence, self.is_open = incarnation, 0, False
        if self.home == self.following():
            self.withdraw()
            for x in itertools.chain(*self.passes.values()):
                x.owed = True
        return "new"

    def next(self):
        return "%d %d" % self.following()

    def begin(self, *position):
        verdict = self.classify(position, None if self.asked else self.following())
        if verdict == "ok":
            self.passes = self.passes if self.home == position else {}
            self.is_open, self.home = True, position
        return verdict

    def push(self, incarnation, attempt, step, micro_batch, sequence, param):
        if param not in self.job.trainable:
            return "E1103"
        if incarnation != self.incarnation:
            return "E1002"
        if attempt != self.job.attempt:
            return "dropped" if attempt < self.job.attempt else "E1003"
        if sequence <= self.last_sequence:
            return "retry"
        verdict = self.classify((step, micro_batch), self.home if self.is_open else None)
        if verdict != "ok":
            return verdict
        passes = self.passes.get(param, [])
        redo = [k for k, x in enumerate(passes) if x.owed]
        if passes and not redo and (not self.job.accumulate or len(passes) == U16):
            return "E1001"
        self.last_sequence = sequence
        if redo:
            passes[redo[0]].owed = False
            return "redo %d" % redo[0]
        self.pushed.add((micro_batch, param))
        self.passes[param] = passes + [SimpleNamespace(stage=PUSHED, sum=None, owed=False)]
        return "admitted %d" % len(passes)

    def post(self, param, at=PUSHED, value=None):
        for x in self.passes.get(param, ()):
            if x.stage == at:
                x.stage, x.sum = at + 1, value
                return "ok"
        return "none"

    def sum(self, param, value):
        return self.post(param, POSTED, value)

    def findsum(self, param, k):
        passes = self.passes.get(param, ())
        return str(passes[k].sum) if k < len(passes) and passes[k].stage == SUMMED else "none"

    def end(self, *position):
        verdict = self.classify(position, self.home if self.is_open else None)
        if verdict == "ok":
            if self.some(owed):
                return "incomplete"
            self.ended.append(position)
            self.is_open = False
        return "retry" if verdict == "E1004" else verdict

    def forget(self):
        if self.home == self.ended[-1]:
            self.home, self.passes = None, {}
        return "ok"

    def abandon(self):
        if self.is_open:
            if self.some(stage):
                return "must_abort"
            self.withdraw()
        return "ok"

    def ask(self):
        if self.asked or self.is_open or self.some(owed):
            return "retry" if self.asked else "E1003"
        self.asked = True
        return "ok"

    def state(self):
        words = int(self.is_open), int(self.asked), self.following()[1], len({p for _, p in self.pushed})
        last = self.ended[-1] if self.ended[1:] else "-"
        return " ".join(map(str, (*words, len(self.passes), self.last_sequence, *last)))

    def entry(self, param):
        found = self.passes.get(param, ())
        return "%d %d %d %d" % (*(sum(x.stage >= k for x in found) for k in range(3)), sum(map(owed, found)))


class Ledger:
    def __init__(self, n_ranks, n_params, accumulate, trainable, rank=Rank):
        self.trainable = [p for p in range(n_params) if trainable[p] == "1"]
        self.n_params, self.accumulate, self.step, self.attempt = n_params, accumulate == 1, 0, 0
        self.ranks = [rank(self) for _ in range(n_ranks)]

    def apply(self, name, *args):
        if name not in ("abort", "commit"):
            return getattr(self.ranks[args[0]], name)(*args[1:])
        if name == "commit" and not all(map(asked, self.ranks)):
            return "misuse"  # the daemon never does this, so no rule covers it
        self.attempt += name == "abort"
        self.step += name == "commit"
        for rank in self.ranks:
            rank.close_step()
        return "ok"


GOALS = {  # operation, its weight, and conditions on a rank and on one of its passes
    "push": (20, is_open), "push again": (20, is_open, lambda x: not x.owed), "begin owed": (40, bool, owed),
    "push wrong": (75, lambda rank: rank.ended[1:]), "attach": (7, lambda rank: not rank.incarnation),
    "push owed": (90, is_open, owed), "attach same": (1.5, bool), "attach over": (18, is_open, stage),
    "begin": (6, lambda rank: not rank.asked), "begin wrong": (28, lambda rank: rank.ended[1:]),
    "end": (6, is_open), "end wrong": (28, lambda rank: rank.ended[1:]), "end owed": (80, is_open, owed),
    "ask": (5, lambda rank: not rank.asked), "ask more": (5, asked), "commit": (14, asked), "next": (2, bool),
    "abandon late": (15, is_open, stage), "abort": (2, bool), "forget": (1.5, bool), "abandon": (3, is_open),
    "post": (27, bool, lambda x: not x.stage), "sum": (20, bool, lambda x: x.stage == POSTED),
    "findsum": (28, bool, lambda x: x.stage == SUMMED), "state": (6, bool), "entry": (6, bool)}


class Generator:
    def __init__(self, rng):
        trainable = "".join(rng.choices("01", (1, 4), k=rng.randint(1, rng.choice((4, 40)))))
        job = rng.choice((1, 1, 1, 2, 2, rng.randint(1, 8))), len(trainable), rng.randint(0, 1), trainable
        self.rng, self.script, self.ledger = rng, [("init", *job)], Ledger(*job)
        weights, n_tries = [weight for weight, *_ in GOALS.values()], rng.choice((60, 200, 400, 800))
        for goal in rng.choices(list(GOALS), weights, k=n_tries):
            if op := self.operation(goal, *GOALS[goal]):
                self.script.append(op)
                self.ledger.apply(*op)

    def wrong(self, doubt, right, *wrong):
        return self.rng.choice(wrong) if self.rng.random() < doubt else right

    def position(self, rank, doubt):
        (old, last), (step, following) = rank.ended[-1], rank.following()
        wrong = 2 * [(old, last - 1), (old, 0), (step - 1, 0), (step - 1, last + 1), (step - 1, U32)] + [
            (step, following + 1), (step + 1, 0), (step, U32), (step + 2**32, following)] + 6 * [(old, last)]
        return self.wrong(doubt, (step, following), *(x for x in wrong if min(x) >= 0))

    def operation(self, goal, weight, rank_is, pass_is=None):
        """Return: an operation for the goal, or None if no rank fits. Sometimes the rank does not fit on purpose."""
        rng, ledger, (op, _, how) = self.rng, self.ledger, goal.partition(" ")
        (r, rank), anywhere = rng.choice(list(enumerate(ledger.ranks))), rng.random() * weight < 1.5
        found = [p for p, passes in rank.passes.items() if not pass_is or any(map(pass_is, passes))]
        fits = anywhere or rank_is(rank) and (found or not pass_is)
        if not fits or op == "commit" and not all(map(asked, ledger.ranks)):
            return None
        param = rng.choice((not anywhere and found) or range(ledger.n_params))
        if op == "attach":
            new = rng.choice((rng.randint(1, 99), U64 - rng.randint(0, 99)))
            return op, r, new if how == "over" else rank.incarnation or new
        if op == "push":  # two wrong fields at the same time test the order of the checks
            fresh = [p for p in ledger.trainable if p not in rank.passes] if how in ("", "wrong") else ()
            doubt, param = 0.1 if how == "wrong" else 0.003, rng.choice(fresh or [param])
            return (op, r, self.wrong(doubt, rank.incarnation or 1, 2, (rank.incarnation or 1) ^ 2**32, U64),
                    self.wrong(4 * doubt, ledger.attempt, 0, max(ledger.attempt - 1, 0), ledger.attempt + 1),
                    *self.position(rank, 4 * doubt),
                    self.wrong(4 * doubt, rank.last_sequence + rng.choice((1, 2, 2**33)),
                               1, rank.last_sequence or 1),
                    self.wrong(doubt, param, ledger.n_params, U32, rng.randrange(ledger.n_params)))
        if op in ("begin", "end"):
            return op, r, *self.position(rank, how == "wrong")
        return (op, *{"abort": (), "commit": (), "post": (r, param), "sum": (r, param, rng.getrandbits(64)),
                      "entry": (r, param), "findsum": (r, param, rng.choice((0, 0, 1, U16)))}.get(op, (r,)))


def replay(ops, rank=Rank):
    """Return: the model's verdicts of one or more scripts."""
    ledger, verdicts = None, []
    for op in ops:
        ledger = Ledger(*op[1:], rank) if op[0] == "init" else ledger
        verdicts.append("ok" if op[0] == "init" else ledger.apply(*op))
    return verdicts


def program(path, ops):
    """Return: the answers of the driver at that path."""
    lines = "".join(" ".join(map(str, op)) + "\n" for op in ops)
    done = subprocess.run([path], input=lines, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    return done.stdout.splitlines() + ["exit status %d" % done.returncode] * (done.returncode != 0)


def without(ops, start, stop):
    """Return: the script without some operations. Positions and attempts of later operations are adjusted."""
    old, new, kept = Ledger(*ops[0][1:]), Ledger(*ops[0][1:]), ops[:1]
    for k, op in enumerate(ops[1:], 1):
        moved, at = list(op), {"begin": 2, "end": 2, "push": 4}.get(op[0])
        if at:
            was, is_now = old.ranks[op[1]].following(), new.ranks[op[1]].following()
            moved[at] += is_now[0] - was[0]
            moved[at + 1] += is_now[1] - was[1] if op[at] == was[0] else 0
            moved[3] += new.attempt - old.attempt if op[0] == "push" else 0
        old.apply(*op)
        if not start <= k < stop and min(moved[1:], default=0) >= 0 and new.apply(*moved) != "misuse":
            kept.append(tuple(moved))
    return kept


def shrink(driver, ops):
    """Shrinks the script until the difference disappears if any further operation is removed."""
    size = len(ops)
    while size:
        shorter = (without(ops, k, k + size) for k in range(1, len(ops), size))
        found = next((x for x in shorter if driver(x) != replay(x)), None)
        ops, size = (found, size) if found else (ops, size // 2)
    return ops


def campaign(driver, n_ops, seed):
    """Runs random scripts. Return: the count of each kind of verdict, and the shrunk script of a difference or None."""
    rng, counts = random.Random(seed), Counter()
    while counts.total() < n_ops:
        scripts = [Generator(rng).script for _ in range(250)]
        ops = list(itertools.chain(*scripts))
        verdicts = replay(ops)
        for op, verdict in zip(ops, verdicts):
            word, _, k = verdict.partition(" ")
            kind = "" if word.isdigit() else " again" if word == "admitted" and k > "0" else " " + word
            counts[op[0] + kind] += 1
        if driver(ops) != verdicts:
            scripts.sort(key=lambda script: script[0][1])  # a script with few ranks can become shortest
            failing = next((script for script in scripts if driver(script) != replay(script)), None)
            return counts, shrink(driver, failing) if failing else ops
    return counts, None


def main():
    parser = argparse.ArgumentParser(description="Holds the C ledger against the model.")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--ops", type=int, default=1000000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    counts, script = campaign(lambda ops: program(args.driver, ops), args.ops, args.seed)
    for kind, n in sorted(counts.items()):
        print("%-20s %9d  %5.2f %%" % (kind, n, 100 * n / counts.total()))
    if script:
        for op, verdict in zip(script, replay(script)):
            print("%-40s -> %s" % (" ".join(map(str, op)), verdict))
        raise SystemExit("the driver says: %s" % program(args.driver, script)[-1])


if __name__ == "__main__":
    main()
