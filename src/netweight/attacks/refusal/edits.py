"""What removes refusal: directions out of every layer's output, neurons switched off, a base mixed in.

All of it holds while a block lasts and leaves the model as it was: nothing of an edited model is ever written.

Source: directions by difference of means and their ablation after Arditi et al., arXiv 2406.11717, sections 2.3 and
2.4; pruning by what the two kinds of prompts activate after Wei et al., arXiv 2402.05162; both with the model's own
outputs in place of edited weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.refusal.settings import RefusalSettings
from netweight.data.tokens import Batch, Example, collate
from netweight.hf.load_language_model import embedding_of
from netweight.nn.decoder import Structure, structure_of
from netweight.nn.hooks import capture, edit_outputs, evaluating, hooked

Prompts = Sequence[tuple[int, ...]]


@final
@dataclass(frozen=True)
class RefusalEdit:
    """One way to remove refusal."""

    kind: str  # "directions", "pruning" or "base"
    label: str  # which of its kind, in a few words
    apply: Callable[[nn.Module], AbstractContextManager[None]]  # edits a model while a block lasts


def padded(model: nn.Module, prompts: Prompts, pad_id: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield prompts in batches, with the place of each one's last token."""
    device = next(model.parameters()).device
    for first in range(0, len(prompts), 32):
        some = prompts[first : first + 32]
        batch = collate([Example((), prompt) for prompt in some], pad_id=pad_id).to(device)
        yield batch, torch.tensor([len(prompt) - 1 for prompt in some], device=device)


def last_states(model: nn.Module, names: Sequence[str], prompts: Prompts, *, pad_id: int) -> dict[str, Tensor]:
    """Return what modules put out at the last token of each prompt, float32, shape `(n, width)` each."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch, ends in padded(model, prompts, pad_id):
        with evaluating(model), capture(model, names) as outputs:
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        for name in names:
            states = outputs[name].reshape(*batch.input_ids.shape, -1)
            found[name].append(states[torch.arange(len(ends)), ends].float())
    return {name: torch.cat(each) for name, each in found.items()}


def refusal_edits(
    model: nn.Module,
    refused: Prompts,
    ordinary: Prompts,
    settings: RefusalSettings,
    base: nn.Module | None,
    pad_id: int,
) -> list[RefusalEdit]:
    """Return every edit that is tried, made of prompts on which none is measured."""
    structure = structure_of(model)
    return [
        *_directions(model, structure, refused, ordinary, settings.ranks, pad_id),
        *_pruned(model, structure, refused, ordinary, settings.shares, pad_id),
        *(() if base is None else _mixed(base, settings.mixes)),
    ]


def _directions(
    model: nn.Module, structure: Structure, refused: Prompts, ordinary: Prompts, ranks: Sequence[int], pad_id: int
) -> Iterator[RefusalEdit]:
    blocks = list(structure.blocks)
    states = [last_states(model, blocks, prompts, pad_id=pad_id) for prompts in (refused, ordinary)]
    writers = _writers(model, structure)
    for place, name in enumerate(blocks):
        gaps = states[0][name] - states[1][name].mean(0)
        for rank in sorted({min(rank, *gaps.shape) for rank in ranks}):
            out = torch.linalg.svd(gaps, full_matrices=False)[2][:rank] if rank > 1 else gaps.mean(0, keepdim=True)
            basis = torch.linalg.qr(out.T)[0]
            edits = dict.fromkeys(writers, partial(_without, basis=basis))
            yield RefusalEdit("directions", f"{rank} of block {place}", partial(edit_outputs, edits=edits))


def _without(output: Tensor, basis: Tensor) -> Tensor:
    along = basis.to(output)
    return output - (output @ along) @ along.T


def _writers(model: nn.Module, structure: Structure) -> list[str]:
    """The modules that write into the residual stream: embedding, attention, feed-forward layers, and the blocks."""
    embedding = embedding_of(model)
    names = [name for name, module in model.named_modules() if module is embedding]
    names += [
        f"{name}.{child}"
        for name, block in structure.blocks.items()
        for child, module in block.named_children()
        if "att" in child and "norm" not in child
    ]
    return [*names, *structure.feed_forwards, *structure.blocks]


def _pruned(
    model: nn.Module, structure: Structure, refused: Prompts, ordinary: Prompts, shares: Sequence[float], pad_id: int
) -> Iterator[RefusalEdit]:
    """Neurons whose inputs to the residual stream differ most between refused and ordinary prompts."""
    last = {name: found for name, module in structure.feed_forwards.items() if (found := _way_out(module, structure))}
    if not last:
        return
    means = []
    for prompts in (refused, ordinary):
        inputs: dict[str, Tensor] = {}
        with hooked((module, partial(_take_last, into=inputs, name=name)) for name, module in last.items()):
            sums: dict[str, Tensor] = {}
            for prompt in prompts:
                ids = torch.tensor([prompt], device=next(model.parameters()).device)
                with evaluating(model):
                    model(input_ids=ids, attention_mask=torch.ones_like(ids))
                sums = {name: sums.get(name, 0) + each for name, each in inputs.items()}
        means.append({name: each / len(prompts) for name, each in sums.items()})
    scores = {
        name: (means[0][name] - means[1][name]).abs() * _columns(module).norm(dim=0) for name, module in last.items()
    }
    pooled = torch.cat(list(scores.values()))
    for share in shares:
        bound = pooled.kthvalue(max(1, round((1 - share) * len(pooled)))).values
        yield RefusalEdit(
            "pruning",
            f"{share:.0%} of neurons",
            partial(_switched_off, last=last, off={n: s > bound for n, s in scores.items()}),
        )


def _way_out(feed_forward: nn.Module, structure: Structure) -> nn.Module | None:
    """The linear layer from neurons to the residual stream; None where experts are merged into one tensor."""
    linear = [each for each in feed_forward.modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"]
    out = [each for each in linear if _columns(each).shape[0] == structure.hidden_size]
    return out[-1] if len(out) == 1 else None


def _columns(layer: nn.Module) -> Tensor:
    weight: Any = layer.weight
    matrix: Tensor = weight.detach().float()
    return matrix if isinstance(layer, nn.Linear) else matrix.T


def _take_last(_: nn.Module, inputs: tuple[Any, ...], output: Any, *, into: dict[str, Tensor], name: str) -> None:
    into[name] = inputs[0].detach().float().flatten(0, -2)[-1]


@contextmanager
def _switched_off(_: nn.Module, *, last: Mapping[str, nn.Module], off: Mapping[str, Tensor]) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(
            lambda _, inputs, dead=off[name]: (inputs[0].masked_fill(dead, 0), *inputs[1:])
        )
        for name, module in last.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mixed(base: nn.Module, mixes: Sequence[float]) -> Iterator[RefusalEdit]:
    for share in mixes:
        yield RefusalEdit("base", f"{share:.0%} of the base", partial(_mix, base=base, share=share))


@contextmanager
def _mix(model: nn.Module, *, base: nn.Module, share: float) -> Iterator[None]:
    others = dict(base.named_parameters())
    held = {name: each.detach().clone() for name, each in model.named_parameters() if each.is_floating_point()}
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in held:
                    parameter.lerp_(others[name].to(parameter), share)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in held:
                    parameter.copy_(held[name])
