# SPDX-License-Identifier: Apache-2.0
"""The documents of the repository, and functions that read them."""

import re

from conftest import ROOT

DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
# The Chinese documents: docs/zh/README.md is the README, docs/zh/faults.md is docs/faults.md.
CHINESE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/zh").glob("*.md"))
# Documents outside docs/ that are pages of the site too.
BESIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
OTHERS = ["client/python/README.md", "tests/README.md", "tests/golden/README.md", "tests/systems/FINDINGS.md"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(text))


def section_of(document, heading):
    return read(document).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows_of(document, heading):
    """The cells of the tables below a heading, without the tables' own headings."""
    lines = section_of(document, heading).splitlines()
    rows = [line for line, after in zip(lines, [*lines[1:], ""]) if line[:2] == "| " and after[:4] != "|---"]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def anchors(text):
    """
    Return: the anchors of a text as hosts of repositories generate them. scripts/docs checks the anchors of the site.
    """
    headings = re.findall(r"^#+ (.*)", without_blocks(text), re.MULTILINE)
    made = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return [*made, *re.findall(r'<a id="([^"]+)">', text)]


def sources(*folders):
    """Return: the text of all source files in these folders. Adjacent string literals are joined."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".c", ".h", ".txt")]
    return re.sub(r'"\s+f?"', "", "".join(texts))
