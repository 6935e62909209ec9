"""The search for embeddings in pipeline folders, and its entry in recipes; all is checked before the first search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from netweight.attacks.embedding_search.report import SubjectRoles, search_section, verdict
from netweight.attacks.embedding_search.search import (
    SEARCHES,
    Comparison,
    SearchedModel,
    TargetImage,
    compare,
    paired,
    turned,
)
from netweight.attacks.embedding_search.settings import FolderSearch, SearchSettings
from netweight.core.progress import QUIET, Progress
from netweight.data.images.pairs import MemorizedPair, check_pairs, image_files, pair_prompts, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.pipeline_prompts import notes_on_unknown_prompts, tokenizers_of
from netweight.metrics.descriptors import CenteredPixels, Descriptor, sscd
from netweight.registry import Result
from netweight.registry import Target as AttackOutcome
from netweight.report.plots import check_figures

# Prompts to start from where the user names none: they have nothing to do with most images.
PLAIN_PROMPTS = (
    "a photo of a dog", "a red car on a road", "a bowl of fruit on a table", "a house by a lake", "a tree in a field",
    "a cup of coffee", "people walking in a city", "a boat on the sea", "a portrait of a woman", "a mountain at night",
    "an old bicycle", "a bird on a branch",
)  # fmt: skip


@final
@dataclass(frozen=True)
class PreparedSearch:
    """Models, images and settings of a search, read and checked."""

    subjects: tuple[SearchedModel, ...]
    """The base, the edited pipeline, and further ones."""
    pairs: tuple[MemorizedPair, ...]
    """Memorized pairs."""
    controls: tuple[MemorizedPair, ...]
    """Pairs that were given as never trained on."""
    targets: tuple[TargetImage, ...]
    """Images that are searched for: the memorized ones and the controls."""
    unrelated: tuple[str, ...]
    """Prompts to start from."""
    settings: SearchSettings
    """Settings of each search."""
    descriptor: Descriptor
    """Measure of the similarity of images."""
    roles: SubjectRoles
    """The names of the subject before the edit and after it."""
    remarks: tuple[str, ...] = ()
    """Decisions of the reader of pictures."""

    @property
    def goal(self) -> str:
        """The criterion by which an image counts as recovered, in words."""
        least = f"{self.settings.needed} of {self.settings.images} images"
        return f"{least} with {self.descriptor.name} of at least {self.settings.threshold:g} to the target"

    def compare(self, seeds: Iterable[int], *, folder: Path, progress: Progress = QUIET) -> Comparison:
        """Search all models for all targets; a folder's ledger is continued."""
        return compare(
            self.subjects, self.targets, self.unrelated, self.settings, seeds=list(seeds),
            similarity=paired(self.descriptor), measure=self.descriptor.name, folder=folder, progress=progress,
        )  # fmt: skip


def prepare(search: FolderSearch, model: Path) -> PreparedSearch:
    """Read models, images and prompts."""
    from netweight.hf.load_pipeline import open_pipeline, trained_prediction

    check_figures()
    if search.base is None:
        raise UsageError(
            "The pipeline before its edit was not given, so there is nothing to compare with.",
            cure="Give the pipeline before its edit (--base).",
        )
    for path in search.tables:
        # The table is checked before models are loaded, which takes long.
        check_pairs(path)
    unrelated = PLAIN_PROMPTS if search.unrelated is None else tuple(read_prompts(search.unrelated))
    descriptor: Descriptor = CenteredPixels() if search.sscd is None else sscd(search.sscd, str(search.sscd_sha256))
    folders = {"original": search.base, "edited": model, **search.also}
    models = {name: open_pipeline(folder, search.pipeline, name=name) for name, folder in folders.items()}
    kinds = {trained_prediction(one) for one in models.values()}
    if len(kinds) > 1:
        raise UsageError(
            f"The models predict different things ({', '.join(sorted(kinds))}), so they are not edits of one another.",
            cure="Give the pipeline before its edit (--base).",
        )
    settings = search.search if "error" in search.search.given else search.search.replace(error=kinds.pop())
    size = models["original"].image_size
    table = read_pairs(search.targets, size, search.pipeline.fit)
    pairs, remarks = table.pairs, (*preview(model, search), *table.remarks)
    targets = [TargetImage(pair.name, pair.prompt, pair.image) for pair in pairs]
    controls = [turned(target) for target in targets]
    never: tuple[MemorizedPair, ...] = ()
    if search.controls is not None:
        table = read_pairs(search.controls, size, search.pipeline.fit)
        never, remarks = table.pairs, (*remarks, *table.remarks)
        controls = [TargetImage(f"control: {pair.name}", pair.prompt, pair.image, trained=False) for pair in never]
    return PreparedSearch(
        tuple(SearchedModel(name, one) for name, one in models.items()), tuple(pairs), never, (*targets, *controls),
        unrelated, settings, descriptor, SubjectRoles("original", "edited", search.least_resistance), remarks,
    )  # fmt: skip


def attack(target: AttackOutcome, settings: FolderSearch, progress: Progress) -> Result:
    """Search a pipeline folder for embeddings, as the command and recipes do."""
    prepared = prepare(settings.replace(base=settings.base or target.before), target.model)
    names = ", ".join(subject.name for subject in prepared.subjects)
    planted, controls = len(prepared.pairs), len(prepared.targets) - len(prepared.pairs)
    progress.note(f"{planted} memorized images and {controls} controls are searched for in: {names}.")
    folder, seeds = target.output / "embedding", range(target.seed, target.seed + settings.seeds)
    comparison = prepared.compare(seeds, folder=folder, progress=progress)
    section = search_section(comparison, prepared.targets, prepared.roles, folder=folder, seed=target.seed)
    section = replace(section, intro=f"{section.intro}\n\nBrought back means: {prepared.goal}.")
    verdicts = {name: verdict(comparison, name)[1] for name in comparison.subjects}
    lines = [f"{name}: {words}" for name, words in verdicts.items()]
    payload = {"verdicts": verdicts, "ledger": str(folder / f"{SEARCHES}.jsonl")}
    return Result(lines, [section], payload, warnings=prepared.remarks)


def check(model: Path | None, settings: FolderSearch) -> None:
    """Refuse before any work what is not a pipeline, and tables that cannot be used."""
    from netweight.hf.load_pipeline import check_pipeline

    if model is not None:
        check_pipeline(model)
        if settings.base is None:
            raise UsageError(
                "The pipeline before its edit was not given, so there is nothing to compare with.",
                cure="Give the pipeline before its edit (--base).",
            )
    for table in settings.tables:
        check_pairs(table)


def preview(model: Path, settings: FolderSearch) -> list[str]:
    """Return sentences about prompts with words that a tokenizer of the pipeline does not know."""
    prompts: dict[str, list[str]] = {table.name: pair_prompts([table]) for table in settings.tables}
    if settings.unrelated is not None:
        prompts[settings.unrelated.name] = read_prompts(settings.unrelated)
    return notes_on_unknown_prompts(tokenizers_of(model), prompts)


def read_files(settings: FolderSearch) -> list[Path]:
    """The images that the tables name."""
    return list(image_files(*settings.tables))
