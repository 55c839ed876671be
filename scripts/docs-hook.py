# SPDX-License-Identifier: Apache-2.0
"""
For mkdocs (mkdocs.yml): adds the pages outside docs/ and the two languages, and checks that the site loads nothing from
other servers.
"""

import os
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
CHINESE = "zh/"
LANGUAGES = re.compile(r'<a href="([^"]+)" hreflang=')
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# URLs that a browser loads by itself. Links are not among them, because a browser loads a link only after a click.
LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>
    |<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^>]*>
    |(?:@import|url\()\s*["']?(?:https?:)?//[^)]*""", re.VERBOSE)  # fmt: skip


def on_files(files, config):
    root = Path(config.docs_dir).parent
    for name in BESIDE:
        files.append(File.generated(config, name, content=(root / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """
    Rewrites links between docs/ and the pages outside it. A link to another file of the repository becomes plain text.
    """
    docs, uri = Path(config.docs_dir), page.file.src_uri
    folder = ((docs.parent if uri in BESIDE else docs) / uri).parent

    def place(match):
        text, target, anchor = match[1], (folder / match[2]).resolve(), match[3] or ""
        if target == docs.parent / "README.md":
            name = "README.md"  # the site begins with docs/README.md
        elif target.is_relative_to(docs):
            name = target.relative_to(docs)
        elif target.parent == docs.parent and target.name in BESIDE:
            name = target.name
        else:
            return text if target.exists() else match[0]
        return f"[{text}]({os.path.relpath(name, Path(uri).parent)}{anchor})"

    return LINK.sub(place, markdown)


def on_page_context(context, page, config, nav):
    """Sets the theme to the page's language. The menu of languages links to the same page in the other language."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith(CHINESE) else "en"
    both = (Path(config.docs_dir) / CHINESE / page.file.src_uri.removeprefix(CHINESE)).exists()
    for choice in config.extra["alternate"]:
        folder = CHINESE if choice["lang"] == "zh" else ""
        choice["link"] = folder + (page.url.removeprefix(CHINESE) if both else "index.html")


def on_post_build(config):
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        text = path.read_text(encoding="utf-8")
        if found := LOADED.search(text):
            raise PluginError(f"{path} loads something from elsewhere: {found[0]}")
        for link in LANGUAGES.findall(text):
            if not (site / link[1:] if link[0] == "/" else path.parent / link).exists():
                raise PluginError(f"{path}: the menu of languages leads to {link}, which is not there")
