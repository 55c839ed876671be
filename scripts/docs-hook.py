# SPDX-License-Identifier: Apache-2.0
"""For mkdocs (mkdocs.yml): pages that lie beside docs/, and the proof that the site loads nothing from elsewhere."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# What a browser fetches by itself: not links, which it follows when somebody clicks.
LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>
    |<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^>]*>
    |(?:@import|url\()\s*["']?(?:https?:)?//[^)]*""", re.VERBOSE)  # fmt: skip


def on_files(files, config):
    root = Path(config.docs_dir).parent
    for name in BESIDE:
        files.append(File.generated(config, name, content=(root / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links between docs/ and the pages beside it; the text alone of a link to a file of the repository that is no page."""
    docs = Path(config.docs_dir)
    folder = docs.parent if page.file.src_uri in BESIDE else docs

    def place(match):
        text, target, anchor = match[1], (folder / match[2]).resolve(), match[3] or ""
        if target.is_relative_to(docs):
            return f"[{text}]({target.relative_to(docs)}{anchor})"
        if target.parent == docs.parent and target.name in BESIDE:
            return f"[{text}]({target.name}{anchor})"
        return text if target.exists() else match[0]

    return LINK.sub(place, markdown)


def on_post_build(config):
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := LOADED.search(path.read_text(encoding="utf-8"))):
            raise PluginError(f"{path} loads something from elsewhere: {found[0]}")
