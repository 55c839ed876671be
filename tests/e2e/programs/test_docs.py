# SPDX-License-Identifier: Apache-2.0
"""
What README.md and docs/ show is true. Every fenced block has a kind, and the kind says what is done with it:

    sh        run with bash -eu; blocks of a document share a folder and the exported variables
    console   run too, and what follows a line "$ COMMAND" must be what that command prints, times aside; "..." leaves lines out
    python    a fragment must compile; a program, whose file is named in its first line, must be run by a later block
    c         compiled with -Wall -Werror; the name of the file stands in its first line. A program must be run by a later block
    yaml      must pass `zerod --check`; "# NAME" in the first line names the file
    text      only in documents where something else checks them: ELSEWHERE

Lines of the kind scripts/... are not run but must name a script that is there, with options that it has. Once, marked
alone, the README is done literally, in a fresh copy of the tree. docs/service.md is done inside a private systemd.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT
from private_systemd import PrivateSystemd

DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
# Those beside them: their blocks are not run, but what they name is there.
OTHERS = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "client/python/README.md", "tests/README.md", "tests/golden/README.md",
          "tests/systems/FINDINGS.md"]
# The test file that checks a document's blocks of kind text, and names it; or why there is nothing to check.
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
        """The name in the comment of its first line."""
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
    """Somebody who does what a document says. literally: with scripts and all."""

    def __init__(self, build, folder, home, literally=False):
        self.zerod, self.folder, self.literally = build.path("daemon/zerod"), folder, literally
        self.variables = folder / ".exported"
        # The Python that runs the tests is the reader's own; in place of pip install it finds the package in the tree.
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        path = path if literally else f"{home}/zerod/bin:{path}"
        self.env = {"HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        if not literally:
            library = str(build.path("client/libzerod.so"))
            self.env |= {"PYTHONPATH": str(ROOT / "client/python"), "ZEROD_LIBRARY": library}

    def give_python(self, folder):
        """A Python of his own to install into, in which torch is there already."""
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
        self.shell(block, block.text, 900 if self.literally else 60)

    def do_console(self, block, later):
        parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
        assert parts[0] == "" and len(parts) > 1, f"{block}: begins with no command"
        for command, shown in zip(parts[1::2], parts[2::2]):
            printed = self.shell(block, command)
            assert agree(plain(printed), plain(shown)), f"{block}: $ {command}\n{printed}is not\n{shown}"

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
    """Are the lines equal? "..." stands for any lines."""
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
    """The script is there and has the options. Return: what is run in its place."""
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
    """A home with zerod installed as `scripts/build --prefix "$HOME/zerod"` would install it."""
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


# The comparison with torch, for which four processes import it; tests/callers has more of that kind.
LONG = ["docs/moving.md"]


@pytest.mark.parametrize("document", [pytest.param(d, marks=pytest.mark.full if d in LONG else ()) for d in DOCUMENTS
                                      if d != "docs/service.md"])
def test_blocks(build, home, tmp_path, document):
    follow_all(Reader(build, tmp_path, home), document)


@pytest.mark.quick
@pytest.mark.parametrize("document", [*DOCUMENTS, *OTHERS])
def test_links(document):
    """They lead to a file of the repository, and to a heading of it."""
    text = plain_text(ROOT / document)
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert ":" not in target, f"{document}: {target}: nobody checks what lies elsewhere"
        path, _, anchor = target.partition("#")
        linked = folder / path if path else ROOT / document
        assert linked.exists(), f"{document}: {target} is not there"
        assert not anchor or anchor in anchors(linked), f"{document}: {target}: no such heading"


@pytest.mark.parametrize("document", [*DOCUMENTS, *OTHERS[:3]])
def test_names(document):
    """Files that are named are there."""
    text = plain_text(ROOT / document)
    for name in re.findall(r"`((?:scripts|config|docs|client|daemon|tests|proto|man|kernels|bench)/[\w./@-]*)`", text):
        assert (ROOT / name).exists() or (ROOT / f"{name}.in").exists(), f"{document}: {name} is not there"
    for script in re.findall(r"(?<![\w/])scripts/[a-z][a-z-]*\b(?!\.)", text):
        assert os.access(ROOT / script, os.X_OK), f"{document}: {script} is no program"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_are_named(document):
    """A test that a document names as `test_file.py: test_name` (or `test_name` of the file named before) is there."""
    text, sources = (ROOT / document).read_text(encoding="utf-8"), []
    for file, name in re.findall(r"`(?:(test[\w-]+\.(?:py|c)))?(?::\s+)?(test_\w+)?`", text):
        if file:
            sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
            assert sources, f"{document}: there is no tests/**/{file}"
        assert not name or any(f" {name}(" in source for source in sources), f"{document}: {name} is no test"
    for attack in re.findall(r"attack `([\w-]+)`", text):
        assert f'"{attack}"' in (ROOT / "tests/programs/hostile.c").read_text(), f"{document}: {attack} is no attack"


def plain_text(path):
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """As hosts of repositories make them; scripts/docs checks those of the site."""
    text = plain_text(path)
    made = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return [*made, *re.findall(r'<a id="([^"]+)">', text)]


def test_anchors(tmp_path):
    (tmp_path / "page.md").write_text('# A `key`: what, why\n```sh\n# no heading\n```\n<a id="e1"></a>\n## Two 2\n')
    assert anchors(tmp_path / "page.md") == ["a-key-what-why", "two-2", "e1"]


def test_site():
    """The site has every document, and each one once; its headings say for whom it is."""
    pages = re.findall(r"^ +- .*: (\S+\.md)$|^  - .*: (README\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = sorted(page or start for page, start in pages)
    assert pages == sorted([*(Path(d).name for d in DOCUMENTS if d != "README.md"), "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])


@pytest.mark.parametrize("document", ["README.md", "docs/README.md"])
def test_figures(document):
    """Each figure of the section that says when to use zerod stands in docs/benchmarks.md."""
    measured = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = (ROOT / document).read_text(encoding="utf-8").split("## When it is worth using\n")[1].split("## Look it up")[0]
    figures = re.findall(r"(\d[\d.]*) (?:ms|MiB|Mi|times)\b", section.split("\n## See")[0])
    assert len(figures) > 4 and all(re.search(rf"(?<![\d.]){re.escape(f)}(?![\d.]*\d)", measured) for f in figures), figures


def test_versions():
    """docs/compatibility.md names the versions that are tested, and those of everything that it promises something of."""
    def number(file, name):
        return re.search(rf"\b{name} = (\d+)", (ROOT / file).read_text())[1]

    said = {row[0]: row[1:] for row in rows_of("docs/compatibility.md", "What it works with")}
    listed = re.findall(r"([\w-]+)==([\d.]+)", "".join(re.findall(r"^ZEROD_(?:TORCH_MODULES|CALLERS|MORE_CALLERS)=\(.*\)$",
                                                                   (ROOT / "scripts/common.sh").read_text(), re.MULTILINE)))
    assert len(listed) > 5
    for name, version in listed:
        assert any(what.startswith(name) and tested.startswith(version) for what, (_, tested) in said.items()), (name, version)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={said["torch"][0].split(";")[0]}"' in project and f'requires-python = ">={said["Python"][0]}"' in project

    promised = {row[0]: row[1] for row in rows_of("docs/compatibility.md", "What a version number promises")}
    wire = number("core/wire/wire.h", "WIRE_VERSION")
    assert f"version {wire}." in promised["wire protocol (`proto/zerod.proto`)"]
    assert f"protocol, version {wire}." in (ROOT / "proto/zerod.proto").read_text()
    assert f"version {number('daemon/memory/journal.h', 'JOURNAL_VERSION')}." in promised["state that a daemon leaves to the next one (the journal)"]
    assert f"format {number('core/checkpoint/description.h', 'DESCRIPTION_FORMAT')};" in promised["checkpoints"]
    assert f"`schema_version` {number('core/wire/status.c', 'SCHEMA_VERSION')} " in promised["`zerodctl --json`"]

    version = re.search(r"version: '(.*?)'", (ROOT / "meson.build").read_text())[1]
    assert f'__version__ = "{version}"' in (ROOT / "client/python/zerod/__init__.py").read_text()
    assert (ROOT / "debian/changelog").read_text().startswith(f"zerod ({version}-")
    assert f"after {version.rsplit('.', 1)[0]}." in (ROOT / "docs/compatibility.md").read_text()


def test_index():
    """docs/README.md lists every document."""
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        name = Path(document).name
        assert name == "README.md" or f"]({name})" in index, f"docs/README.md does not list {name}"


def rows_of(document, heading):
    """The cells of the tables below a heading, without the tables' own headings."""
    section = (ROOT / document).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = section.splitlines()
    rows = [line for line, after in zip(lines, [*lines[1:], ""]) if line.startswith("| ") and not after.startswith("|---")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_settings_of_others():
    """docs/moving.md has a row for each argument of DDP and FSDP, in the torch that is here."""
    torch = pytest.importorskip("torch")
    from torch.distributed import fsdp

    def arguments(*kinds):
        names = {name for kind in kinds for name in inspect.signature(kind).parameters if not name.startswith("_")}
        return names - {"module", "self"}

    ddp = "".join(row[0] for row in rows_of("docs/moving.md", "From DDP"))
    missing = {name for name in arguments(torch.nn.parallel.DistributedDataParallel) if f"`{name}`" not in ddp}
    assert not missing, f"docs/moving.md, From DDP: {missing}"
    ours = "".join(row[0] for row in rows_of("docs/moving.md", "From FSDP"))
    names = arguments(fsdp.FullyShardedDataParallel, fsdp.fully_shard, fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy)
    names |= {member.name for kind in (fsdp.ShardingStrategy, fsdp.StateDictType) for member in kind if member.name[0] != "_"}
    missing = {name for name in names if not re.search(rf"\b{name}\b", ours)}
    assert not missing, f"docs/moving.md, From FSDP: {missing}"


def test_keys_of_ours():
    """What docs/moving.md writes as a setting is one: of the configuration, or of the package."""
    text = (ROOT / "docs/moving.md").read_text(encoding="utf-8")
    config = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for key in set(re.findall(r"`((?:zero_optimization|diagnostics|checkpoint)\.\w+)", text)):
        assert f"`{key}`" in config, f"{key} is no key"
    package = sources("client/python/zerod")
    for name in set(re.findall(r"\bzerod\.([a-zA-Z]\w+)\(|\bopt\.(\w+)\b", text)):
        name = name[0] or name[1]
        assert re.search(rf"\b(def|class) {name}\b|self\.{name}\b", package) or hasattr(__import__("torch").optim.Optimizer, name), name


def sources(*folders):
    """One text of all files of these folders: string literals that stand one after the other are one."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".c", ".h", ".txt")]
    return re.sub(r'"\s+f?"', "", "".join(path.read_text(encoding="utf-8") for path in files))


def test_errors_of_others(build):
    """docs/errors.md: each text was seen, and explain knows those that have a code, as that code."""
    seen = re.sub(r"\s+", " ", sources("tests/explain", "tests/systems/texts", "tests/client"))
    rows, ctl = rows_of("docs/errors.md", "Texts of DDP and DeepSpeed"), build.path("client/ctl/zerodctl")
    for text, _, where in rows:
        text = text.strip("`")
        for piece in re.split(r"\b\d+\b|lm_head\.weight", text):
            assert piece in seen, f"{text}: where is this from?"
        if code := re.search(r"\[(E\d+)\]", where):
            said = subprocess.run([ctl, "explain"], input=f"{text}\n", capture_output=True, text=True)
            assert said.stdout.startswith(f"{code[1]} "), f"{text}: {said.stdout}{said.stderr}"
    assert len(rows) > 8


def test_errors_of_zerod():
    """docs/errors.md: each text without a code is said somewhere, and those with a code are docs/diagnostics.md's."""
    said = sources("client", "core", "daemon")
    rows = rows_of("docs/errors.md", "Texts of zerod without a code")
    for text, _ in rows:
        for piece in text.strip("`").split("zerodrun -n N"):
            assert piece in said, f"nobody says {text}"
    assert len(rows) > 8
    ours = {re.sub(r"\W.*", "", code[1:]): [first, when] for first, code, when, _ in rows_of("docs/errors.md", "Texts of zerod with a code")}
    index = {re.sub(r"\W.*", "", code[1:]): row for code, *row in rows_of("docs/diagnostics.md", "Index")}
    assert ours == index


@pytest.mark.parametrize("document", ELSEWHERE)
def test_elsewhere(document):
    where = ELSEWHERE[document]
    assert not where.startswith("tests/") or document in (ROOT / where).read_text(), f"{where} does not read {document}"
    assert any(block.kind == "text" for block in blocks_of(document)), f"{document} has no such block any more"


def test_service(build, tmp_path):
    """docs/service.md, inside a private systemd in which zerod is installed already."""
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
        assert "zerod" in machine.run("id", "-nG", "alice").stdout.split()
    finally:
        machine.stop()


def fresh_copy(target):
    """The tree as a clone would have it: no build folders, nothing that is ignored."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.mark.full
@pytest.mark.alone
def test_newcomer(build, tmp_path):
    """In a fresh copy: scripts/quickstart, then the README from its first block to its last."""
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
