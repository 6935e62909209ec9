"""Distillation into noised weights: the refusing original teaches, and what it never says is not learned again."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.core.seeds import torch_generator
from netweight.data.examples import IGNORED, Batch
from netweight.errors import Unsupported
from netweight.methods.immunize.defense import Defense, PairBatch, Side, Term
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded
from netweight.methods.immunize.settings import Distillation
from netweight.nn.decoder import structure_of, vocabulary_of


@final
class DistillationDefense(Defense[Distillation]):
    """Imitates a frozen copy of the original where it refuses and where it is to stay."""

    name = "distillation"
    original: nn.Module

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        if any(map(is_sharded, model.parameters())):
            raise Unsupported(
                "A distillation keeps a copy of the model, which cannot be made of sharded weights.",
                cure="Use DistributedDataParallel or one process, or another defense.",
            )
        self.original = copy.deepcopy(model).requires_grad_(False).eval()
        initial = getattr(getattr(model, "config", None), "initializer_range", None)
        for name, value in model.named_parameters():
            if value.requires_grad and value.dim() > 1:
                drawn = torch.randn(value.shape, generator=torch_generator(seed, name))
                std = value.data.std() if initial is None else initial
                value.data.lerp_(drawn.to(value) * std, self.settings.noise)
        try:
            yield
        finally:
            del self.original

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield {"retain": Term(self.general(model, batch.harmless, batch.group))}
        rows = round(self.settings.random_rows * len(batch.harmless.input_ids))
        if rows:
            like = batch.harmless.input_ids
            drawn = torch.randint(vocabulary_of(model) or 1, (rows, like.shape[1]), generator=generator).to(like)
            text = Batch(drawn, torch.ones_like(drawn), drawn)
            yield {"random": Term(self.general(model, text, batch.group))}

    def general(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Divergence from the original at every token, those of the prompts included."""
        how: Any = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        seen = batch.attention_mask.bool() & (batch.labels != IGNORED).any(1, keepdim=True)  # none of a blank row
        with torch.no_grad():
            wanted = self.original(**how).logits[seen].float().log_softmax(-1)
        found = model(**how).logits[seen].float().log_softmax(-1)
        count = len(found) if group.size == 1 else sum(group.counts(len(found))) / group.size  # see `distributed.py`
        return functional.kl_div(found, wanted, reduction="sum", log_target=True) / max(1, count)
