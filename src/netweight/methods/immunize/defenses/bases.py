"""Parts that several defenses share: looking ahead by gradients, temporary weights, and a copy of the original."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import Batch
from netweight.errors import Unsupported
from netweight.methods.immunize.defense import Defense, S

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.distributed import ProcessGroup
else:
    losses, language_model, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.hf.load_language_model",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class LooksAhead(Defense[S]):
    """Defense that computes gradients of a decoder within its loss."""

    looks_ahead = True

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        # This call refuses models that are not decoders.
        language_model.structure_of(model)
        yield


class WithOriginal(Defense[S]):
    """A defense that measures against a frozen copy of the original."""

    _copy: nn.Module | None = None

    @property
    def original(self) -> nn.Module:
        """The copy, which is kept while the model trains."""
        if self._copy is None:
            raise Unsupported(
                f"{self.name} compares with the original model, which is kept only during the training.",
                cure="Evaluate during training: eval_strategy='steps'.",
            )
        return self._copy

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        # This call refuses models that are not decoders.
        language_model.structure_of(model)
        steps.refuse_sharded(self, model)
        self._copy = copy.deepcopy(model).requires_grad_(False).eval()
        try:
            yield
        finally:
            self._copy = None

    def both(self, model: nn.Module, batch: Batch, **options: Any) -> tuple[Any, Any]:
        """Return the outputs of the original and of the model for a batch."""
        how: Any = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **options}
        with torch.no_grad():
            original = self.original(**how)
        return original, model(**how)

    def moved(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> tuple[Any, Tensor]:
        """Return the model's output for a batch, and the mean distance of its states from the original's by depth."""
        original, output = self.both(model, batch, output_hidden_states=True)
        apart = [
            (one[losses.token_mask(batch)].float() - other[losses.token_mask(batch)].float()).norm(dim=-1)
            for one, other in zip(output.hidden_states, original.hidden_states, strict=True)
        ]
        return output, torch.stack([losses.mean_of_all(each, group) for each in apart]).mean()


class MovesWeights(LooksAhead[S]):
    """Defense that computes gradients at other weights than the present ones."""

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        steps.refuse_sharded(self, model)
        with super().preparation(model, seed=seed):
            yield
