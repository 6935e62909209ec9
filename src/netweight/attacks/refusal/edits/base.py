"""The model before its alignment, mixed into the weights, and taken beyond."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, EditSettings, RefusalEdit
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import nn


@final
class BaseMixture(EditSettings):
    """The base mixed into the model."""

    shares: Annotated[tuple[float, ...], Cli(own=False)] = Field(
        (0.5, 1.0, 1.5),
        min_length=1,
        description="Shares of the base in the weights; values above 1 extrapolate beyond it.",
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each share; none without a base."""
        base = material.base
        for share in self.shares if base is not None else ():
            assert base is not None
            yield RefusalEdit("base", f"{share:.0%} of the base", partial(mixed, base=base, share=share))


@contextmanager
def mixed(model: nn.Module, *, base: nn.Module, share: float) -> Iterator[None]:
    """Mix a base into a model's weights while a block lasts; the weights come back bit by bit."""
    import torch

    others = dict(base.named_parameters())
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
