# SPDX-License-Identifier: Apache-2.0
"""The output of the scripts while they compile, and the targets that scripts/quickstart compiles."""

import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("ZEROD_SOURCE_ROOT", Path(__file__).resolve().parents[2]))
SLOW = "for i in 1 2 3 4; do echo \"[$i/4] Compiling file $i\"; sleep 1; done"


def script(folder, ninja):
    """Return: a command that runs compile() with this shell text instead of ninja."""
    program = folder / "ninja"
    program.write_text(f"#!/bin/bash\n{ninja}\n")
    program.chmod(0o755)
    (folder / "tree").mkdir()
    return ["bash", "-c", f"set -eu; . {shlex.quote(str(ROOT / 'scripts/common.sh'))}; PATH={folder}:$PATH; progress_s=2; "
            f"compile {folder}/tree some targets; say built"]


def test_progress_in_a_file(tmp_path):
    result = subprocess.run(script(tmp_path, SLOW), capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert 1 <= len(lines[:-1]) <= 2 and lines[-1] == "built", lines  # in four seconds, one line every second one
    assert all(re.fullmatch(r"compiling: [1-4] of 4", line) for line in lines[:-1]), lines
    assert "Compiling file 4" in (tmp_path / "tree/compile.log").read_text()


def test_progress_on_a_terminal(tmp_path):
    """The progress is one line, which is rewritten, and erased at the end."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(script(tmp_path, SLOW), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while data := os.read(ours, 4096):
                said += data
        except OSError:  # no process has the terminal open
            pass
        assert process.wait(60) == 0
    os.close(ours)
    shown, end = said.decode().rsplit("\r\033[K", 1)
    assert end == "built\r\n"
    assert len(re.findall(r"\rcompiling: [1-4] of 4\033\[K", shown)) >= 2 and "\n" not in shown, said


def test_what_failed(tmp_path):
    """After a failure all output of ninja is printed, and the script ends."""
    result = subprocess.run(script(tmp_path, "echo '[1/2] Compiling a'; echo 'a.c:1: error: no'; exit 1"),
                            capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "[1/2] Compiling a\na.c:1: error: no\nbash: compiling failed\n"


@pytest.mark.parametrize("more", ["zerod-example", "libzerod"])
def test_quickstart_compiles_what_it_runs(build, more):
    """The targets exist in the build, and are far from all targets."""
    text = (ROOT / "scripts/quickstart").read_text()
    named = [words.split() for words in re.findall(r"targets\+?=\(([^)]+)\)", text)]
    targets = named[0] + next(words for words in named[1:] if more in " ".join(words))
    assert len(targets) >= 4

    def n_commands(*of):
        command = ["ninja", "-C", build.path("."), "-t", "commands", *of]
        return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    assert n_commands(*targets) < 0.6 * n_commands("all")
