"""Make the label of a path: find out what it holds, read its tensors once, and collect the rows.

Nothing of the model is loaded or run; measurements that need a forward pass are listed as not measured, with the option
that makes them.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from netweight.core.environment import netweight_version
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.labels.adapter_rows import adapter_group, measure_adapters
from netweight.labels.against import base_group, compare_with_base
from netweight.labels.federation_rows import federation_group
from netweight.labels.ingredients import ingredient_group
from netweight.labels.kinds import Subject, identify, title_of
from netweight.labels.label import Group, Label, LayerChange, Row
from netweight.labels.speech import speech_group
from netweight.labels.weight_rows import bits_group, weight_group
from netweight.labels.weights import measure_weights

# Measurements that need the model to run: key, title, kinds of input, and the command that makes them.
AUDITS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("refusals", "What it refuses", ("language model",), "netweight attack refusal"),
    ("retraining", "How hard it is to retrain", ("language model",), "netweight attack finetune"),
    ("memorized", "What it repeats from training", ("pipeline",), "netweight forget detect"),
)


def label(
    path: str | Path,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    progress: Progress = QUIET,
) -> Label:
    """Measure what is in a model's files, without loading or running the model.

    Args:
        path: A file or folder: a model of transformers, a pipeline of diffusers, safetensors files or PyTorch
            checkpoints, a LoRA, a folder of LoRAs, or the folder of a federation.
        base: The model that it was made from; tensors are compared with it, layer by layer.
        threads: Threads that read and encode; one per core by default.
        progress: Where progress is shown.

    Returns:
        The label.

    Raises:
        UsageError: There is no such path, or it holds nothing that a label can describe.
        Unsupported: It holds weights in a form that is not read here, such as GGUF.
        CorruptBlob: A file is damaged.
        UnsafeInput: A PyTorch checkpoint cannot be opened without running its code.
    """
    subject = identify(path)
    workers = threads or os.cpu_count() or 1
    groups: list[Group] = []
    layers: tuple[LayerChange, ...] = ()
    digest = ""
    if subject.weights or subject.pickles:
        facts = measure_weights(subject.weights, subject.pickles, threads=workers, progress=progress)
        digest = facts.digest
        groups += [weight_group(subject, facts), bits_group(facts), ingredient_group(subject, facts)]
    if subject.kind == "language model":
        groups.append(speech_group(subject))
    if subject.adapters:
        groups.append(adapter_group(subject, *measure_adapters(subject.adapters, progress=progress)))
    if subject.kind == "federation":
        groups.append(federation_group(subject))
    if base is not None:
        other = identify(base)
        if not subject.weights or not other.weights:
            raise UsageError(
                f"{path} and {base} cannot be compared: both need safetensors files.",
                cure="Leave out --base, or give models in safetensors files.",
            )
        comparison = compare_with_base(subject.weights, other.weights, threads=workers, progress=progress)
        groups.append(base_group(comparison, other.name))
        layers = comparison.layers
    if rows := not_measured(subject, base=base is not None):
        groups.append(Group(title="Not measured", anchor="not-measured", rows=tuple(rows)))
    return Label(
        name=subject.name, kind=title_of(subject), groups=tuple(groups), layers=layers, digest=digest,
        made_with=f"netweight {netweight_version()}", created=datetime.date.today().isoformat(),
    )  # fmt: skip


def not_measured(subject: Subject, *, base: bool) -> list[Row]:
    """Return the rows about what could be measured of such an input and was not, with the way to measure it.

    Args:
        subject: What the label is about.
        base: Whether it was compared with a base.
    """
    rows = [
        Row(key=key, title=title, value=command, state="not measured")
        for key, title, kinds, command in AUDITS
        if subject.kind in kinds
    ]
    if subject.weights and not base and subject.kind not in ("adapter", "adapters", "federation"):
        rows.append(Row(key="base", title="What changed against a base", value="--base MODEL", state="not measured"))
    return rows
