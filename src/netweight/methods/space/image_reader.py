"""Readers of attributes in images: functions that users bring, checked wherever they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from netweight.core.foreign_errors import running
from netweight.core.lazy import import_named
from netweight.errors import UsageError

ImageReader = Callable[[Tensor], Mapping[str, Tensor]]
"""A function from images of shape `(n, 3, height, width)`, 0 to 1, to each attribute's values, shape `(n,)`."""


def import_reader(where: str) -> ImageReader:
    """Import a reader.

    Args:
        where: The module and the function, as `MODULE:FUNCTION`.

    Returns:
        A function that calls it. It raises UsageError where the reader fails, or returns anything but a finite
        number of each image for each attribute.

    Raises:
        UsageError: There is no such module or function.
    """
    read = import_named(where, "The reader")

    def checked(images: Tensor) -> Mapping[str, Tensor]:
        with running(f"The reader {where!r}"):
            attributes = read(images)
        if not isinstance(attributes, Mapping) or not attributes:
            raise UsageError(
                f"The reader {where!r} returned {type(attributes).__name__} instead of a dict of attributes.",
                cure="Return a dict from the name of each attribute to a tensor with one number for each image.",
            )
        for name, values in attributes.items():
            if not isinstance(values, Tensor) or values.shape != (len(images),):
                shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UsageError(
                    f"The reader {where!r} returned {shape} for {name!r} instead of a tensor of shape "
                    f"({len(images)},).",
                    cure="Return a tensor with one number for each image.",
                )
            if not bool(torch.isfinite(values).all()):
                raise UsageError(
                    f"The reader {where!r} returned NaN or infinity for {name!r}.", cure="Correct the reader."
                )
        return attributes

    return checked
