"""The ways of holding a language model's weights that NeuZip's inference tables compare, and how each is applied.

Vanilla bf16, the quantizers of `integrations/quantizers.py`, and netweight at every number of mantissa bits, block size
and fidelity. All of them convert the same layers: the linear ones but the output layer, as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from netweight.hf.quantizers import linear_layers, missing, quantize_, quantizers

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BITS", "BLOCKS", "VANILLA", "Way", "apply", "reason_missing", "ways"]

BITS = (0, 1, 3)
"""Mantissa bits of the paper's lossy rows."""
BLOCKS = (32, 64, 128, 256, 512)
"""Block sizes of the paper's table 4."""
_BLOCK = 512  # of the paper's table 3
Fidelity = Literal["corrected", "reference"]


@dataclass(frozen=True)
class Way:
    """One way of holding the weights.

    Attributes:
        name: Its name in tables; the papers' where they have it.
        bits: Mantissa bits that netweight keeps; None for vanilla and quantizers.
        block: Weights that share a normalizer; None for none.
        fidelity: "corrected" is netweight's own rounding, "reference" that of the paper's code.
        whole: Whether embeddings and output layer are converted too.
        quantizer: Whether another library's quantizer does it.
    """

    name: str
    bits: int | None = None
    block: int | None = None
    fidelity: Fidelity = "corrected"
    whole: bool = False
    quantizer: bool = False


VANILLA = Way("Vanilla")


def ways(*, extras: bool) -> tuple[Way, ...]:
    """Return the ways to measure, in the order of the paper's table 3 and then of its table 4.

    Args:
        extras: Whether to add numbers of bits that the paper does not have, and whole models.
    """
    found = [VANILLA, *(Way(quantizer.name, quantizer=True) for quantizer in quantizers())]
    for fidelity in ("corrected", "reference"):
        found += [_lossy(bits, _BLOCK, fidelity) for bits in BITS]
    found.append(Way("NeuZip 7-bit (lossless)", bits=7))
    if extras:
        found += [_lossy(bits, _BLOCK, "corrected") for bits in (2, 4, 5, 6)]
        found.append(Way("NeuZip 7-bit (lossless), embeddings too", bits=7, whole=True))
        found.append(Way("NeuZip 3-bit, embeddings too", bits=3, block=_BLOCK, whole=True))
    blocks = [block for block in (None, *BLOCKS) if block != _BLOCK]
    found += [
        _lossy(bits, block, fidelity) for fidelity in ("corrected", "reference") for bits in BITS for block in blocks
    ]
    return tuple(found)


def _lossy(bits: int, block: int | None, fidelity: Fidelity) -> Way:
    how = ", as the reference code" if fidelity == "reference" else ""
    blocks = "" if block == _BLOCK else ", no blocks" if block is None else f", blocks of {block}"
    return Way(f"NeuZip {bits}-bit{how}{blocks}", bits=bits, block=block, fidelity=fidelity)


def reason_missing(way: Way) -> str:
    """Return why a way cannot be measured here, or an empty text."""
    return next((missing(quantizer) for quantizer in quantizers() if quantizer.name == way.name), "")


def apply(way: Way, model: nn.Module) -> float | None:
    """Convert a dense bf16 model in place.

    Args:
        way: How.
        model: A language model of transformers.

    Returns:
        The largest relative change of a weight for netweight's ways, else None.

    Raises:
        MissingExtra: The library of a quantizer is not installed.
    """
    layers = linear_layers(model)
    if way.quantizer:
        quantize_(model, next(quantizer for quantizer in quantizers() if quantizer.name == way.name), layers)
    if way.bits is None:
        return None
    import netweight

    report = netweight.compress_(
        model,
        include=None if way.whole else layers,
        mantissa_bits=way.bits,
        block_size=way.block,
        fidelity=way.fidelity,
    )
    return float(report.worst_change)
