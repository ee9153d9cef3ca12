"""Hooks of MkDocs: a page may link to any file of the project, which then is part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
#: Documents beside docs/ -> their pages on the site.
DOCUMENTS = {
    "README.md": "index.md",
    "DESIGN.md": "developers/design.md",
    "CONTRIBUTING.md": "developers/contributing.md",
    "CHANGELOG.md": "changelog.md",
    "REFUSALS.md": "reference/refusals.md",
    "calibration/README.md": "developers/eight-gpus.md",
    "calibration/results/README.md": "developers/own-runs.md",
}
LINK = re.compile(r"(?<!\\)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the documents, and every file that a page links to."""
    for source, page in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    pages = list(files.documentation_pages())
    for page in pages:  # which grows, as pages that are linked to have links as well
        for match in LINK.finditer(page.content_string):
            target = _target(page.src_uri, match[1])
            if target is None or target in DOCUMENTS or target.startswith("docs/"):
                continue
            name = f"project/{target}"
            if (ROOT / target).is_file() and files.get_file_from_path(name) is None:
                file = File.generated(config, name, abs_src_path=str(ROOT / target))
                files.append(file)
                if file.is_documentation_page():
                    pages.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where things are on the site; folders, which a site cannot show, become plain text."""

    def link(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1])
        if target is None:
            return match[0]
        if not (ROOT / target).exists():
            raise PluginError(f"{page.file.src_uri} links to {match[1]}, which is not there")
        return f"]({_link(page.file.src_uri, target)}{match[2] or ''})"

    folders = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)")
    markdown = folders.sub(lambda match: match[1] if _is_folder(page.file.src_uri, match[2]) else match[0], markdown)
    return LINK.sub(link, markdown)


def _is_folder(page: str, link: str) -> bool:
    target = _target(page, link)
    return target is not None and (ROOT / target).is_dir()


def _target(page: str, link: str) -> str | None:
    """Return what a link of ``page`` leads to as a path in the project; None where it leads elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    sources = {name: source for source, name in DOCUMENTS.items()}
    source = page.removeprefix("project/") if page.startswith("project/") else sources.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _link(page: str, target: str) -> str:
    """Return the link from ``page`` to the file ``target`` of the project, as the site has it."""
    if target in DOCUMENTS:
        place = DOCUMENTS[target]
    else:
        place = target.removeprefix("docs/") if target.startswith("docs/") else f"project/{target}"
    return posixpath.relpath(place, posixpath.dirname(page) or ".")
