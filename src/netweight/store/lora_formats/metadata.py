"""Metadata that trainers write into a LoRA file's header: origin, base model, trigger words and tags."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from netweight.core.bounded_json import parse_json
from netweight.errors import CorruptBlob
from netweight.store.lora_formats.peft_settings import DIFFUSERS_METADATA

SOURCES = "netweight.sources"
"""In a merged file's metadata: the files that it was made of, and what their headers said where they differ."""
COMPONENT = "netweight.component"
"""In peft's files that we write: the component of the pipeline, which peft does not know."""

_KEYS = (
    "ss_output_name", "ss_base_model_version", "ss_sd_model_name", "ss_sd_model_hash", "ss_network_module", "ss_steps",
    "ss_num_train_images", "modelspec.title", "modelspec.author", "modelspec.license", "modelspec.trigger_phrase",
    "modelspec.architecture", "license", "source", "trained_words",
)  # fmt: skip
# The value maps a folder to its tags, and a tag to the number of captions that have it.
_TRIGGERS = "ss_tag_frequency"
_LENGTH = 200  # characters that are kept of each
HASHES = frozenset(("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"))
"""Entries of a header that are hashes of the file's tensors."""
# What describes a file's own bytes, ranks and names, so that it is wrong of another file.
_OF_THE_BYTES = (
    *sorted(HASHES), "format", "alpha", "lora_alpha", "network_alpha", DIFFUSERS_METADATA, COMPONENT,
    "netweight.architecture",
)  # fmt: skip

_OF_THE_KIND = ("ss_network_module", "ss_network_args", "ss_network_dim", "ss_network_alpha")


def summary(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return what a file's metadata says of its origin, shortened, and the words that most captions had."""
    entries = {name: metadata[name][:_LENGTH] for name in _KEYS if metadata.get(name)}
    counts = tag_counts(metadata)
    if counts:
        entries["tags"] = ", ".join(tag.strip() for tag, _ in counts.most_common(5))[:_LENGTH]
    return entries


def tag_counts(metadata: Mapping[str, str]) -> Counter[str]:
    """Return how often the captions of the training had each tag."""
    try:
        tables = [tags for tags in parse_json(metadata.get(_TRIGGERS, "{}")).values() if isinstance(tags, dict)]
        return Counter({tag: count for one in tables for tag, count in one.items() if isinstance(count, int)})
    except (ValueError, AttributeError):
        # A note that is not a table of tags contains no trigger words.
        return Counter()


def base_model(metadata: Mapping[str, str]) -> str | None:
    """The base model as trainers name it: the kind of model before a checkpoint's own name."""
    # An example is stable-diffusion-v1/lora.
    kind = metadata.get("modelspec.architecture", "").partition("/")[0]
    return metadata.get("ss_base_model_version") or kind or metadata.get("ss_sd_model_name") or None


def network_alpha(metadata: Mapping[str, str], where: Path) -> float | None:
    """The alpha of all modules that a header states where no tensor does, or None."""
    for key in ("alpha", "lora_alpha", "network_alpha"):
        if key in metadata:
            try:
                return float(metadata[key])
            except ValueError as error:
                raise CorruptBlob(
                    f"{where}: its header states {key} = {metadata[key]!r}, which is not a number.",
                    cure="Fetch the file again, or write the number that it was trained with.",
                ) from error
    return None


def number(metadata: Mapping[str, str], key: str) -> float | None:
    """The number that an entry states; None where there is none."""
    try:
        return float(metadata[key])
    except (KeyError, ValueError):
        return None


def kept(metadata: Mapping[str, str], rank: int | None = None, *, converted: bool = False) -> dict[str, str]:
    """Return the metadata that is also true of a file derived from this one.

    Args:
        metadata: The file's metadata.
        rank: The new file's rank if it is another one, for the trainer's note of it; its alpha is not noted then.
        converted: Whether the file was of another kind of adapter than LoRA.
    """
    entries = {key: value for key, value in metadata.items() if key not in _OF_THE_BYTES}
    if rank is not None:
        entries.pop("ss_network_alpha", None)
        if "ss_network_dim" in entries:
            entries["ss_network_dim"] = f"{rank}"
    if converted:
        entries = {key: value for key, value in entries.items() if key not in _OF_THE_KIND}
    return entries


def union(sources: Sequence[tuple[Path, Mapping[str, str]]], weights: Sequence[float]) -> dict[str, str]:
    """The metadata of a file that was merged of others.

    An entry that all files that have it agree on stays. Tags are added up; titles, trigger words and licenses are put
    side by side. Where other entries differ, they are listed by file.

    Args:
        sources: Files and their metadata.
        weights: The weight of each.
    """
    own = [
        {key: value for key, value in kept(metadata).items() if key not in ("ss_network_dim", "ss_network_alpha")}
        for _, metadata in sources
    ]
    if not any(own):
        return {}
    merged: dict[str, str] = {}
    for key in dict.fromkeys(key for each in own for key in each):
        values = list(dict.fromkeys(each[key] for each in own if key in each))
        if len(values) == 1:
            merged[key] = values[0]
        elif key == _TRIGGERS:
            tables: dict[str, dict[str, int]] = {}
            for each in own:
                try:
                    for folder, tags in parse_json(each.get(key, "{}")).items():
                        table = tables.setdefault(folder, {})
                        for tag, count in tags.items():
                            table[tag] = table.get(tag, 0) + int(count)
                except (ValueError, AttributeError, TypeError):
                    # A note that is not a table of tags does not add any.
                    continue
            merged[key] = json.dumps(tables)
        elif key.startswith("modelspec.") or key in ("ss_output_name", "trained_words", "license", "source"):
            merged[key] = ", ".join(values)
    merged[SOURCES] = json.dumps([
        {"file": path.name, "weight": weight}
        | {key: value for key, value in each.items() if merged.get(key) != value and key != _TRIGGERS}
        for (path, _), each, weight in zip(sources, own, weights, strict=True)
    ])  # fmt: skip
    return merged
