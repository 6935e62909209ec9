"""Files that a treatment of a model folder copies unchanged: licence, README, tokenizer and all others beside weights.

`save_pretrained` writes weights and configuration alone. Whoever publishes the result also owes the author's licence
and card, and its users need the tokenizer, the chat template and custom code exactly as they were.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.core.bounded_json import read_json
from netweight.core.linked_folders import files_below
from netweight.core.progress import silent_bars
from netweight.core.weight_endings import WEIGHTS
from netweight.report.card_sections import CARD, without_other_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Endings of files with weights and of their indexes, which a treatment writes anew.
_REPLACED = (*WEIGHTS, ".index.json")
# Reports about the source, which say nothing of what a treatment made of it.
_REPORTS = ("-report", "-reports", "attacks")
_GENERATION = "generation_config.json"
_PATH_KEYS = ("_name_or_path", "name_or_path", "tokenizer_file", "_model_name_or_path")


def carry_over(source: str | Path, target: str | Path) -> list[str]:
    """Copy the files of a model folder that a treatment does not write, and take paths of this disk out of the rest.

    Files that the target holds already are left alone, except tokenizer files, which are those of the source to the
    byte. Weights, hidden files, and folders of reports about the source are not copied, nor is evidence about the
    source's weights in its card.

    Args:
        source: The model folder that was treated.
        target: The folder with the treated weights and their configuration.

    Returns:
        The copied files, relative to the target, in alphabetical order.
    """
    source, target = Path(source), Path(target)
    copied: list[str] = []
    for file in sorted(files_below(source)):
        inside = file.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        report = any(part.endswith(_REPORTS) for part in inside.parts[:-1])
        if hidden or report or file.name.lower().endswith(_REPLACED):
            continue
        place = target / inside
        if place.exists() and not _of_tokenizer(file.name):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
        copied.append(inside.as_posix())
    remove_evidence(target)
    for name in ("config.json", _GENERATION, "tokenizer_config.json"):
        _without_paths(target / name)
    return copied


def save_weights(network: PreTrainedModel, source: str | Path, target: str | Path) -> None:
    """Write the weights of a treated model and its configuration, and copy how the source generates.

    Libraries open many a generation_config.json that they refuse to write again, such as one with a temperature and no
    sampling. A treatment does not change how a model generates, so the file is copied and not written.

    Args:
        network: The treated model.
        source: The folder that it was opened from.
        target: The folder that is written.
    """
    source, target = Path(source), Path(target)
    stated = source / _GENERATION
    own = network.generation_config
    if stated.is_file():
        network.generation_config = type(own)()
    try:
        with silent_bars():
            network.save_pretrained(target)
    finally:
        network.generation_config = own
    if stated.is_file():
        shutil.copyfile(stated, target / _GENERATION)


def remove_evidence(target: Path) -> None:
    """Remove from a card what netweight tested before a treatment changed the weights, with the verdict on it."""
    card = target / CARD
    if not card.is_file():
        return
    before = card.read_text(encoding="utf-8", errors="surrogateescape")
    after = without_other_weights(before, None)
    if after != before:
        card.write_text(after, encoding="utf-8", errors="surrogateescape")


def _of_tokenizer(name: str) -> bool:
    return name.startswith(("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template"))


def _without_paths(file: Path) -> None:
    """Remove entries that name a path of this disk."""
    if not file.exists():
        return
    values = read_json(file)
    paths = [key for key in _PATH_KEYS if _is_path(values.get(key))]
    if paths:
        remaining = {key: value for key, value in values.items() if key not in paths}
        file.write_text(json.dumps(remaining, indent=2, ensure_ascii=False) + "\n")


def _is_path(value: object) -> bool:
    """Return True if a text is a path of a disk and not an id of a hub, such as "author/model"."""
    if not isinstance(value, str) or not value:
        return False
    return value.startswith(("/", ".", "~", "\\")) or value[1:3] in (":\\", ":/") or Path(value).is_absolute()
