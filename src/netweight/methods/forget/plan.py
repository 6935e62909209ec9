"""Plans of the commands of `netweight forget`, for `--plan`: steps, time and memory, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netweight.core import quantities
from netweight.data.images.pairs import image_files, pair_prompts
from netweight.data.prompts import read_prompts
from netweight.hf.load_pipeline import open_pipeline
from netweight.hf.pipeline_costs import PlannedDescent, Stage, folder_bytes, measured_plan
from netweight.methods.forget.edits.edit import EditSizes
from netweight.methods.forget.edits.trained import TrainedEdit
from netweight.methods.forget.folder_settings import FolderAudit, FolderForgetting
from netweight.methods.forget.records import read_records
from netweight.methods.forget.settings import FolderDetection, FolderLocalization, FolderStatistics
from netweight.nn.text_to_image import most_rows
from netweight.registry import Result

# Ordinary prompts whose images an audit compares.
_SHOWN = 16
# Bytes per second that a slow disk reads and writes, digests included.
_COPIED = 400e6


def plan_statistics(settings: FolderStatistics, pipeline: Path) -> Result:
    """Plan `forget statistics`, which runs the text encoder and no denoiser."""
    count = len(read_prompts(settings.prompts, column=settings.column))
    return measured_plan(
        open_pipeline(pipeline, settings.pipeline), [Stage("activity of neurons", prompts=count)]
    ).result()


def plan_detect(settings: FolderDetection, pipeline: Path) -> Result:
    """Plan `forget detect`: a prediction for every prompt and seed, and one for each seed without a prompt."""
    seeds, stages = len(settings.detection.seeds), []
    for name in ("prompts", "ordinary", "held_out"):
        file = getattr(settings, name)
        if file is not None:
            count = len(read_prompts(file, column=settings.column))
            title = {"prompts": "scores of prompts", "ordinary": "scores of ordinary prompts"}.get(
                name, "scores of others"
            )
            stages.append(Stage(title, predictions=seeds * (count + 1), prompts=count))
    return measured_plan(open_pipeline(pipeline, settings.pipeline), stages, rows=settings.detection.rows).result()


def plan_localize(settings: FolderLocalization, pipeline: Path) -> Result:
    """Plan `forget localize`, whose search goes on until the threshold is reached."""
    count = len(read_prompts(settings.prompts, column=settings.column))
    model = open_pipeline(pipeline, settings.pipeline)
    return measured_plan(
        model, [settings.localization.stage(count)], rows=settings.localization.detection.rows
    ).result()


def plan_apply(settings: FolderForgetting, pipeline: Path) -> Result:
    """Plan `forget apply`: the check's images before and after, the edit, and the copy of the folder."""
    model, edit = open_pipeline(pipeline, settings.pipeline), settings.edit
    memorized = pair_prompts([settings.targets]) if settings.targets is not None else []
    ordinary = read_prompts(settings.ordinary, column=settings.column) if settings.ordinary is not None else []
    pictures = len(image_files(settings.targets)) if settings.targets is not None else 0
    sizes = EditSizes(len(memorized), len(ordinary), pictures, settings.anchors is not None)
    stages = list(edit.stages(sizes))
    if settings.verify and memorized:
        count = settings.images * len(memorized)
        how: dict[str, Any] = {"guidance": settings.guidance, "steps": settings.steps}
        stages = [
            Stage.images("check: images before the edit", count, **how), *stages,
            Stage.images("check: images after the edit", count, **how),
        ]  # fmt: skip
    descent = None
    if isinstance(edit, TrainedEdit):
        from netweight.methods.forget.edits.training import chosen_weights

        trained = sum(each.numel() for each in chosen_weights(model.denoiser, edit.layers).values())
        together = edit.at_once or most_rows(model, edit.batch, gradients=True)
        descent = PlannedDescent(together, trained, float32=True)
    size = folder_bytes(pipeline)
    return measured_plan(model, stages, descent=descent).result([
        f"The folder of {quantities.size(size)} is copied, which takes about {quantities.duration(size / _COPIED)}."
    ])  # fmt: skip


def plan_undo(pipeline: Path) -> Result:
    """Plan `forget undo`, which copies files and runs no network."""
    read_records(pipeline)
    size = folder_bytes(pipeline)
    return Result(
        [
            f"Nothing was done. {quantities.size(size)} are copied and compared byte for byte, which takes about "
            f"{quantities.duration(size / _COPIED)}; no network is run."
        ],
        payload={"plan": {"bytes": size, "seconds": size / _COPIED}},
    )


def plan_audit(settings: FolderAudit, edited: Path) -> Result:
    """Plan `forget audit`: scores, errors, images and searches, by the model before the edit and by the edited one."""
    search, how = settings.search, settings.search.search
    prompts, planted, others = len(pair_prompts([search.targets])), len(image_files(search.targets)), 0
    ordinary = len(read_prompts(settings.ordinary, column=settings.column))
    if settings.others is not None:
        others = len(read_prompts(settings.others, column=settings.column))
    controls = planted if search.controls is None else len(image_files(search.controls))
    models = 2 + len(search.also)
    # If neurons are switched off, images with random neurons switched off are generated as well.
    groups = 3 if any(record.units for record in read_records(edited)) else 2
    shown: dict[str, Any] = {"guidance": how.guidance, "steps": how.generation_steps}
    stages = [
        Stage("scores", predictions=settings.look_seeds * (ordinary + 2 * prompts + ordinary // 2 + 4)),
        Stage(
            "errors on pictures", predictions=4 * settings.noises * (planted + controls),
            encoded=2 * (planted + controls),
        ),
        Stage.images(
            "images before and after the edit",
            settings.images * (groups * prompts + 2 * (min(_SHOWN, ordinary) + others)), **shown,
        ),
    ]  # fmt: skip
    if settings.searched:
        walks = models * (planted + controls) * search.seeds
        trials = len(how.starts) * how.restarts * len(how.every_rate)
        looks = sum(
            Stage.images("", 1, guidance=guidance, steps=how.generation_steps).predictions
            for guidance in how.every_guidance
        )
        count = walks * trials * len(how.eval_steps) * how.images
        stages.append(Stage(
            "searches, if none ends early", gradients=walks * trials * how.steps * how.draws,
            predictions=count * looks, decoded=count * len(how.every_guidance),
        ))  # fmt: skip
    model = open_pipeline(edited, search.pipeline)
    trials = len(how.starts) * how.restarts * len(how.every_rate)
    descent = PlannedDescent(most_rows(model, trials * how.draws, gradients=True)) if settings.searched else None
    return measured_plan(model, stages, rows=64, descent=descent, models=models).result()
