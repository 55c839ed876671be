# SPDX-License-Identifier: Apache-2.0
"""
The blocks of README.md and docs/ are correct. Every fenced block has a kind, which decides how it is tested:

    sh        run with bash -eu; blocks of a document share a folder and the exported variables. zerod must print
              nothing (quiet.py)
    console   run too; the lines after "$ COMMAND" must be that command's output, except times; "..." stands for any
              lines. If the rest of the output goes to a file log..., zerod must print nothing in that file (quiet.py)
    python    a fragment must compile; a program, whose file is named in its first line, must be run by a later block
    c         compiled with -Wall -Werror; the first line has the name of the file. A program must be run by a later
              block
    yaml      must pass `zerod --check`; "# NAME" in the first line names the file
    text      allowed only in the documents of ELSEWHERE, where another test checks them

Lines like scripts/... are not run but must name an existing script and options that it has. One test, marked alone,
executes the README literally in a fresh copy of the tree. docs/service.md is executed inside a private systemd.
test_pages.py checks the text outside of blocks. test_chinese_pages.py compares the blocks of docs/zh/ with those of the
English pages.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import quiet
from conftest import ROOT
from documents import DOCUMENTS
from private_systemd import PrivateSystemd

# The test file that checks a document's text blocks and names the document; or the reason why there is nothing to
# check.
ELSEWHERE = {
    "docs/architecture.md": "a picture",
    "docs/configuration.md": "tests/core/config/test-config-docs.c",
    "docs/diagnostics.md": "tests/core/diagnosis/test-diagnosis.c",
             "docs/faults.md": "tests/faults/test_systems.py",
}
TIME = re.compile(r"\b\d+(\.\d+)? ?(ns|us|ms|s|min)\b")
SCRIPT = re.compile(r"^(scripts/|pip install ).*$", re.MULTILINE)


@dataclass
class Block:
    document: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.document}:{self.line}: {self.kind}"

    def file_name(self):
        """Return: the file name in the comment of the block's first line, or None."""
        named = re.match(r"(?:/\*|//|#) (\S+?)[:\s]", self.text)
        return named[1] if named else None


def blocks_of(document):
    blocks, start = [], None
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        assert not line.startswith("~~~"), f"{document}:{number}: write ``` instead"
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
        else:
            assert line == "```", f"{document}:{start}: a block that does not end"
            text = "".join(f"{body}\n" for body in lines[start:number - 1])
            blocks.append(Block(document, start, lines[start - 1].removeprefix("```"), text))
            start = None
    assert start is None, f"{document}:{start}: a block that does not end"
    return blocks


class Reader:
    """Executes a document's blocks as a reader would. literally: runs scripts too."""

    def __init__(self, build, folder, home, literally=False):
        self.zerod, self.folder, self.literally = build.path("daemon/zerod"), folder, literally
        self.variables = folder / ".exported"
        # The tests' Python is the reader's Python. Instead of a pip install, it finds the package in the tree.
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        path = path if literally else f"{home}/zerod/bin:{path}"
        self.env = {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        if not literally:
            library = str(build.path("client/libzerod.so"))
            self.env |= {"PYTHONPATH": str(ROOT / "client/python"), "ZEROD_LIBRARY": library}

    def give_python(self, folder):
        """Makes a separate Python environment for pip install, which already has torch."""
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "tests.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
        self.env["PATH"] = f"{folder / 'bin'}:{self.env['PATH']}"

    def shell(self, block, text, timeout=180):
        if not self.literally:
            text = SCRIPT.sub(lambda line: check_script(block, line[0]), text)
        text = f"[ ! -e {self.variables} ] || . {self.variables}\n{text}\nexport -p >{self.variables}\n"
        result = subprocess.run(["bash", "-eu", "-c", text], cwd=self.folder, env=self.env, text=True, timeout=timeout,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert result.returncode == 0, f"{block}\n{result.stdout}"
        return result.stdout

    def follow(self, block, later):
        handlers = {"sh": self.do_sh, "console": self.do_console, "c": self.do_c, "python": self.do_python, "yaml": self.do_yaml, "text": self.do_text}
        assert block.kind in handlers, f"{block}: nobody checks blocks of this kind"
        handlers[block.kind](block, later)

    def do_sh(self, block, later):
        output = self.shell(block, block.text, 900 if self.literally else 60)
        assert quiet.said_in(output) == [], f"{block}\n{output}"

    def do_console(self, block, later):
        parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
        assert parts[0] == "" and len(parts) > 1, f"{block}: begins with no command"
        for command, shown in zip(parts[1::2], parts[2::2]):
            printed = self.shell(block, command)
            assert agree(plain(printed), plain(shown)), f"{block}: $ {command}\n{printed}is not\n{shown}"
            for log in [*self.folder.glob("log*"), *self.folder.glob("node*/log")]:
                assert quiet.said_in(log.read_text()) == [], f"{block}: $ {command}\n{log.read_text()}"

    def do_c(self, block, later):
        name = block.file_name() or "fragment.c"
        (self.folder / name).write_text(block.text)
        self.shell(block, f"gcc -std=gnu17 -Wall -Werror -fsyntax-only {name} $(pkg-config --cflags zerod)")
        if re.search(r"\bmain\(", block.text):
            stem = re.escape(name.removesuffix(".c"))
            assert any(re.search(rf"\./{stem}\b", b.text) for b in later), f"{block}: nothing runs it"

    def do_python(self, block, later):
        compile(block.text, str(block), "exec")
        name = block.file_name()
        if name is not None:
            pytest.importorskip("torch", reason="PyTorch is not installed")
            (self.folder / name).write_text(block.text)
            runs = re.compile(rf"\b(python|torchrun .*) {re.escape(name)}\b")
            assert any(runs.search(b.text) for b in later), f"{block}: nothing runs it"

    def do_yaml(self, block, later):
        name = Path(block.file_name() or "fragment.yaml").name
        (self.folder / name).write_text(block.text)
        result = subprocess.run([self.zerod, "--config", name, "--check"], cwd=self.folder, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "", f"{block}\n{result.stderr}"

    def do_text(self, block, later):
        assert block.document in ELSEWHERE, f"{block}: what checks this?"


def plain(text):
    return [TIME.sub("TIME", line).rstrip() for line in text.splitlines()]


def agree(printed, shown):
    """Return: whether the lines are equal. "..." stands for any lines."""
    if not shown or not printed:
        return all(line == "..." for line in shown) and not printed
    if shown[0] == "...":
        return any(agree(printed[n:], shown[1:]) for n in range(len(printed) + 1))
    return printed[0] == shown[0] and agree(printed[1:], shown[1:])


def test_agree():
    assert agree([], []) and agree([], ["..."]) and agree(["a"], ["a"]) and agree(["a", "b", "c"], ["a", "...", "c"])
    assert agree(["a", "b"], ["...", "b"]) and agree(["a", "b"], ["...", "a", "b", "..."])
    assert not agree(["a"], []) and not agree([], ["a"]) and not agree(["a", "b"], ["a"]) and not agree(["a"], ["...", "b"])


def check_script(block, line):
    """Checks that the script exists and has the options. Return: the command to run instead."""
    words = line.split("#")[0].split()
    if words[0] == "pip":
        assert words[-1].endswith("zerod-*.whl"), f"{block}: nothing to install in {words[-1]}"
        return ":"
    script = ROOT / words[0]
    assert os.access(script, os.X_OK), f"{block}: {words[0]} is no program"
    said = subprocess.run([script, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert said.returncode == 0, f"{block}: {words[0]} --help: {said.stderr}"
    for word in words[1:]:
        assert not word.startswith("-") or word in said.stdout, f"{block}: {words[0]} has no {word}"
    return ":"


@pytest.fixture(scope="module", autouse=True)
def no_sanitizers(build):
    if build.sanitize:
        pytest.skip("documents are checked without sanitizers")


@pytest.fixture(scope="module")
def home(build, tmp_path_factory):
    """A home folder with zerod installed as by `scripts/build --prefix "$HOME/zerod"`."""
    folder = tmp_path_factory.mktemp("home")
    installed, prefix = folder / "installed", folder / "zerod"
    subprocess.run(["meson", "install", "-C", build.folder, "--no-rebuild", "--quiet", "--destdir", installed], check=True)
    shutil.move(f"{installed}{build.options['prefix']}", prefix)
    if build.options["libdir"] != "lib":
        for entry in (prefix / build.options["libdir"]).iterdir():
            entry.rename(prefix / "lib" / entry.name)
    pc = prefix / "lib/pkgconfig/zerod.pc"
    text = re.sub(r"^prefix=.*", f"prefix={prefix}", pc.read_text(), flags=re.MULTILINE)
    pc.write_text(re.sub(r"^libdir=.*", "libdir=${prefix}/lib", text, flags=re.MULTILINE))
    return folder


def follow_all(reader, document):
    blocks = blocks_of(document)
    for i, block in enumerate(blocks):
        reader.follow(block, blocks[i + 1:])


# Documents whose programs run for most of a minute: scripts/test --part docs follows them.
LONG = ["docs/moving.md", "docs/checkpoints.md"]


@pytest.mark.parametrize("document", [pytest.param(d, marks=pytest.mark.full if d in LONG else ()) for d in DOCUMENTS
                                      if d != "docs/service.md"])
def test_blocks(build, home, tmp_path, document):
    follow_all(Reader(build, tmp_path, home), document)


@pytest.mark.parametrize("document", ELSEWHERE)
def test_elsewhere(document):
    where = ELSEWHERE[document]
    assert not where.startswith("tests/") or document in (ROOT / where).read_text(), f"{where} does not read {document}"
    assert any(block.kind == "text" for block in blocks_of(document)), f"{document} has no such block any more"


def test_service(build, tmp_path):
    """docs/service.md works inside a private systemd with an installed zerod."""
    if why := PrivateSystemd.missing():
        pytest.skip(why)
    reader = Reader(build, tmp_path, tmp_path)
    machine = PrivateSystemd(build, tmp_path / "machine")
    try:
        for block in blocks_of("docs/service.md"):
            if block.kind == "sh":
                text = SCRIPT.sub(lambda line: check_script(block, line[0]), block.text)
                result = machine.run("env", f"PATH={machine.bin}:/usr/sbin:/usr/bin", "bash", "-eu", "-c", text, check=False)
                assert result.returncode == 0, f"{block}\n{result.stdout}{result.stderr}"
            else:
                reader.follow(block, [])
                machine.path(block.file_name()).write_text(block.text)
        assert machine.state("zerod@pretrain.service") == "active"
        assert "0 of 2 ranks" in machine.zerodctl("pretrain", "status", user="alice").stdout
        assert machine.run("ls", "/var/lib/zerod/pretrain", user="alice").stdout == ""
    finally:
        machine.stop()


def fresh_copy(target):
    """Copies the tree as a clone would have it, without build folders and ignored files."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.mark.full
@pytest.mark.alone
def test_newcomer(build, tmp_path):
    """In a fresh copy, scripts/quickstart and all blocks of the README work."""
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no git checkout, so nobody knows what a clone would have")
    tree = tmp_path / "zerod"
    fresh_copy(tree)
    reader = Reader(build, tree, tmp_path, literally=True)
    reader.give_python(tmp_path / "venv")
    for quickstart in ("scripts/quickstart", "scripts/quickstart --torch"):
        said = reader.shell(quickstart, quickstart, timeout=1800)
        assert "FAILED" not in said and re.search(r"^== checks$", said, re.MULTILINE), said
    follow_all(reader, "README.md")
