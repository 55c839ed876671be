# SPDX-License-Identifier: Apache-2.0
"""
The text of documents outside of their blocks (test_docs.py): links, names, and tables that repeat facts of other files.
"""

import inspect
import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from documents import BESIDE, CHINESE, DOCUMENTS, OTHERS, anchors, links, read, rows_of, section_of, sources, without_blocks


@pytest.mark.quick
@pytest.mark.parametrize("document", [*DOCUMENTS, *CHINESE, *BESIDE, *OTHERS])
def test_links(document):
    """Links lead to an existing file of the repository, and to an existing heading."""
    for target in links(read(document)):
        assert ":" not in target, f"{document}: {target}: nobody checks what lies elsewhere"
        path, _, anchor = target.partition("#")
        linked = (ROOT / document).parent / path if path else ROOT / document
        assert linked.exists(), f"{document}: {target} is not there"
        assert not anchor or anchor in anchors(read(linked)), f"{document}: {target}: no such heading"


@pytest.mark.quick
def test_anchors():
    text = '# A `key`: what, why\n```sh\n# no heading\n```\n<a id="e1"></a>\n## Two 2\n'
    assert anchors(text) == ["a-key-what-why", "two-2", "e1"]


@pytest.mark.parametrize("document", [*DOCUMENTS, *CHINESE, *BESIDE])
def test_names(document):
    """Named files exist."""
    text = without_blocks(read(document))
    folders = "scripts|config|docs|client|daemon|tests|proto|man|kernels|bench"
    for name in re.findall(rf"`((?:{folders})/[\w./@-]*)`", text):
        assert (ROOT / name).exists() or (ROOT / f"{name}.in").exists(), f"{document}: {name} is not there"
    for script in re.findall(r"(?<![\w/])scripts/[a-z][a-z-]*\b(?!\.)", text):
        assert os.access(ROOT / script, os.X_OK), f"{document}: {script} is no program"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_are_named(document):
    """A test that a document names as `test_file.py: test_name` (or `test_name` in the file named before) exists."""
    text, tests = read(document), []
    for file, name in re.findall(r"`(?:(test[\w-]+\.(?:py|c)))?(?::\s+)?(test_\w+)?`", text):
        if file:
            tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
            assert tests, f"{document}: there is no tests/**/{file}"
        assert not name or any(f" {name}(" in test for test in tests), f"{document}: {name} is no test"
    for attack in re.findall(r"attack `([\w-]+)`", text):
        assert f'"{attack}"' in read("tests/programs/hostile.c"), f"{document}: {attack} is no attack"


# ---- the site ----------------------------------------------------------------------------------------------


def test_index():
    """docs/README.md lists every document."""
    for name in (Path(document).name for document in DOCUMENTS):
        assert name == "README.md" or f"]({name})" in read("docs/README.md"), f"docs/README.md does not list {name}"


def test_site():
    """The site has every document, and each one once."""
    pages = re.findall(r"^ +- .*: (\S+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(pages) == sorted([*(document.removeprefix("docs/") for document in DOCUMENTS[1:] + CHINESE), *BESIDE])


# ---- tables that repeat facts of other files ---------------------------------------------------------------


@pytest.mark.parametrize("document", ["README.md", "docs/README.md"])
def test_figures(document):
    """Each figure of the section about when to use zerod is in docs/benchmarks.md or its tables."""
    text = section_of(document, "When it is worth using")
    if document == "docs/README.md":
        text += section_of(document, "When it is not")
    measured = read("docs/benchmarks.md") + read("docs/benchmark-tables.md")
    figures = re.findall(r"(\d[\d.]*) (?:ms|MiB|Mi)\b", text)
    assert len(figures) > 4
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", measured), figure


def test_versions_that_are_tested():
    """docs/compatibility.md has the versions of scripts/common.sh and pyproject.toml."""
    said = {row[0]: row[1:] for row in rows_of("docs/compatibility.md", "What it works with")}
    lists = re.findall(r"^ZEROD_(?:TORCH_MODULES|CALLERS|MORE_CALLERS)=.*", read("scripts/common.sh"), re.MULTILINE)
    listed = re.findall(r"([\w-]+)==([\d.]+)", "".join(lists))
    assert len(listed) > 5
    for name, version in listed:
        [tested] = [tested for what, (_, tested) in said.items() if what.split(" ")[0] == name]
        assert tested.startswith(version), f"{name}: {version} is tested"
    others = re.search(r"^ZEROD_OTHER_TRANSFORMERS=\((.*)\)$", read("scripts/common.sh"), re.MULTILINE)[1].split()
    assert said["transformers"][1].endswith(f"; the Trainer also with {', '.join(others)}")
    torches = re.search(r"^ZEROD_OTHER_TORCHES=\((.*)\)$", read("scripts/common.sh"), re.MULTILINE)[1].split()
    assert f"; compiled models also with {', '.join(torches)};" in said["torch"][1]
    modules = re.search(r"^ZEROD_TIMM_MODULES=\((.*)\)$", read("scripts/common.sh"), re.MULTILINE)[1].split()
    of_timm = dict(module.split("==") for module in modules)
    assert said[f"timm, with torchvision {of_timm['torchvision']}"][1] == of_timm["timm"]
    assert f"; {of_timm['torch']} with timm;" in said["torch"][1]
    project = read("pyproject.toml")
    assert f'"torch>={said["torch"][0].split(";")[0]}"' in project
    assert f'requires-python = ">={said["Python"][0]}"' in project


def test_versions_that_are_promised():
    """docs/compatibility.md has the current versions of protocols and formats, and its examples are of this series."""
    def number(file, name):
        return re.search(rf"\b{name} = (\d+)", read(file))[1]

    rows = rows_of("docs/compatibility.md", "What a version number promises")
    promised = {row[0].split(" ")[0]: row[1] for row in rows}
    wire = number("core/wire/wire.h", "WIRE_VERSION")
    assert f"version {wire}." in promised["wire"] and f"protocol, version {wire}." in read("proto/zerod.proto")
    assert f"version {number('daemon/memory/journal.h', 'JOURNAL_VERSION')}." in promised["state"]
    assert f"format {number('core/checkpoint/description.h', 'DESCRIPTION_FORMAT')};" in promised["checkpoints"]
    assert f"`schema_version` {number('core/wire/status.c', 'SCHEMA_VERSION')} " in promised["`zerodctl"]

    version = re.search(r"version: '(.*?)'", read("meson.build"))[1]
    assert f'__version__ = "{version}"' in read("client/python/zerod/__init__.py")
    assert read("debian/changelog").startswith(f"zerod ({version}-")
    assert f"after {version.rsplit('.', 1)[0]}." in read("docs/compatibility.md")


def test_settings_of_others():
    """docs/moving.md has a row for each argument of DDP and FSDP in the installed torch."""
    torch = pytest.importorskip("torch")
    from torch.distributed import fsdp

    def arguments(*kinds):
        names = {name for kind in kinds for name in inspect.signature(kind).parameters}
        return {name for name in names - {"module", "self"} if name[0] != "_"}

    def check(heading, names):
        said = " ".join(row[0] for row in rows_of("docs/moving.md", heading))
        missing = {name for name in names if not re.search(rf"\b{name}\b", said)}
        assert not missing, f"docs/moving.md, {heading}: {missing}"

    kinds = fsdp.FullyShardedDataParallel, fsdp.fully_shard, fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy
    values = {member.name for kind in (fsdp.ShardingStrategy, fsdp.StateDictType) for member in kind}
    check("From DDP", arguments(torch.nn.parallel.DistributedDataParallel))
    check("From FSDP", arguments(*kinds) | {name for name in values if name[0] != "_"})


def test_settings_of_ours():
    """Settings that docs/moving.md names exist in the configuration or in the package."""
    torch = pytest.importorskip("torch")
    text, config, package = read("docs/moving.md"), read("docs/configuration.md"), sources("client/python/zerod")
    for key in set(re.findall(r"`((?:zero_optimization|diagnostics|checkpoint)\.\w+)", text)):
        assert f"`{key}`" in config, f"{key} is no key"
    for name in set(re.findall(r"\b(?:zerod\.(?=\w+\()|opt\.)([a-zA-Z]\w+)", text)):
        made = re.search(rf"\b(?:def|class) {name}\b|self\.{name}\b", package)
        assert made or hasattr(torch.optim.Optimizer, name), f"{name} is nothing of zerod's"


def test_errors_of_others(build):
    """
    docs/errors.md: a test or a report contains each foreign text, and explain gives each text with a code that code.
    """
    seen = re.sub(r"\s+", " ", sources("tests/explain", "tests/systems/texts", "tests/client"))
    rows, ctl = rows_of("docs/errors.md", "Texts of DDP and DeepSpeed"), build.path("client/ctl/zerodctl")
    assert len(rows) > 8
    for text, _, where in rows:
        text = text.strip("`")
        for piece in re.split(r"\b\d+\b|lm_head\.weight", text):
            assert piece in seen, f"{text}: where is this from?"
        if code := re.search(r"\[(E\d+)\]", where):
            said = subprocess.run([ctl, "explain"], input=f"{text}\n", capture_output=True, text=True)
            assert said.stdout.startswith(f"{code[1]} "), f"{text}: {said.stdout}{said.stderr}"


def test_errors_of_zerod():
    """docs/errors.md: the source contains each text without a code, and docs/diagnostics.md each text with a code."""
    said = sources("client", "core", "daemon")
    rows = rows_of("docs/errors.md", "Texts of zerod without a code")
    assert len(rows) > 8
    for text, _ in rows:
        for piece in text.strip("`").split("zerodrun -n N"):
            assert piece in said, f"nobody says {text}"

    def code_of(cell):
        return re.match(r"\[(E\d+)\]", cell)[1]

    rows = rows_of("docs/errors.md", "Texts of zerod with a code")
    ours = {code_of(code): [first, when] for first, code, when, _ in rows}
    assert ours == {code_of(code): row for code, *row in rows_of("docs/diagnostics.md", "Index")}
