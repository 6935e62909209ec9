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

# Mantissa bits of the paper's lossy rows.
BITS = (0, 1, 3)
# Block sizes of the paper's table 4.
BLOCKS = (32, 64, 128, 256, 512)
_BLOCK = 512  # of the paper's table 3
Fidelity = Literal["corrected", "reference"]


@dataclass(frozen=True)
class Way:
    """One way of holding the weights."""

    name: str  # its name in tables; the papers' where they have it
    bits: int | None = None  # mantissa bits that netweight keeps; None for vanilla and quantizers
    block: int | None = None  # weights that share a normalizer; None for none
    fidelity: Fidelity = "corrected"  # "corrected" is netweight's own rounding, "reference" that of the paper's code
    whole: bool = False  # whether embeddings and output layer are converted too
    quantizer: bool = False  # whether another library's quantizer does it


VANILLA = Way("Vanilla")


def ways(*, extras: bool) -> tuple[Way, ...]:
    """Return the ways to measure, in the order of the paper's table 3 and then of its table 4."""
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
    """Convert a dense bf16 model in place."""
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
