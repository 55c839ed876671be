# SPDX-License-Identifier: Apache-2.0
"""
The rule for a run that is right: zerod says nothing. No diagnostic, no finding, no warning of the Python package, no code in
any output, and no line in the log of a daemon that has CONFIG. Notices, and lines such as "zerod: AdamW, stage 2", are allowed.
"""

import re

# A line of the log names no level, so that of a daemon with this configuration has warnings and errors only.
CONFIG = {"log_level": "warning"}
CODE, WARNING = re.compile(r"\bE1\d{3}\b"), ": ZerodWarning: "
ENTRY = re.compile(r"^(\[zerod\] )?zerod\[[^\]]*\]: .*$", re.MULTILINE)


def said_in(output):
    """The lines of a program's output with a code or a warning of zerod's."""
    return [line for line in output.splitlines() if CODE.search(line) or WARNING in line]


def said_in_log(output):
    """The first lines of what a daemon with CONFIG has logged, also where zerodrun has printed it."""
    return [match.group() for match in ENTRY.finditer(output)]


def brief(finding):
    """zero-gradient head.weight: ..."""
    rank = None if finding["rank"] is None else f"rank {finding['rank']}"
    return " ".join(filter(None, (finding["kind"], rank, finding["param"]))) + f": {finding['text']}"


def findings_of(daemon):
    """Those of each node of the job."""
    return [finding for each in getattr(daemon, "daemons", [daemon]) for finding in each.status()["findings"]]


def said_by(daemon):
    """All that a daemon with CONFIG has said: its diagnostics, its findings, its log."""
    said = [diagnostic["text"] for diagnostic in daemon.json("diagnostics")]
    return [*said, *map(brief, findings_of(daemon)), *said_in_log(daemon.log())]
