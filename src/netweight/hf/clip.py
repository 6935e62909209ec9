"""CLIP from a folder of transformers that the user has: how well images follow prompts, and features for CLIP-FID.

    clip = Clip("clip-vit-base-patch32")
    clip.alignment(images, prompts)
    frechet_distance(clip(images), clip(references))

Nothing is downloaded: reports of prompt alignment name the folder's model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.lazy import extra
from netweight.errors import UsageError
from netweight.hf import open_compressed_with

with extra("diffusion", "CLIP is read with transformers"):
    from transformers import AutoTokenizer, CLIPModel
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD


# Images or prompts that go through the model together.
_AT_ONCE = 64


@final
class Clip:
    """A CLIP model with its tokenizer; also a `Descriptor`, whose vectors are the image embeddings."""

    def __init__(self, folder: str | Path, *, name: str | None = None) -> None:
        folder = Path(folder)
        self._model, self._tokenizer = _opened(folder)
        self.name = name or f"CLIP {folder.resolve().name}"
        self._side = int(self._model.config.vision_config.image_size)
        self._mean, self._deviation = _normalization(folder)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the embeddings of images, not scaled to length 1: float32, shape `(n, width)`."""
        parts = [
            self._model.get_image_features(pixel_values=self._scaled(part)) for part in torch.split(images, _AT_ONCE)
        ]
        return torch.cat([part.pooler_output for part in parts]).float()

    def texts(self, prompts: Sequence[str]) -> Tensor:
        """Return the embeddings of prompts, not scaled to length 1: float32, shape `(n, width)`."""
        if not prompts:
            raise UsageError("There is no prompt to embed.", cure="Give at least one.")
        longest = self._model.config.text_config.max_position_embeddings
        found = []
        for start in range(0, len(prompts), _AT_ONCE):
            part = list(prompts[start : start + _AT_ONCE])
            given = self._tokenizer(part, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            with torch.no_grad():
                embedded = self._model.get_text_features(
                    input_ids=given["input_ids"], attention_mask=given["attention_mask"]
                )
            found.append(embedded.pooler_output)
        return torch.cat(found).float()

    def alignment(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return how well each image follows its prompt: the cosine of their embeddings."""
        if len(images) != len(prompts):
            raise UsageError(f"There are {len(images)} images and {len(prompts)} prompts.", cure="Give one for each.")
        return F.cosine_similarity(self(images), self.texts(prompts))

    def _scaled(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        shorter = min(height, width)
        size = [self._side * height // shorter, self._side * width // shorter]
        scaled = F.interpolate(images.float(), size, mode="bicubic", antialias=True).clamp(0, 1)
        top, left = ((side - self._side) // 2 for side in size)
        middle = scaled[:, :, top : top + self._side, left : left + self._side]
        mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (self._mean, self._deviation))
        normalized: Tensor = (middle - mean) / deviation
        return normalized


def _opened(folder: Path) -> tuple[Any, Any]:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no model folder: it holds no config.json.", cure="Name a folder with CLIP.")
    open_compressed_with("transformers")
    try:
        model = CLIPModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be opened as CLIP: {error}", cure="Check that config, weights and tokenizer are there."
        ) from error
    model.train(False)
    model.requires_grad_(False)
    return model, tokenizer


def _normalization(folder: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Channel means and deviations of the folder; OpenAI's where it has none."""
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("image_mean", OPENAI_CLIP_MEAN), config.get("image_std", OPENAI_CLIP_STD)
