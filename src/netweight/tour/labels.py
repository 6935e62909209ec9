"""Labels of the tour's results: a language model before and after its treatment, a pipeline, LoRAs, a federation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from netweight.core.atomic_writes import whole_file
from netweight.core.progress import QUIET, Progress
from netweight.labels.label import Label
from netweight.labels.measure import label
from netweight.labels.page import pictures_page
from netweight.recipes.run import StepResult
from netweight.report.report import Report

PAGE = "labels.html"
# Adapters of the bank of faces, which are written as a folder of LoRAs.
_ADAPTERS = 12


def write_labels(done: Sequence[StepResult], models: Path, out: Path, *, progress: Progress = QUIET) -> Path | None:
    """Write one page with the labels of what the chapters made.

    Args:
        done: The steps of the tour that ended.
        models: The folder in which the tour works.
        out: The folder of the report.
        progress: Where progress is shown.

    Returns:
        The page; None where no chapter made anything that is shown.
    """
    entries = list(_entries(done, models, progress))
    if not entries:
        return None
    text = pictures_page(
        "Labels of the tour's models", "The content of this tour's models, as `netweight label` shows it.", entries
    )
    with whole_file(out / PAGE, overwrite=True) as file:
        file.write(text.encode())
    return out / PAGE


def _entries(done: Sequence[StepResult], models: Path, progress: Progress) -> Iterator[tuple[str, Label]]:
    """Captions and labels, of the chapters that ran."""
    made = {(each.chapter, each.step.verb): each.path for each in done}
    before, after = models / "inputs" / "ciphers" / "model", made.get(("immunize", "immunize"))
    if after is not None:
        yield "A language model before its treatment", label(before, progress=progress)
        yield "The same model after `netweight immunize`", label(after, base=before, progress=progress)
    if pipeline := made.get(("forget", "forget")):
        yield "A text-to-image pipeline after `netweight forget apply`", label(pipeline, progress=progress)
    if ("adapters", "space-fit") in made:
        yield "A folder of LoRA adapters", label(_adapters(models / "my-loras"), progress=progress)
    if federation := made.get(("federate", "federate")):
        _write_report([each for each in done if each.chapter == "federate"], federation)
        yield "A federation after its audit", label(federation, progress=progress)


def _adapters(folder: Path) -> Path:
    """Some adapters of the bank of faces, in the files of peft."""
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.lora_formats.writing import write_adapter
    from netweight.toys import checkpoint

    bank = AdapterBank.open(checkpoint("faces-bank") / "bank")
    for name in bank.names[:_ADAPTERS]:
        if not (folder / name).exists():
            write_adapter(bank.adapter(name), folder / name, layout="peft")
    return folder


def _write_report(done: Sequence[StepResult], folder: Path) -> None:
    """The chapter's sections as the report of the federation, where its label reads them."""
    report = Report("Federation of the tour")
    for entry in done:
        for section in entry.sections.values():
            report.add(section)
    report.write(folder)
