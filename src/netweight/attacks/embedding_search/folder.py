"""Pipeline folders under the search for embeddings: files of prompts and images in, models and targets to search out.

`netweight attack embedding` calls it. Everything is read and checked here, before the first search.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from pydantic import DirectoryPath, FilePath

from netweight.attacks.embedding_search.compare import Subject, Target, turned
from netweight.attacks.embedding_search.report import Wanted
from netweight.attacks.embedding_search.search import Similarity, paired
from netweight.attacks.embedding_search.settings import Said, SearchSettings
from netweight.core.names import nearest_names
from netweight.data.memorized_pairs import Pair, check_pairs, painted_size, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import MissingExtra, NameNotFound, UsageError
from netweight.metrics.copies import CenteredPixels, Descriptor, sscd

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


# Prompts to start from where the user names none: they have nothing to do with most images.
PLAIN_PROMPTS = (
    "a photo of a dog", "a red car on a road", "a bowl of fruit on a table", "a house by a lake", "a tree in a field",
    "a cup of coffee", "people walking in a city", "a boat on the sea", "a portrait of a woman", "a mountain at night",
    "an old bicycle", "a bird on a branch",
)  # fmt: skip
_SAID: Mapping[str, Said] = {"epsilon": "noise", "v_prediction": "velocity", "sample": "sample"}


@final
@dataclass(frozen=True)
class FolderSearch:
    """How pipeline folders are searched.

    Attributes:
        targets: Rows with prompt and image: memorized pairs, see `memorized_pairs`.
        base: The pipeline before its edit.
        controls: Rows likewise, of images that no model was trained on; None turns every target upside down and
            exchanges its colors.
        unrelated: Prompts to start from, a file of `read_prompts`; None takes `PLAIN_PROMPTS`.
        also: Name → further edited pipelines, such as a hardened one.
        sscd: SSCD's TorchScript file; None compares centered pixels.
        sscd_sha256: Its digest.
        search: Fields of `SearchSettings`; those left out have its defaults.
        device: Where models go.
        least_resistance: Steps that further pipelines are to need at least, as a multiple of those of the edited one.

    Raises:
        UsageError: A setting of the search cannot be meant, SSCD lacks its digest, or a name is taken.
    """

    targets: FilePath
    base: DirectoryPath | None = None
    controls: FilePath | None = None
    unrelated: FilePath | None = None
    also: Mapping[str, DirectoryPath] = field(default_factory=dict)
    sscd: FilePath | None = None
    sscd_sha256: str | None = None
    search: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    least_resistance: float | None = None

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if (self.sscd is None) != (self.sscd_sha256 is None):
            raise UsageError(
                "SSCD's file and its digest go together.",
                cure="Give both --sscd and --sscd-sha256: the file is a program.",
            )
        if {"original", "edited"} & self.also.keys():
            raise UsageError('A further model is called "original" or "edited".', cure="Give it another name.")
        known = [each.name for each in fields(SearchSettings)]
        for name in self.search:
            if name not in known:
                near = ", ".join(nearest_names(name, known, count=2))
                raise NameNotFound(f"A search has no setting {name!r}.", cure=f"Nearest: {near}.")
        SearchSettings(**self.search)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        named = (self.targets, self.controls, self.unrelated, self.sscd)
        return tuple(path for path in named if path is not None)


@final
@dataclass(frozen=True)
class Prepared:
    """What is to be searched, read and checked."""

    subjects: tuple[Subject, ...]  # the base, the edited pipeline, and further ones
    pairs: tuple[Pair, ...]  # memorized pairs
    targets: tuple[Target, ...]
    unrelated: tuple[str, ...]  # prompts to start from
    settings: SearchSettings
    similarity: Similarity  # what tells that an image is the target
    descriptor: Descriptor  # what it compares by
    wanted: Wanted  # which subject is which

    @property
    def measure(self) -> str:
        """What similarities are called."""
        return self.descriptor.name

    @property
    def goal(self) -> str:
        """When an image counts as brought back, in words."""
        least = f"{self.settings.needed} of {self.settings.images} images"
        return f"{least} with {self.measure} of at least {self.settings.threshold:g} to the target"


def prepare(search: FolderSearch, model: Path) -> Prepared:
    """Read models, images and prompts."""
    from netweight.hf.load_pipeline import load_text_to_image

    _need_extras()
    if search.base is None:
        raise UsageError("There is nothing to compare with.", cure="Name the pipeline before its edit as base.")
    for table in (search.targets, search.controls):
        if table is not None:
            check_pairs(table)  # before models are loaded
    unrelated = PLAIN_PROMPTS if search.unrelated is None else tuple(read_prompts(search.unrelated))
    descriptor: Descriptor = CenteredPixels() if search.sscd is None else sscd(search.sscd, str(search.sscd_sha256))
    folders = {"original": search.base, "edited": model, **search.also}
    models = {name: load_text_to_image(folder, device=search.device, name=name) for name, folder in folders.items()}
    said = {predicted_error(one) for one in models.values()}
    if len(said) > 1:
        raise UsageError("The models predict different things, so they are not edits of one another.")
    settings = SearchSettings(**{"error": said.pop(), **search.search})
    size = painted_size(models["original"])
    pairs = read_pairs(search.targets, size)
    targets = [Target(pair.name, pair.prompt, pair.image) for pair in pairs]
    controls = [turned(target) for target in targets]
    if search.controls is not None:
        controls = [
            Target(f"control: {pair.name}", pair.prompt, pair.image, trained=False)
            for pair in read_pairs(search.controls, size)
        ]
    return Prepared(
        tuple(Subject(name, one) for name, one in models.items()),
        tuple(pairs),
        (*targets, *controls),
        unrelated,
        settings,
        paired(descriptor),
        descriptor,
        Wanted("original", "edited", search.least_resistance),
    )


def predicted_error(model: PipelineModel) -> Said:
    """Return which error suits a pipeline: that in what its network was trained to say."""
    return _SAID[str(model.pipeline.scheduler.config.prediction_type)]


def _need_extras() -> None:
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"The report needs {' and '.join(missing)}, which is not installed.",
            cure='Run: pip install "netweight[evidence]"',
        )
