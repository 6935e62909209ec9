"""What ordinary captions pay for an edit, and whether other ways to choose and to scale neurons ask for less: measured.

    python -m netweight_experiments.benchmarks.forget.collateral

On a miniature of captioned shapes, its six verbatim pictures, eight seeds each; 96 ordinary captions, half of them
never shown in training. Seeds and blocks of them are those of `edits.py`. A WAY is ORDER[:LOWER][@FACTOR]:

ORDER    In which refinement spares single neurons, after whole layers. "paper": by layer and index. "harm": first those
         whose absence changes the first prediction for 16 ordinary captions most. "usual": first those that ordinary
         captions make most active. "far": first those that the prompt moves least from their mean.
LOWER    By so many deviations memorization is to fall below the mean of ordinary prompts; 0 by default.
FACTOR   What the neurons found are multiplied with; 0 by default.

After every WAY what is known is written to FILE.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from netweight.core.environment import describe
from netweight.core.units import Units
from netweight.methods.forget.detect import calibrate, detect, first_step, greatest, pairwise
from netweight.methods.forget.layers import measure_statistics, text_activations, value_layers
from netweight.methods.forget.localize import localize_prompt
from netweight.methods.forget.masking import MaskedRow, RowMasks
from netweight.methods.forget.search import Predictions, Trials, blocked_by_layer, predicted, prune, run_searches
from netweight.methods.forget.settings import LocalizationConfig
from netweight.metrics.copies import copies_of_prompt
from netweight.nn.batching import Batches, Costs
from netweight.toys.diffusion import SHAPES_FOLDER, training_record
from netweight_experiments.benchmarks.forget.edits import Bench
from netweight_experiments.benchmarks.script import now, script, write

ORDERS = ("paper", "harm", "usual", "far")
WAYS = ("paper", "harm", "usual", "far", "paper:0.5", "paper:1", "harm:0.5", "harm:1", "paper@-0.25", "harm@-0.25",
        "paper@-0.5", "harm@-0.5")  # fmt: skip
READ = ("color", "ground", "size")  # shapes are not read well before any edit


class Ways(Bench):
    """A bench that refines in other orders."""

    def __init__(self, options):
        super().__init__(options)
        model = self.model
        self.layers = value_layers(model.denoiser)
        self.threshold = calibrate(detect(model, self.world.ordinary_captions[:48], self.detection))
        self.usual = measure_statistics(model, self.world.ordinary_captions)
        self.harm = self.measured_harm(self.world.ordinary_captions[100:116])

    @torch.no_grad()
    def measured_harm(self, captions):
        """How much each neuron's absence changes what is first predicted for captions, mean square."""
        neurons = [(name, index) for name, layer in self.layers.items() for index in range(layer.width)]
        trials = [{}] + [{name: {index}} for name, index in neurons]
        noise, timestep = first_step(self.model, self.detection)
        masks = RowMasks(self.model.denoiser, self.layers)
        total = torch.zeros(len(neurons))
        for place, caption in enumerate(captions):
            prompt, start = masks.read(self.model.embed([caption])), noise[place % len(noise)]

            def predicted(chosen, prompt=prompt, start=start):
                rows = [MaskedRow(prompt, trial, 0) for trial in trials[chosen]]
                with masks.blocking(rows) as text:
                    return self.model.predict(start.expand(len(rows), -1, -1, -1), timestep, text).noise

            said = Batches(64).run(predicted, len(trials))
            total += (said[1:] - said[0]).square().flatten(1).mean(1)
        return dict(zip(neurons, total.tolist(), strict=True))

    def found(self, prompt, order, lower):
        """A prompt's neurons."""
        deviation = self.threshold.value - self.threshold.broken
        threshold = replace(self.threshold, broken=self.threshold.broken - lower * deviation)
        config = LocalizationConfig(detection=self.detection)
        usually = localize_prompt(self.model, prompt, self.usual, threshold, config)
        if order == "paper":
            return usually.neurons
        initial = [(name, index) for name, indices in usually.initial.items() for index in indices]
        refined = self.refined(prompt, initial, usually.refinement_threshold + 1e-5, self.key(prompt, order))
        return Units({name: sorted(found) for name, found in blocked_by_layer(refined).items()})

    def key(self, prompt, order):
        if order == "harm":
            return lambda neuron: -self.harm[neuron]
        if order == "usual":
            return lambda neuron: -float(self.usual.means[neuron[0]][neuron[1]])
        active = text_activations(self.model, self.layers, self.model.embed([prompt]))
        far = self.usual.z({name: values[0].cpu() for name, values in active.items()})
        return lambda neuron: float(far[neuron[0]][neuron[1]])

    def refined(self, prompt, initial, limit, key):
        """Refinement as netweight does it, single neurons in the order of a key."""
        predictions = Predictions(self.model, self.layers, self.detection)

        def search():
            costs, text = Costs(), predictions.masks.read(self.model.embed([prompt]))
            unblocked = yield from predicted(
                [MaskedRow(text, {}, seed) for seed in range(len(self.detection.seeds))], costs
            )
            kept = (greatest(pairwise(unblocked)) > self.threshold.value).nonzero().flatten().tolist()
            trials = Trials(text, kept, unblocked[kept], costs)
            layers = [
                [place for place, neuron in enumerate(initial) if neuron[0] == name] for name in reversed(self.layers)
            ]
            whole = yield from prune(trials, initial, [layer for layer in layers if layer], limit, ahead=32)
            left = [initial[place] for place in whole]
            single = [[place] for place in sorted(range(len(left)), key=lambda place: key(left[place]))]
            kept = yield from prune(trials, left, single, limit, ahead=32)
            return [left[place] for place in kept]

        with torch.no_grad():
            ((_, found),) = run_searches([search()], predictions, 1)
        if isinstance(found, Exception):
            raise found
        return found

    def measured(self, way):
        """What a way comes to on every verbatim picture."""
        rest, _, factor = way.partition("@")
        order, _, lower = rest.partition(":")
        if order not in ORDERS:
            raise SystemExit(f"The order {order!r} is unknown; there are {', '.join(ORDERS)}.")
        factor, rows = float(factor or 0), {}
        seeds = range(self.first_seed, self.first_seed + self.options.seeds)
        others = range(self.first_ordinary_seed, self.first_ordinary_seed + len(self.captions))
        for picture in self.planted:
            if picture.kind != "verbatim":
                continue
            units = self.found(picture.prompt, order, float(lower or 0))
            copies = copies_of_prompt(
                picture, self.drawn([picture.prompt] * len(seeds), seeds, units, factor), self.planted
            )
            right = self.world.agreement(self.captions, self.drawn(self.captions, others, units, factor))
            rows[picture.prompt] = {
                "neurons": {name: found.tolist() for name, found in units.items()},
                "to image": copies.to_image, "median": statistics.median(copies.to_image),
                "copies": copies.copies(), "copies of any": copies.any_match(),
                "points lost": {name: round(100 * (self.before[name] - right[name]), 1) for name in READ},
            }  # fmt: skip
        return {"summary": summary(rows), "pictures": rows}


def summary(rows):
    parts = list(rows.values())
    return {
        "broken, median NCC at most 0.3": sum(row["median"] <= 0.3 for row in parts),
        "of": len(parts),
        "neurons, median": statistics.median(sum(map(len, row["neurons"].values())) for row in parts),
        "copies": sum(row["copies"] for row in parts),
        "copies of any": sum(row["copies of any"] for row in parts),
        "points lost, median of edits": {
            name: statistics.median(row["points lost"][name] for row in parts) for name in READ
        },
        "points lost, median of edits and attributes": statistics.median(
            row["points lost"][name] for row in parts for name in READ
        ),
    }


def main():
    parser = script(__doc__, whole=True)
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--model", type=Path, default=SHAPES_FOLDER)
    parser.add_argument("--block", type=int, choices=range(4), default=0)
    options = parser.parse_args()
    options.seeds, options.captions = 8, 96
    torch.set_num_threads(1)
    bench = Ways(options)
    values = {
        "what": "orders of refinement, aims and factors, on captioned shapes: a miniature",
        "date": now(),
        "options": {"block": options.block, "seeds": options.seeds, "captions": options.captions},
        "model": bench.model.digest(),
        "training": training_record(options.model)["about"],
        "threshold": bench.threshold.to_json(),
        "ordinary before": bench.before,
        "ways": {},
        "environment": describe(),
    }
    for way in options.ways:
        values["ways"][way] = bench.measured(way)
        print(way, json.dumps(values["ways"][way]["summary"]), flush=True)
        write(options.output, values)


if __name__ == "__main__":
    main()
