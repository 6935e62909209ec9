"""The models that NeuZip's inference tables measure, with their texts: stand-ins trained here, or a named folder.

At small scale windows are short and a few hundred of them are scored; at paper scale everything is as in the paper's
code: windows of 1,024 tokens, the whole test text, bf16 autocast, no key-value cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight_experiments.toys import decoder, encoder_decoder
from netweight_experiments.toys.encoder_decoder import LONGEST, batches

from netweight.core.digest import of_file
from netweight.core.progress import Progress
from netweight.data.corpora import Pair, count_words, tiny_shakespeare, wikisql, wikitext2, wmt14_german_english
from netweight.errors import UsageError
from netweight.hf.load_language_model import language_model
from netweight.metrics.perplexity import Losses, causal_losses, cut_windows, encoder_decoder_losses
from netweight.reproduce.inference_rows import Subject, Text
from netweight.reproduce.registry import Scale

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["EXTENTS", "STAND_IN", "Extent", "Opened", "open_decoder", "open_encoder_decoder"]

STAND_IN = "stand-in"
"""Name of the models that are trained here, in tables."""
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
    """How much is measured at a scale.

    Attributes:
        window: Tokens per window of a decoder.
        windows: Most windows (or pairs) of the table's text, evenly spaced; None for all.
        beside: The same for the text that stands beside it; 0 leaves that out.
        batch: Windows (or pairs) per forward pass, and per iteration of the speed.
        rounds: Rounds of timing.
        extras: Whether ways that the paper does not have are measured.
    """

    window: int
    windows: int | None
    beside: int
    batch: int
    rounds: int
    extras: bool


EXTENTS: dict[Scale, Extent] = {
    "small": Extent(window=256, windows=512, beside=128, batch=8, rounds=7, extras=True),
    "paper": Extent(window=1024, windows=None, beside=0, batch=1, rounds=5, extras=False),
}


@dataclass(frozen=True)
class Opened:
    """A subject and what is known of it.

    Attributes:
        subject: What is measured.
        differs: What differs from the paper's set-up.
        training: What came of the stand-in's training; empty for a named model.
        inputs: Name of each input → its digest.
        published: Name of the paper's model that this is by its configuration, or "".
    """

    subject: Subject
    differs: tuple[str, ...]
    training: dict[str, Any]
    inputs: dict[str, str]
    published: str


def open_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open a decoder for table 3(a): the named one, or the stand-in, which is trained first.

    Args:
        scale: "paper" needs `model`.
        model: A folder of transformers with a tokenizer.
        folder: Where the stand-in is kept.
        progress: Where progress is shown.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    extent = EXTENTS[scale]
    training: dict[str, Any] = {}
    path = _named(model, scale, "decoder")
    if path is None:
        path = folder / "decoder"
        training = decoder.trained(wikitext2("valid"), path, decoder.SMALL, progress=progress)
    opened, tokenizer = language_model(path, "decoder")
    size = min(extent.window, int(getattr(opened.config, "max_position_embeddings", extent.window)))
    texts = [_windows("WikiText-2", wikitext2("test"), tokenizer, size, extent.windows, extent.batch)]
    if extent.beside:
        texts.append(_windows("Shakespeare", tiny_shakespeare(), tokenizer, size, extent.beside, extent.batch))
    first = texts[0][1][: extent.batch]

    def iterate(current: nn.Module) -> None:
        causal_losses(current, first, batch=extent.batch)

    inputs = _digests(path) if model else {}
    about = {"weights": _weights_digest(path), "iteration": [extent.batch, size]}
    name = path.name if model else STAND_IN
    config = opened.config
    shape = tuple(getattr(config, key, None) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    differs = _decoder_differs(scale, training, size, [len(windows) for _, windows in texts])
    subject = Subject(name, opened, [text for text, _ in texts], iterate, about)
    return Opened(subject, differs, training, inputs, _same(_DECODERS, shape))


def open_encoder_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open an encoder-decoder for table 3(b): the named one, or the stand-in, which is trained first.

    Args:
        scale: "paper" needs `model`, and measures translation; "small" measures SQL from questions.
        model: A folder of transformers with a tokenizer.
        folder: Where the stand-in is kept.
        progress: Where progress is shown.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    extent = EXTENTS[scale]
    training: dict[str, Any] = {}
    path = _named(model, scale, "encoder-decoder")
    pairs = wmt14_german_english() if scale == "paper" else wikisql("test")
    if path is None:
        path = folder / "encoder-decoder"
        recipe = encoder_decoder.SMALL
        training = encoder_decoder.trained(wikisql("train"), wikisql("dev"), path, recipe, progress=progress)
    opened, tokenizer = language_model(path, "encoder-decoder")
    chosen = _spaced(pairs, extent.windows)
    longest = (1024, 1024) if scale == "paper" else LONGEST
    given = list(batches(chosen, tokenizer, extent.batch, longest=longest))

    def losses(current: nn.Module, shown: Progress) -> Losses:
        return encoder_decoder_losses(current, given, progress=shown)

    def iterate(current: nn.Module) -> None:
        encoder_decoder_losses(current, given[:1])

    task = "WMT14 de-en" if scale == "paper" else "WikiSQL"
    text = Text(task, losses, 1.0, {"text": task, "pairs": len(chosen)})
    about = {"weights": _weights_digest(path), "iteration": [extent.batch]}
    name = path.name if model else STAND_IN
    config = opened.config
    shape = tuple(getattr(config, key, None) for key in ("d_model", "num_layers", "num_heads"))
    subject = Subject(name, opened, [text], iterate, about)
    differs = _encoder_decoder_differs(scale, training, len(chosen), len(pairs))
    return Opened(subject, differs, training, _digests(path) if model else {}, _same(_ENCODER_DECODERS, shape))


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


def _spaced(pairs: Sequence[Pair], most: int | None) -> list[Pair]:
    return [pairs[place] for place in _places(len(pairs), most)]


def _weights_digest(path: Path) -> list[str]:
    return sorted(_digests(path).values())


def _digests(path: Path) -> dict[str, str]:
    return {file.name: of_file(file) for file in sorted(path.glob("*.safetensors"))}


def _same(known: Mapping[str, tuple[int, ...]], shape: tuple[Any, ...]) -> str:
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
