"""The model before its alignment, mixed into the weights, and taken beyond."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import nn


@final
class UnalignedMixture(RefusalEditSettings):
    """The model before its alignment, mixed into the model."""

    shares: Annotated[tuple[float, ...], Cli(own=False)] = Field(
        (0.5, 1.0, 1.5),
        min_length=1,
        description="Shares of the unaligned model in the weights; values above 1 extrapolate beyond it.",
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each share; none without an unaligned model."""
        unaligned = material.unaligned
        for share in self.shares if unaligned is not None else ():
            assert unaligned is not None
            edit = partial(mixed, unaligned=unaligned, share=share)
            yield RefusalEdit("unaligned", f"{share:.0%} of the unaligned model", edit)


@contextmanager
def mixed(model: nn.Module, *, unaligned: nn.Module, share: float) -> Iterator[None]:
    """Mix an unaligned model into a model's weights while a block lasts; the weights come back bit by bit."""
    import torch

    others = dict(unaligned.named_parameters())
    own = {name: each.detach().clone() for name, each in model.named_parameters() if each.is_floating_point()}
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.lerp_(others[name].to(parameter), share)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.copy_(own[name])
