"""Links of the pages in docs/ to files outside docs/: checked, and shown as the path, since a site has no such page.

Called by mkdocs, which is told so in mkdocs.yml. Within the repository the same links lead to the files.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.site_links")  # mkdocs counts what is logged under its name


def outside_links(text: str, folder: Path) -> list[str]:
    """Find links that leave the documentation and lead nowhere.

    Args:
        text: A page, Markdown.
        folder: The folder that it lies in.

    Returns:
        The targets that do not exist, in their order.
    """
    return [target for _, target, _ in LINK.findall(text) if not (folder / target).exists()]


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replace links to files of the repository by their text and path; warn of those that do not exist."""
    folder = Path(page.file.abs_src_path).parent
    for target in outside_links(markdown, folder):
        log.warning("%s links to %s, which does not exist", page.file.src_path, target)
    return LINK.sub(lambda found: f"{found[1]} (`{found[2].removeprefix('../')}`)", markdown)
