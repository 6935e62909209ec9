"""Seeds derived by name, so that every random draw has its own stream whatever the order of work. Any layer may use it.

Give each draw a path, such as `derive(seed, "client", 3, "round", 7)`: adding, leaving out or reordering other draws
then changes nothing here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from netweight.errors import UsageError

if TYPE_CHECKING:
    import numpy
    import torch


def _encode(part: str | int) -> bytes:
    """Encode one path part so that no two paths share an encoding: kind, length, content."""
    if isinstance(part, bool) or not isinstance(part, str | int):
        raise UsageError(
            f"A seed path may contain text and integers, not {part!r} ({type(part).__name__}).",
            cure="Convert it with str() or int().",
        )
    content = str(part).encode()
    kind = b"s" if isinstance(part, str) else b"i"
    return kind + len(content).to_bytes(8, "little") + content


def derive(seed: int, *path: str | int) -> int:
    """Derive an independent seed from a root seed and a path."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"The seed must be an integer, not {seed!r}.")
    state = hashlib.blake2b(digest_size=8, person=b"netweight.seed")
    for part in (seed, *path):
        state.update(_encode(part))
    return int.from_bytes(state.digest(), "little") >> 1


def torch_generator(seed: int, *path: str | int, device: str = "cpu") -> torch.Generator:
    """Make a torch generator on `device`, seeded by `derive(seed, *path)`."""
    import torch

    return torch.Generator(device).manual_seed(derive(seed, *path))


def numpy_generator(seed: int, *path: str | int) -> numpy.random.Generator:
    """Make a numpy generator seeded by `derive(seed, *path)`."""
    import numpy

    return numpy.random.default_rng(derive(seed, *path))
