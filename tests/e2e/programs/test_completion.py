# SPDX-License-Identifier: Apache-2.0
"""Completion in a real bash, with the words and the cursor that bash gives to a function of `complete`."""

import os
import pty
import re
import select
import socket
import subprocess
import time

import pytest
from conftest import ROOT, environment

COMPLETION = ROOT / "completion/zerod.bash"
PROGRAMS = {"zerod": "daemon/zerod", "zerodrun": "client/run/zerodrun", "zerodctl": "client/ctl/zerodctl"}
# As bash does it: the function that `complete` has for the program gets program, word and word before.
ASK = """
. "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
function=$(complete -p "$1" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
"$function" "$1" "${COMP_WORDS[COMP_CWORD]#=}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"}
"""


@pytest.fixture(scope="module")
def path(build, tmp_path_factory):
    """A folder with the programs."""
    folder = tmp_path_factory.mktemp("bin")
    for name, place in PROGRAMS.items():
        (folder / name).symlink_to(build.path(place))
    return folder


@pytest.fixture
def offered(path, tmp_path):
    """What is offered for the last of these words; "=" is a word of its own, as in bash."""

    def ask(*words, **variables):
        env = environment({"PATH": f"{path}:/usr/bin:/bin", "HOME": tmp_path} | variables)
        result = subprocess.run(["bash", "--norc", "-u", "-c", ASK, "bash", COMPLETION, *words],
                                cwd=tmp_path, env=env, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        return set(result.stdout.split())

    return ask


def help_of(build, program):
    return subprocess.run([build.path(PROGRAMS[program]), "--help"], capture_output=True, text=True, check=True).stdout


def commands_of(text):
    """Of zerodctl's help: the lines of each command, under its words."""
    commands, words = {}, None
    for line in text.splitlines():
        if begun := re.match(r"  ([a-z][a-z-]*(?: [a-z][a-z-]*)*)", line):
            words = tuple(begun[1].split())
        elif not line.startswith("   "):
            words = None
        if words:
            commands.setdefault(words, []).append(line)
    return commands


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_of_help(build, offered, program):
    """Each option is offered, of a command behind that command; and nothing else is."""
    text = help_of(build, program)
    everywhere = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    seen = offered(program, "--")
    for words, lines in commands_of(text).items():
        own = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(lines)))
        assert own <= offered(program, *words, "--"), words
        seen |= own
    assert seen == everywhere
    assert len(seen) > 5


def test_every_command_of_help(build, offered):
    commands = commands_of(help_of(build, "zerodctl"))
    assert ("status",) in commands and ("checkpoint", "verify") in commands
    assert offered("zerodctl", "") == {words[0] for words in commands}
    assert offered("zerodctl", "--socket", "x", "--json", "") == offered("zerodctl", "")
    assert offered("zerodctl", "checkpoint", "") == {words[1] for words in commands if words[0] == "checkpoint"}
    assert offered("zerodctl", "checkpoint", "s") == {"save", "show"}
    assert offered("zerodctl", "plan", "") == set()


def test_options_of_other_commands_are_not_offered(offered):
    assert "--watch" in offered("zerodctl", "status", "--") and "--watch" not in offered("zerodctl", "plan", "--")
    assert "--no-wait" in offered("zerodctl", "checkpoint", "save", "--")
    assert "--no-wait" not in offered("zerodctl", "--")


def test_sockets_and_configurations(offered, tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("job.yaml", "ds.json", "job.yml", "job.txt"):
        (tmp_path / name).touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "job.sock"))
        assert offered("zerodctl", "--socket", "job") == {"job.sock"}
        assert offered("zerodctl", "status", "--socket", "=", "job") == {"job.sock"}
        assert offered("zerodctl", "--socket", "=") >= {"job.sock", "folder"}
        assert offered("zerodrun", "--socket", "~/j") == {"~/job.sock"}
        given = str(tmp_path / "job.sock")
        assert given in offered("zerod", "--socket", "", ZEROD_SOCKET=given)
    for words in (["zerod", "--config"], ["zerod", "-c"], ["zerodrun", "-n", "2", "--config"], ["zerodctl", "plan", "--config"]):
        assert offered(*words, "") == {"job.yaml", "ds.json", "job.yml", "folder"}, words


def test_values(offered):
    assert offered("zerodrun", "--color", "") == {"auto", "always", "never"}
    assert offered("zerodrun", "-n", "") == offered("zerodrun", "--tee", "") == set()
    assert offered("zerodctl", "plan", "--stage", "") == {"1", "2", "3"}
    assert offered("zerodctl", "plan", "--grad-dtype", "=", "b") == {"bf16"}


def test_the_program_of_zerodrun(offered):
    assert "sh" in offered("zerodrun", "-n", "2", "--", "s")
    assert offered("zerodrun", "-n", "2", "--", "sh", "--no") == set()


def test_keys(path, tmp_path):
    """Somebody types a word and the key TAB."""
    env = environment({"PATH": f"{path}:/usr/bin:/bin", "HOME": tmp_path, "TERM": "dumb", "PS1": "$ "})
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], {key: str(value) for key, value in env.items()})
    try:
        os.write(terminal, f". {COMPLETION}\nzerodctl checkp\tver\t\n".encode())
        said, deadline = "", time.monotonic() + 20
        while "checkpoint verify" not in said and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                said += os.read(terminal, 4096).decode()
        assert "zerodctl checkpoint verify" in said, said
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def test_where_it_is_installed(build, tmp_path):
    """Where bash-completion looks for a file with the program's name."""
    subprocess.run(["meson", "install", "-C", build.folder, "--no-rebuild", "--quiet", "--tags", "runtime", "--destdir", tmp_path],
                   check=True)
    for program in PROGRAMS:
        [file] = tmp_path.glob(f"**/share/bash-completion/completions/{program}")
        assert file.read_text() == COMPLETION.read_text()
