# SPDX-License-Identifier: Apache-2.0
"""
Each page of docs/zh/ has the contents of its English page, as far as a test can compare them. test_pages.py checks
links and names.
"""

import os
import re
from itertools import zip_longest
from pathlib import Path

import pytest
from conftest import ROOT
from documents import CHINESE, links, read, without_blocks


def english_of(chinese):
    return "README.md" if Path(chinese).name == "README.md" else f"docs/{Path(chinese).name}"


ENGLISH = [english_of(chinese) for chinese in CHINESE]


def blocks(text):
    """Return: the parts that must be equal word for word, in order: fenced and indented blocks, and quoted messages."""
    return re.findall(r"^```[\s\S]*?^```$|(?<=\n\n) {4}.*(?:\n {4}.*)*|^> .*(?:\n> .*)*", text, re.MULTILINE)


def shape(text):
    """Return: the marks of headings, tables with their cells, and list items, in order."""
    return re.findall(r"^(?:#+ |\||[*-] )| \|(?= |$)", without_blocks(text), re.MULTILINE)


def leads_to(page, link):
    """Return: the link's target as (path from the repository's root, anchor)."""
    path, _, anchor = link.partition("#")
    return os.path.relpath((ROOT / page).parent / path if path else ROOT / page, ROOT), anchor


def facts(page, text):
    """
    Return: the parts of sentences that all languages share: code, figures, codes of diagnostics, and link targets.
    """
    text = re.sub(r"^\[(?:中文|English)\].*|^> .*|^ {4}.*", "", without_blocks(text), flags=re.MULTILINE)
    text = re.sub(r"\s+", " ", text)
    code = re.findall(r"`[^`]+`", text)
    words = re.sub(r"`[^`]+`|\]\([^)]*\)|<a id=.*?>", " ", text)
    figures = re.findall(r"(?<![\w.])[A-Z]?\d+(?:\.\d+)*(?:e-?\d+)?", words)
    to = [leads_to(page, link) for link in links(text)]
    to = [f"a link to {english_of(path) if path in CHINESE else path}#{anchor}" for path, anchor in to]
    return {*code, *figures, *to}


def differences(page, text):
    """Return: the differences between this text of a Chinese page and the English page, except for sentences."""
    original = read(english_of(page))
    pairs = enumerate(zip_longest(blocks(text), blocks(original)))
    found = [f"block {n}: {here!r} is not {there!r}" for n, (here, there) in pairs if here != there]
    if shape(text) != shape(original):
        found.append("headings, tables and lists are not the same")
    here, there, words = facts(page, text), facts(english_of(page), original), re.sub(r"\s+", " ", original)
    found += [f"missing: {fact}" for fact in sorted(there - here)]
    return found + [f"not in English: {fact}" for fact in sorted(here - there) if fact.strip("`") not in words]


@pytest.mark.quick
@pytest.mark.parametrize("page", CHINESE)
def test_same(page):
    assert differences(page, read(page)) == []


@pytest.mark.quick
@pytest.mark.parametrize("page", CHINESE)
def test_each_leads_to_the_other(page):
    """
    The third line of each page links to its page in the other language. Other links of a Chinese page lead to Chinese
    pages if they exist.
    """
    english = english_of(page)
    for this, other, name in (page, english, "English"), (english, page, "中文"):
        assert read(this).splitlines()[2] == f"[{name}]({os.path.relpath(ROOT / other, (ROOT / this).parent)})"
    for target in links(read(page))[1:]:
        assert leads_to(page, target)[0] not in ENGLISH, f"{page}: {target} is there in Chinese, too"


@pytest.mark.quick
def test_changes_are_noticed():
    """A change of any block or other compared part is detected."""
    def notices(page, old, new):
        assert old in read(page) and differences(page, read(page).replace(old, new)), f"{page}: {old}"

    page = "docs/zh/trainer.md"
    all_blocks = blocks(read(page))
    assert len(all_blocks) > 5
    for block in all_blocks:
        notices(page, block, f"{block[:-5]}?{block[-5:]}")
        notices(page, f"{block}\n", "")
        notices(page, block, f"{block}\n\n{block}")
    notices(page, f"\n{all_blocks[0]}\n", f"\n{all_blocks[1]}\n")
    notices(page, "../checkpoints.md", "../trace.md")
    notices(page, "E1107", "E1108")
    notices(page, "`persist: off`", "`persist: on`")
    notices(page, "| `zerodctl status`", "| | `zerodctl status`")
    notices("docs/zh/faults.md", "#the-rows", "")
    notices("docs/zh/faults.md", "8.73e-7", "8.74e-7")
    notices("docs/zh/error-prior-iteration.md", "390 391", "391 390")
