"""Pipeline folders under the search for embeddings: files of prompts and images in, models and targets to search out.

`netweight attack embedding` calls it. Everything is read and checked here, before the first search.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from netweight.attacks.embedding_search.comparison import Subject, Target, turned
from netweight.attacks.embedding_search.findings import Wanted
from netweight.attacks.embedding_search.search import Similarity
from netweight.attacks.embedding_search.settings import Said, SearchSettings
from netweight.attacks.embedding_search.similarity import paired
from netweight.errors import MissingExtra, UsageError
from netweight.evidence.descriptors import CenteredPixels, sscd
from netweight.integrations.diffusion_pipeline import PipelineModel, load_text_to_image
from netweight.zoo.language.rows import read_rows
from netweight.zoo.prompt_images import made_size, read_prompt_images

__all__ = ["PLAIN_PROMPTS", "SAID", "FolderSearch", "Prepared", "prepare"]

PLAIN_PROMPTS = (
    "a photo of a dog", "a red car on a road", "a bowl of fruit on a table", "a house by a lake", "a tree in a field",
    "a cup of coffee", "people walking in a city", "a boat on the sea", "a portrait of a woman", "a mountain at night",
    "an old bicycle", "a bird on a branch",
)  # fmt: skip
"""Prompts to start from where the user names none: they have nothing to do with most images."""
SAID: Mapping[str, Said] = {"epsilon": "noise", "v_prediction": "velocity", "sample": "sample"}
"""Prediction type of a scheduler → in which prediction a search counts the error."""


@final
@dataclass(frozen=True)
class FolderSearch:
    """How pipeline folders are searched.

    Attributes:
        base: The pipeline before its edit.
        targets: Rows with prompt and image: memorized pairs. Images are files, their paths relative to this one.
        controls: Rows likewise, of images that no model was trained on; None turns every target upside down and
            exchanges its colors.
        unrelated: Rows with prompt, to start from; None takes `PLAIN_PROMPTS`.
        also: Name → further edited pipelines, such as a hardened one.
        sscd: SSCD's TorchScript file; None compares centered pixels.
        sscd_sha256: Its digest.
        search: Fields of `SearchSettings`; those left out have its defaults.
        device: Where models go.
        least_resistance: Steps that further pipelines are to need at least, as a multiple of those of the edited one.
    """

    base: Path
    targets: Path
    controls: Path | None = None
    unrelated: Path | None = None
    also: Mapping[str, Path] = field(default_factory=dict)
    sscd: Path | None = None
    sscd_sha256: str | None = None
    search: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    least_resistance: float | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        named = (self.targets, self.controls, self.unrelated, self.sscd)
        return tuple(path for path in named if path is not None)


@final
@dataclass(frozen=True)
class Prepared:
    """What is to be searched, read and checked.

    Attributes:
        subjects: The base, the edited pipeline, and further ones.
        targets: Memorized pairs, then controls.
        unrelated: Prompts to start from.
        settings: Of every search.
        similarity: What tells that an image is the target.
        measure: What it is called.
        wanted: Which subject is which.
    """

    subjects: tuple[Subject, ...]
    targets: tuple[Target, ...]
    unrelated: tuple[str, ...]
    settings: SearchSettings
    similarity: Similarity
    measure: str
    wanted: Wanted


def prepare(search: FolderSearch, model: Path) -> Prepared:
    """Read models, images and prompts.

    Args:
        search: How.
        model: Folder of the edited pipeline.

    Raises:
        UsageError: A folder is no pipeline, a file has no such column, an image cannot be read, a setting cannot be
            meant, or two models share a name.
        Unsupported: A pipeline is of a kind that is not known.
        UnsafeInput: SSCD's file has another digest.
        MissingExtra: matplotlib, scipy or Pillow is not installed.
    """
    _need_extras()
    if (search.sscd is None) != (search.sscd_sha256 is None):
        raise UsageError(
            "SSCD's file and its digest go together.", cure="Give both --sscd and --sscd-sha256: the file is a program."
        )
    descriptor = CenteredPixels() if search.sscd is None else sscd(search.sscd, str(search.sscd_sha256))
    folders = {"original": search.base, "edited": model, **search.also}
    if len(folders) < 2 + len(search.also):
        raise UsageError('A further model is called "original" or "edited".', cure="Give it another name.")
    SearchSettings(**search.search)  # refused before models are loaded
    models = {name: load_text_to_image(folder, device=search.device, name=name) for name, folder in folders.items()}
    said = {SAID[str(one.pipeline.scheduler.config.prediction_type)] for one in models.values()}
    if len(said) > 1:
        raise UsageError("The models predict different things, so they are not edits of one another.")
    settings = SearchSettings(**{"error": said.pop(), **search.search})
    targets = _targets(search.targets, models["original"])
    controls = [turned(target) for target in targets]
    if search.controls is not None:
        controls = _targets(search.controls, models["original"], trained=False)
    return Prepared(
        tuple(Subject(name, one) for name, one in models.items()),
        (*targets, *controls),
        PLAIN_PROMPTS if search.unrelated is None else _prompts(search.unrelated),
        settings,
        paired(descriptor),
        descriptor.name,
        Wanted("original", "edited", search.least_resistance),
    )


def _need_extras() -> None:
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"The report needs {' and '.join(missing)}, which is not installed.",
            cure='Run: pip install "netweight[evidence]"',
        )


def _prompts(path: Path) -> tuple[str, ...]:
    rows = read_rows(path)
    rows.need("prompt")
    return tuple(dict.fromkeys(str(row.values.get("prompt") or "") for row in rows.rows))


def _targets(path: Path, model: PipelineModel, *, trained: bool = True) -> list[Target]:
    """Pairs of a file, their images of the size that the model makes."""
    rows = read_prompt_images(path, made_size(model))
    names = _names([row.prompt for row in rows])
    return [
        Target(name if trained else f"control: {name}", row.prompt, row.image, trained)
        for name, row in zip(names, rows, strict=True)
    ]


def _names(prompts: list[str]) -> list[str]:
    """Prompts, numbered where one comes several times."""
    counted = [(prompt, prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]
    return [prompt if not before else f"{prompt} ({before + 1})" for prompt, before in counted]
