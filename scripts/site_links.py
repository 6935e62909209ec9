"""What the site needs beside mkdocs: links of pages to files outside docs/, and a place for every page.

Links to files of the repository are checked, and shown as the path, since a site has no such page; within the
repository they lead to the files. Pages that mkdocs.yml does not name come last. Called by mkdocs, which is told so in
mkdocs.yml.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # programs of figures, among others, whose files may not exist yet
log = logging.getLogger("mkdocs.hooks.site_links")  # mkdocs counts what is logged under its name


def outside_links(text: str, folder: Path) -> list[str]:
    """Find links that leave the documentation and lead nowhere.

    Args:
        text: A page, Markdown.
        folder: The folder that it lies in.

    Returns:
        The targets that do not exist, in their order.
    """
    return [target for _, target, _ in LINK.findall(COMMENT.sub("", text)) if not (folder / target).exists()]


def named(nav: Any) -> set[str]:
    """Collect the pages that a navigation names, at any depth.

    Args:
        nav: Texts, lists and mappings, as YAML gives them.

    Returns:
        Paths relative to the folder of the documentation.
    """
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return {page for part in parts for page in named(part)}


def on_config(config: Any) -> Any:
    """Put pages that the navigation does not name at its end, so that none is lost."""
    pages = {path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")}
    if left := sorted(pages - named(config.nav)):
        config.nav.append({"More": left})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replace links to files of the repository by their text and path; warn of those that do not exist."""
    folder = Path(page.file.abs_src_path).parent
    for target in outside_links(markdown, folder):
        log.warning("%s links to %s, which does not exist", page.file.src_path, target)
    return LINK.sub(lambda found: f"{found[1]} (`{found[2].removeprefix('../')}`)", markdown)
