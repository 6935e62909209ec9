"""Products with weights in the fixed-length form, decoding and writing them: by kernels on the GPU, else decoded first.

On a GPU a kernel that reads the payload as it is multiplies 64 rows of inputs at a time, up to 256; with more the
weight is decoded first, since then arithmetic takes the time and not memory. Elsewhere weights are decoded
and multiplied as dense ones are, with the same bits. Compressed models call this through their operators; the format
is in `codec/fixed.py`, with products of few rows on the CPU, the kernels are in `kernels/fixed.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

import torch
import torch.nn.functional as F

from netweight.codec.cuda import launching
from netweight.codec.fixed import decode_fixed, decode_fixed_rows, layout_of_shape

# The most rows of inputs. For more, reading the weight once for each 64 rows takes longer than decoding it once.
MOST_FUSED = 256
# Rows of inputs that a kernel takes at most.
_MOST_AT_ONCE = 64
_FILE = "fixed.cu"
# Tensor cores have bf16 from this capability on.
_LEAST_CAPABILITY = (8, 0)
# Rows of inputs for which each warp loads its own.
_MOST_NARROW = 32
# The most warps of such a block, and the most parts of its columns.
_MOST_WARPS, _MOST_SPLITS = 16, 8
# For more inputs: warps of a block, blocks of a processor, and the most parts of the columns.
_SIDE_WARPS, _SIDE_BLOCKS, _MOST_SIDE_SPLITS = 8, 2, 16
_DECODE_THREADS = _FINISH_THREADS = 256
_ENCODE_THREADS, _SUM_THREADS, _PLACE_THREADS = 512, 1024, 128
# Tiles of the same rows that a block decodes. Half of its warps then handle only escapes, which was fastest when
# measured.
_TILES_DECODED = 4
_LISTED = 512  # kListed in kernels/fixed.cu
# Addresses are multiples of so many bytes.
_ALIGNMENT = 16


@final
@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Launch parameters of a product."""

    entry: str
    """Name of the kernel."""
    warps: int
    """Number of warps of a block."""
    row_tiles: int
    """Tiles of 16 rows that a block takes."""
    splits: int
    """Blocks that share the columns of the same rows; a second kernel adds their sums if there are several."""
    blocks: int
    """Number of blocks of the whole grid."""


@cache
def plan(batch: int, rows: int, columns: int, processors: int) -> LaunchPlan:
    """Choose the kernel for 1 to 64 rows of inputs; columns are split where rows alone do not occupy the processors."""
    layout = layout_of_shape(rows, columns)
    if batch > _MOST_NARROW:
        blocks = -(-layout.tile_rows // _SIDE_WARPS)
        splits = max(1, min(_SIDE_BLOCKS * processors // blocks, layout.tile_columns // 4, _MOST_SIDE_SPLITS))
        return LaunchPlan(f"product_{_MOST_AT_ONCE}", _SIDE_WARPS, _SIDE_WARPS, splits, blocks * splits)
    entry = next(f"product_{most}" for most in (8, 16, 32) if batch <= most)
    # For more inputs, two tiles share the loaded inputs.
    row_tiles = 1 if batch <= 8 else 2
    blocks = -(-layout.tile_rows // row_tiles)
    # Narrow weights have small blocks, so that the sum over a block's warps does not take longer than the product.
    tiles_each = 4 if blocks >= 4 * processors else 2
    # With so many blocks, two of them share a processor.
    most = _MOST_WARPS // row_tiles if blocks > 2 * processors else _MOST_WARPS
    warps = max(1, min(most, layout.tile_columns // tiles_each))
    # A split is worth a second kernel only if each warp keeps some tiles to multiply.
    splits = max(1, min(processors // blocks, layout.tile_columns // (4 * warps), _MOST_SPLITS))
    return LaunchPlan(entry, warps, row_tiles, splits, blocks * splits)


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether the kernels can run on a device: a GPU with bf16 tensor cores, with driver and NVRTC in order."""
    if device.type != "cuda" or launching.unavailable_because() is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def decode(payload: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Decode a payload, by `encode_fixed` or passed by `check_fixed`, on its device; on a GPU it returns at once."""
    if not runs_on(payload.device):
        return decode_fixed(payload)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=payload.device)
    layout = layout_of_shape(rows, columns)
    splits = -(-layout.tile_columns // _TILES_DECODED)
    arguments: list[launching.Argument] = [_aligned(payload), weight, rows, columns, splits]
    launching.launch(
        _FILE, "decode_fixed", layout.tile_rows * splits, _DECODE_THREADS, arguments, device=payload.device
    )
    return weight


def overwrite(weight: torch.Tensor, payload: torch.Tensor, status: torch.Tensor) -> None:
    """Write a weight over one of its shape in the fixed-length form, on a GPU, which is not waited for.

    The exponents that have codes stay as they are. If too many others come to be, or their list outgrows the payload, 1
    is ORed into `status`, int32 of shape (1,), and the payload holds nothing. Its address must be a multiple of 16.
    """
    rows, columns = weight.shape
    layout = layout_of_shape(rows, columns)
    listed = torch.empty(layout.tile_rows * _LISTED, dtype=torch.int32, device=weight.device)
    source, on = _aligned(weight.contiguous()), weight.device
    arguments: list[launching.Argument] = [source, payload, listed, status, rows, columns]
    launching.launch(_FILE, "encode_fixed", layout.tile_rows, _ENCODE_THREADS, arguments, device=on)
    launching.launch(_FILE, "add_up_escapes", 1, _SUM_THREADS, [payload, rows, columns], device=on)
    arguments = [payload, listed, status, rows, columns, payload.numel()]
    launching.launch(_FILE, "place_escapes", layout.tile_rows, _PLACE_THREADS, arguments, device=on)


def gather_rows(
    payload: torch.Tensor, rows: int, columns: int, ids: torch.Tensor, status: torch.Tensor | None
) -> torch.Tensor:
    """Decode the rows `ids`, of shape (*ids.shape, columns); a GPU notes wrong rows in `status`."""
    if status is None or not runs_on(payload.device):
        return decode_fixed_rows(payload, ids)
    output = torch.empty(*ids.shape, columns, dtype=torch.bfloat16, device=payload.device)
    if ids.numel():
        places = ids.to(torch.int64).contiguous()
        arguments: list[launching.Argument] = [places, _aligned(payload), output, rows, columns, status]
        launching.launch(_FILE, "fixed_rows", ids.numel(), _DECODE_THREADS, arguments, device=payload.device)
    return output


def linear(
    x: torch.Tensor, payload: torch.Tensor, rows: int, columns: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear` with a weight in the fixed-length form, bf16; on a GPU it returns at once."""
    # Elsewhere, and with more than 256 rows of inputs, it is torch's own of the decoded weight. Else products are
    # summed in fp32 and rounded to bf16 once, as torch does for dense weights, in another order than there: outputs
    # agree within what rounding in fp32 can do. The same call on the same GPU gives the same bits. Where an input is
    # infinite, an output can be NaN that would be infinite with the dense weight.
    batch = x.numel() // columns
    if not (0 < batch <= MOST_FUSED and runs_on(payload.device) and fit(x, bias, rows, columns, payload.device)):
        return F.linear(x, decode(payload, rows, columns), bias)
    inputs = _aligned(x.reshape(batch, columns).contiguous())
    y = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    payload, added = _aligned(payload), None if bias is None else bias.contiguous()
    # Even a view of the whole tensor would take some microseconds.
    if batch <= _MOST_AT_ONCE:
        _multiply(inputs, payload, added, y)
    else:
        for at in range(0, batch, _MOST_AT_ONCE):
            _multiply(inputs[at : at + _MOST_AT_ONCE], payload, added, y[at : at + _MOST_AT_ONCE])
    return y.view(*x.shape[:-1], rows)


def fit(x: torch.Tensor, bias: torch.Tensor | None, rows: int, columns: int, device: torch.device) -> bool:
    """Return whether a kernel can take input and bias; where it cannot, torch reports what is wrong with them."""
    if x.dtype != torch.bfloat16 or x.device != device or x.shape[-1] != columns:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.device == device and bias.shape == (rows,))


def _multiply(x: torch.Tensor, payload: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Fill `y` of shape (batch, rows) from `x` of shape (batch, columns)."""
    (batch, columns), rows = x.shape, y.shape[1]
    chosen = plan(batch, rows, columns, launching.multiprocessors(x.get_device()))
    several = chosen.splits > 1
    partial: torch.Tensor | int = 0  # a null pointer
    if several:
        partial = torch.empty(chosen.splits, batch, rows, dtype=torch.float32, device=x.device)
    added = 0 if bias is None else bias
    launching.launch(
        _FILE, chosen.entry, chosen.blocks, 32 * chosen.warps,
        [payload, x, added, y, partial, batch, rows, columns, chosen.splits], device=x.device,
    )  # fmt: skip
    if several:
        blocks = -(-y.numel() // _FINISH_THREADS)
        summed = [partial, added, y, batch, rows, chosen.splits]
        launching.launch(_FILE, "finish", blocks, _FINISH_THREADS, summed, device=x.device)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where loads of 16 bytes need one."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
