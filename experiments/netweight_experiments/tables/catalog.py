"""Everything that the five papers show as a table or a figure, and how far it can be measured here.

The list is what `netweight reproduce --list` prints. What is registered can be run; for the rest the catalog says why
it cannot be. Titles are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from netweight_experiments.tables.published import published, published_ids
from netweight_experiments.tables.registry import registered, unmet

State: TypeAlias = Literal["reproduced here", "small stand-in", "needs data, GPU or package", "cannot be"]

# Beginning of an id → the paper.
PAPERS = {
    "neuzip": "NeuZip (arXiv 2410.20650)",
    "hyperfl": "HyperFL (arXiv 2412.07187)",
    "repnoise": "RepNoise (arXiv 2405.14577)",
    "nemo": "NeMo (arXiv 2406.02366)",
    "w2w": "weights2weights (arXiv 2406.09413)",
}

_OTHERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("unpublished.yaml").read_text(encoding="utf-8"))
_TITLES: dict[str, str] = _OTHERS["tables"] | _OTHERS["figures"]
_TABLES, _UNSEEN = list(_OTHERS["tables"]), _OTHERS["unseen"]
_CANNOT = {
    **dict.fromkeys(_OTHERS["drawings"], "a drawing of the idea; it shows no measurement"),
    **dict.fromkeys(
        _UNSEEN, "neither its numbers nor what it measures are in the summaries that this work was made from"
    ),
    **_OTHERS["studies"],
}


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper."""

    id: str  # its name here
    paper: str  # the paper it belongs to
    title: str  # what it shows
    state: State  # how far it is measured
    reason: str  # what is missing, why it cannot be, or what the small scale lacks; may be empty
    numbers: bool  # whether published numbers are at hand
    command: str  # what measures it at its largest scale here or elsewhere; empty where nothing does


def items() -> tuple[Item, ...]:
    """Return every table and figure of the five papers, in the papers' order, with its state."""
    numbered = dict.fromkeys(published_ids())
    everything = [*numbered, *_TABLES, *_UNSEEN, *_OTHERS["figures"]]
    everything += [table_id for table_id in registered() if table_id not in everything]
    return tuple(
        Item(table_id, paper, title_of(table_id), *_state(table_id), table_id in numbered, _command(table_id))
        for prefix, paper in PAPERS.items()
        for table_id in everything
        if table_id.startswith(f"{prefix}-")
    )


def title_of(table_id: str) -> str:
    """Return what a table or figure shows; its id where the catalog has no title."""
    numbers = published(table_id)
    if numbers is not None:
        return numbers.title
    if table_id in _UNSEEN:
        return "A table of the appendix that is not at hand"
    return _TITLES.get(table_id, table_id)


def _state(table_id: str) -> tuple[State, str]:
    entry = registered().get(table_id)
    if entry is None:
        return "cannot be", _CANNOT.get(table_id, "no function of this version measures it")
    missing = "; ".join(unmet(entry.needs))
    if missing:
        return "needs data, GPU or package", missing
    at_size = f"paper scale needs {' and '.join(entry.paper_needs)}" if entry.paper_needs else ""
    return ("small stand-in" if entry.stand_in else "reproduced here"), at_size


_PLACEHOLDERS = {"model": "--model FOLDER", "judge": "--judge MODULE:FUNCTION", "recipe": "--recipe FILE"}


def _command(table_id: str) -> str:
    """What to type where everything that it needs is there."""
    entry = registered().get(table_id)
    if entry is None:
        return ""
    data = "NETWEIGHT_DATA=FOLDER " if any(need.startswith("data:") for need in entry.needs) else ""
    if not entry.paper_needs:
        return f"{data}netweight reproduce {table_id}"
    options = "".join(f" {_PLACEHOLDERS[option]}" for option in entry.options if option in _PLACEHOLDERS)
    return f"{data}netweight reproduce {table_id} --scale paper{options}"
