"""Language models from folders of transformers, dense and with their tokenizer; compressed folders too.

`load_causal_lm` keeps the dtype that a model was saved in: where it is to be trained or attacked, nothing of it may be
rounded on the way in. `language_model` opens encoder-decoders as well, in bf16. A folder without a tokenizer may hold
one of llama2.c. `measure_tasks` runs tasks of EleutherAI's lm-evaluation-harness, where it is installed; the harness
fetches their data itself, or reads tasks of your own from a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from netweight.core.lazy import extra, open_compressed_with
from netweight.core.progress import silent_bars
from netweight.errors import MissingExtra, NameNotFound, Unsupported, UsageError
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def load_causal_lm(folder: str | Path, *, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a causal language model in evaluation mode, in the dtype it was saved in."""
    model, tokenizer = _opened(Path(folder), "AutoModelForCausalLM", "auto", "a causal language model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    nn.Module.to(model, device)
    return model, tokenizer


def load_network(folder: str | Path) -> PreTrainedModel:
    """Open a model of transformers in evaluation mode, compressed weights as they are; no tokenizer is needed."""
    check_folder(folder)
    with extra("llm", "The model needs transformers"):
        import transformers
    open_compressed_with("transformers")
    try:
        with silent_bars():
            model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} cannot be opened as a model: {error}", cure="Check config and weights.") from error
    network: PreTrainedModel = model.eval()
    return network


def language_model(
    folder: Path, kind: Literal["decoder", "encoder-decoder"]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a language model in evaluation mode, in bf16."""
    if kind == "decoder":
        return _opened(folder, "AutoModelForCausalLM", torch.bfloat16, "a decoder")
    return _opened(folder, "AutoModelForSeq2SeqLM", torch.bfloat16, "an encoder-decoder")


def _opened(
    folder: Path, loader: str, dtype: torch.dtype | str, what: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with extra("llm", "Language models need transformers"):
        import transformers
    check_folder(folder)
    try:
        compressed = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if compressed:
            open_compressed_with("transformers")
        with silent_bars():
            model = getattr(transformers, loader).from_pretrained(folder, local_files_only=True, dtype=dtype)
            tokens = find_llama2c(folder)
            tokenizer = (
                transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
                if tokens is None
                else llama2c_tokenizer(tokens)
            )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be opened as {what} with its tokenizer: {error}",
            cure="Check that config, weights and tokenizer files are all there.",
        ) from error
    if compressed:
        import netweight

        netweight.decompress_(model)
    return model.eval(), tokenizer


def check_folder(folder: str | Path) -> None:
    """Refuse what is no model folder, before anything is loaded."""
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder} is no model folder: it holds no config.json.", cure="Name a folder of transformers, unpacked."
        )


def check_finite(model: nn.Module) -> None:
    """Refuse a model with a weight that is NaN or infinite, by the weight's name."""
    for name, value in model.named_parameters():
        part = value.to_local() if hasattr(value, "to_local") else value  # of a sharded one this process's part
        if not bool(part.isfinite().all()):
            raise UsageError(f"The weight {name!r} holds NaN or infinity.", cure="Take a sound copy of the model.")


def positions_of(model: nn.Module) -> int | None:
    """How many tokens the model's configuration allows, that of its text part if it has several; None if unknown."""
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def embedding_of(model: nn.Module) -> nn.Embedding | None:
    """The model's embedding of tokens; None if there is none to be found."""
    get = getattr(model, "get_input_embeddings", None)
    found = [get()] if callable(get) else list(model.modules())
    return next((each for each in found if isinstance(each, nn.Embedding)), None)


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model takes, as its configuration and its tokenizer say."""
    longest = int(min(tokenizer.model_max_length, 1 << 30))
    return min(longest, positions_of(model) or longest)


# File in a trained model's folder that says how it was trained and what came of it.
ABOUT = "training.json"


# ---- tokenizers of llama2.c ------------------------------------------------------------------------------------------

_SPACE = "\u2581"  # sentencepiece writes a space so
_SPECIAL = ("<unk>", "<s>", "</s>")


def find_llama2c(folder: Path) -> Path | None:
    """Return the one `tok*.bin` of a folder without a tokenizer of its own, or None."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    files = sorted(folder.glob("tok*.bin"))
    return files[0] if len(files) == 1 else None


def llama2c_pieces(file: Path) -> list[tuple[bytes, float]]:
    """Read the vocabulary: each piece with its score, the higher the earlier it is merged."""
    data = file.read_bytes()
    found: list[tuple[bytes, float]] = []
    at = 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise ValueError(f"a piece of {length} bytes at {at}")
            found.append((data[at + 8 : at + 8 + length], score))
            at += 8 + length
        for piece, _ in found:
            piece.decode("utf-8")
    except (struct.error, ValueError) as error:
        raise Unsupported(f"{file} is not a tokenizer of llama2.c: {error}.", cure="Restore the file.") from error
    if len(found) < 259:
        raise Unsupported(f"{file} holds {len(found)} tokens; three special ones and 256 bytes are the least.")
    return found


def llama2c_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Make a tokenizer of transformers that splits text as llama2.c does."""
    # A space is put before the text, characters without a piece fall back to their bytes, and the neighbors whose union
    # has the highest score are merged first. No token is added by itself. A special token that the text spells out is
    # taken as that token, as transformers does.
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    read = llama2c_pieces(file)
    names = list(_SPECIAL) + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [piece.decode("utf-8").replace(" ", _SPACE) for piece, _ in read[len(names) :]]
    ids = {name: number for number, name in enumerate(names)}
    scores = {name: score for name, (_, score) in zip(names, read, strict=True)}
    merges = [
        (scores[name], number, (name[:cut], name[cut:]))
        for number, name in enumerate(names[259:], start=259)
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    made = Tokenizer(models.BPE(ids, [pair for *_, pair in merges], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


# ---- tasks of lm-evaluation-harness ----------------------------------------------------------------------------------

# Task and metric → score, standard error, number of examples.
Scores: TypeAlias = Mapping[tuple[str, str], tuple[float, float | None, int | None]]
_Z = 1.959964  # of a normal 95 % interval around the harness's own standard error


def check_lm_eval() -> None:
    """Refuse before hours of work what would fail after them."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtra("Tasks need lm-evaluation-harness, which is not installed.", cure="Run: pip install lm-eval")


def measure_tasks(
    folder: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    device: str = "cpu",
    own: str | Path | None = None,
) -> Scores:
    """Run tasks on a model folder."""
    check_lm_eval()
    harness: Any = importlib.import_module("lm_eval")
    known: Any = importlib.import_module("lm_eval.tasks").TaskManager(include_path=None if own is None else str(own))
    unknown = [task for task in tasks if task not in known.all_tasks]
    if unknown:
        raise NameNotFound(f"lm-evaluation-harness has no task {unknown[0]!r}.", cure="See: lm-eval ls tasks")
    model, tokenizer = load_causal_lm(folder, device=device)
    wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=8
    )
    found = harness.simple_evaluate(
        model=wrapped, tasks=list(tasks), limit=limit, task_manager=known, bootstrap_iters=1000, log_samples=False
    )
    return _scores(found)


def _scores(found: Mapping[str, Any]) -> Scores:
    scores: dict[tuple[str, str], tuple[float, float | None, int | None]] = {}
    for task, results in found["results"].items():
        n = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in results.items():
            metric, _, filtered = key.partition(",")
            error = results.get(f"{metric}_stderr,{filtered}")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                known = float(error) if isinstance(error, int | float) else None
                scores[task, metric if filtered == "none" else f"{metric} ({filtered})"] = float(value), known, n
    return scores


def task_findings(name: str, before: Scores, after: Scores) -> list[Finding]:
    """Put a defended model's scores beside its base's."""
    findings = []
    for (task, metric), (value, error, n) in after.items():
        ends = None if error is None else (value - _Z * error, value + _Z * error)
        base = before.get((task, metric), (None, None, None))[0]
        findings.append(Finding(f"{task} {metric}, {name}", value, ci95=ends, n=n or None, baseline=base))
    return findings
