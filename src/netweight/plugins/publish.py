"""`netweight publish`: checks of a model's folder before its publication, and its upload to the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import Field

from netweight.core.bounded_json import parse_json
from netweight.core.lazy import extra
from netweight.core.progress import Progress
from netweight.core.weight_endings import PICKLES
from netweight.errors import NetweightError, UsageError
from netweight.methods.compress.folder_format import MANIFEST
from netweight.methods.compress.verify import verify
from netweight.methods.forget.records import FOLDER as RECORDS
from netweight.methods.forget.records import read_records
from netweight.plugins.model_card import entries_of, license_of, verdict_of
from netweight.registry import CardEntry, Context, Result, shell_line
from netweight.report.card_sections import CARD, evidence_of, worst_evidence
from netweight.report.finding import Finding, Section
from netweight.report.verdict import decide, stated_outcome
from netweight.settings import Cli, Settings
from netweight.store import open_store
from netweight.store.weights_digest import weights_digest

# Files that training, tools and systems leave behind, by shell patterns of names.
_STRAY = (
    ".DS_Store", "Thumbs.db", "__pycache__", ".ipynb_checkpoints", ".git", ".cache", "*.lock", "*.part", "*.tmp", "*~",
    "*.swp", "optimizer*.pt", "optimizer*.bin", "scheduler.pt", "rng_state*.pth", "scaler.pt", "trainer_state.json",
    "training_args.bin", "global_step*", "attacks.jsonl", "searches.jsonl", "ledger.jsonl", ".env", "*.log",
)  # fmt: skip
# Files that run code when they are opened.
_RUNS_CODE = (*(f"*{ending}" for ending in PICKLES), "*.joblib")
_SHOWN = 5  # names in a reason
_AGAIN = "This command writes it again: netweight report RUN --card "
_PLACE = re.compile(r"(?:/(?:home|Users|root|tmp|mnt|data|work|scratch|var)/|[A-Za-z]:\\)[^\s\"'`<>)]*")


@final
class PublishSettings(Settings):
    """Settings of the publication of a model's folder."""

    to: Annotated[str | None, Cli(metavar="OWNER/NAME")] = Field(
        default=None, description="Upload the folder to this repository of the hub, if all checks pass."
    )
    private: bool = Field(default=False, description="Make the repository private, if it is new.")
    message: str = Field(default="Upload with netweight", description="Message of the commit on the hub.")


def publish(settings: PublishSettings, context: Context, folder: Path) -> Result:
    """Check a folder, and upload it if that is asked for and all checks pass."""
    stated, entries = verdict_of(folder), entries_of(folder)
    findings = check(folder, stated, entries, context.progress)
    section = Section("Publishing", findings, question="Can this folder be published?")
    verdict = decide(section)
    lines = [
        f"{folder}: license {license_of(folder) or 'not stated'}.",
        f"Verdict in the card: {stated or 'none.'}",
    ]
    # Neither a card's verdict nor a record of a treatment says what was tested.
    untested = stated is None and not entries
    if untested:
        lines.append(
            "No test of this model is recorded in its card. The checks below are about its files and say nothing about "
            "what the model does."
        )
    lines += [f"  {name}" for finding in section.findings for name in finding.detail.get("which", ())[:_SHOWN]]
    lines += [
        f"  {finding.name}: {finding.detail['reason']}" for finding in section.findings
        if finding.value is False and "reason" in finding.detail
    ]  # fmt: skip
    name = settings.to or f"OWNER/{folder.resolve().name}"
    steps = () if verdict.failed else (shell_line("hf", "upload", name, folder),)
    if settings.to is None:
        return Result(lines, [section], {"folder": str(folder)}, next=steps, advises=not untested)
    if verdict.failed:
        return Result([*lines, "Nothing was uploaded."], [section], {"folder": str(folder), "uploaded": None})
    url = upload(folder, settings.to, private=settings.private, message=settings.message)
    return Result(
        [*lines, f"Uploaded: {url}"], [section], {"folder": str(folder), "uploaded": url}, advises=not untested
    )


def check(folder: Path, verdict: str | None, entries: Sequence[CardEntry], progress: Progress) -> list[Finding]:
    """Return what stands against publishing a model's folder, as findings with targets.

    Args:
        folder: The folder of a model, a pipeline or an adapter.
        verdict: The sentence with which its card states a verdict; None where it states none.
        entries: What records in the folder say of treatments.
        progress: Where progress is shown; digests are read in full.
    """
    license_name, card = license_of(folder), (folder / CARD).is_file()
    stray, code = sorted(_matching(folder, _STRAY)), sorted(_matching(folder, _RUNS_CODE))
    places = sorted(_places(folder))
    missing = (
        "no. Write `license: NAME` into the metadata of README.md, between the first two lines `---`, or add a file "
        "LICENSE." + f" Then repeat: netweight report RUN --card {folder}" * (folder / MANIFEST).exists()
    )
    return [
        Finding(
            "a license is stated",
            license_name is not None,
            target=True,
            detail={} if license_name else {"reason": missing},
        ),
        Finding(
            "there is a model card",
            card,
            target=True,
            detail={} if card else {"reason": f"no. This command writes one: netweight report RUN --card {folder}"},
        ),
        _verdict(folder, verdict, entries),
        *_tested_weights(folder, progress),
        _digests(folder, progress),
        _count("files that do not belong in a published model", stray),
        _count("files that run code when they are opened", [name for name in code if name not in stray]),
        _count("files that contain paths of this machine", places),
        *_undoable(folder),
    ]


def _undoable(folder: Path) -> list[Finding]:
    """Return whether records hold the weights from before an edit, with which anybody can undo it; none without one."""
    records = read_records(folder)
    if not records:
        return []
    held = [f"{RECORDS}/{place:03d}: make it again with --no-undo" for place, each in enumerate(records, start=1)
            if each.undoable]  # fmt: skip
    return [_count("edits that anybody can undo with the records in the folder", held)]


def _count(name: str, which: list[str]) -> Finding:
    return Finding(name, len(which), better="lower", target=0, detail={"which": which})


def _verdict(folder: Path, stated: str | None, entries: Sequence[CardEntry]) -> Finding:
    name = "the card states that the model passed its audits"
    if stated is not None:
        worst = worst_evidence((folder / CARD).read_text(encoding="utf-8"))
        if worst is not None and worst.sentence != stated:
            reason = (
                f"no. Its evidence states another verdict: {worst.sentence} The first line was edited. {_AGAIN}{folder}"
            )
            return Finding(name, False, target=True, detail={"verdict": stated, "reason": reason})
        return Finding(name, stated_outcome(stated) == "passed", target=True, detail={"verdict": stated})
    if all(entry.tags == ("compressed",) for entry in entries) and (folder / MANIFEST).exists():
        return Finding(name, None, detail={"reason": "only compressed, without loss; its digests are checked below"})
    if not entries:
        return Finding(name, None, detail={"reason": "the folder contains no record of a treatment"})
    reason = f"the card has none; add it: netweight report RUN --card {folder}"
    return Finding(name, None, target=True, detail={"reason": reason})


def _tested_weights(folder: Path, progress: Progress) -> list[Finding]:
    """Return whether the evidence in the card is about the weights in the folder; nothing where a card has none."""
    file = folder / CARD
    entries = evidence_of(file.read_text(encoding="utf-8")) if file.is_file() else []
    if not entries:
        return []
    name = "the evidence in the card is about these weights"
    if not all(each.weights for each in entries):
        reason = "a report in the card does not name the weights that it tested"
        return [Finding(name, None, detail={"reason": reason})]
    try:
        weights = weights_digest(folder, progress)
    except NetweightError as error:
        return [Finding(name, None, target=True, detail={"reason": str(error)})]
    others = [f"{each.source} It is about other weights: repeat it on {folder}." for each in entries
              if weights not in each.weights]  # fmt: skip
    return [Finding(name, not others, target=True, detail={"which": others})]


def _digests(folder: Path, progress: Progress) -> Finding:
    """Return whether weight files can be read, and all files of a compressed folder have their digests."""
    name = "files that are damaged or were changed"
    bad: list[str] = []
    files = sorted(folder.rglob("*.safetensors"))
    if (folder / MANIFEST).exists():
        try:
            bad += [_damage(folder, each) for each in verify(folder, progress=progress) if each.passed is False]
        except NetweightError as error:
            bad.append(str(error))
    else:
        for file in files:
            try:
                with open_store(file) as store:
                    store.names()
            except NetweightError as error:
                bad.append(f"{file.relative_to(folder)}: {error}")
    if not files:
        return Finding(name, None, target=0, better="lower", detail={"reason": "there is no .safetensors file"})
    return Finding(name, len(bad), n=len(files), better="lower", target=0, detail={"which": bad})


def _damage(folder: Path, finding: Finding) -> str:
    """Return what `verify` found, with the cure where it is the card that was edited."""
    which = ", ".join(str(name) for name in finding.detail.get("which", ()))
    text = f"{finding.name}: {which}" if which else finding.name
    if CARD in text:
        text += f" (a card that was edited after it was written: repeat netweight report RUN --card {folder})"
    return text


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if (
            path.is_symlink()
            and not path.resolve().is_relative_to(folder.resolve())
            and "blobs" not in str(path.resolve())
        ):
            yield f"{relative} (a link out of the folder)"
        elif any(fnmatch.fnmatch(part, pattern) for part in relative.parts for pattern in patterns):
            yield relative.as_posix()


def _places(folder: Path) -> Iterator[str]:
    """Paths of a disk in JSON values and in the card."""
    here = {str(Path.home()), os.getcwd(), str(folder.resolve().parent)} - {"/"}
    for file in sorted(folder.rglob("*.json")):
        if file.stat().st_size > 10_000_000:
            continue
        try:
            values = list(_texts(parse_json(file.read_bytes())))
        except (OSError, ValueError):
            # A file that is no JSON is not checked.
            continue
        for text in values:
            if _PLACE.match(text) or any(text.startswith(f"{place}/") for place in here):
                yield f"{file.relative_to(folder).as_posix()}: {text}"
    card = folder / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        places = {*_PLACE.findall(text), *(place for place in here if f"{place}/" in text)}
        yield from (f"{CARD}: {place}" for place in sorted(places))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list) and len(value) < 1000:
        for each in value:
            yield from _texts(each)


def upload(folder: Path, name: str, *, private: bool = False, message: str = "Upload with netweight") -> str:
    """Upload a folder to a repository of the hub, which is made if it is new; return the address of the commit.

    Raises:
        UsageError: The hub refuses, or cannot be reached.
    """
    with extra("llm", "Uploading needs huggingface_hub"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    try:
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url)
    except HFValidationError as error:
        raise UsageError(f"No repository can be named {name!r}.", cure="Write it as OWNER/NAME.") from error
    except (HfHubHTTPError, OSError) as error:
        raise UsageError(
            f"{folder} could not be uploaded to {name}: {error}.", cure="Log in with `hf auth login`, and try again."
        ) from error
