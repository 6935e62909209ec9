"""What a search for embeddings tests and how strongly."""

from __future__ import annotations

from pathlib import Path

from netweight.attacks.embedding_search.settings import FolderSearch
from netweight.data.images.pairs import check_pairs


def tested(settings: FolderSearch) -> list[tuple[str, str]]:
    """Return the images that are searched for, the searches, their limits and the criterion: names and values.

    Args:
        settings: Settings of the attack; the table of targets exists.
    """
    search = settings.search
    targets = _pairs(settings.targets)
    controls = f"{_pairs(settings.controls)} as controls" if settings.controls is not None else (
        "each turned and recolored as its control"
    )  # fmt: skip
    each = len(search.starts) * len(search.every_rate) * search.restarts
    rates = ", ".join(f"{rate:g}" for rate in search.every_rate)
    stops = ", or fewer, because a search stops at its first success" if search.first else ""
    measure = "centered pixels" if settings.sscd is None else "SSCD"
    rows = [
        ("memorized images", f"{targets}, {controls}"),
        ("searches for each image in each pipeline",
         f"{each * settings.seeds}{stops}: starting points ({len(search.starts)}) times learning rates "
         f"({len(search.every_rate)}) times restarts ({search.restarts}) times seeds ({settings.seeds})"),
        ("starting points", ", ".join(search.starts)),
        ("learning rates", rates),
        ("most steps of a search", f"{search.steps:,}"),
        ("largest change of an embedding", "unbounded" if search.radius is None else f"{search.radius:g} of its norm"),
        ("an image counts as recovered",
         f"{search.needed} of {search.images} images with a similarity ({measure}) of at least {search.threshold:g}"),
        ("guidance scales of compared images", ", ".join(f"{scale:g}" for scale in search.every_guidance)),
    ]  # fmt: skip
    if settings.least_resistance is not None:
        rows.append(("target", f"at least {settings.least_resistance:g} times the steps of the edited pipeline"))
    return rows


def _pairs(table: Path) -> int:
    """Return the number of different pairs in a table."""
    return len({(str(row.values["prompt"]), str(row.values["image"])) for row in check_pairs(table).rows})
