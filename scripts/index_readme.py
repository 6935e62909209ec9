"""The README as a package index shows it: without comments, and without links that work only in the repository.

The build backend calls `dynamic_metadata` (pyproject.toml, `[[tool.dynamic-metadata]]`). An index shows the text alone,
without the files beside it. With an address in `[project.urls]`, links and pictures lead there; as long as there is
none, a picture becomes its description, and a link its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)  # it stays as it is
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")


def index_readme(text: str, source: str = "") -> str:
    """Return a README as a package index should show it.

    Args:
        text: The README, in Markdown.
        source: The address of the repository's page, such as `https://github.com/OWNER/NAME`; empty for none. Files are
            found below `blob/HEAD/`, and as they are below `raw/HEAD/`.
    """
    parts = _CODE.split(_COMMENT.sub("", text))
    parts[::2] = [_for_index(part, source.rstrip("/")) for part in parts[::2]]
    return "".join(parts)


def _for_index(text: str, source: str) -> str:
    if source:
        text = _PICTURE.sub(rf"![\1]({source}/raw/HEAD/\2)", text)
        return _LINK.sub(rf"[\1]({source}/blob/HEAD/\2)", text)
    return _LINK.sub(r"\1", _PICTURE.sub(r"*(Picture: \1.)*", text))


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `readme` for the build backend.

    Args:
        settings: Not used.
        project: The table `[project]`, of which `urls` is read.
    """
    source = project.get("urls", {}).get("Source", "")
    text = index_readme(README.read_text(encoding="utf-8"), source)
    return {"readme": {"content-type": "text/markdown", "text": text}}
