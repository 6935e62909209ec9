"""The label of a path: identifies the input, reads its tensors once, and collects the rows.

Nothing of the model is loaded or run, unless minutes and rows for audits are given; audits that were not asked for are
listed as not measured, with the options that ask for them.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Container
from pathlib import Path

from netweight.core.environment import netweight_version
from netweight.core.hub import local_model
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.labels.adapter_rows import adapter_group, measure_adapters
from netweight.labels.against import base_group, compare_with_base
from netweight.labels.audit_commands import AUDITS, LabelAudits, Request, audit_groups, planned, run_audits
from netweight.labels.federation_rows import federation_groups
from netweight.labels.identify_subject import LabelSubject, identify, title_of
from netweight.labels.ingredients import ingredient_group
from netweight.labels.label import Label, LayerChange, Row, RowGroup
from netweight.labels.speech import speech_group
from netweight.labels.weight_rows import bits_group, weight_group
from netweight.labels.weights import measure_weights


def label(
    path: str | Path,
    *,
    base: str | Path | None = None,
    minutes: float | None = None,
    refused: str | Path | None = None,
    ordinary: str | Path | None = None,
    harmful: str | Path | None = None,
    benign: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    threads: int | None = None,
    progress: Progress = QUIET,
) -> Label:
    """Measure what is in a model's files; the model is loaded and run only by the audits that `minutes` asks for.

    Args:
        path: A file or folder, or the id of a model on the Hugging Face hub: a model of transformers, a pipeline of
            diffusers, safetensors files or PyTorch checkpoints, a LoRA, a folder of LoRAs, or the folder of a
            federation.
        base: The model that it was made from, in the same forms; tensors are compared with it, layer by layer.
        minutes: Time for audits, above 0. Those for which rows are given run one after another; what does not fit is
            ended, and the label says so.
        refused: Rows with prompts that a language model refuses: a file, or hub:NAME.
        ordinary: Rows with prompts that a language model answers, or ordinary prompts for a pipeline.
        harmful: Rows of harmful prompts and responses, on which a language model is fine-tuned.
        benign: Rows of abilities that such a fine-tuning keeps.
        prompts: File of prompts whose pictures a pipeline may have memorized.
        out: Folder in which audits keep their work, from which a second call continues; NAME-label/audits by default.
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
    subject = identify(local_model(str(path), pickles=True))
    base = None if base is None else local_model(str(base), pickles=True)
    rows = {"refused": refused, "ordinary": ordinary, "harmful": harmful, "benign": benign, "prompts": prompts}
    given = {name: str(value) for name, value in {**rows, "base": base}.items() if value is not None}
    audits = planned(subject, given, minutes)
    workers = threads or os.cpu_count() or 1
    groups: list[RowGroup] = []
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
    audited = LabelAudits()
    if audits and minutes is not None:
        folder = Path(out) if out is not None else Path(f"{file_name(subject.name)}-label") / "audits"
        audited = run_audits(subject, audits, Request(minutes, given, folder), progress=progress)
    if subject.kind == "federation":
        groups += federation_groups(subject)
    # The report of a federation already contains the results of its audit.
    if subject.kind != "federation" or audited.rows:
        groups = [group for group in groups if group.anchor != "verdict"]
        groups += audit_groups(audited)
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
    if missing := not_measured(subject, base=base is not None, audited=audited.keys):
        basis = "netweight label measures these with the options beside them"
        groups.append(RowGroup(title="Not measured", anchor="not-measured", rows=tuple(missing), basis=basis))
    return Label(
        name=subject.name, kind=title_of(subject), groups=tuple(groups), layers=layers, digest=digest,
        made_with=f"netweight {netweight_version()}", created=datetime.date.today().isoformat(),
    )  # fmt: skip


def file_name(name: str) -> str:
    """Return the name of a model in the characters that names of files have everywhere.

    Args:
        name: The name of its label.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def not_measured(subject: LabelSubject, *, base: bool, audited: Container[str] = ()) -> list[Row]:
    """Return the rows about what could be measured of such an input and was not, with the options that measure it.

    Args:
        subject: What the label is about.
        base: Whether it was compared with a base.
        audited: Keys of the audits that were asked for.
    """
    rows = [
        Row(key=audit.key, title=audit.title, value=audit.options, state="not measured")
        for audit in AUDITS
        if subject.kind in audit.kinds and audit.key not in audited and subject.kind != "federation"
    ]
    if subject.weights and not base and subject.kind not in ("adapter", "adapters", "federation"):
        rows.append(Row(key="base", title="Change against a base", value="--base", state="not measured"))
    return rows
