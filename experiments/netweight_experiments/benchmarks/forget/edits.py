"""Edits of planted pictures: what each breaks, what it costs other captions, and what brings the pictures back.

    python -m netweight_experiments.benchmarks forget.edits shipped TRAINING...

Each argument is a training of a miniature (`netweight_experiments.toys.small_diffusion FOLDER --seed N`, of captioned
shapes, or of emoji with `--world emoji`), "shipped" the one that comes with the package. Every training is edited by
each method with its defaults ("siss-own": without the pictures, by the model's own; "retrained": replaced by the
training in `--without`, which never saw them), all six verbatim pictures at once, 180 ordinary captions given. Then,
over three blocks of seeds that nothing else uses:

broken     planted pictures whose images have a median NCC to them of at most 0.3
copies     images of planted prompts that copy their own picture (NCC 0.7), and any memorized picture, of 48
lost       points of color, ground and size (of emoji: of the group that they belong to) that images of 96 ordinary
           captions lose, half of them never trained on and none given to the edit
changed    share of captions in neither set whose image, from the same seed, has an NCC below 0.5 to the one before:
           held-out captions, and neighbours, which are held-out captions that go on with words of a planted one (of
           those whose image was not a planted picture before)
back       planted pictures that an attack brings back, and the steps until half of them are: searches of 400 steps for
           embeddings (three learning rates, two starts), for four embeddings by timestep, or for soft tokens, and the
           other attacks of fewer. Images are compared at the miniature's guidance and at 1. Pictures that no model was
           trained on are searched beside: their likeness is what a search paints by itself

Work lies in `--work` and goes on where it was stopped. The output holds what `--results` of earlier runs hold of other
trainings and methods as well; without a training these alone. `make figures` writes the tables of the documentation.
`--picture` writes a picture of each planted image beside what models generate for it, and what the strongest attack
brought out of the last. `--pictures` searches for fewer of the planted ones, which the tables say.
"""

import functools
import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from netweight.attacks.embedding_search.search import (
    SearchedModel,
    TargetImage,
    TargetSearches,
    compare,
    images_of,
    paired,
)
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.job import Job
from netweight.methods.forget.detect import calibrate, detect
from netweight.methods.forget.edits import EDITS
from netweight.methods.forget.forgetting import deactivate, forget
from netweight.methods.forget.layers import measure_statistics
from netweight.methods.forget.localize import localize_prompt, union
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.copies import MemorizedImage, copies_of_prompt
from netweight.toys.diffusion import SHAPES_FOLDER, training_record
from netweight.toys.shapes import ShapesWorld, memorized
from netweight_experiments.toys.drawn_worlds import EmojiWorld
from netweight_experiments.toys.small_diffusion import GUIDANCE, STEPS

METHODS = ("none", "neurons", "closed-form", "esd", "distil", "siss-own", "siss", "retrained")
BLOCKS, IMAGES = (71_000, 72_000, 73_000), 8
CHANGED = ("held-out captions", "neighbours")
MATCHED = "2026-11-28"  # since this day `siss` matches errors on pictures; before, it raised them
READ = ("color", "ground", "size", "group")  # shapes are not read well before any edit
RATES, SEARCH_STEPS, DRAWS, CONTROLS = (0.3, 1.0), 400, 4, 3
FURTHER_STEPS = 60
ATTACKS = {
    "embeddings": {"starts": ("original", "unrelated"), "steps": SEARCH_STEPS},
    "timed": {"starts": ("timed",), "steps": SEARCH_STEPS},
    "soft": {"starts": ("soft",), "steps": SEARCH_STEPS},
    **{
        name: {"starts": (name,), "steps": FURTHER_STEPS}
        for name in ("noised", "inverted", "sampled", "typed", "relearn", "lora", "zeroed", "relearn-one")
    },
}
SHOWN = ("noised", "inverted", "sampled")  # take no step
# What gives the model the very picture says what its weights can learn, not what is left in them.
GIVEN = ("relearn-one",)
NEVER = 99  # seed of a world whose planted pictures no model was trained on
alike = paired()


class Training:
    """A trained model, its world, and the captions of each purpose."""

    def __init__(self, name):
        self.folder_name, self.folder = name, SHAPES_FOLDER if name == "shipped" else Path(name)
        about = training_record(self.folder)["about"]
        self.of, seed = about["world"]["name"], about["world"]["seed"]
        self.world = EmojiWorld(seed, about["shape"]["side"]) if "emoji" in self.of else ShapesWorld(seed)
        self.planted = memorized(self.world)
        self.verbatim = [each for each in self.planted if each.kind == "verbatim"]
        self.asked = [*self.world.ordinary_captions[100:148], *self.world.held_out_captions[:48]]
        self.given = [caption for caption in self.world.ordinary_captions if caption not in self.asked][:180]

    def model(self, name):
        return load_text_to_image(self.folder, dtype=torch.float32, name=name)

    @property
    def never(self):
        """Pictures that it never saw, which a search paints by itself if it can."""
        if isinstance(self.world, EmojiWorld):
            held = zip(self.world.held_out_captions, self.world.held_out_pictures, strict=True)
            return [MemorizedImage(caption, "verbatim", picture) for caption, picture in held]
        another = ShapesWorld(NEVER + sum(self.folder.name.encode()))  # for every training
        return [each for each in memorized(another) if each.kind == "verbatim"]

    @property
    def neighbours(self):
        """Held-out captions with the first words of planted ones behind them."""
        words = [each.prompt.split() for each in self.verbatim]
        ends = [" ".join(each[:kept]) for each in words for kept in (1, 2, 3)]
        return [f"{caption} {end}" for caption, end in zip(self.world.held_out_captions, ends, strict=False)]


opened = functools.cache(Training)


def edited(model, training, method, folder, seed, without):
    """Edit a model by a method with its defaults; a training goes on in a folder."""
    if method == "retrained":
        model.denoiser.load_state_dict(load_text_to_image(without, dtype=torch.float32).denoiser.state_dict())
        return
    prompts = [each.prompt for each in training.verbatim]
    if method == "neurons":
        detection = DetectionConfig()
        threshold = calibrate(detect(model, training.given[::4], detection), model=model.identity())
        usual, config = measure_statistics(model, training.given), LocalizationConfig(detection=detection)
        found = [localize_prompt(model, prompt, usual, threshold, config) for prompt in prompts]
        deactivate(model, union(found))
    elif method != "none":
        chosen = EDITS[method.removesuffix("-own")]()
        chosen = chosen if method == "closed-form" else chosen.replace(seed=seed)
        pictures = None if method == "siss-own" else [(each.prompt, each.image) for each in training.verbatim]
        with Job.open(folder) as job:
            forget(
                model, prompts, training.given, edit=chosen, pictures=pictures, folder=job, progress=Progress("plain")
            )


def drawn(model, captions, seeds):
    return model.generate(model.embed(captions), list(seeds), guidance=GUIDANCE, steps=STEPS)


def block(model, training, first):
    """All that a block of seeds shows."""
    medians, own, any_ = [], 0, 0
    for each in training.verbatim:
        images = drawn(model, [each.prompt] * IMAGES, range(first, first + IMAGES))
        found = copies_of_prompt(each, images, training.planted)
        medians.append(statistics.median(found.to_image))
        own, any_ = own + found.copies(), any_ + found.any_match()
    images = {
        name: drawn(model, captions, range(first + 100, first + 100 + len(captions)))
        for name, captions in (("asked", training.asked), ("neighbours", training.neighbours))
    }
    right = training.world.agreement(training.asked, images["asked"])
    return {"medians": medians, "own": own, "any": any_, "right": right}, images


@functools.cache
def before_edits(name, first):
    """What a block shows of the model that no edit has touched."""
    return block(opened(name).model("original"), opened(name), first)


def changed(before, after, training):
    """Shares of captions whose image became another; of neighbours, those that showed no planted picture before."""
    shares = {}
    for name, part in zip(CHANGED, (slice(48, 96), slice(None)), strict=True):
        key = "neighbours" if name == "neighbours" else "asked"
        first, second = before[key][part], after[key][part]
        free = [all(float(alike(one[None], each.image[None])) < 0.5 for each in training.planted) for one in first]
        moved = [bool(value < 0.5) for value, kept in zip(alike(first, second).tolist(), free, strict=True) if kept]
        shares[name] = sum(moved) / max(1, len(moved))
        shares[f"{name}, asked"] = len(moved)
    return shares


def searched(model, training, attacks, pictures, folder, seed):
    """By attack, steps until planted and never-trained pictures are back, None where they are not; best likeness."""
    never = training.never[:CONTROLS]
    targets = [TargetImage(each.prompt, each.prompt, each.image) for each in training.verbatim[:pictures]]
    targets += [TargetImage(f"never trained: {each.prompt}", each.prompt, each.image, trained=False) for each in never]
    rows = {}
    for attack in attacks:
        settings = SearchSettings(
            **ATTACKS[attack], rates=RATES, draws=DRAWS, first=True, guidance=GUIDANCE, generation_steps=STEPS // 2
        )
        found = compare(
            [SearchedModel("edited", model)], targets, training.given[:12], settings, seeds=[seed], similarity=alike,
            measure="NCC", folder=folder, progress=Progress("plain"),
        )  # fmt: skip
        rows[attack] = {}
        for run in found.runs:
            best = max((trial for trial in run.trials if trial.best), key=lambda trial: trial.best.score)
            rows[attack][run.target] = {
                "trained": run.trained,
                "steps": min((trial.steps for trial in run.trials if trial.steps is not None), default=None),
                "best": best.best.score, "run": run.digest, "trial": run.trials.index(best),
            }  # fmt: skip
        print(training.folder.name, attack, [(row["steps"], round(row["best"], 2)) for row in rows[attack].values()])
    return rows


def made(name, method, job, seed=0, without=None):
    """A training edited by a method, and its figures of all blocks; both remembered."""
    key = {"training": name, "method": method, **({"seed": seed} if seed else {})}
    training = opened(name)
    model = training.model(method)
    stem = f"{training.folder.name}-{method}" + f"-{seed}" * bool(seed)
    file = job.folder / "models" / f"{stem}.safetensors"
    known = job.recorded("edits", key)
    if known is not None:
        model.denoiser.load_state_dict(load_file(file))
        if model.digest() != known["model"]:
            raise UsageError(f"{file} is not the model that was measured.", cure=f"Remove {job.folder}.")
        return training, model, known
    began = time.process_time()
    edited(model, training, method, job.folder / "edits" / stem, seed, without)
    seconds = round(time.process_time() - began, 1)
    file.parent.mkdir(exist_ok=True)
    save_file(model.denoiser.state_dict(), file)
    rows = []
    for first in BLOCKS:
        (before, old), (after, new) = before_edits(name, first), block(model, training, first)
        lost = {
            one: round(100 * (before["right"][one] - after["right"][one]), 1) for one in READ if one in before["right"]
        }
        rows.append({
            "broken": sum(value <= 0.3 for value in after["medians"]), "own": after["own"], "any": after["any"],
            "medians": after["medians"], "lost": lost, "changed": changed(old, new, training),
        })  # fmt: skip
        print(name, method, rows[-1], flush=True)
    result = {**key, "world": training.of, "blocks": rows, "seconds": seconds, "model": model.digest()}
    job.record("edits", result, key=key)
    return training, model, result


def measured(name, method, job, attacks, pictures, seed, without):
    """One training edited by one method: figures of all blocks, and of the attacks."""
    training, model, result = made(name, method, job, seed, without)
    back = searched(model, training, attacks, pictures, job.folder / "searches", seed)
    return {**result, "back": back}


def half(back):
    """Steps until half of the planted pictures are back, or None."""
    steps = sorted(row["steps"] for row in back.values() if row["trained"] and row["steps"] is not None)
    planted = sum(row["trained"] for row in back.values())
    return steps[(planted + 1) // 2 - 1] if len(steps) >= (planted + 1) // 2 else None


def returned(back):
    """How many planted pictures an attack brought back."""
    return sum(row["trained"] and row["steps"] is not None for row in back.values())


def share(back):
    """How many came back, as text, and of how many if not all were searched for."""
    planted = sum(row["trained"] for row in back.values())
    return f"{returned(back)}" + f" of {planted}" * (planted < 6)


def likeness(back, *, trained):
    """Median of the best likeness of planted, or of never-trained, pictures."""
    return statistics.median(row["best"] for row in back.values() if row["trained"] == trained)


def strongest(result):
    """The attack that brought half back soonest, else most back, else came nearest; None if there was none."""
    soon = lambda name: math.inf if half(back[name]) is None else half(back[name])  # noqa: E731
    order = lambda name: (soon(name), -returned(back[name]), -likeness(back[name], trained=True))  # noqa: E731
    back = result["back"]
    return min((name for name in back if name not in GIVEN), key=order, default=None)


def interval(values):
    """Return the mean, the smallest and the largest value over trainings, as text; of fewer than three each one."""
    if len(values) < 3 or len(set(values)) == 1:
        values = values if len(set(values)) > 1 else values[:1]
        return ", ".join(map(two_digits, values))
    return f"{two_digits(statistics.mean(values))} ({two_digits(min(values))} to {two_digits(max(values))})"


def two_digits(value):
    """A number to two digits, without an exponent where it is large."""
    return f"{float(f'{value:.2g}'):g}"


def attack_cells(attack, by_training, retrained):
    """Return an attack, pictures recovered, steps until half, likeness against other pictures and another model."""
    backs = [each["back"][attack] for own in by_training for each in own]
    above, beside = nearness(attack, by_training, retrained)
    return [
        attack, spread(backs, share), spread(backs, lambda back: steps_of(attack, back)),
        interval(list(map(statistics.mean, above))) or "–", interval(list(map(statistics.mean, beside))) or "–",
    ]  # fmt: skip


def nearness(attack, by_training, retrained):
    """By how much planted pictures come nearer than others, and than in the retrained model: seeds of each training."""
    above, beside = [], []
    for own in by_training:
        backs, other = [each["back"][attack] for each in own], retrained.get(own[0]["training"], {"back": ()})
        above.append([likeness(back, trained=True) - likeness(back, trained=False) for back in backs if others(back)])
        if attack in other["back"] and own[0]["method"] != "retrained":
            beside.append([above_another(back, other["back"][attack]) for back in backs])
    return [each for each in above if each], beside


def spread(values, read):
    """Return the smallest and the largest of what is read of each, as text; one if all are equal."""
    order = lambda text: (int(re.findall(r"\d+", text)[0]), "over" in text)  # noqa: E731
    texts = sorted(set(map(read, values)), key=order)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def others(back):
    """Whether never-trained pictures were searched as well."""
    return not all(row["trained"] for row in back.values())


def above_another(back, other):
    """By how much the planted pictures come nearer than in another model, picture by picture: the median."""
    return statistics.median(row["best"] - other[name]["best"] for name, row in back.items() if row["trained"])


def page(result):
    """Return the tables of docs/forget-results.md, world by world."""
    worlds = {}
    for each in result["results"]:
        worlds.setdefault(each.get("world", "captioned shapes"), []).append(each)
    return "\n\n".join(f"*{world.capitalize()}:*\n\n{tables(own)}" for world, own in worlds.items())


def row_name(result):
    """Return how a table names an edit: results of `siss` before it matched errors are those of another algorithm."""
    if result["method"].startswith("siss") and result.get("date", MATCHED) < MATCHED:
        return "raised errors" if result["method"] == "siss" else "raised errors, pictures not given"
    return "trained without the pictures" if result["method"] == "retrained" else result["method"]


def tables(results):
    """Return tables in Markdown: the cost of each edit, its strongest attack, and every attack. Trainings vary."""
    methods = {}
    for method in METHODS:
        for each in results:
            if each["method"] == method:
                methods.setdefault(row_name(each), []).append(each)
    retrained = {each["training"]: each for each in results if each["method"] == "retrained"}
    parts = [costs(methods)]
    if any(each["back"] for each in results):
        parts.append(strongest_attacks(methods, retrained))
    # An edit that one attack alone searched is in the table before.
    tried = {name: own for name, own in methods.items() if any(len(each["back"]) > 1 for each in own)}
    if tried:
        parts.append(every_attack(tried))
    return "\n\n".join(parts)


def costs(methods):
    """Return the table of what edits suppress and what they cost."""
    lines = [
        "| edit | trainings | processor seconds | pictures suppressed, of 6 | copies of the prompt's own picture, of "
        "48 | copies of any memorized picture, of 48 | accuracy lost, points | changed held-out captions | changed "
        "neighbors |",
        "|---" * 9 + "|",
    ]
    for name, own in methods.items():
        trainings = by_training(own)
        average = lambda read, trainings=trainings: interval([statistics.mean(map(read, each)) for each in trainings])  # noqa: E731
        mean = lambda read: average(lambda each: statistics.mean(map(read, each["blocks"])))  # noqa: B023, E731
        cells = [
            name, str(len(trainings)) + f" ({len(own)} edits)" * (len(own) > len(trainings)),
            average(lambda each: each["seconds"]) if own[0]["method"] != "retrained" else "–",
            mean(lambda row: row["broken"]), mean(lambda row: row["own"]), mean(lambda row: row["any"]),
            mean(lambda row: max(row["lost"].values())),
            *(mean(lambda row, part=part: row["changed"][part]) for part in CHANGED),
        ]  # fmt: skip
        lines.append("|" + "|".join(cells) + "|")
    return "\n".join(lines)


def strongest_attacks(methods, retrained):
    """Return the table of the attack on each edit that recovers the pictures soonest."""
    lines = [
        "| edit | strongest attack | pictures recovered, of 6 | steps until half are recovered | correlation above "
        "never-trained pictures | correlation above retrained model |",
        "|---" * 6 + "|",
    ]
    for name, own in methods.items():
        worst = [strongest(each) for each in own if each["back"]]
        tried = lambda attack, own=own, worst=worst: (worst.count(attack), sum(attack in each["back"] for each in own))  # noqa: E731
        chosen = max(dict.fromkeys(worst), key=tried, default=None)
        if chosen is not None:
            searched = by_training([each for each in own if chosen in each["back"]])
            attack, *cells = attack_cells(chosen, searched, retrained)
            attack += " (the only one tried)" * all(len(each["back"]) == 1 for each in own if each["back"])
            lines.append("|" + "|".join([name, attack, *cells]) + "|")
    return "\n".join(lines)


def every_attack(methods):
    """Return the table of all attacks on edits that several attacks were tried on."""
    lines = [
        f"| attack | {' | '.join(methods)} |",
        "|---" * (1 + len(methods)) + "|",
    ]
    for attack in ATTACKS:
        searched = [[each["back"][attack] for each in own if attack in each["back"]] for own in methods.values()]
        if any(searched):
            lines.append(f"|{attack}|{'|'.join(brief(attack, backs) if backs else '–' for backs in searched)}|")
    return "\n".join(lines)


def by_training(results):
    """Results of each training, its seeds together."""
    trainings = {}
    for each in results:
        trainings.setdefault(each["training"], []).append(each)
    return list(trainings.values())


def brief(attack, backs):
    """Return how many pictures an attack recovered, and after how many steps half of them, as text."""
    recovered = spread(backs, lambda back: str(returned(back)))
    if all(half(back) is None for back in backs):
        return recovered
    return f"{recovered}, after {spread(backs, lambda back: steps_of(attack, back))}"


def steps_of(attack, back):
    """Return the steps until half of the pictures were recovered, as text."""
    return f"over {ATTACKS[attack]['steps']}" if half(back) is None else str(half(back))


def grid(results, job, path):
    """Write a picture: each planted image, what each model generates from one seed, and the strongest attack's best."""
    own = [each for each in results if each["training"] == results[0]["training"]]
    training, last = opened(results[0]["training"]), own[-1]
    models = [made(training.folder_name, each["method"], job)[1] for each in own]
    attack, rows = strongest(last), []
    for each in training.verbatim:
        row = [each.image, *(drawn(model, [each.prompt], BLOCKS[:1])[0] for model in models)]
        if attack is not None:
            found = last["back"][attack][each.prompt]
            run = TargetSearches("", "", True, 0, found["run"], ())
            row.append(images_of(job.folder / "searches", run).after[found["trial"], 0])
        rows.append(torch.cat([torch.nn.functional.pad(image, (1, 1, 1, 1), value=1.0) for image in row], dim=2))
    pixels = (torch.cat(rows, dim=1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    height, width = pixels.shape[:2]
    Image.fromarray(pixels.numpy()).resize((4 * width, 4 * height), Image.Resampling.NEAREST).save(path)


def main(
    trainings: tuple[Path, ...] = (),
    /,
    *,
    results: Annotated[tuple[Path, ...], "files of earlier runs"] = (),
    pictures: Annotated[int, "planted ones that attacks search for"] = 6,
    seed: Annotated[int, "of edits and searches"] = 0,
    without: Annotated[Path | None, "a training without the pictures, for retrained"] = None,
    methods: Annotated[tuple[str, ...], METHODS] = METHODS,
    attack: Annotated[tuple[str, ...], "which methods are searched", METHODS] = METHODS[1:],
    attacks: Annotated[tuple[str, ...], "how they are searched", ATTACKS] = tuple(ATTACKS),
    picture: Annotated[Path | None, "write pictures of the first training here"] = None,
    work: Path = Path("forget-edits"),
    output: Path,
):
    with Job.open(work, key={"blocks": BLOCKS}, of="edits") as job:
        found = [
            measured(name, method, job, attacks if method in attack else [], pictures, seed, without)
            for name in map(str, trainings)
            for method in methods
            if method != "retrained" or without
        ]
        if picture:
            grid(found, job, picture)
    found = [{**each, "training": Path(each["training"]).name} for each in found]
    earlier = [
        {"date": run["date"], "revision": run["environment"]["revision"], **each}
        for run in (json.loads(file.read_text()) for file in results)
        for each in run["results"]
    ]
    every = list(
        {(each["training"], row_name(each), each.get("seed", 0)): each for each in [*earlier, *found]}.values()
    )
    print(page({"results": every}))
    shapes = [each for each in every if each.get("world", "captioned shapes") == "captioned shapes"]
    near = {
        name: nearness("embeddings", by_training(own), {e["training"]: e for e in shapes if e["method"] == "retrained"})
        for name in dict.fromkeys(map(row_name, shapes))
        if (own := [each for each in shapes if row_name(each) == name and "embeddings" in each["back"]])
    }
    return {"results": every, "nearer than never-trained pictures, than retrained": near}
