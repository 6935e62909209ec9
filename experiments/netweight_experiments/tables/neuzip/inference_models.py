"""The models that NeuZip's inference tables measure, with their texts, and the formats that hold their weights.

At small scale windows are short and a few hundred of them are scored; at paper scale everything is as in the paper's
code: windows of 1,024 tokens, the whole test text, bf16 autocast, no key-value cache. All formats convert the same
layers: the linear ones but the output layer, as the paper does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netweight.core.files import digest_file
from netweight.core.progress import Progress
from netweight.data.corpora import count_words, tiny_shakespeare, wikisql, wikitext2, wmt14_german_english
from netweight.errors import UsageError
from netweight.hf.load_language_model import language_model
from netweight.metrics.perplexity import Losses, causal_losses, cut_windows, encoder_decoder_losses
from netweight_experiments.tables.neuzip.inference_runs import Subject, Text
from netweight_experiments.tables.registry import Scale
from netweight_experiments.toys import decoder, encoder_decoder
from netweight_experiments.toys.encoder_decoder import LONGEST, batches

# Name of the models that are trained here, in tables.
STAND_IN = "stand-in"
# How to tell the papers' models by their configuration: vocabulary, width, blocks; or width, blocks, heads.
_DECODERS = {"Llama-3 8B": (128256, 4096, 32), "Llama-2 13B": (32000, 5120, 40), "Yi-1.5 34B": (64000, 7168, 60)}
_ENCODER_DECODERS = {"T5 1B": (1024, 24, 16), "T5 3B": (1024, 24, 32), "T5 11B": (1024, 24, 128)}
_FETCH = {
    "decoder": "Llama-3 8B, Llama-2 13B or Yi-1.5 34B (meta-llama/Meta-Llama-3-8B, meta-llama/Llama-2-13b-hf, "
    "01-ai/Yi-1.5-34B)",
    "encoder-decoder": "T5 of 1B, 3B or 11B (google-t5/t5-large, t5-3b, t5-11b; which ones the paper took is inferred)",
}


@dataclass(frozen=True)
class Extent:
    """How much is measured at a scale."""

    window: int  # tokens per window of a decoder
    windows: int | None  # most windows (or pairs) of the table's text, evenly spaced; None for all
    beside: int
    batch: int  # windows (or pairs) per forward pass, and per iteration of the speed
    rounds: int  # rounds of timing
    extras: bool  # whether ways that the paper does not have are measured


EXTENTS: dict[Scale, Extent] = {
    "small": Extent(window=256, windows=512, beside=128, batch=8, rounds=7, extras=True),
    "paper": Extent(window=1024, windows=None, beside=0, batch=1, rounds=5, extras=False),
}


@dataclass(frozen=True)
class Opened:
    """A subject and what is known of it."""

    subject: Subject  # what is measured
    differs: tuple[str, ...]  # what differs from the paper's set-up
    training: dict[str, Any]  # what came of the stand-in's training; empty for a named model
    inputs: dict[str, str]  # name of each input → its digest
    published: str  # name of the paper's model that this is by its configuration, or ""

    @property
    def text(self) -> str:
        """Name of the table's text."""
        return self.subject.texts[0].name

    @property
    def unit(self) -> str:
        """Unit of memory."""
        return "GiB" if self.published else "MB"

    def memory(self, count: int) -> float:
        """Return bytes in the unit of memory."""
        return count / ((1 << 30) if self.published else 10**6)


def open_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open a decoder for table 3(a): the named one, or the stand-in, which is trained first."""
    extent, path, training = EXTENTS[scale], _named(model, scale, "decoder"), dict[str, Any]()
    if path is None:
        path = folder / "decoder"
        training = decoder.trained(wikitext2("valid"), path, decoder.SMALL, progress=progress)
    network, tokenizer = language_model(path, "decoder")
    size = min(extent.window, int(getattr(network.config, "max_position_embeddings", extent.window)))
    texts = [_windows("WikiText-2", wikitext2("test"), tokenizer, size, extent.windows, extent.batch)]
    if extent.beside:
        texts.append(_windows("Shakespeare", tiny_shakespeare(), tokenizer, size, extent.beside, extent.batch))
    first = texts[0][1][: extent.batch]

    def iterate(current: nn.Module) -> None:
        causal_losses(current, first, batch=extent.batch)

    about = {"weights": _weights_digest(path), "iteration": [extent.batch, size]}
    subject = Subject(path.name if model else STAND_IN, network, [text for text, _ in texts], iterate, about)
    differs = _decoder_differs(scale, training, size, [len(windows) for _, windows in texts])
    same = _same(_DECODERS, network.config, "vocab_size", "hidden_size", "num_hidden_layers")
    return Opened(subject, differs, training, _digests(path) if model else {}, same)


def open_encoder_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open an encoder-decoder for table 3(b): the named one, or the stand-in, which is trained first."""
    extent, path, training = EXTENTS[scale], _named(model, scale, "encoder-decoder"), dict[str, Any]()
    pairs = wmt14_german_english() if scale == "paper" else wikisql("test")
    if path is None:
        path, recipe = folder / "encoder-decoder", encoder_decoder.SMALL
        training = encoder_decoder.trained(wikisql("train"), wikisql("dev"), path, recipe, progress=progress)
    network, tokenizer = language_model(path, "encoder-decoder")
    chosen = [pairs[place] for place in _places(len(pairs), extent.windows)]
    longest = (1024, 1024) if scale == "paper" else LONGEST
    given = list(batches(chosen, tokenizer, extent.batch, longest=longest))

    def losses(current: nn.Module, shown: Progress) -> Losses:
        return encoder_decoder_losses(current, given, progress=shown)

    def iterate(current: nn.Module) -> None:
        encoder_decoder_losses(current, given[:1])

    task = "WMT14 de-en" if scale == "paper" else "WikiSQL"
    text = Text(task, losses, 1.0, {"text": task, "pairs": len(chosen)})
    about = {"weights": _weights_digest(path), "iteration": [extent.batch]}
    subject = Subject(path.name if model else STAND_IN, network, [text], iterate, about)
    differs = _encoder_decoder_differs(scale, training, len(chosen), len(pairs))
    same = _same(_ENCODER_DECODERS, network.config, "d_model", "num_layers", "num_heads")
    return Opened(subject, differs, training, _digests(path) if model else {}, same)


def _named(model: str | None, scale: Scale, kind: str) -> Path | None:
    if scale == "paper" and not model:
        raise UsageError(
            f"Paper scale measures the paper's {kind} models, and none was named.",
            cure=f"Fetch {_FETCH[kind]} as a folder and name it: --model FOLDER",
        )
    return Path(model) if model else None


def _windows(
    name: str, text: str, tokenizer: Any, size: int, most: int | None, batch: int
) -> tuple[Text, torch.Tensor]:
    """A text cut into windows, some of them chosen; words are counted in the whole text, as the paper's code does."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    windows = cut_windows(ids, size)
    chosen = windows[_places(len(windows), most)]

    def losses(model: nn.Module, progress: Progress) -> Losses:
        return causal_losses(model, chosen, batch=batch, progress=progress, description=f"perplexity on {name}")

    about = {"text": name, "window": size, "windows": len(chosen)}
    return Text(name, losses, len(ids) / count_words(text), about), chosen


def _places(count: int, most: int | None) -> list[int]:
    """Which of `count` pieces to take: all, or `most` of them evenly spaced."""
    if most is None or count <= most:
        return list(range(count))
    return [place * count // most for place in range(most)]


def _weights_digest(path: Path) -> list[str]:
    return sorted(_digests(path).values())


def _digests(path: Path) -> dict[str, str]:
    return {file.name: digest_file(file) for file in sorted(path.glob("*.safetensors"))}


def _same(known: Mapping[str, tuple[int, ...]], config: Any, *keys: str) -> str:
    """Name of the paper's model with this shape, or ""."""
    shape = tuple(getattr(config, key, None) for key in keys)
    return next((name for name, own in known.items() if own == shape), "")


def _decoder_differs(scale: Scale, training: dict[str, Any], size: int, counts: list[int]) -> tuple[str, ...]:
    found = []
    if training:
        found.append(
            f"The model is a stand-in of {training['weights'] / 1e6:.1f} million weights in the shape of Llama, "
            "trained here on WikiText-2's validation split; the paper measures Llama-3 8B, Llama-2 13B and Yi-1.5 34B."
        )
        found.append(_trained_how(training, "per word"))
    if scale == "small":
        beside = f", and {counts[1]} of Tiny Shakespeare, which the paper does not have" if len(counts) > 1 else ""
        found.append(
            f"Windows of {size} tokens, {counts[0]} of them evenly spaced over WikiText-2's test split{beside}; "
            "the paper takes all windows of 1,024."
        )
    if training and scale == "small":
        found.append("The stand-in has seen no Shakespeare: it does no better there than guessing, and ranks nothing.")
    found.append("WikiText-2 is the version that writes rare words as <unk>; the paper's code takes the raw one.")
    found.append("Measured on a CPU by wall time; the paper's speeds are a GPU's.")
    return tuple(found)


def _encoder_decoder_differs(scale: Scale, training: dict[str, Any], taken: int, there: int) -> tuple[str, ...]:
    found = []
    if training:
        found.append(
            f"The model is a stand-in of {training['weights'] / 1e6:.1f} million weights in the shape of T5, "
            "trained here; the paper measures T5 of 1B, 3B and 11B."
        )
        found.append(_trained_how(training, "per token"))
    if scale == "small":
        found.append(
            f"The task is SQL from a question and its table ({taken} of {there} test pairs of WikiSQL, which name "
            "only the columns that the query uses); the paper's is translation, WMT14 de-en."
        )
    else:
        found.append("Sources begin with “translate German to English: ”; the paper does not say how it prompts.")
    found.append("Measured on a CPU by wall time; the paper's speeds are a GPU's.")
    return tuple(found)


def _trained_how(training: dict[str, Any], unit: str) -> str:
    fit = training["fit"]
    model = training[f"held-out perplexity {unit}"]
    frequencies = training[f"held-out perplexity {unit} of token frequencies"]
    rose = (
        "it overfits: held-out loss rose after that, and the weights of its best look were kept"
        if fit["overfits"]
        else "held-out loss was still at its best then"
    )
    return (
        f"Trained for {fit['steps']} steps, best at {fit['best_step']} ({rose}); "
        f"held-out perplexity {model:.4g} {unit}, against {frequencies:.4g} by token frequencies alone."
    )
