"""What brings planted images back: neurons switched off, other mitigations, and a hardened model, controls beside.

    python -m netweight_experiments.benchmarks.forget.search

Everything is measured on the small world of captioned shapes and its six verbatim pictures, a miniature. NeMo's neurons
are found for each prompt; mitigations are measured by what the planted prompts paint and by what becomes of ordinary
captions with the same seeds; the search runs on the original, on the model with each target's own neurons off, and on a
model hardened against all of them. Ledgers and checkpoints stay in `--work`, so that a run that is stopped goes on.
"""

import json
import statistics
from pathlib import Path

import torch

from netweight.attacks.embedding_search.compare import Comparison, Subject, Target, compare, turned
from netweight.attacks.embedding_search.report import Wanted, search_findings, search_section, verdict
from netweight.attacks.embedding_search.search import paired
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.environment import describe
from netweight.core.progress import Progress
from netweight.core.units import Units
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image, one_token_words, padding_masks
from netweight.methods.forget.detect import calibrate, detect
from netweight.methods.forget.harden import harden
from netweight.methods.forget.layers import measure_statistics
from netweight.methods.forget.localize import localize
from netweight.methods.forget.mitigations import (
    AllActive,
    AttentionScaling,
    Deactivated,
    EmbeddingAdjustment,
    RandomTokens,
    WeightPruning,
    neuron_counts,
    random_units,
)
from netweight.methods.forget.settings import DetectionConfig, HardenSettings, LocalizationConfig
from netweight.report.report import Report
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.shapes import ShapesWorld
from netweight_experiments.benchmarks.script import now, options_of, script, write

GUIDANCE, STEPS = 3.0, 10  # of every generation
alike = paired()


def arguments():
    parser = script(__doc__, whole=True)
    parser.add_argument("--model", type=Path, default=SHAPES_FOLDER)
    parser.add_argument("--work", type=Path, default=Path("forget-search"))
    parser.add_argument("--targets", type=int, default=6)
    parser.add_argument("--controls", type=int, default=6)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", help="what is hardened, by the grammar of Select; all weights by default")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def neurons_of(model, prompts, ordinary, options):
    """NeMo's neurons of each prompt."""
    detection = DetectionConfig(seeds=tuple(range(6)))
    threshold = calibrate(detect(model, ordinary[:24], detection), model=model.digest())
    found = localize(
        model, prompts, measure_statistics(model, ordinary), threshold, LocalizationConfig(detection=detection),
        ledger=options.work / "neurons.jsonl", progress=Progress(),
    )  # fmt: skip
    return {one.prompt: one for one in found}, threshold


def painted(model, prompts, seeds):
    text = model.embed([prompt for prompt in prompts for _ in seeds])
    return model.generate(text, [*seeds] * len(prompts), guidance=GUIDANCE, steps=STEPS)


def mitigations_of(model, targets, ordinary, found, options):
    """Every mitigation, with the images of planted prompts and of ordinary ones beside those of the model as it is."""
    seeds, plain = range(100, 104), ordinary[:3]
    counts = neuron_counts(model.denoiser)
    whole = Units({name: range(size) for name, size in counts.items()})
    prompts = [target.prompt for target in targets]
    before = {prompt: painted(model, [prompt], seeds) for prompt in (*prompts, *plain)}
    general = [
        AllActive(), Deactivated(whole, "all value neurons of down and mid blocks off"),
        EmbeddingAdjustment(), AttentionScaling(),
        AttentionScaling(padding_masks(model), name="attention scaling, padding masked"),
        *(RandomTokens(count, one_token_words(model)) for count in (1, 4, 10)),
        WeightPruning(tuple(ordinary[:6]), share=0.01, steps=5),
    ]  # fmt: skip

    def own(prompt):
        units = found[prompt].neurons
        drawn = []
        for matched, name in ((False, "random neurons, equal count"), (True, "random neurons, layer-matched")):
            try:
                others = random_units(units, counts, layer_matched=matched, seed=options.seed)
            except UsageError as error:  # more than half of a layer cannot be matched by others
                print(f"{prompt}: no {name}: {error}", flush=True)
            else:
                drawn.append(Deactivated(others, name))
        return [Deactivated(units, "NeMo's neurons off"), *drawn]

    rows = {}
    for target in targets:
        for mitigation in (*general, *own(target.prompt)):
            with mitigation(model, [target.prompt]) as mitigated:
                images = painted(mitigated, [target.prompt, *plain], seeds)
            own_images, others = images[: len(seeds)], images[len(seeds) :]
            entry = rows.setdefault(mitigation.name, {"to target": [], "ordinary, same seed": [], "each": []})
            scores = alike(own_images, target.image.expand_as(own_images)).tolist()
            entry["to target"].append(statistics.median(scores))
            entry["each"].append(scores)
            same = alike(others, torch.cat([before[prompt] for prompt in plain])).tolist()
            entry["ordinary, same seed"].append(statistics.median(same))
    return rows


def hardened_of(options, targets, ordinary, settings):
    """The original model, hardened against all targets."""
    model = load_text_to_image(options.model, dtype=torch.float32, name="hardened")
    search = settings.replace(steps=20, restarts=1, draws=4)
    how = HardenSettings(rounds=options.rounds, steps=40, layers=options.layers, search=search, seed=options.seed)
    record = harden(
        model, [target.prompt for target in targets], torch.stack([target.image for target in targets]), ordinary[:48],
        settings=how, folder=options.work / f"hardened-{options.layers or 'all'}".replace("*", ""),
        progress=Progress("plain"),
    )  # fmt: skip
    return model, record


def searches_of(options, original, hardened, targets, controls, found, ordinary, settings):
    """All searches; in the model with neurons off, each target and its control meet that target's own."""
    common = {"seeds": range(options.seeds), "similarity": alike, "measure": "NCC", "progress": Progress("plain")}
    parts = []
    for number, target in enumerate(targets):
        pair = [target, *(control for control in controls if control.name.startswith(target.name))]

        def off(model, units=found[target.prompt].neurons, prompt=target.prompt):
            return Deactivated(units)(model, [prompt])

        subjects = [
            Subject("original", original),
            Subject("neurons off", original, off, found[target.prompt].neurons.to_json()),
            Subject("hardened", hardened),
        ]
        folder = options.work / f"searches-{options.layers or 'all'}".replace("*", "")
        parts.append(compare(subjects, pair, ordinary[48:60], settings, folder=folder, **common))
        print(number, [verdict(parts[-1], name) for name in parts[-1].subjects], flush=True)
    order = ("original", "neurons off", "hardened")
    runs = sorted((run for part in parts for run in part.runs), key=lambda run: order.index(run.subject))
    failures = tuple(failure for part in parts for failure in part.failures)
    return Comparison(tuple(runs), settings, "NCC", failures, sum(part.seconds for part in parts)), folder


def main():
    options = arguments()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    world = ShapesWorld()
    ordinary = [kind.caption for kind in world.ordinary[:60]]
    planted = [one for one in world.planted if one.kind == "verbatim"][: options.targets]
    targets = [Target(one.caption, one.caption, one.picture) for one in planted]
    controls = [turned(target) for target in targets[: options.controls]]
    model = load_text_to_image(options.model, dtype=torch.float32, name="original")
    settings = SearchSettings(
        steps=options.steps, restarts=1, draws=4, images=3, guidance=GUIDANCE, generation_steps=STEPS
    )
    found, threshold = neurons_of(model, [target.prompt for target in targets], ordinary, options)
    counts = {prompt: [one.status, len(one.neurons)] for prompt, one in found.items()}
    print(counts, threshold, flush=True)
    mitigations = mitigations_of(model, targets, ordinary, found, options)
    for name, entry in mitigations.items():
        print(f"{name:46}", *(f"{statistics.median(entry[key]):.2f}" for key in ("to target", "ordinary, same seed")))
    hardened, record = hardened_of(options, targets, ordinary, settings)
    held_out = [kind.caption for kind in world.held_out[:8]]
    kept = alike(painted(hardened, held_out, [1]), painted(model, held_out, [1])).tolist()
    print("held-out captions after hardening, same seed:", [f"{value:.2f}" for value in kept], flush=True)
    comparison, folder = searches_of(options, model, hardened, targets, controls, found, ordinary, settings)
    wanted = Wanted("original", "neurons off", 5)
    report = Report("Search for embeddings in a miniature", seeds=(options.seed,))
    report.add(search_section(comparison, [*targets, *controls], wanted, folder=folder, seed=options.seed))
    print(report.write(options.work))
    findings = [finding.to_json() for finding in search_findings(comparison, wanted, seed=options.seed)]
    for finding in findings:
        print(finding["name"], finding["value"], finding["ci95"], finding["n"], finding["detail"].get("by start", ""))
    verdicts = {name: verdict(comparison, name) for name in comparison.subjects}
    print(json.dumps(verdicts, indent=1))
    values = {
        "what": "search for embeddings, mitigations and hardening on captioned shapes: a miniature",
        "date": now(),
        "options": options_of(options),
        "model": model.digest(),
        "neurons": counts,
        "threshold": threshold.to_json(),
        "mitigations": mitigations,
        "hardening": {"rounds": [vars(log) for log in record.rounds], "trained": record.trained, "kept": kept},
        "comparison": comparison.to_json(),
        "findings": findings,
        "verdicts": verdicts,
        "environment": describe(),
    }
    write(options.output, values)


if __name__ == "__main__":
    main()
