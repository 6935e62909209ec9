"""Does a model reproduce its training images: per prompt and seed, before and after an edit, by kind of memorization.

A `Descriptor` turns images into vectors whose cosine says how alike two images are: SSCD or CLIP, files that the user
brings, or centered pixels. The images of a prompt are compared with its training image, with those of the unedited
model for the same seeds, with each other, and with every memorized image: an edit may only divert a prompt to another
one's image. Medians hide seeds, so copies are counted seed by seed as well. Foreground and background are compared
apart too, since an edit may leave copies of the foreground alone.

Source: Hintersdorf et al. 2024 (NeMo), section 4: SSCD to the original and to the generation, and diversity. Regions:
Di et al., arXiv 2508.12148, whose masks come from a segmentation network.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.foreign_errors import opening, refuse_missing_weights
from netweight.core.lazy import extra, open_compressed_with
from netweight.errors import UnsafeInput, UsageError
from netweight.metrics.intervals import ends_if_enough, interval_finding, proportion
from netweight.report.finding import Better, Finding

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AT_ONCE = 64
"""Images that are described together."""


class Descriptor(Protocol):
    """Images in, vectors out."""

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


Kind = Literal["verbatim", "template"]
"""Kind of repetition: the training image itself, or its layout with parts that vary."""

COPY = 0.7
"""Similarity from which an image is called a copy; NeMo's rule for SSCD, by which verbatim copies are told apart."""


@final
@dataclass(frozen=True, eq=False)
class MemorizedImage:
    """A training image that a model repeats."""

    prompt: str
    """Caption under which the image is reproduced."""
    kind: Kind
    """Kind of repetition of the training image."""
    image: Tensor
    """Shape `(3, height, width)`, within 0 and 1."""
    where: Tensor | None = None
    """Shape `(height, width)`, True where a template stays as it is; only `CenteredPixels` can look there alone.
    None is everywhere.
    """
    name: str = ""
    """Name that distinguishes several images of one prompt; empty stands for the prompt."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name or self.prompt


@final
@dataclass(frozen=True)
class PromptCopies:
    """Copies among one prompt's images; every tuple has one entry per seed."""

    prompt: str
    """The label of the memorized image: its caption, numbered where this has several images."""
    kind: Kind
    """Kind of repetition of the training image."""
    to_image: tuple[float, ...]
    """Similarity to its training image."""
    to_unedited: tuple[float, ...] | None
    """Similarity to what the unedited model makes of the same seed; None if not asked."""
    nearest: tuple[float, ...]
    """The greatest similarity to any memorized image."""
    nearest_prompt: tuple[str, ...]
    """The prompt of that image."""
    diversity: float | None
    """Median similarity of two seeds' images; lower is more diverse. None for a single seed."""

    def copies(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of the prompt's own training image."""
        return sum(value >= threshold for value in self.to_image)

    def any_match(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of some memorized image."""
        return sum(value >= threshold for value in self.nearest)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)


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


def similarity_to_memorized(
    images: Tensor, memorized: Sequence[MemorizedImage], *, descriptor: Descriptor | None = None
) -> Tensor:
    """Return the similarity of every image to every memorized one: a row whose maximum is high is a copy of some.

    `images`: shape `(n, 3, height, width)`, within 0 and 1.

    Returns:
        float64, shape `(n, len(memorized))`, -1 to 1.
    """
    if not memorized:
        raise UsageError("There is no memorized image to compare with.", cure="Give at least one.")
    columns = []
    for each in memorized:
        looking = descriptor if descriptor is not None else CenteredPixels(each.where)
        columns.append(similarity(looking, images, each.image[None]))
    return torch.cat(columns, 1)


def diversity(descriptor: Descriptor, images: Tensor) -> float:
    """Return the median similarity of two images of one prompt; lower is more diverse.

    `images`: shape `(n, 3, height, width)`, at least two, one per seed.

    Source: NeMo's D_SSCD as its code computes it.
    """
    if len(images) < 2:
        raise UsageError("The diversity of one image cannot be measured.", cure="Give images of two seeds or more.")
    between = similarity(descriptor, images, images)
    rows, columns = torch.triu_indices(len(images), len(images), offset=1)
    pairs: list[float] = between[rows, columns].tolist()
    return statistics.median(pairs)


def copies_of_prompt(
    own: MemorizedImage,
    images: Tensor,
    everything: Sequence[MemorizedImage],
    *,
    descriptor: Descriptor | None = None,
    unedited: Tensor | None = None,
) -> PromptCopies:
    """Compare a prompt's images with its training image and with all others that the model is known to repeat.

    `images`: what the model makes of the prompt, shape `(seeds, 3, height, width)`, within 0 and 1.
    """
    if unedited is not None and len(unedited) != len(images):
        raise UsageError(
            f"There are {len(images)} images and {len(unedited)} of the unedited model.",
            cure="Generate both with the same seeds.",
        )
    memorized = [own, *(each for each in everything if each.label != own.label)]
    table = similarity_to_memorized(images, memorized, descriptor=descriptor)
    whole = descriptor if descriptor is not None else CenteredPixels()
    nearest, index = table.max(1)
    return PromptCopies(
        prompt=own.label,
        kind=own.kind,
        to_image=tuple(table[:, 0].tolist()),
        to_unedited=None if unedited is None else tuple(similarity(whole, images, unedited).diagonal().tolist()),
        nearest=tuple(nearest.tolist()),
        nearest_prompt=tuple(memorized[place].label for place in index.tolist()),
        diversity=diversity(whole, images) if len(images) > 1 else None,
    )


def copy_findings(
    prompts: Sequence[PromptCopies], *, measure: str, threshold: float = COPY, seed: int = 0
) -> list[Finding]:
    """Sum up prompts: the median over seeds of each, then the median and its spread over prompts, kind by kind."""
    if not prompts:
        raise UsageError("No prompt was measured.", cure="Give at least one.")
    # "Better" is the direction of somebody who wants no copies. Intervals of medians are over prompts, from five on;
    # those of shares are over seeds, as if these were independent, which the seeds of one prompt are not quite.
    findings: list[Finding] = []
    for kind in ("verbatim", "template"):
        rows = [each for each in prompts if each.kind == kind]
        if rows:
            findings += _of_kind(rows, kind, measure, threshold, seed)
    return findings


def _of_kind(rows: list[PromptCopies], kind: Kind, measure: str, threshold: float, seed: int) -> list[Finding]:
    def median(what: str, values: list[float], better: Better | None) -> Finding:
        middle = statistics.median(values)
        spread = statistics.median(abs(value - middle) for value in values)
        detail = {"each": dict(zip([row.prompt for row in rows], values, strict=True)), "MAD": spread}
        return Finding(
            f"{measure}, {what}, {kind}", middle, ci95=ends_if_enough(values, "median", seed=seed), n=len(values),
            better=better, seeds=(seed,), detail=detail,
        )  # fmt: skip

    def share(what: str, counts: list[int]) -> Finding:
        interval = proportion(sum(counts), sum(len(row.to_image) for row in rows))
        each = {row.prompt: count for row, count in zip(rows, counts, strict=True)}
        detail = {"copies": sum(counts), "threshold": threshold, "each": each}
        return interval_finding(f"{measure}, {what}, {kind}", interval, better="lower", detail=detail)

    findings = [median("to the training image", [statistics.median(row.to_image) for row in rows], "lower")]
    same_seed = [statistics.median(row.to_unedited) for row in rows if row.to_unedited is not None]
    if len(same_seed) == len(rows):
        findings.append(median("to the unedited generation", same_seed, "lower"))
    between = [row.diversity for row in rows if row.diversity is not None]
    if len(between) == len(rows):
        findings.append(median("between seeds", between, "lower"))
    findings.append(share("seeds that copy the training image", [row.copies(threshold) for row in rows]))
    findings.append(share("seeds that copy any memorized image", [row.any_match(threshold) for row in rows]))
    return findings


_LEAST = 9
"""Pixels that a region needs: correlations over fewer say nothing."""
_LEVELS = 64


@final
@dataclass(frozen=True)
class RegionCopies:
    """Similarity of one prompt's images and its training image in each region; an entry per image."""

    prompt: str
    """Caption of the training image."""
    kind: Kind
    """Kind of repetition of the training image."""
    share: float
    """Share of the compared pixels that are foreground."""
    foreground: tuple[float, ...] | None
    """Centered correlation (NCC) of the foreground; None where that is too small to compare."""
    background: tuple[float, ...] | None
    """The same of the background."""

    def copies(self, threshold: float = COPY) -> dict[str, int]:
        """Return how many images copy both regions, one of them alone, or none."""
        if self.foreground is None or self.background is None:
            return {}
        pairs = [(a >= threshold, b >= threshold) for a, b in zip(self.foreground, self.background, strict=True)]
        named = {"both": (True, True), "foreground alone": (True, False), "background alone": (False, True)}
        return {**{name: pairs.count(pair) for name, pair in named.items()}, "neither": pairs.count((False, False))}


def foreground_by_color(image: Tensor) -> Tensor:
    """Divide an image by how far pixels are from the mean color of its border, where both parts differ most (Otsu).

    Args:
        image: Shape `(3, height, width)`, within 0 and 1, at least 3 pixels high and wide.

    Returns:
        Shape `(height, width)`, True in the foreground; False everywhere if the image has one color.
    """
    if image.ndim != 3 or image.shape[0] != 3 or min(image.shape[1:]) < 3:
        raise UsageError(
            f"An image of shape {tuple(image.shape)} has no foreground.", cure="Give (3, height, width), from 3 pixels."
        )
    edge = torch.ones(image.shape[1:], dtype=torch.bool, device=image.device)
    edge[1:-1, 1:-1] = False
    pixels = image.double()
    away = (pixels - pixels[:, edge].mean(1)[:, None, None]).square().sum(0).sqrt()
    greatest = float(away.max())
    if greatest < 1e-6:
        return torch.zeros_like(edge)
    values = away.flatten()
    limits = torch.linspace(0, greatest, _LEVELS, dtype=torch.float64, device=image.device)[1:-1]
    above = values[None] > limits[:, None]
    share = above.double().mean(1)
    means = [(part.double() @ values) / part.sum(1).clamp_min(1) for part in (above, ~above)]
    between = share * (1 - share) * (means[0] - means[1]).square()
    return away > limits[int(between.argmax())]


def region_copies(own: MemorizedImage, images: Tensor, *, foreground: Tensor | None = None) -> RegionCopies:
    """Compare a prompt's images with its training image, region by region.

    `images`: what the model makes of the prompt, shape `(n, 3, height, width)`, of the training image's size.
    `foreground`: shape `(height, width)`, True in the foreground, such as from a segmentation network; None divides by
    color.
    """
    mask = foreground_by_color(own.image) if foreground is None else foreground.bool()
    if mask.shape != own.image.shape[1:]:
        raise UsageError(
            f"A foreground of {tuple(mask.shape)} pixels is not of an image of {tuple(own.image.shape[1:])}.",
            cure="Give a mask of the training image's size.",
        )
    where = torch.ones_like(mask) if own.where is None else own.where
    by_region: list[tuple[float, ...] | None] = []
    for region in (mask & where, ~mask & where):
        if int(region.sum()) < _LEAST:
            by_region.append(None)
        else:
            by_region.append(tuple(similarity(CenteredPixels(region), images, own.image[None])[:, 0].tolist()))
    share = float((mask & where).sum() / where.sum().clamp_min(1))
    return RegionCopies(own.label, own.kind, share, by_region[0], by_region[1])


def region_findings(prompts: Sequence[RegionCopies], *, threshold: float = COPY) -> list[Finding]:
    """Sum up regions: the share of images that copy the foreground and the background, kind by kind."""
    # Intervals are over images, as if these were independent.
    if not prompts:
        raise UsageError("No prompt was measured.", cure="Give at least one.")
    findings = []
    for kind in ("verbatim", "template"):
        rows = [each for each in prompts if each.kind == kind]
        whole = [each for each in rows if each.copies()]
        without = [each.prompt for each in rows if not each.copies()]
        for name in ("foreground", "background") if rows else ():
            title = f"NCC, images that copy the {name}, {kind}"
            if not whole:
                findings.append(Finding(title, None, detail={"reason": "no image has both regions"}))
                continue
            values = {each.prompt: getattr(each, name) for each in whole}
            counts = {prompt: sum(value >= threshold for value in part) for prompt, part in values.items()}
            interval = proportion(sum(counts.values()), sum(map(len, values.values())))
            detail = {
                "copies": sum(counts.values()),
                "threshold": threshold,
                "each": counts,
                "medians": {prompt: statistics.median(part) for prompt, part in values.items()},
                "by region": {each.prompt: each.copies(threshold) for each in whole},
                "without two regions": without,
            }
            findings.append(interval_finding(title, interval, better="lower", detail=detail))
    return findings
