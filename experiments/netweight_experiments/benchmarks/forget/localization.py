"""How fast memorized prompts are localized beside the one-by-one loop, to the same neurons: measured, written as JSON.

    python -m netweight_experiments.benchmarks forget.localization

On a miniature of captioned shapes, with its own threshold and statistics. Two loops, written from what the paper and
a description of the released code say; each is compared with netweight at the settings that must find the very same
neurons, which is asserted for every prompt and round.

released  What the released code computes for a prompt: every prediction is made twice, the first one at the step before
          and thrown away; the prompt's activations are collected by a run of the U-Net; statistics are read from the
          disk in every stage; neurons that both rules chose are tried twice; every score is of all seeds that count.
          Against `fidelity="reference", timing="code"`.
clean     The same loop without any of that: one prediction per question, activations from the text, statistics in
          memory, every neuron once. Against the defaults.

Netweight is given all prompts in one call of `localize`, and searches several side by side.

Both block neurons by a hook on the layer, run the seeds of a question as one batch, and compare by netweight's own
structural similarity, not by torchmetrics' slower one. Sides take turns in every round, so that they meet the same
machine; ratios are of all prompts together, theirs over ours, with a t-interval over rounds of three or more.
"""

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from netweight.core.names import Units
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.forget.detect import calibrate, detect, first_step, greatest, noise_difference
from netweight.methods.forget.layers import Statistics, measure_statistics, text_activations, value_layers
from netweight.methods.forget.localize import localize, stage_neurons
from netweight.methods.forget.scaling import deactivated
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.intervals import t_interval
from netweight.metrics.structural_similarity import (
    published_structural_similarity,
    similarity_matrix,
    structural_similarity,
)
from netweight.nn.hooks import capture
from netweight.toys.diffusion import SHAPES_FOLDER, training_record
from netweight.toys.shapes import ShapesWorld

TOLERANCE = 1e-5  # of similarities, as in netweight: nearer ones are rounding
SIDES = ("loop", "netweight")


class Loop:
    """The search one question at a time. `released` computes in vain what the released code does."""

    def __init__(self, model, file, threshold, config, *, released):
        self.model, self.file, self.config, self.released = model, file, config, released
        self.threshold = threshold.value
        self.aim = threshold.value if config.fidelity == "reference" else threshold.broken
        self.layers = value_layers(model.denoiser)
        self.usual = None if released else Statistics.read_published(file, self.layers)

    def predictions(self, text, noise, blocked):
        """Noise differences with neurons blocked, one row per seed."""
        place = 0 if self.config.detection.timing == "paper" else 1
        timesteps = self.model.timesteps(self.config.detection.steps)
        units = Units({name: sorted(set(indices)) for name, indices in blocked.items() if indices})
        rows = text.rows([0] * len(noise))
        with deactivated(self.model.denoiser, units):
            for timestep in timesteps[: place + 1] if self.released else timesteps[place : place + 1]:
                said = self.model.predict(noise, timestep, rows).noise
        return noise_difference(said, noise)

    def activations(self, text, noise):
        """The prompt's mean absolute values, layer by layer."""
        if not self.released:
            return {name: value[0] for name, value in text_activations(self.model, self.layers, text).items()}
        with capture(self.model.denoiser, list(self.layers)) as seen:
            self.predictions(text, noise[:1], {})
            return {name: seen[name][-1].double().abs().mean(0) for name in self.layers}

    def stage(self, active, theta, top):
        usual = Statistics.read_published(self.file, self.layers) if self.released else self.usual
        return stage_neurons(active, usual.z(active), theta, top, repeated=self.config.fidelity == "reference")

    @torch.no_grad()
    def run(self, prompt):
        """Return the neurons of every layer before and after refinement, or None for a prompt that is not memorized."""
        text = self.model.embed([prompt])
        noise, _ = first_step(self.model, self.config.detection)
        plain = self.predictions(text, noise, {})
        strict = self.config.fidelity == "reference"
        seeds = greatest(similarity_matrix(plain, published=strict))
        score = seeds.max() if strict else seeds.mean()
        kept = seeds > self.threshold
        if not kept.any() or score <= self.threshold:
            return None
        noise, plain = noise[kept], plain[kept]

        def highest(blocked):
            measure = published_structural_similarity if strict else structural_similarity
            return float(measure(plain, self.predictions(text, noise, blocked)).max())

        active = self.activations(text, noise)
        for top, theta in enumerate(self.config.thetas):
            blocked = self.stage(active, theta, top)
            reached = highest(blocked)
            if reached <= self.aim:
                break
        limit = max(reached, self.aim)

        def holds(trial):
            found = highest(trial)
            return found < limit if strict else found <= limit + TOLERANCE

        initial = {name: list(indices) for name, indices in blocked.items()}
        for name in reversed(self.layers):
            trial = {**blocked, name: []}
            if blocked[name] and holds(trial):
                blocked = trial
        for name in reversed(self.layers):
            place = 0
            while place < len(blocked[name]):
                trial = {**blocked, name: blocked[name][:place] + blocked[name][place + 1 :]}
                if holds(trial):
                    blocked = trial
                else:
                    place += 1
        return initial, blocked


class Counter:
    """Counts runs of a network and their rows."""

    def __init__(self, network):
        self.calls = self.rows = 0
        network.register_forward_pre_hook(self._count)

    def _count(self, module, inputs):
        self.calls, self.rows = self.calls + 1, self.rows + len(inputs[0])


def timed(counter, work):
    """What `work` returns, and what it took."""
    calls, rows = counter.calls, counter.rows
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return found, {**took, "runs": counter.calls - calls, "rows": counter.rows - rows}


def compared(model, prompts, ordinary, config, count, *, released):
    """Rounds of both sides on all prompts; fails where they differ."""
    counter = Counter(model.denoiser)
    threshold = calibrate(detect(model, ordinary, config.detection))
    usual = measure_statistics(model, ordinary)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "statistics.pt"
        usual.write_published(file)
        usual = Statistics.read_published(file, value_layers(model.denoiser))
        loop = Loop(model, file, threshold, config, released=released)
        for number in range(count + 1):  # the first warms both up, by one prompt, and is not counted
            asked = prompts if number else prompts[:1]
            theirs = {prompt: timed(counter, lambda prompt=prompt: loop.run(prompt)) for prompt in asked}
            work = partial(localize, model, asked, usual, threshold, config, folder=Path(folder) / str(number))
            found, cost = timed(counter, work)
            row = {"loop": added([cost for _, cost in theirs.values()]), "netweight": cost}
            for ours in found:
                same(ours.prompt, theirs[ours.prompt][0], ours)
            if number:
                rounds.append(row)
                print(
                    "released" if released else "clean",
                    number,
                    {side: rounded(row[side]) for side in SIDES},
                    flush=True,
                )
    return {"threshold": threshold.to_json(), "rounds": rounds, **ratios(rounds)}


def same(prompt, theirs, ours):
    if theirs is None:
        if ours.status != "not memorized":
            raise AssertionError(f"{prompt}: the loop finds nothing memorized, netweight does.")
    elif (ours.initial, ours.refined) != theirs:
        raise AssertionError(f"{prompt}: {theirs} by the loop, {(ours.initial, ours.refined)} by netweight.")


def added(costs):
    costs = list(costs)
    return {what: sum(cost[what] for cost in costs) for what in costs[0]}


def rounded(cost):
    return {what: round(value, 3) for what, value in cost.items()}


def ratios(rounds):
    """Theirs over ours, of whole rounds: the median with its range, and the mean's interval."""
    found = {}
    for what in ("cpu", "wall", "runs", "rows"):
        whole = [row["loop"][what] / row["netweight"][what] for row in rounds]
        found[what] = {"median": statistics.median(whole), "least": min(whole), "greatest": max(whole)}
        if len(set(whole)) > 1 and len(whole) > 2:
            found[what]["ci95"] = t_interval(whole).ci95
    return {"ratios": found}


def main(
    *,
    model: Path = SHAPES_FOLDER,
    rounds: int = 5,
    prompts: Annotated[int, "planted ones: six verbatim, then two templates"] = 8,
    seeds: int = 10,
    together: Annotated[int, "prompts side by side"] = LocalizationConfig().prompts,
    threads: int = 1,
):
    world = ShapesWorld(training_record(model)["about"]["world"]["seed"])
    planted = [each.caption for each in world.planted[:prompts]]
    detection = DetectionConfig(seeds=tuple(range(seeds)))
    config = LocalizationConfig(detection=detection, prompts=together)
    as_released = config.replace(fidelity="reference", detection=detection.replace(timing="code"))
    results: dict[str, Any] = {"model": load_text_to_image(model).digest()}
    for name, how in (("released", as_released), ("clean", config)):
        opened = load_text_to_image(model, dtype=torch.float32)
        ordinary = world.ordinary_captions[:48]
        results[name] = compared(opened, planted, ordinary, how, rounds, released=name == "released")
        print(name, json.dumps(results[name]["ratios"], indent=1), flush=True)
        yield results
