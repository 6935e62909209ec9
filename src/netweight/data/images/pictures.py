"""The reader of pictures: files as clinics, phones and hubs have them become 8-bit tensors of one size.

`decode_pictures` is what federations, forgetting and inversion read pictures with. It turns a picture as its EXIF entry
says, applies its color profile, lays transparent ones on white, and brings 16-bit gray to 8 bits by one scale for all
pictures that are read together. What it had to decide is in `remarks`, in words; what it cannot decide, such as which
frame of an animation is meant, is an error that names the picture.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from netweight.core.lazy import library
from netweight.core.linked_folders import files_below, refuse_broken_link
from netweight.errors import NetweightError, UsageError

Fit = Literal["stretch", "crop", "pad"]
"""Way of bringing a picture to another shape: stretched; cut to the shape in its middle; or with black bars."""

# Endings of files that Pillow reads; others are opened to see.
ENDINGS = frozenset(
    ".png .jpg .jpeg .jpe .jfif .tif .tiff .bmp .dib .webp .gif .ppm .pgm .pbm .pnm .jp2 .j2k .tga .avif .apng".split()
)
# Files that lie beside pictures and are none.
_BESIDE = frozenset(
    ".txt .csv .tsv .json .jsonl .xml .yaml .yml .md .html .db .ini .log .parquet .npz .npy .py".split()
)
_BESIDE_NAMES = frozenset(("thumbs.db", "desktop.ini", "license", "readme", "copying", "notice"))
_OTHER_PROGRAMS = {
    ".dcm": "a DICOM file", ".dicom": "a DICOM file", ".heic": "a HEIC photo", ".heif": "a HEIC photo",
    ".svg": "a drawing", ".pdf": "a document", ".nii": "a volume", ".cr2": "a raw photo", ".nef": "a raw photo",
    ".dng": "a raw photo",
}  # fmt: skip
_GRAY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N", "I", "F")
_WIDE = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
# Tags of a TIFF: which number is white, and whether numbers have a sign.
_PHOTOMETRIC, _SAMPLE_FORMAT = 262, 339
_SIGNED = 2
_DEPTHS = (8, 10, 12, 14, 16)
# Pictures that a remark names; the others are counted.
_NAMED = 3
# A picture of more than two levels counts as clipped if this share of its pixels is black or white.
_CLIPPED = 0.98


@final
@dataclass(frozen=True)
class DecodedPictures:
    """Pictures that were read together."""

    splits: tuple[Tensor, ...]
    """Pictures of each split, uint8 of shape `(n, channels, height, width)`; there is one channel if all pictures are
    gray.
    """
    remarks: tuple[str, ...]
    """Decisions of the reader, and oddities of some pictures, in whole sentences."""


@dataclass
class _Remarks:
    """Gathers remarks, each with the pictures that it is about."""

    by_reason: dict[str, list[str]] = field(default_factory=dict)
    cures: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, name: str, *, cure: str = "") -> None:
        self.by_reason.setdefault(what, []).append(name)
        self.cures[what] = cure

    def sentences(self) -> tuple[str, ...]:
        lines = []
        for what, names in self.by_reason.items():
            count = f"{len(names)} pictures" if len(names) > 1 else "1 picture"
            more = ", …" if len(names) > _NAMED else ""
            lines.append(f"{what}: {count} ({', '.join(names[:_NAMED])}{more}). {self.cures[what]}".rstrip())
        return tuple(lines)


def decode_pictures(
    splits: Sequence[Sequence[tuple[str, Any]]], *, of: str, size: tuple[int, int] | None = None, fit: Fit = "stretch"
) -> DecodedPictures:
    """Decode the pictures of one data set: all in gray if each of them is gray, else all in color.

    Args:
        splits: For each split, the name of every picture, for messages, and the picture: a path, encoded bytes, a
            mapping with `bytes` or `path` as the `datasets` library has it, an image of Pillow or an array.
        of: The name of the data set, for messages.
        size: Height and width that all pictures are brought to; without it they must have one size.
        fit: How pictures of another shape are brought to that size.

    Returns:
        The pictures and the remarks.

    Raises:
        UsageError: A picture cannot be read, has several frames, or holds numbers whose range is unknown; sizes differ
            and none is given; or a split is empty.
    """
    if not all(splits):
        raise UsageError(f"{of} has a split without pictures.", cure="Give at least one picture in each split.")
    # Two passes, since opening reads a header only and decoded pictures may be large.
    gray, depth = True, 0
    for name, source in (pair for split in splits for pair in split):
        picture = _open(source, name)
        gray = gray and _is_gray(picture)
        if picture.mode in _WIDE:
            depth = max(depth, _depth(picture, name))
    remarks = _Remarks()
    decoded = [[_decode(source, name, gray, depth, size, fit, remarks) for name, source in split] for split in splits]
    shapes = sorted({tuple(picture.shape[1:]) for split in decoded for picture in split})
    if len(shapes) > 1:
        sizes = ", ".join(f"{height}×{width}" for height, width in shapes[:4])
        raise UsageError(
            f"The pictures of {of} have {len(shapes)} sizes ({sizes}{', …' if len(shapes) > 4 else ''}).",
            cure="Give one size for all: --size HEIGHTxWIDTH (in Python, size=(height, width)).",
        )
    return DecodedPictures(tuple(torch.stack(split) for split in decoded), remarks.sentences())


def picture_files(folder: Path, *, below: bool = True) -> tuple[list[Path], list[Path]]:
    """List the pictures of a folder, in sorted order, and other files that lie among them.

    Args:
        folder: The folder.
        below: Whether its sub-folders are searched as well.

    Hidden files are not looked at. A file whose ending is none of a picture is opened to see whether it is one.

    Returns:
        The pictures, and files that are known to be none, such as tables.

    Raises:
        UsageError: A file is neither a picture that can be read nor one of a kind that lies beside pictures.
    """
    pictures, others = [], []
    for path in sorted(files_below(folder, without=("__MACOSX",)) if below else folder.iterdir()):
        inside = path.relative_to(folder).parts
        refuse_broken_link(path)
        if not path.is_file() or any(part.startswith(".") for part in inside):
            continue
        ending = path.suffix.lower()
        if ending in ENDINGS:
            pictures.append(path)
        elif ending in _BESIDE or path.name.lower() in _BESIDE_NAMES:
            others.append(path)
        elif ending in _OTHER_PROGRAMS:
            raise UsageError(
                f"{path} is {_OTHER_PROGRAMS[ending]}, which is not supported.",
                cure="Save it as PNG, of 8 or 16 bits, or move it out of the folder.",
            )
        else:
            _open(path, str(path))
            pictures.append(path)
    return pictures, others


@contextmanager
def _naming(name: str, remarks: _Remarks | None = None) -> Iterator[None]:
    """Turn what Pillow raises into an error that names the picture, and its warnings into remarks."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            yield
        if remarks is not None:
            for reason in dict.fromkeys(str(each.message).partition(".")[0] for each in warned):
                remarks.add(f"Read although Pillow warns ({reason})", name)
    except image.DecompressionBombError as error:
        raise UsageError(
            f"{name} is larger than {2 * image.MAX_IMAGE_PIXELS:,} pixels, more than is allowed.",
            cure="Cut it into tiles, or save it smaller.",
        ) from error
    except NetweightError:
        raise
    # The decoders of the formats raise errors of many kinds.
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        # Pillow names the type of its argument, and not the picture.
        if "BytesIO" in reason:
            reason = "its format is unknown"
        raise UsageError(
            f"{name} is not a picture that Pillow can read: {reason}.", cure="Remove or repair it."
        ) from error


def _open(source: Any, name: str, remarks: _Remarks | None = None) -> Any:
    """Open a picture without decoding it."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    with _naming(name, remarks):
        if isinstance(source, bytes):
            picture = image.open(io.BytesIO(source))
        elif isinstance(source, str | Path):
            picture = image.open(io.BytesIO(Path(source).read_bytes()))
        else:
            picture = source if isinstance(source, image.Image) else image.fromarray(np.asarray(source))
        frames = getattr(picture, "n_frames", 1)
        formats = getattr(picture, "tag_v2", {}).get(_SAMPLE_FORMAT, ())
    # Photos of phones hold a second picture, such as a depth map, behind the one that is shown.
    if frames > 1 and picture.format != "MPO":
        raise UsageError(
            f"{name} has {frames} frames, and it is not known which of them is meant.",
            cure="Save the frames that are meant as pictures of their own.",
        )
    # Pillow reads numbers of 8 bits as if they had no sign, so that black and white change places.
    if picture.mode not in _WIDE and _SIGNED in formats:
        raise UsageError(
            f"{name} contains numbers of 8 bits with a sign, and it is not known which of them are black and white.",
            cure="Save it as PNG, of 8 or 16 bits.",
        )
    return picture


def _is_gray(picture: Any) -> bool:
    """Return whether a picture has no colors: by its mode, or by its palette."""
    if picture.mode in ("P", "PA"):
        palette = np.frombuffer(bytes(picture.palette.getdata()[1]), np.uint8) if picture.palette else np.zeros(0)
        bands = len(picture.palette.mode) if picture.palette else 3
        colors = palette[: len(palette) // bands * bands].reshape(-1, bands)[:, :3]
        return bool((colors == colors[:, :1]).all())
    return picture.mode in _GRAY


def _numbers(picture: Any, name: str) -> NDArray[np.float64]:
    """The numbers of a picture of more than 8 bits."""
    with _naming(name):
        values: NDArray[np.float64] = np.asarray(picture).astype(np.float64)
    if not np.isfinite(values).all():
        raise UsageError(f"{name} contains NaN or infinity.", cure="Repair the picture, or remove it.")
    return values


def _depth(picture: Any, name: str) -> int:
    """The number of bits of gray that a picture's numbers need; 0 for numbers between 0 and 1."""
    values = _numbers(picture, name)
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 65535:
        raise UsageError(
            f"{name} contains gray values from {low:g} to {high:g}, and it is not known which of them are black "
            f"and white.",
            cure="Choose a window first, and save it as PNG, of 8 or 16 bits.",
        )
    if picture.mode == "F":
        if high > 1:
            raise UsageError(
                f"{name} contains fractions up to {high:g}, and it is not known which of them is white.",
                cure="Scale them to between 0 and 1, or save it as PNG, of 8 or 16 bits.",
            )
        return 0
    return next(bits for bits in _DEPTHS if high < 2**bits)


def _white_is_zero(picture: Any) -> bool:
    """Return whether a TIFF stores white as 0; Pillow inverts such pictures of up to 8 bits, and no others."""
    return picture.mode in _WIDE and getattr(picture, "tag_v2", {}).get(_PHOTOMETRIC) == 0


def _narrowed(picture: Any, name: str, depth: int, inverted: bool, remarks: _Remarks) -> Any:
    """An 8-bit gray picture of one with more bits; all pictures of a data set by the same scale."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    values = _numbers(picture, name)
    if picture.mode == "F":
        scale, what = 255.0, "Fractions of gray, read as 0 for black and 1 for white"
    else:
        scale = 255 / (2**depth - 1)
        what = f"Gray of more than 8 bits, read as {depth} bits, the same for all"
    remarks.add(what, name)
    levels = (values * scale).round().clip(0, 255).astype(np.uint8)
    if inverted:
        levels = 255 - levels
        remarks.add("Inverted, because they store white as 0", name)
    narrow = image.fromarray(levels)
    narrow.info.update({key: value for key, value in picture.info.items() if key in ("exif", "icc_profile")})
    if isinstance(hidden := picture.info.get("transparency"), int):
        narrow.putalpha(image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8)))
    return narrow


def _decode(
    source: Any, name: str, gray: bool, depth: int, size: tuple[int, int] | None, fit: Fit, remarks: _Remarks
) -> Tensor:
    """Decode a picture as uint8 of shape `(channels, height, width)`."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    operations = library("PIL.ImageOps", "Decoding pictures", "federated")
    picture = _open(source, name, remarks)
    # The tag is read here, because the rotated picture does not have tags.
    inverted = _white_is_zero(picture)
    with _naming(name, remarks):
        turned = operations.exif_transpose(picture)
        if turned is not picture and turned.size and picture.getexif().get(0x0112, 1) != 1:
            remarks.add("Rotated as their EXIF entry states", name)
    picture = turned
    if picture.mode in _WIDE:
        picture = _narrowed(picture, name, depth, inverted, remarks)
    with _naming(name, remarks):
        picture = _in_standard_colors(picture, name, remarks)
        if _has_alpha(picture):
            picture = picture.convert("RGBA")
            if picture.getchannel("A").getextrema()[0] < 255:
                picture = image.alpha_composite(image.new("RGBA", picture.size, "white"), picture)
                remarks.add("Put on a white background, because they are partly transparent", name)
        picture = picture.convert("L" if gray else "RGB")
        picture = _fitted(picture, name, size, fit, remarks)
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
    _note_odd(pixels, name, remarks)
    return pixels.unsqueeze(0) if gray else pixels.permute(2, 0, 1)


def _has_alpha(picture: Any) -> bool:
    """Return whether a picture states how transparent its pixels are."""
    return "A" in picture.getbands() or "a" in picture.getbands() or "transparency" in picture.info


def _in_standard_colors(picture: Any, name: str, remarks: _Remarks) -> Any:
    """A picture in sRGB: its color profile is applied, as programs that show pictures do."""
    profile = picture.info.get("icc_profile")
    if not profile or picture.mode == "1":
        return picture
    # A profile is one of colors: those of a palette are looked up first, and transparency is no color.
    alpha = picture.convert("RGBA").getchannel("A") if _has_alpha(picture) else None
    if picture.mode not in ("L", "RGB", "CMYK", "LAB"):
        picture = picture.convert("L" if picture.mode in _GRAY else "RGB")
    try:
        management = library("PIL.ImageCms", "Applying color profiles", "federated")
        own = management.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" not in str(management.getProfileName(own)):
            picture = management.profileToProfile(picture, own, management.createProfile("sRGB"), outputMode="RGB")
            remarks.add("Converted from their color profile to sRGB", name)
    except (management.PyCMSError, OSError) as error:
        remarks.add(f"Read without their color profile, which cannot be applied ({error})", name)
    if alpha is not None:
        picture = picture.convert("RGB")
        picture.putalpha(alpha)
    return picture


def _fitted(picture: Any, name: str, size: tuple[int, int] | None, fit: Fit, remarks: _Remarks) -> Any:
    """A picture of the size wanted."""
    if fit not in get_args(Fit):
        raise UsageError(f"The fit {fit!r} is unknown.", cure=f"Choose among {', '.join(get_args(Fit))}.")
    if size is None or picture.size == size[::-1]:
        return picture
    image = library("PIL.Image", "Decoding pictures", "federated")
    operations = library("PIL.ImageOps", "Decoding pictures", "federated")
    width_height, way = size[::-1], image.Resampling.BILINEAR
    shape = picture.width * width_height[1] != picture.height * width_height[0]
    done = {"stretch": "Resized, which changed their shape", "crop": "Resized and cut in the middle",
            "pad": "Resized, with black bars"}[fit] if shape else "Resized"  # fmt: skip
    remarks.add(f"{done}, to {size[0]} × {size[1]} pixels", name)
    if not shape or fit == "stretch":
        return picture.resize(width_height, way)
    return (
        operations.fit(picture, width_height, way)
        if fit == "crop"
        else operations.pad(picture, width_height, way, color=0)
    )


def _note_odd(pixels: Tensor, name: str, remarks: _Remarks) -> None:
    """Name a picture of one value, or one that is black and white but for few pixels."""
    low, high = int(pixels.min()), int(pixels.max())
    if low == high:
        remarks.add("Of one value everywhere", name, cure="They show nothing: remove their files, or replace them.")
    elif len(pixels.unique()) > 2 and (  # type: ignore[no-untyped-call]
        float(((pixels == 0) | (pixels == 255)).float().mean()) > _CLIPPED
    ):
        remarks.add(
            "Probably clipped, since nearly all pixels are black or white", name,
            cure="Save them again from the original, with its whole range of values (PNG of 8 or 16 bits), or remove "
            "their files.",
        )  # fmt: skip
