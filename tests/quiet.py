# SPDX-License-Identifier: Apache-2.0
"""
The rule for a correct run: zerod reports nothing. There is no diagnostic, no finding, no warning of the Python package,
no code in any output, and no line in the log of a daemon with CONFIG. Notices, and lines such as "zerod: AdamW, stage
2", are allowed.
"""

import re

# Lines of the log do not show their level. With this configuration the log has only warnings and errors.
CONFIG = {"log_level": "warning"}
CODE, WARNING = re.compile(r"\bE1\d{3}\b"), ": ZerodWarning: "
ENTRY = re.compile(r"^(\[zerod\] )?zerod\[[^\]]*\]: .*$", re.MULTILINE)


def said_in(output):
    """Return: the lines of a program's output that contain a code or a warning of zerod."""
    return [line for line in output.splitlines() if CODE.search(line) or WARNING in line]


def said_in_log(output):
    """Return: the first line of each log entry of a daemon with CONFIG, also as printed by zerodrun."""
    return [match.group() for match in ENTRY.finditer(output)]


def brief(finding):
    """zero-gradient head.weight: ..."""
    rank = None if finding["rank"] is None else f"rank {finding['rank']}"
    return " ".join(filter(None, (finding["kind"], rank, finding["param"]))) + f": {finding['text']}"


def findings_of(daemon):
    """Return: the findings of all nodes of the job."""
    return [finding for each in getattr(daemon, "daemons", [daemon]) for finding in each.status()["findings"]]


def said_by(daemon):
    """Return: everything that a daemon with CONFIG reported: diagnostics, findings, log."""
    said = [diagnostic["text"] for diagnostic in daemon.json("diagnostics")]
    return [*said, *map(brief, findings_of(daemon)), *said_in_log(daemon.log())]
