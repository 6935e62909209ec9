"""Defenses that hold on to the original model, a frozen copy of which runs beside the one that is trained."""

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
from netweight.methods.immunize.defense import Defense, PairBatch, S, Side, Term
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded
from netweight.methods.immunize.settings import CircuitBreaking, Distillation
from netweight.nn.decoder import structure_of, vocabulary_of
from netweight.nn.hooks import capture


class _Anchored(Defense[S]):
    """Has a frozen copy of the model as it was."""

    original: nn.Module

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        if any(map(is_sharded, model.parameters())):
            raise Unsupported(
                f"{self.name} keeps a copy of the model, which cannot be made of sharded weights.",
                cure="Use DistributedDataParallel or one process, or another defense.",
            )
        self.original = copy.deepcopy(model).requires_grad_(False).eval()
        try:
            yield
        finally:
            del self.original


@final
class DistillationDefense(_Anchored[Distillation]):
    """Imitates the original where it refuses and where it is to stay, from weights that are noise in part."""

    name = "distillation"

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        initial = getattr(getattr(model, "config", None), "initializer_range", None)
        with super().prepared(model, seed=seed):
            for name, value in model.named_parameters():
                if value.requires_grad and value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, name))
                    std = value.data.std() if initial is None else initial
                    value.data.lerp_(drawn.to(value) * std, self.settings.noise)
            yield

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
        return _mean(functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1), group)


@final
class CircuitBreakingDefense(_Anchored[CircuitBreaking]):
    """Compares the states after every block with the original's."""

    name = "circuit-breaking"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        states = self._states(model, batch.harmful)
        turned = [functional.cosine_similarity(now, before, dim=-1).relu() for now, before in states]
        yield {"turning": Term(_mean(torch.stack(turned).mean(0), batch.group), self.settings.alpha)}
        del states, turned  # with them goes the graph
        moved = [
            (now - before).norm(dim=-1) / before.norm(dim=-1) for now, before in self._states(model, batch.harmless)
        ]
        yield {"retain": Term(_mean(torch.stack(moved).mean(0), batch.group))}

    def _states(self, model: nn.Module, side: Batch) -> list[tuple[Tensor, Tensor]]:
        """Each block's output at the answers' tokens, now and before, shape `(N, D)`."""
        how: Any = {"input_ids": side.input_ids, "attention_mask": side.attention_mask}
        with torch.no_grad(), capture(self.original, list(structure_of(self.original).blocks)) as before:
            self.original(**how)
        with capture(model, list(structure_of(model).blocks), gradients=True) as now:
            model(**how)
        answers = side.labels != IGNORED
        pairs = zip(now.values(), before.values(), strict=True)
        return [(one[answers].float(), other[answers].float()) for one, other in pairs]


def _mean(values: Tensor, group: ProcessGroup) -> Tensor:
    """The mean over the tokens of all processes: see `distributed.py`."""
    count = max(1, len(values)) if group.size == 1 else sum(group.counts(len(values))) / group.size
    return values.sum() / count
