"""Textual inversions: files with the learned embedding of a new word, which pipelines load into their text encoders.

Training scripts of diffusers write `{"<word>": vectors}`, AUTOMATIC1111 `{"string_to_param": {"*": vectors}}` and
kohya `{"emb_params": vectors}`. For pipelines of several text encoders a file holds vectors for each: `clip_l` for the
first and `clip_g` for the second. A word of several vectors takes as many tokens of a prompt.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from netweight.errors import CorruptBlob, NetweightError, Unsupported, UsageError
from netweight.store import open_store
from netweight.store.torch_archive import refuse_inflated

ENDINGS = (".safetensors", ".bin", ".pt", ".pti")
# A textual inversion of a hundred vectors for all encoders of a large pipeline is smaller than this number of bytes.
_MOST_BYTES = 1 << 23
# Names of vectors by the text encoder that they are for.
_ENCODERS = {
    "clip_l": "text_encoder", "text_encoders_0": "text_encoder",
    "clip_g": "text_encoder_2", "text_encoders_1": "text_encoder_2",
}  # fmt: skip
# Names under which files hold their only embedding without saying its word; programs take the file's name for it.
_NAMELESS = ("emb_params", "*")


@final
@dataclass(frozen=True, eq=False)
class TextualInversion:
    """The embedding of a new word."""

    file: Path
    """File that contains it."""
    word: str
    """The word of prompts that is replaced by the embedding."""
    vectors: Mapping[str, Tensor]
    """Vectors of shape `(n, width)` by part, such as `text_encoder_2`; an empty name is for the only text encoder."""


def read_textual_inversion(path: Path) -> TextualInversion:
    """Read a file with the embedding of a word; no code in it is run.

    Args:
        path: A safetensors, `.bin`, `.pt` or `.pti` file.

    Returns:
        The embedding. Its word is the one that the file says; where it says none, the file's name.

    Raises:
        Unsupported: The file holds something else.
        CorruptBlob: It cannot be read.
    """
    state = _state(path)
    if isinstance(state.get("string_to_param"), Mapping):
        state = {"*": state["string_to_param"].get("*")}
    vectors = {str(name): value for name, value in state.items()}
    one_encoder = len(vectors) == 1 and not vectors.keys() & _ENCODERS.keys() and _is_word(next(iter(vectors)))
    by_encoder = bool(vectors) and vectors.keys() <= _ENCODERS.keys()
    if not (one_encoder or by_encoder) or not all(map(_is_one, vectors.values())):
        raise Unsupported(
            f"{path} is not the embedding of one word: it contains "
            f"{', '.join(map(repr, list(vectors)[:3])) or 'nothing'}{', …' if len(vectors) > 3 else ''}.",
            cure="Give a file of a textual inversion, such as learned_embeds.safetensors.",
        )
    if one_encoder:
        ((name, value),) = vectors.items()
        word = path.name.partition(".")[0] if name in _NAMELESS else name
        return TextualInversion(path, word, {"": _rows(value)})
    return TextualInversion(
        path, path.name.partition(".")[0], {_ENCODERS[name]: _rows(value) for name, value in vectors.items()}
    )


def textual_inversions(folder: Path) -> Iterator[TextualInversion]:
    """Find the textual inversions that lie at the top of a pipeline's folder, or in its folder `embeddings`."""
    for path in sorted([*folder.glob("*"), *folder.glob("embeddings/*")]):
        if path.suffix in ENDINGS and path.is_file() and path.stat().st_size < _MOST_BYTES:
            try:
                yield read_textual_inversion(path)
            except NetweightError:
                # The file is of another kind or damaged; the function that reads it later reports this.
                continue


def load_textual_inversions(pipeline: Any, files: Iterable[Path]) -> None:
    """Add words with their embeddings to the tokenizers and text encoders of a pipeline.

    Args:
        pipeline: A pipeline of diffusers; changed in place.
        files: Files of textual inversions.

    Raises:
        UsageError: A word is known to the tokenizer already, or vectors are not as wide as a text encoder's.
        Unsupported: A file holds something else, or the pipeline cannot load such words.
    """
    for inversion in map(read_textual_inversion, files):
        if not hasattr(pipeline, "load_textual_inversion"):
            raise Unsupported(
                f"{inversion.file} cannot be loaded: a {type(pipeline).__name__} does not take textual inversions.",
                cure="Leave --embedding out.",
            )
        for part, vectors in _by_encoder(pipeline, inversion).items():
            tokenizer = getattr(pipeline, part.replace("text_encoder", "tokenizer"))
            if inversion.word in tokenizer.get_vocab():
                raise UsageError(
                    f"The word {inversion.word!r} of {inversion.file} is in the vocabulary of the tokenizer already.",
                    cure="Leave --embedding out if the pipeline was saved with it.",
                )
            pipeline.load_textual_inversion(
                {inversion.word: vectors}, token=inversion.word, tokenizer=tokenizer,
                text_encoder=getattr(pipeline, part),
            )  # fmt: skip


def has_word(prompt: str, word: str) -> bool:
    """Return whether a prompt contains a word, and not only a longer one that it is a part of."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt) is not None


def _by_encoder(pipeline: Any, inversion: TextualInversion) -> dict[str, Tensor]:
    """Return vectors by the pipeline's text encoder that they are for; all CLIP encoders must get some."""
    widths = {
        part: encoder.get_input_embeddings().weight.shape[1]
        for part in ("text_encoder", "text_encoder_2")
        if (encoder := getattr(pipeline, part, None)) is not None and _is_clip(encoder)
    }
    vectors = dict(inversion.vectors)
    if "" in vectors and len(widths) == 1:
        vectors = {next(iter(widths)): vectors[""]}
    shapes = {part: value.shape[1] for part, value in vectors.items()}
    if shapes != widths:
        found, wanted = (
            ", ".join(f"{width} for {part or 'its only text encoder'}" for part, width in each.items())
            for each in (shapes, widths)
        )
        raise UsageError(
            f"{inversion.file} has vectors of another model: their widths are {found}, and this pipeline needs "
            f"{wanted}.",
            cure="Give a textual inversion that was trained for this model.",
        )
    return vectors


def _is_clip(encoder: Any) -> bool:
    return "clip" in str(getattr(encoder.config, "model_type", "")).lower()


def _is_word(name: str) -> bool:
    """Return whether a tensor's name can be a word, and is not that of a network's weight, such as `norm.weight`."""
    return name in _NAMELESS or name.startswith("<") or "." not in name


def _is_one(value: object) -> bool:
    """Return whether a value is one vector, or several."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (1, 2) and value.numel() > 0


def _rows(value: Tensor) -> Tensor:
    return value.detach().float().reshape(-1, value.shape[-1])


def _state(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        if path.suffix in (".safetensors", ".pti") and not zipfile.is_zipfile(path):
            # The store also opens files that netweight compressed.
            with open_store(path) as store:
                state: Any = {name: store.get(name) for name in store.names()}
        else:
            refuse_inflated(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorruptBlob(f"{path} cannot be read as a file of tensors: {reason}") from error
    if isinstance(state, Tensor):
        state = {"*": state}
    if not isinstance(state, Mapping):
        raise Unsupported(f"{path} contains a {type(state).__name__} instead of tensors by name.")
    return state
