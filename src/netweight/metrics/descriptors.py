"""Descriptors of images: vectors whose cosine says how similar two images are.

SSCD and CLIP are files that the user has; centered pixels need no file.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.foreign_errors import opening, refuse_missing_weights
from netweight.core.lazy import extra, open_compressed_with
from netweight.errors import UnsafeInput, UsageError

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AT_ONCE = 64
"""Images that are described together."""


class Descriptor(Protocol):
    """Function from images to vectors whose cosine says how similar two images are."""

    @property
    def name(self) -> str: ...

    def __call__(self, images: Tensor) -> Tensor:
        """Return vectors of shape `(n, width)` for images of shape `(n, 3, height, width)` within 0 and 1."""


@final
class CenteredPixels:
    """Pixels minus their mean; the cosine of two is the centered correlation of two images (NCC)."""

    # Finds copies in place and misses shifted or recolored ones. It is not SSCD and never called so.
    # where: shape `(height, width)`, True where pixels are compared (the fixed part of a template); None compares all.

    def __init__(self, where: Tensor | None = None) -> None:
        self._where = where

    @property
    def name(self) -> str:
        """`"NCC"`, or `"NCC of the fixed part"`."""
        return "NCC" if self._where is None else "NCC of the fixed part"

    def __call__(self, images: Tensor) -> Tensor:
        """Return centered pixels, float64, shape `(n, 3 * pixels)`."""
        if self._where is not None and self._where.shape != images.shape[2:]:
            raise UsageError(
                f"Images of {tuple(images.shape[2:])} pixels cannot be compared with a mask of "
                f"{tuple(self._where.shape)} pixels.",
                cure="Give a mask of the images' size.",
            )
        compared = images.double() if self._where is None else images.double()[:, :, self._where.to(images.device)]
        flat = compared.flatten(1)
        return flat - flat.mean(1, keepdim=True)


@final
class TorchScriptDescriptor:
    """A network in a TorchScript file that the user brings, such as SSCD or an Inception for FID."""

    # A TorchScript file is a program: it is opened only if its SHA-256 is the one that the user gives. Images are
    # resized to `side` × `side` pixels, bilinearly with antialiasing, then normalized by `mean` and `deviation`.

    def __init__(
        self,
        path: str | Path,
        sha256: str,
        *,
        name: str,
        side: int,
        mean: Sequence[float] = _IMAGENET_MEAN,
        deviation: Sequence[float] = _IMAGENET_DEVIATION,
    ) -> None:
        self.name = name
        self.sha256 = sha256.lower()
        self._side, self._mean, self._deviation = side, mean, deviation
        self._network = _opened(Path(path), self.sha256)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the network's vectors, float32."""
        scaled = F.interpolate(images.float(), (self._side, self._side), mode="bilinear", antialias=True)
        mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (self._mean, self._deviation))
        vectors = self._network((scaled - mean) / deviation)
        if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(images):
            raise UsageError(
                f"The network of {self.name} does not return one vector per image.",
                cure="Give a TorchScript file that turns (n, 3, side, side) into (n, width).",
            )
        return vectors.float()


def sscd(path: str | Path, sha256: str) -> TorchScriptDescriptor:
    """Open SSCD as its authors published it for copy detection: `sscd_disc_mixup` in TorchScript.

    Source: Pizzi et al. 2022, "A Self-Supervised Descriptor for Image Copy Detection"; 320 pixels as in their code.
    """
    return TorchScriptDescriptor(path, sha256, name="SSCD", side=320)


@final
class Clip:
    """CLIP from a folder of transformers that the user has: how well images follow prompts, and a `Descriptor`.

        clip = Clip("clip-vit-base-patch32")
        clip.alignment(images, prompts)
        frechet_distance(clip(images), clip(references))

    Its vectors are the image embeddings. Nothing is downloaded.
    """

    def __init__(self, folder: str | Path, *, name: str | None = None) -> None:
        folder = Path(folder)
        self._model, self._tokenizer = _clip(folder)
        self.name = name or f"CLIP {folder.resolve().name}"
        self._side = int(self._model.config.vision_config.image_size)
        self._mean, self._deviation = _channels(folder)

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
        batches = []
        for start in range(0, len(prompts), _AT_ONCE):
            part = list(prompts[start : start + _AT_ONCE])
            given = self._tokenizer(part, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            with torch.no_grad():
                embedded = self._model.get_text_features(
                    input_ids=given["input_ids"], attention_mask=given["attention_mask"]
                )
            batches.append(embedded.pooler_output)
        return torch.cat(batches).float()

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


def described(descriptor: Descriptor, images: Tensor) -> Tensor:
    """Return vectors of length 1, a few images at a time.

    `images`: shape `(n, 3, height, width)`, within 0 and 1.

    Returns:
        float64, shape `(n, width)`; the zero vector where a descriptor finds nothing, as in an image of one color.
    """
    if images.ndim != 4 or not images.numel():
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be described.", cure="Give a batch (n, 3, height, width)."
        )
    if not images.isfinite().all():
        raise UsageError(
            "An image contains NaN or infinity, so it cannot be described.", cure="Leave the image out, and report it."
        )
    vectors = torch.cat([descriptor(part).double() for part in torch.split(images.detach(), _AT_ONCE)])
    scaled: Tensor = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return scaled


def _opened(path: Path, sha256: str) -> torch.nn.Module:
    if not path.is_file():
        raise UsageError(f"There is no TorchScript file {path}.", cure="Download it first, and name it.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise UnsafeInput(
            f"{path} has the SHA-256 {digest}, not {sha256}; it was not opened.",
            cure="Give the digest of the file that you trust, or fetch the file again.",
        )
    try:
        # torch 2.9 and later warn that TorchScript is deprecated, and still open it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            network: torch.nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"torch cannot open {path} as TorchScript: {error}", cure="Give a TorchScript file."
        ) from error
    return network.eval()


def _clip(folder: Path) -> tuple[Any, Any]:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is not a model folder: it contains no config.json.", cure="Name a folder with CLIP."
        )
    with extra("diffusion", "CLIP is read with transformers"):
        from transformers import AutoTokenizer, CLIPModel
    open_compressed_with("transformers")
    with opening(folder, "CLIP", cure="Check that config, weights and tokenizer exist."):
        kind: Any = CLIPModel
        model, loaded = kind.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    refuse_missing_weights(folder, loaded, "CLIP")
    model.train(False)
    model.requires_grad_(False)
    return model, tokenizer


def _channels(folder: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Channel means and deviations of the folder; OpenAI's where it has none."""
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("image_mean", OPENAI_CLIP_MEAN), config.get("image_std", OPENAI_CLIP_STD)


def similarity(descriptor: Descriptor, images: Tensor, references: Tensor) -> Tensor:
    """Return the similarity of every image to every reference.

    `images`: shape `(n, 3, height, width)`, within 0 and 1. `references`: shape `(m, 3, height, width)`.

    Returns:
        float64, shape `(n, m)`, -1 to 1.
    """
    a, b = described(descriptor, images), described(descriptor, references)
    if a.shape[1] != b.shape[1]:
        raise UsageError(
            f"{descriptor.name} cannot compare images of {tuple(images.shape[2:])} pixels with references of "
            f"{tuple(references.shape[2:])}.",
            cure="Resize one of them.",
        )
    return a @ b.T
