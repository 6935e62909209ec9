"""Edits and mitigations at prompt time: copies that they leave, their cost, and whether errors give the edit away.

    python -m netweight_experiments.benchmarks forget.effects shipped TRAINING...

Each argument is a training of a miniature, as for `forget.edits`; "shipped" is the one that comes with the package.
Every training is edited with all six verbatim pictures at once, by each edit with its defaults; mitigations change no
weight and act while images are generated. For each of them:

own        images of planted prompts that copy their own picture (NCC 0.7), of 48 a block
any        images of planted prompts that copy any memorized picture of the miniature
lost       points of color, ground and size, the worst of them, that images of 48 ordinary captions, and of 48 held-out
           ones, lose; no edit was given any of them
changed    share of held-out captions, and of neighbours, whose image from the same seed has an NCC below 0.5 to before
errors     two-sided area under the curve by which the model's errors on pictures, under their own prompt and under the
           empty one, tell the planted pictures from 24 that no model was trained on: 0.5 tells nothing apart
scores     the same for scores of detection, against 40 held-out captions

A mitigation at prompt time leaves the weights as they are, so that its errors are those of the original. `retrained` is
the training in `--without`, which saw neither the pictures nor their captions (`small_diffusion --without-planted`):
what is left there comes of the pictures and captions, and not of memory.
Work lies in `--work` and goes on where it was stopped; `--results` adds what earlier files hold of other trainings.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import load_file, save_file

from netweight.hf.load_pipeline import one_token_words, padding_masks
from netweight.job import Job
from netweight.methods.forget.detect import detect, roc
from netweight.methods.forget.membership import picture_errors, two_sided
from netweight.methods.forget.mitigations import AttentionScaling, EmbeddingAdjustment, RandomTokens
from netweight.methods.forget.settings import DetectionConfig
from netweight.metrics.copies import copies_of_prompt
from netweight.toys.shapes import ShapesWorld, memorized
from netweight_experiments.benchmarks.forget.edits import (
    CHANGED,
    IMAGES,
    NEVER,
    READ,
    changed,
    drawn,
    edited,
    interval,
    opened,
)
from netweight_experiments.benchmarks.script import RESULTS

EDITED = ("none", "neurons", "closed-form", "esd", "siss", "retrained")
MITIGATED = ("random words", "embedding adjustment", "attention scaling")
FIRST = 74_000  # seed of images, which nothing else uses
OTHER_WORLDS = 4
LOST = ("ordinary", "held out")
CHOSEN_ON = ("shipped", "seed-1-planted-7", "seed-2-planted-8")  # trainings that the settings of `siss` were chosen on


def mitigation(name, model, seed):
    """A mitigation at prompt time, with the defaults of the library."""
    if name == "random words":
        return RandomTokens(4, one_token_words(model), seed=seed)
    return EmbeddingAdjustment() if name == "embedding adjustment" else AttentionScaling(padding_masks(model))


def never_trained(training):
    """Pictures of the kind that is planted, which no model was trained on."""
    worlds = [ShapesWorld(NEVER + number + sum(training.folder.name.encode())) for number in range(OTHER_WORLDS)]
    return [each for world in worlds for each in memorized(world) if each.kind == "verbatim"]


def signs(model, training):
    """Two-sided areas under the curve, by what is read; and the mean errors that two of them are made of."""
    planted = [(each.prompt, each.prompt, each.image) for each in training.verbatim]
    others = [(f"{place}", each.prompt, each.image) for place, each in enumerate(never_trained(training))]
    errors, never = (picture_errors(model, pictures) for pictures in (planted, others))
    found, means = {}, {}
    for kind in ("own", "empty"):
        one, two = (list(getattr(each, kind).values()) for each in (errors, never))
        found[f"errors, {kind}"] = two_sided(roc([-each for each in one], [-each for each in two]).auc)
        means[kind] = {"planted": statistics.mean(one), "never trained": statistics.mean(two)}
    config = DetectionConfig(seeds=4)
    scores = detect(model, [each.prompt for each in training.verbatim], config)
    ordinary = detect(model, training.world.held_out_captions[:40], config)
    for kind in ("similarity", "wen"):
        one, two = ([getattr(each, kind) for each in part] for part in (scores, ordinary))
        found[f"scores, {kind}"] = two_sided(roc(one, two).auc)
    return {"AUC": found, "errors": means}


def shown(model, training, blocks):
    """Copies among the images of planted prompts, and the images of other captions, block by block."""
    rows, images = [], []
    for first in range(FIRST, FIRST + 1000 * blocks, 1000):
        own, any_ = 0, 0
        for each in training.verbatim:
            found = copies_of_prompt(
                each, drawn(model, [each.prompt] * IMAGES, range(first, first + IMAGES)), training.planted
            )
            own, any_ = own + found.copies(), any_ + found.any_match()
        made = {
            name: drawn(model, captions, range(first + 100, first + 100 + len(captions)))
            for name, captions in (("asked", training.asked), ("neighbours", training.neighbours))
        }
        right = {
            name: training.world.agreement(training.asked[part], made["asked"][part])
            for name, part in (("ordinary", slice(None, 48)), ("held out", slice(48, None)))
        }
        rows.append({"own": own, "any": any_, "right": right})
        images.append(made)
    return rows, images


def measured(name, what, job, blocks, seed, without):
    """Everything of one training and one edit or mitigation; remembered."""
    key = {"training": name, "what": what, "blocks": blocks, "seed": seed}
    known = job.recorded("effects", key)
    if known is not None:
        return known
    training = opened(name)
    model, original = training.model(what), training.model("original")
    file = job.folder / "models" / f"{training.folder.name}-{what}-{seed}.safetensors"
    began = time.process_time()
    if file.exists():
        model.denoiser.load_state_dict(load_file(file))
    elif what in EDITED:
        edited(model, training, what, job.folder / "edits" / f"{training.folder.name}-{what}-{seed}", seed, without)
        file.parent.mkdir(exist_ok=True)
        save_file(model.denoiser.state_dict(), file)
    seconds = time.process_time() - began
    before, old = shown(original, training, blocks)
    if what in EDITED:
        (rows, new), read = shown(model, training, blocks), signs(model, training)
    else:
        prompts = [*(each.prompt for each in training.verbatim), *training.asked, *training.neighbours]
        with mitigation(what, model, seed)(model, prompts) as changed_model:
            rows, new = shown(changed_model, training, blocks)
        read = None
    parts = [
        {
            "own": row["own"], "any": row["any"],
            "lost": {
                part: {one: 100 * (was["right"][part][one] - row["right"][part][one]) for one in READ
                       if one in row["right"][part]}
                for part in row["right"]
            },
            "changed": changed(first, second, training),
        }
        for row, was, first, second in zip(rows, before, old, new, strict=True)
    ]  # fmt: skip
    result = {**key, "world": training.of, "seconds": round(seconds, 1), "rows": parts, "signs": read}
    print(name, what, result, flush=True)
    job.record("effects", result, key=key)
    return result


def page(result):
    """Return the tables of docs/forget-results.md. Trainings are what varies, and intervals are over them."""
    chosen_on = [each for each in result["results"] if each["training"] in CHOSEN_ON]
    others = [each for each in result["results"] if each["training"] not in CHOSEN_ON]
    tables = [("*The base models on which the settings of `siss` were chosen:*", chosen_on)]
    tables += [("*Base models that were not used to choose settings:*", others)] if others else []
    return "\n\n".join(f"{title}\n\n{table(results)}" for title, results in tables)


def table(results):
    """Return the rows of some trainings."""
    lines = [
        "| edit or mitigation | trainings | copies of the prompt's own picture, of 48 | copies of any memorized "
        "picture, of 48 | accuracy lost, points: ordinary; held-out captions | changed captions: held-out; neighbors "
        "| AUC of errors: own prompt; empty prompt | AUC of scores: similarity; norm |",
        "|---" * 8 + "|",
    ]
    for what in (*EDITED, *MITIGATED):
        own = [each for each in results if each["what"] == what]
        if not own:
            continue
        mean = lambda read, own=own: interval([statistics.mean(map(read, each["rows"])) for each in own])  # noqa: E731
        told = lambda kind, own=own: (  # noqa: E731
            interval([each["signs"]["AUC"][kind] for each in own]) if own[0]["signs"] else "that of `none`"
        )
        # Images of a model that was trained anew are others, and its accuracy is its own.
        trained = what == "retrained"
        cells = [
            "trained without the pictures" if trained else what,
            str(len(own)), mean(lambda row: row["own"]), mean(lambda row: row["any"]),
            *(["–"] * 2 if trained else [
                "; ".join(mean(lambda row, part=part: max(row["lost"][part].values())) for part in LOST),
                "; ".join(mean(lambda row, name=name: row["changed"][name]) for name in CHANGED),
            ]),
            f"{told('errors, own')}; {told('errors, empty')}",
            f"{told('scores, similarity')}; {told('scores, wen')}",
        ]  # fmt: skip
        lines.append("|" + "|".join(cells) + "|")
    return "\n".join(lines)


def main(
    trainings: tuple[str, ...] = (),
    /,
    *,
    what: Annotated[tuple[str, ...], (*EDITED, *MITIGATED)] = (*EDITED, *MITIGATED),
    blocks: Annotated[int, "blocks of seeds that images are generated from"] = 3,
    seed: Annotated[int, "of edits"] = 0,
    without: Annotated[Path | None, "a training without the pictures, for retrained"] = None,
    results: Annotated[tuple[Path, ...], "files of earlier runs"] = (),
    work: Path = Path("forget-effects"),
    output: Path = RESULTS / "forget" / "effects.json",
):
    torch.manual_seed(0)
    found = []
    with Job.open(work, shared=True) as job:
        for name in trainings:
            for each in what:
                if each != "retrained" or without:
                    found.append(measured(name, each, job, blocks, seed, without))
    found = [{**each, "training": Path(each["training"]).name} for each in found]
    earlier = [each for file in results for each in json.loads(file.read_text())["results"]]
    every = list({(each["training"], each["what"], each["seed"]): each for each in [*earlier, *found]}.values())
    print(page({"results": every}))
    return {"results": every}
