"""What switching off the neurons of planted pictures does, seed by seed, and what ordinary captions pay: measured.

    python -m netweight_experiments.benchmarks.forget.edits

On a miniature of captioned shapes, with the defaults of detection and localization; the threshold is calibrated on 48
ordinary captions, statistics are of all 240 that training showed. Pictures are drawn from seeds that nothing else
used, guidance 3, 20 steps. For each planted picture:

own       NCC to the planted picture with its neurons off, copies (0.7 and more) of it and of any planted one.
random    The same with as many other neurons off, and with as many of each layer (`--draws` draws, their median),
          where there are so many others.
ordinary  Color, ground and size that pictures of ordinary captions show: how many points fewer are right than before,
          from the same seeds, half of the captions never shown in training. The same for layer-matched random neurons.

In the end the neurons of all pictures are switched off together. With `--alarm` memorization counts as broken at the
threshold of detection already, as in the released code. `--captions 0` and `--draws 0` leave out what they count.
`--block` 1, 2 and 3 have seeds of their own, of detection, of localization and of all pictures, so that a model chosen
by one block is judged by others.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from netweight.core.environment import describe
from netweight.core.units import Units
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.forget.detect import calibrate, detect, roc
from netweight.methods.forget.edit import deactivated
from netweight.methods.forget.layers import measure_statistics
from netweight.methods.forget.localize import localize_prompt
from netweight.methods.forget.mitigations import neuron_counts, random_units
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.copies import COPY, CenteredPixels, copies_of_prompt, described
from netweight.toys.diffusion import SHAPES_FOLDER, training_record
from netweight.toys.shapes import ShapesWorld, memorized
from netweight_experiments.benchmarks.script import now, options_of, script, write
from netweight_experiments.toys.small_diffusion import GUIDANCE, STEPS

FIRST_SEED, FIRST_ORDINARY_SEED = 1000, 5000  # those from 0 on are localization's
BLOCKS, DRAWN, LOOKED_AT = 4, 1000, 10  # seeds from one block to the next, of pictures and of first predictions
NOTHING = Units({})


class Bench:
    """A model, what it was trained on, and what it drew before any edit."""

    def __init__(self, options):
        self.options = options
        first = LOOKED_AT * options.block
        self.detection = DetectionConfig(seeds=tuple(range(first, first + LOOKED_AT)))
        self.first_seed = FIRST_SEED + DRAWN * options.block
        self.first_ordinary_seed = FIRST_ORDINARY_SEED + DRAWN * options.block
        self.model = load_text_to_image(options.model, dtype=torch.float32)
        self.world = ShapesWorld(training_record(options.model)["about"]["world"]["seed"])
        self.planted = memorized(self.world)
        self.counts = neuron_counts(self.model.denoiser)
        half = options.captions // 2
        self.captions = [*self.world.ordinary_captions[48 : 48 + half], *self.world.held_out_captions[:half]]
        self.before = self.ordinary(NOTHING) if half else None

    def drawn(self, captions, seeds, units, factor=0.0):
        with deactivated(self.model.denoiser, units, factor=factor):
            return self.model.generate(self.model.embed(captions), seeds, guidance=GUIDANCE, steps=STEPS)

    def own(self, picture, units):
        """A planted picture's copies with neurons off."""
        seeds = range(self.first_seed, self.first_seed + self.options.seeds)
        images = self.drawn([picture.prompt] * len(seeds), seeds, units)
        found = copies_of_prompt(picture, images, self.planted)
        return {
            "median": statistics.median(found.to_image),
            "to image": found.to_image,
            "copies": found.copies(),
            "copies of any": found.any_match(),
            "nearest": found.nearest_prompt,
        }

    def ordinary(self, units):
        """What pictures of ordinary captions show, with neurons off."""
        seeds = range(self.first_ordinary_seed, self.first_ordinary_seed + len(self.captions))
        images = self.drawn(self.captions, seeds, units)
        right = self.world.agreement(self.captions, images)
        if not units:
            self.images = described(CenteredPixels(), images)
            return right
        same = (described(CenteredPixels(), images) * self.images).sum(1)
        lost = {name: round(100 * (value - right[name]), 1) for name, value in self.before.items()}
        return {"points lost": lost, "NCC to unedited, median": float(same.median())}

    def random(self, units, *, matched):
        """Draws of as many other neurons; none where there are not so many."""
        try:
            return [
                random_units(units, self.counts, layer_matched=matched, seed=draw) for draw in range(self.options.draws)
            ]
        except UsageError:
            return []

    def edit(self, picture, statistics_, threshold):
        """Everything about one planted picture."""
        found = localize_prompt(
            self.model, picture.prompt, statistics_, threshold, LocalizationConfig(detection=self.detection)
        )
        units = found.neurons
        row = {
            "kind": picture.kind, "localization": found.to_json(),
            "unedited": self.own(picture, NOTHING), "own": self.own(picture, units),
            "ordinary": self.ordinary(units) if self.captions else None,
        }  # fmt: skip
        for name, matched in (("random", False), ("random, layer-matched", True)):
            draws = [self.own(picture, other) for other in self.random(units, matched=matched)]
            row[name] = (
                {"median": statistics.median(each["median"] for each in draws), "draws": draws} if draws else None
            )
        others = self.random(units, matched=True)[:1]
        row["ordinary, random, layer-matched"] = self.ordinary(others[0]) if others and self.captions else None
        return row, units


def main():
    parser = script(__doc__, whole=True)
    parser.add_argument("--model", type=Path, default=SHAPES_FOLDER)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--captions", type=int, default=96)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--block", type=int, choices=range(BLOCKS), default=0)
    parser.add_argument("--alarm", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options)
    model, world, look = bench.model, bench.world, bench.detection
    threshold = calibrate(detect(model, world.ordinary_captions[:48], look), model=model.digest())
    if options.alarm:
        threshold = replace(threshold, broken=None)
    usual = measure_statistics(model, world.ordinary_captions)
    scores = {each.prompt: each.similarity for each in detect(model, [one.prompt for one in bench.planted], look)}
    held_out = [each.similarity for each in detect(model, world.held_out_captions, look)]
    print(threshold, "before:", bench.before, flush=True)
    rows, together = {}, {"verbatim": NOTHING, "all": NOTHING}
    for picture in bench.planted:
        rows[picture.prompt], units = bench.edit(picture, usual, threshold)
        together["all"] |= units
        if picture.kind == "verbatim":
            together["verbatim"] |= units
        print(line(picture.prompt, rows[picture.prompt]), flush=True)
    unions = {}
    for name, units in together.items() if options.captions else ():
        others = bench.random(units, matched=True)[:1]
        unions[name] = {
            "neurons": len(units), "of": sum(bench.counts.values()), "ordinary": bench.ordinary(units),
            "planted": {each.prompt: bench.own(each, units) for each in bench.planted},
            "ordinary, random, layer-matched": bench.ordinary(others[0]) if others else None,
        }  # fmt: skip
        print(name, len(units), unions[name]["ordinary"], unions[name]["ordinary, random, layer-matched"], flush=True)
    areas = {kind: auc(rows, scores, held_out, kind) for kind in ("verbatim", "template")}
    result = summary(rows, areas, options.draws)
    print(json.dumps(result, indent=1))
    values = {
        "what": "neurons of planted pictures off, on captioned shapes: a miniature",
        "date": now(),
        "options": options_of(options),
        "model": model.digest(),
        "training": training_record(options.model)["about"],
        "threshold": threshold.to_json(),
        "detection": {"planted": scores, "held out": held_out},
        "ordinary before": bench.before,
        "summary": result,
        "pictures": rows,
        "together": unions,
        "environment": describe(),
    }
    write(options.output, values)


def auc(rows, scores, held_out, kind):
    return roc([scores[prompt] for prompt, row in rows.items() if row["kind"] == kind], held_out).auc


def line(prompt, row):
    random = [row[name] and round(row[name]["median"], 2) for name in ("random", "random, layer-matched")]
    own, sizes = row["own"], [len(part) for part in row["localization"]["refined"].values()]
    return (
        f"{prompt[:20]:20} {sizes} NCC {own['median']:.2f} copies {own['copies']} any {own['copies of any']} "
        f"random {random} lost {(row['ordinary'] or {}).get('points lost')}"
    )


def left_by_random(part):
    """How many pictures random neurons leave as they are."""
    matched = [row["random, layer-matched"] for row in part]
    return {
        "left by layer-matched random neurons, at least 0.9": sum(
            each is not None and each["median"] >= 0.9 for each in matched
        ),
        "layer-matched not possible": sum(each is None for each in matched),
        "left by as many random neurons, at least 0.9": sum(
            row["random"] is not None and row["random"]["median"] >= 0.9 for row in part
        ),
    }


def summary(rows, areas, draws):
    """The targets, over verbatim pictures, with templates beside."""
    found = {"AUC against held-out captions": areas}
    for kind in ("verbatim", "template"):
        part = [row for row in rows.values() if row["kind"] == kind]
        lost = [row["ordinary"]["points lost"] for row in part if row["ordinary"]]
        seeds = sum(len(row["own"]["to image"]) for row in part)
        found[kind] = {
            "pictures": len(part),
            "broken, median NCC at most 0.3": sum(row["own"]["median"] <= 0.3 for row in part),
            **(left_by_random(part) if draws else {}),
            f"seeds that copy the own picture ({COPY})": [sum(row["own"]["copies"] for row in part), seeds],
            "seeds that copy any planted picture": [sum(row["own"]["copies of any"] for row in part), seeds],
            "points lost by ordinary captions, median of edits": {
                name: statistics.median(each[name] for each in lost) for name in (lost or [{}])[0]
            },
        }
    return found


if __name__ == "__main__":
    main()
