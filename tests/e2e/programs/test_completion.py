# SPDX-License-Identifier: Apache-2.0
"""
Completion in real shells. bash is tested with the words and the cursor that it passes to a function of `complete`.
"""

import os
import pty
import re
import select
import shutil
import socket
import subprocess
import time

import pytest
from conftest import ROOT, environment

COMPLETION = ROOT / "completion/zerod.bash"
PROGRAMS = {"zerod": "daemon/zerod", "zerodrun": "client/run/zerodrun", "zerodctl": "client/ctl/zerodctl"}
# bash calls the function that `complete` has for the program with program, current word and previous word.
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
    """
    Return: a function that returns what is offered for the last of these words. "=" is a separate word, as in bash.
    """

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
    """Parses zerodctl's help. Return: the lines of each command, by its words."""
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
    """The options of the help are offered, each command's options after that command, and no other options."""
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
    for words in ("zerod --config", "zerod -c", "zerodrun -n 2 --config", "zerodctl plan --config"):
        assert offered(*words.split(), "") == {"job.yaml", "ds.json", "job.yml", "folder"}, words


def test_values(offered):
    assert offered("zerodrun", "--color", "") == {"auto", "always", "never"}
    assert offered("zerodrun", "-n", "") == offered("zerodrun", "--tee", "") == set()
    assert offered("zerodctl", "plan", "--stage", "") == {"1", "2", "3"}
    assert offered("zerodctl", "plan", "--grad-dtype", "=", "b") == {"bf16"}


def test_the_program_of_zerodrun(offered):
    assert "sh" in offered("zerodrun", "-n", "2", "--", "s")
    assert offered("zerodrun", "-n", "2", "--", "sh", "--no") == set()


class Terminal:
    """A shell in a pseudo terminal."""

    def __init__(self, command, path, home):
        env = environment({"PATH": f"{path}:/usr/bin:/bin", "HOME": home, "TERM": "dumb", "PS1": "$ ", "COLUMNS": 100})
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, {key: str(value) for key, value in env.items()})

    def type(self, keys, until):
        """Types the keys. Return: the output up to this pattern."""
        os.write(self.terminal, keys.encode())
        said, deadline = "", time.monotonic() + 30
        while not re.search(until, said, re.DOTALL):
            assert time.monotonic() < deadline, f"{keys!r}: {said}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                said += os.read(self.terminal, 65536).decode(errors="replace")
        return said

    def close(self):
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(path, tmp_path):
    opened = []

    def start(*command):
        if not shutil.which(command[0]):
            pytest.skip(f"there is no {command[0]}")
        opened.append(Terminal(command, path, tmp_path))
        return opened[-1]

    yield start
    for shell in opened:
        shell.close()


def test_bash_at_a_terminal(terminal):
    shell = terminal("bash", "--norc", "--noprofile", "-i")
    shell.type(f". {COMPLETION}\nzerodctl checkp\tver\t", "zerodctl checkpoint verify ")


def test_zsh(build, terminal):
    """Options and commands of --help, as zsh lists them."""
    shell = terminal("zsh", "-f", "-i")
    shell.type(f"fpath=({COMPLETION.parent} $fpath); autoload -U compinit; compinit -u -D; LISTMAX=1000\n"
               "bindkey '^I' list-choices; echo READY\n", "\nREADY")  # fmt: skip

    def listed(line):
        # zsh prints the line, the list, and the line again.
        said = shell.type(f"{line}\t", rf"{re.escape(line)}.*\n.*{re.escape(line)}")
        shell.type("\x15\n", r"\$ ")
        return set(re.sub(re.escape(line), "", said).split())

    for program in PROGRAMS:
        text = help_of(build, program)
        everywhere = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        seen = listed(f"{program} --") & everywhere
        for words, lines in commands_of(text).items():
            own = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(lines)))
            seen |= listed(f"{' '.join([program, *words])} --") & own if own else set()
        assert seen == everywhere, program
    commands = commands_of(help_of(build, "zerodctl"))
    assert {words[0] for words in commands} <= listed("zerodctl --socket x ")
    assert {"save", "list", "verify", "show"} <= listed("zerodctl checkpoint ")


def test_fish(build, path, tmp_path):
    if not shutil.which("fish"):
        pytest.skip("there is no fish")
    for program in PROGRAMS:
        shutil.copy(COMPLETION.with_suffix(".fish"), tmp_path / f"{program}.fish")
    env = environment({"PATH": f"{path}:/usr/bin:/bin", "HOME": tmp_path})

    def offered(*lines):
        program = lines[0].split()[0]
        ask = "".join(f"; complete -C '{line}'" for line in lines)
        command = ["fish", "--no-config", "-c", f"source {tmp_path}/{program}.fish{ask}"]
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        return {line.split("\t")[0] for line in result.stdout.splitlines()}

    for program in PROGRAMS:
        text = help_of(build, program)
        lines = [f"{program} --", *(f"{' '.join([program, *words])} --" for words in commands_of(text))]
        assert offered(*lines) == set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)), program
    commands = commands_of(help_of(build, "zerodctl"))
    assert offered("zerodctl ") == {words[0] for words in commands}
    assert offered("zerodctl checkpoint ") >= {"save", "list", "verify", "show"}
    assert offered("zerodrun --color ") == {"auto", "always", "never"}


def test_where_it_is_installed(build, tmp_path):
    """The completion files are installed in the places where bash-completion, fish and zsh look for them."""
    command = ["meson", "install", "-C", build.folder, "--no-rebuild", "--quiet", "--tags", "runtime"]
    subprocess.run([*command, "--destdir", tmp_path], check=True)
    plan = (build.folder / "meson-info/intro-install_plan.json").read_text()
    files = [f"bash-completion/completions/{program}" for program in PROGRAMS]
    files += [f"fish/vendor_completions.d/{program}.fish" for program in PROGRAMS]
    for file in [*files, "zsh/site-functions/_zerod"]:
        assert list(tmp_path.glob(f"**/share/{file}")), file
        assert f'/{file}"' in plan, f"{file} is not in the plan, from which wheels are made"
