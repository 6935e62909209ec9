"""Part of the stop of `compress`: what other stops have made, compressed, verified, restored; and run compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from netweight.core import digest
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.compress.folder import compress_folder, decompress_folder
from netweight.methods.compress.runtime.model import compress_, memory_footprint
from netweight.methods.compress.verify import TREATMENT, verify
from netweight.report.conclusions import by_targets
from netweight.report.finding import Column, Finding, Table
from netweight.report.report import Report
from netweight.tour.stop import Place
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.faces_pipeline import FACES_BANK
from netweight.toys.language import ALIGNED, cipher_world, opened
from netweight.toys.shapes import ShapesWorld

__all__ = ["Other", "Ran", "add_everything", "all_others", "computed"]

_OTHERS = by_targets(
    "tour: compress, other models", met="All of them are bit for bit as they were.", missed="Something differs."
)
_COMMAND = "netweight tour"  # alone it has no other stops' models
_IMAGES, _ROWS = 4, 32  # that a model paints, and examples that a model answers, before and after


@final
@dataclass(frozen=True)
class Other:
    """A model taken through compression and back.

    Attributes:
        name: What it is.
        nbytes: Of its plain weight files.
        stored_nbytes: Of its compressed weight files.
        tensors: How many there are.
        wrong: Tensors and files that are damaged, missing, or differ, after compression or after restoring.
    """

    name: str
    nbytes: int
    stored_nbytes: int
    tensors: int
    wrong: int


@final
@dataclass(frozen=True)
class Ran:
    """What a model computed with dense and with compressed weights.

    Attributes:
        name: What it is.
        different: Numbers that differ in any bit.
        numbers: How many were compared.
        dense: Bytes of its weights in memory.
        compressed: The same once they are compressed.
    """

    name: str
    different: int
    numbers: int
    dense: int
    compressed: int


def all_others(place: Place) -> tuple[Other, ...]:
    """Compress, verify and restore what the stops before have made, and the bank of adapters."""
    work = place.folder / "others"
    work.mkdir()
    (shard,) = sorted(FACES_BANK.glob("*.safetensors"))  # it is compressed as it comes with the package
    decompress_folder(shard, work / "bank.safetensors", progress=place.progress)
    models = {**place.models, "the bank of 256 adapters": work / "bank.safetensors"}
    return tuple(_taken(name, path, work / str(number), place) for number, (name, path) in enumerate(models.items()))


def _taken(name: str, source: Path, beside: Path, place: Place) -> Other:
    ending = source.suffix if source.is_file() else ""
    small, back = (beside.with_name(f"{beside.name}-{part}{ending}") for part in ("net", "restored"))
    summary = compress_folder(source, small, progress=place.progress)
    decompress_folder(small, back, progress=place.progress)
    audit = [each for each in verify(small, source, progress=place.progress) if each.target is not None]
    wrong = sum(int(each.value or 0) for each in audit) + (_digests(source) != _digests(back))
    return Other(name, summary.nbytes, summary.stored_nbytes, summary.tensors, wrong)


def _digests(path: Path) -> dict[str, str]:
    """Of a file, or of all files of a folder by name."""
    if path.is_file():
        return {"": digest.of_file(path)}
    return {str(file.relative_to(path)): digest.of_file(file) for file in path.rglob("*") if file.is_file()}


def computed(place: Place) -> tuple[Ran, ...]:
    """Let a painting model and a language model compute with dense and with compressed weights."""
    painter = load_text_to_image(
        place.models.get("the painting model, hardened", SHAPES_FOLDER), dtype=torch.float32, name="shapes"
    )
    prompts = ShapesWorld().ordinary_captions[:_IMAGES]

    def painted() -> Tensor:
        return painter.generate(painter.embed(prompts), range(len(prompts)), guidance=3.0, steps=10)

    world = cipher_world()
    file = place.models.get("the immunized model", world.folder / ALIGNED)
    reader = opened(world.language.shape, file)
    rows = [example.prompt for example in world.held_out("guard", _ROWS)]
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[world.pad_id] * (longest - len(row))] for row in rows])

    def read() -> Tensor:
        logits: Tensor = reader(tokens).logits
        return logits

    return (
        _ran("the painting model", painter.denoiser, painted),
        _ran("the language model", reader, read),
    )


@torch.no_grad()
def _ran(name: str, model: nn.Module, compute: Callable[[], Tensor]) -> Ran:
    before, dense = compute(), memory_footprint(model)
    compress_(model)
    after = compute()
    different = int((before.view(torch.int32) != after.view(torch.int32)).sum())
    return Ran(name, different, before.numel(), dense, memory_footprint(model))


def add_everything(report: Report, others: Sequence[Other], ran: Sequence[Ran]) -> None:
    """Add what became of the other stops' models to a report."""
    findings = [
        Finding(f"{each.name}: tensors and files that are not as they were", each.wrong, n=each.tensors, better="lower",
                target=0, command=_COMMAND)
        for each in others
    ]  # fmt: skip
    for each in ran:
        findings += [
            Finding(f"{each.name}, run compressed: numbers that differ in any bit", each.different, n=each.numbers,
                    better="lower", target=0, command=_COMMAND),
            Finding(f"{each.name}, run compressed: memory of the weights", each.compressed / 1e6, n=1, unit="MB",
                    better="lower", baseline=each.dense / 1e6, command=_COMMAND),
        ]  # fmt: skip
    columns = ("model", "tensors", Column("plain", "MB"), Column("compressed", "MB", "lower"), Column("saved", "%"))
    rows = [
        (each.name, each.tensors, each.nbytes / 1e6, each.stored_nbytes / 1e6,
         100 * (1 - each.stored_nbytes / each.nbytes))
        for each in others
    ]  # fmt: skip
    report.section(
        "Everything else of this tour",
        findings,
        tables=[Table("Sizes of the other models", columns, rows, ("MB are 10⁶ bytes of weight files.",))],
        question="Does the same hold for every model of this tour?",
        intro="Models that the other stops have made, and the bank of adapters, are compressed, verified tensor by "
        "tensor, restored and compared file by file. Small files gain less, since each tensor carries a header.",
        conclusion=_OTHERS(findings)[1],
        treatment=TREATMENT,
        audits=("identity",),
    )
