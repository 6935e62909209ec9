"""A model folder and a file of pairs in, a defended model folder out: what `netweight immunize` and recipes do.

The defended folder holds, beside the weights, the record of every step and a report of what changed inside.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field, FilePath

from netweight.core.digest import of_file
from netweight.core.files import part_of
from netweight.core.progress import QUIET, Progress
from netweight.data.text import text_pairs, withhold
from netweight.data.tokens import BELOW, Template, load_examples, padding_of, tokenized_pairs
from netweight.errors import UsageError
from netweight.hf.load_language_model import context_of, load_causal_lm
from netweight.job import Job, check_destination
from netweight.methods.immunize.catalog import named_defense
from netweight.methods.immunize.layer_metrics import LEAST_PAIRS, Insight, Look, look_inside, weight_changes
from netweight.methods.immunize.report import DEPTH, REPORT, TREATMENT, add_depth_section
from netweight.methods.immunize.settings import Settings
from netweight.methods.immunize.train import RECORD, Record, immunize
from netweight.report.finding import Column, Table
from netweight.report.report import Report

_TRAINED_BY = ("lr", "epochs", "batch_size", "seed", "save_every", "frozen")
Count = Annotated[int, Field(ge=1)]


@final
@dataclass(frozen=True)
class FolderDefense:
    """How a folder is defended. What is None is as the catalog has it for the defense.

    Attributes:
        pairs: Rows with prompt, chosen (harmless) and rejected (harmful).
        retain: Rows with prompt and response: what the model is to keep besides.
        defense: Its name in the catalog.
        lr: Highest learning rate.
        epochs: Passes over the pairs.
        batch_size: Pairs per step.
        seed: Of the order of pairs, of noise and of dropout.
        save_every: Steps between checkpoints.
        frozen: Layers that are not trained, such as "0-3,head".
        withhold: Categories of the pairs that the defense is not to see.
        chat: Whether prompts go through the tokenizer's chat template.
        device: Where the model goes.

    Raises:
        NameNotFound: There is no such defense.
        UsageError: The defense cannot be held by a folder, or a setting of training cannot be.
    """

    pairs: FilePath
    retain: FilePath | None = None
    defense: str = "repnoise"
    lr: float | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    seed: int | None = None
    save_every: Count | None = None
    frozen: str | None = None
    withhold: tuple[str, ...] = ()
    chat: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if named_defense(self.defense).defense.name == "security-vectors":
            raise UsageError(
                "A security vector protects while it is at work in a model that others train, so no folder can hold "
                "it.",
                cure="Use netweight.methods.immunize.train.immunize where the training is yours, or another defense.",
            )
        _ = self.settings

    @property
    def settings(self) -> Settings:
        """The settings of training: the catalog's, but for those that were given."""
        given = {name: getattr(self, name) for name in _TRAINED_BY if getattr(self, name) is not None}
        return dataclasses.replace(named_defense(self.defense).settings, **given)


@final
@dataclass(frozen=True)
class Immunized:
    """A folder that was defended."""

    record: Record  # what was done
    report: Path  # the page about it
    not_looked_at: str  # why the report does not show the depth; empty if it does


def immunize_folder(
    source: str | Path,
    destination: str | Path,
    defense: FolderDefense,
    *,
    command: str | None = None,
    progress: Progress = QUIET,
) -> Immunized:
    """Train a defense into a model and write it as a folder of its own, whole or not at all."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None, folder=part_of(destination))
    network, tokenizer = load_causal_lm(source, device=defense.device)
    form: Template | Literal["chat"] = "chat" if defense.chat else BELOW
    how: Any = {"context": context_of(network, tokenizer), "template": form}
    texts = text_pairs(defense.pairs)
    texts = withhold(texts, defense.withhold)[0] if defense.withhold else texts
    pairs = tokenized_pairs(texts, tokenizer, **how)
    kept = [] if defense.retain is None else load_examples(defense.retain, tokenizer, **how)
    pad, why_not = padding_of(tokenizer), why_not_looked_at(len(pairs))
    before = None if why_not else look_inside(network, pairs, pad_id=pad)
    with Job.beside(destination, overwrite=None, folder=part_of(destination)) as job:
        record = immunize(
            network, pairs, kept, defense=defense.defense, settings=defense.settings, folder=job, pad_id=pad,
            progress=progress,
        )  # fmt: skip
        report = _report(source, destination, defense, record, command, looked=before is not None)
        if before is not None:
            after = look_inside(network, pairs, pad_id=pad)
            _add_depth(report, source, network, before, after)
        network.save_pretrained(job.tree)
        tokenizer.save_pretrained(job.tree)
        record.write(job.file(RECORD))
        report.write(job.file(REPORT))
        job.publish(destination, overwrite=None)
    return Immunized(record, destination / REPORT / "report.html", why_not)


def why_not_looked_at(pairs: int) -> str:
    """Say why so many pairs cannot show the depth of a defense here; nothing if they can."""
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        return f'pictures need {" and ".join(missing)}: pip install "netweight[evidence]"'
    return f"{pairs} pairs are fewer than {LEAST_PAIRS}" if pairs < LEAST_PAIRS else ""


def _add_depth(report: Report, source: Path, network: Any, before: Look, after: Look) -> None:
    """Compare weights too: the model before is opened again, beside the one after."""
    add_depth_section(report, Insight(weight_changes(load_causal_lm(source)[0], network), before, after), seen=True)


def _report(
    source: Path, destination: Path, defense: FolderDefense, record: Record, command: str | None, *, looked: bool
) -> Report:
    files = [file for file in (defense.pairs, defense.retain) if file is not None]
    report = Report(
        f"{destination.name}: {source.name} with {defense.defense}",
        summary="What was trained into the model, and what that did inside of it. How long it holds is for attacks to "
        "say: resistance is delay, not prevention.",
        command=command,
        seeds=(defense.settings.seed,),
        inputs={str(file): of_file(file) for file in files},
    )
    held = f" Layers {defense.frozen} were not trained." if defense.frozen else ""
    away = f" Pairs of {', '.join(defense.withhold)} were kept from it." if defense.withhold else ""
    return report.section(
        "Training",
        [],
        tables=[_terms(record)] if record.steps else [],
        intro=f"{defense.defense}: {len(record.steps)} steps on {record.trained:,} weights.{held}{away}",
        treatment=TREATMENT,
        audits=(DEPTH,) if looked else (),
    )


def _terms(record: Record) -> Table:
    first, last = record.steps[0].terms, record.steps[-1].terms
    rows = [(name, first[name].value, term.value) for name, term in last.items() if name in first]
    return Table("Terms of the loss", ("term", Column("first step"), Column("last step")), rows)
