"""The attack on refusal on model folders: files in, a section out.

What removes refusal holds while a block lasts and leaves the model as it was: nothing of an edited model, and no
answer, is ever written. Scores of edits are kept in `edits.jsonl`, so that a second call goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.attacks.refusal.judges import phrase_judge, user_judge
from netweight.attacks.refusal.measurement import EditScore, Examiner, Panel, Refusal
from netweight.attacks.refusal.prompts import Question, QuestionSplit, in_parts, read_questions, refuse_shared
from netweight.attacks.refusal.report import refusal_section
from netweight.attacks.refusal.selection import ScoredEdit, best_edits
from netweight.attacks.refusal.settings import RefusalSettings
from netweight.attacks.refusal.tested import tested
from netweight.core.digests import digest_config, digest_file, digest_tensor
from netweight.core.progress import QUIET, Progress
from netweight.data.rows import read_rows
from netweight.data.tokens import padding_of
from netweight.errors import UsageError
from netweight.hf.language_model_folder import model_config
from netweight.hf.load_language_model import check_finite, check_outputs, load_causal_lm
from netweight.job import Job
from netweight.report.finding import Section

EDITS = "edits"
"""Name of the rows in a folder that remember scores and measurements of edits."""
# A direction is computed from at least this many refused prompts.
_LEAST_REFUSED = 4


def attack_refusal(
    settings: RefusalSettings, model: str | Path, *, folder: str | Path | Job, seed: int, progress: Progress = QUIET
) -> Section:
    """Remove refusal from a model in many ways, measure what is left, and discard what was edited.

    Args:
        settings: Prompts, edits and judge.
        model: A folder of transformers, which stays as it is.
        folder: Remembers scores of edits in `edits.jsonl`.
        seed: Seed of the order of prompts.
        progress: Receives what is done.

    Returns:
        Findings, a table of edits, and a conclusion.

    Raises:
        UsageError: Files or rows cannot be used, or the model does not refuse enough prompts.
        Unsupported: The model is not a decoder with a list of blocks.
    """
    warnings: list[str] = []
    for each in (model, settings.unaligned):
        if each is not None:
            model_config(each)
    network, tokenizer = load_causal_lm(model, device=settings.device)
    check_finite(network)
    check_outputs(network)
    unaligned = None if settings.unaligned is None else load_causal_lm(settings.unaligned, device=settings.device)[0]
    sources = {"refused": read_rows(settings.refused), "ordinary": read_rows(settings.ordinary)}
    settings.check_columns(sources.values())
    questions = {
        kind: read_questions(rows, kind, network, tokenizer, settings, seed=seed, report=warnings.append)
        for kind, rows in sources.items()
    }
    refuse_shared(questions["refused"], questions["ordinary"], tokenizer)
    refused, ordinary = (in_parts(each) for each in questions.values())
    phrases = phrase_judge(settings.phrases)
    judge = {"phrases": phrases, "first-tokens": None}.get(settings.judge)
    if settings.judge not in ("phrases", "first-tokens"):
        judge = user_judge(settings.judge, option="--judge", device=settings.device)
    helps = None if settings.helps is None else user_judge(settings.helps, option="--helps", device=settings.device)
    examiner = Examiner(
        network, tokenizer, judge=judge, phrases=phrases, helps=helps, new_tokens=settings.new_tokens,
        pad_id=padding_of(tokenizer),
    )  # fmt: skip
    prompts = [*refused.make, *refused.choose, *refused.measure]
    with Job.open(folder, shared=True) as job:
        about = _identity(settings, network, unaligned, refused, ordinary)
        progress.note(f"Generating answers to {len(prompts)} prompts that the model may refuse.")
        answers = _remembered(job, {**about, "what": "answers"}, lambda: {"answers": examiner.answers(prompts)})[
            "answers"
        ]
        flags = examiner.learn_first_tokens(prompts, answers)
        leads = dict(zip(prompts, (examiner.lead(q, a) for q, a in zip(prompts, answers, strict=True)), strict=True))
        make = [question for question, flag in zip(refused.make, flags, strict=False) if flag]
        if len(make) < _LEAST_REFUSED:
            raise UsageError(
                f"The model refuses {sum(flags)} of {len(prompts)} prompts. Edits need at least "
                f"{_LEAST_REFUSED} refused prompts in the half from which they are computed.",
                cure="Give prompts that it refuses as --refused, or phrases of its refusals as --phrases.",
            )
        panels = [
            _panel(examiner, part, other, leads, job, about, name)
            for name, part, other in (
                ("choose", refused.choose, ordinary.choose),
                ("measure", refused.measure, ordinary.measure),
            )
        ]
        panels[1].refuse_blind_judge()
        count = sum(len(panel.ordinary) for panel in panels)
        mixed = sum(panel.ordinary_refusals() for panel in panels)
        if mixed:
            warnings.append(
                f"The answers to {mixed} of {count} ordinary prompts begin like refusals. Edits are computed from the "
                "difference of both kinds of prompts: give ordinary prompts that the model answers (--ordinary)."
            )
        material = EditMaterial(
            network, [each.prompt + leads[each] for each in make], [each.prompt for each in ordinary.make],
            pad_id=examiner.pad_id, unaligned=unaligned,
        )  # fmt: skip
        edits = [edit for _, kind in settings.chosen_edits() for edit in kind.candidates(material)]
        scored = _scored(edits, panels[0], job, about, progress)
        best = best_edits(scored, settings)
        panels[1].prepare()
        before = _measured(None, panels[1], job, about)
        with progress.task("answers of the best edits", total=len(best), unit="edits") as work:
            for edit in best:
                edit.measured = _measured(edit.edit, panels[1], job, about)
                work.update()
    section = refusal_section(
        before, scored, settings, seed=seed, refused_ordinary=mixed / count, warnings=list(dict.fromkeys(warnings))
    )
    numbers = f"{len(prompts)} refused, {len(ordinary.make) + len(ordinary.choose) + len(ordinary.measure)} ordinary"
    did = [("edits that were tried", str(len(edits))), ("prompts", numbers)]
    return replace(section, tested=[*did, *tested(settings)])


def _identity(
    settings: RefusalSettings, network: nn.Module, unaligned: nn.Module | None, *parts: QuestionSplit
) -> dict[str, Any]:
    """Return what a remembered row depends on: weights and prompts themselves, not the files that hold them."""
    prompts = [[list(q.prompt), list(q.response)] for each in parts for q in (*each.make, *each.choose, *each.measure)]
    about: dict[str, Any] = {name: getattr(settings, name) for name in ("judge", "phrases", "helps", "new_tokens")}
    about["phrases"] = list(settings.phrases)
    # Judges that are models have other states in training mode.
    for judge in filter(None, (settings.judge, settings.helps)):
        files = sorted(Path(judge.partition("#")[0]).glob("*.safetensors"))
        about |= {f"weights of {judge}": [digest_file(each) for each in files]} if files else {}
    about |= {name: value.to_json() for name, value in settings if isinstance(value, RefusalEditSettings)}
    return {
        "model": _digest(network), "prompts": digest_config(prompts), "settings": about,
        "unaligned": None if unaligned is None else _digest(unaligned),
    }  # fmt: skip


def _digest(network: nn.Module) -> str:
    return digest_config({name: digest_tensor(each) for name, each in network.named_parameters()})


def _remembered(job: Job, key: dict[str, Any], make: Any) -> dict[str, Any]:
    row = job.recorded(EDITS, key)
    if row is None:
        row = make()
        job.record(EDITS, row, key=key)
    return row


def _panel(
    examiner: Examiner,
    refused: Sequence[Question],
    ordinary: Sequence[Question],
    leads: dict[Question, tuple[int, ...]],
    job: Job,
    about: dict[str, Any],
    name: str,
) -> Panel:
    """Make a panel; ordinary prompts are only answered first where the model thinks before it answers."""
    ordinary_leads: list[tuple[int, ...]] = [()] * len(ordinary)
    if any(leads.values()):
        key = {**about, "what": f"ordinary answers, {name}"}
        answers = _remembered(job, key, lambda: {"answers": examiner.answers(ordinary)})["answers"]
        ordinary_leads = [examiner.lead(q, answer) for q, answer in zip(ordinary, answers, strict=True)]
    return Panel(examiner, refused, ordinary, [leads[each] for each in refused], ordinary_leads)


def _scored(
    edits: Sequence[RefusalEdit], panel: Panel, job: Job, about: dict[str, Any], progress: Progress
) -> list[ScoredEdit]:
    """Score every edit by single forward passes."""
    scored = []
    with progress.task("edits", total=len(edits), unit="edits") as work:
        for edit in edits:
            key = {**about, "what": "score", "edit": [edit.kind, edit.label]}
            row = job.recorded(EDITS, key)
            if row is None:
                with edit.apply(panel.examiner.model):
                    row = asdict(panel.score())
                job.record(EDITS, row, key=key)
            scored.append(ScoredEdit(edit, EditScore(**row)))
            work.update()
    return scored


def _measured(edit: RefusalEdit | None, panel: Panel, job: Job, about: dict[str, Any]) -> Refusal:
    """Measure the model, edited or as it is, by its answers."""
    key = {**about, "what": "measurement", "edit": None if edit is None else [edit.kind, edit.label]}
    row = job.recorded(EDITS, key)
    if row is None:
        if edit is None:
            row = asdict(panel.measure())
        else:
            with edit.apply(panel.examiner.model):
                row = asdict(panel.measure())
        job.record(EDITS, row, key=key)
    return Refusal(**row)
