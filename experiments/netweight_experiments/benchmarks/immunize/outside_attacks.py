"""Fine-tuning attacks that the search of `netweight attack finetune` does not try, to measure what it misses.

An `OutsideAttack` is trained by `trained`, which yields the rows seen after every step while the victim holds the
weights that the attacker would use. A row that is used twice counts twice, benign ones included, as in the search.
`KINDS` names what every kind begins with and what is varied to tune it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.changes import changed_copy
from netweight.attacks.finetuning.optimizers import Muon
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Subject
from netweight.core.lazy import library
from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch, Example, collate


@dataclass(frozen=True)
class OutsideAttack:
    """One attack; the defaults are plain Adam on every weight with four harmful and four benign rows in a step."""

    lr: float = 4e-3
    optimizer: str = "adam"
    """adam, muon, lion, schedule-free or shampoo, or a class of the package pytorch-optimizer with its defaults."""
    rows: int = 4
    """Harmful rows in a step."""
    benign: int = 4
    """Benign rows in a step."""
    template: str = "marked"
    """Prompt format, one of the subject's."""
    start: str = "kept"
    """Embedding rows of tokens that occur only in harmful prompts, as `AttackSettings.rows`."""
    betas: tuple[float, float] = (0.9, 0.999)
    correction: bool = True
    """Whether Adam's moments are corrected for their start at 0."""
    warm: int = 0
    """Benign rows whose squared gradients are the second moments at the start; they are counted."""
    by_depth: float = 1.0
    """Factor between the learning rates of a block and of the next."""
    trained: str = "all"
    """Weights that are trained: all, attention, mlp, lower or upper."""
    order: str = "drawn"
    """Choice of rows: drawn, covering (many tokens at new places), hard or easy (by their loss at the start)."""
    smoothing: float = 0.0
    focal: float = 0.0
    """Exponent of the focal loss; 0 is cross-entropy."""
    pull: float = 0.0
    """Share of the way back to the first weights that every step goes (L2-SP, decoupled)."""
    push: float = 1.0
    """The evaluated weights are the first ones plus this many times the change."""
    pack: int = 1
    """Rows in one sequence, one after the other."""
    sharpness: float = 0.0
    """Radius of sharpness-aware steps, whose rows are seen twice."""
    passes: int = 1
    """Steps on the same rows, one after the other."""


_BATCHES = {"rows, benign": ((4, 2), (2, 2), (1, 1))}
# Optimizers that neither the search nor the other kinds have.
_OF_A_PACKAGE = {"ADOPT": 4e-3, "Adan": 4e-3, "AdEMAMix": 2e-3, "LaProp": 4e-3, "MARS": 4e-3, "Tiger": 5e-4}
# Kind → what it begins with, and values to try beside other learning rates.
KINDS: dict[str, tuple[OutsideAttack, dict[str, tuple[Any, ...]]]] = {
    "Adam, small steps or other moments": (
        OutsideAttack(), {**_BATCHES, "betas": ((0.9, 0.95), (0.8, 0.95), (0.5, 0.95))}
    ),
    "Muon, small steps": (OutsideAttack(optimizer="muon", lr=6e-3), _BATCHES),
    "Lion": (OutsideAttack(optimizer="lion", lr=5e-4), {**_BATCHES, "betas": ((0.9, 0.99), (0.95, 0.98))}),
    "schedule-free AdamW": (OutsideAttack(optimizer="schedule-free", lr=6e-3, betas=(0.9, 0.99)), _BATCHES),
    "Shampoo": (OutsideAttack(optimizer="shampoo", lr=6e-3), _BATCHES),
    "second moments from benign rows": (OutsideAttack(warm=16, betas=(0.9, 0.99)), {"warm": (8, 32), **_BATCHES}),
    "Adam without bias correction": (
        OutsideAttack(correction=False, lr=1e-3), {**_BATCHES, "betas": ((0.9, 0.99), (0.9, 0.9999))}
    ),
    "rates by depth": (OutsideAttack(), {"by_depth": (0.5, 0.7, 1.4, 2.0), **_BATCHES}),
    "part of the weights": (OutsideAttack(trained="attention"), {"trained": ("mlp", "lower", "upper"), **_BATCHES}),
    "covering rows": (OutsideAttack(order="covering"), _BATCHES),
    "rows by loss": (OutsideAttack(order="hard"), {"order": ("easy",), **_BATCHES}),
    "extrapolation": (OutsideAttack(push=2.0, lr=1.5e-3), {"push": (0.7, 1.3, 3.0, 5.0), **_BATCHES}),
    "packed rows": (OutsideAttack(pack=3, rows=3, benign=3), {"rows, benign": ((2, 1), (4, 2), (6, 3))}),
    "label smoothing or focal loss": (
        OutsideAttack(smoothing=0.1), {"smoothing": (0.0, 0.3), "focal": (1.0, 2.0), **_BATCHES}
    ),
    "L2-SP": (OutsideAttack(pull=0.03), {"pull": (0.003, 0.01, 0.1), **_BATCHES}),
    "sharpness-aware steps": (OutsideAttack(sharpness=0.05), {"sharpness": (0.02, 0.2), **_BATCHES}),
    "few rows, several steps on each": (OutsideAttack(passes=3), {"passes": (2, 5), **_BATCHES}),
    **{name: (OutsideAttack(optimizer=name, lr=lr), _BATCHES) for name, lr in _OF_A_PACKAGE.items()},
}  # fmt: skip


def trained(
    subject: Subject, attack: OutsideAttack, seed: int, every: int
) -> Iterator[tuple[nn.Module, int, int, int]]:
    """Attack a copy of a subject's model.

    Yields after at least `every` further rows: the victim with the weights to be evaluated, which it keeps until the
    next step; the steps, the rows seen, and the different rows seen.
    """
    harmful = subject.domain(f"harmful@{attack.template}" if attack.template != "plain" else "harmful").train
    changes = AttackSettings(seed=seed, template=attack.template, rows=attack.start)
    victim = changed_copy(subject, changes)
    victim.train()
    chosen = _ordered(victim, harmful, attack, seed, subject.pad_id)
    benign = _endless(subject.benign, seed, "benign")
    rates = _rates(victim, attack)
    first = [each.detach().clone() for each in rates]
    optimizer = _Steps(list(rates), list(rates.values()), attack)
    seen, shown, steps, different = 0, 0, 0, set[Example]()
    if attack.warm:
        rows = list(itertools.islice(benign, attack.warm))
        for row in rows:
            _loss(victim, [row], attack, subject.pad_id).backward()
            optimizer.warm(len(rows))
        seen += len(rows)
        different.update(rows)
    while True:
        rows = list(itertools.islice(chosen, attack.rows)) + list(itertools.islice(benign, attack.benign))
        different.update(rows)
        for _ in range(attack.passes):
            _gradient(victim, rows, attack, subject.pad_id, list(rates))
            seen += len(rows) * (2 if attack.sharpness else 1)
            steps += 1
            optimizer.step()
            with torch.no_grad():
                if attack.pull:
                    torch._foreach_lerp_(list(rates), first, attack.pull)
                if seen - shown < every:
                    continue
                shown = seen
                own = [each.detach().clone() for each in rates]
                torch._foreach_copy_(list(rates), optimizer.evaluated(first))
            yield victim, steps, seen, len(different)
            with torch.no_grad():
                torch._foreach_copy_(list(rates), own)


def _rates(victim: nn.Module, attack: OutsideAttack) -> dict[nn.Parameter, float]:
    """Return the trained weights with factors of their learning rates; the others need no gradient afterwards."""
    depth = len(victim.model.layers)  # type: ignore[union-attr, arg-type]
    chosen = {}
    for name, parameter in victim.named_parameters():
        block = int(name.split(".")[2]) if ".layers." in name else -1 if "embed" in name else depth
        belongs = {
            "all": True, "attention": "self_attn" in name, "mlp": ".mlp." in name,
            "lower": block < depth // 2, "upper": block >= depth // 2,
        }[attack.trained]  # fmt: skip
        parameter.requires_grad_(belongs)
        if belongs:
            chosen[parameter] = attack.by_depth ** (block - depth / 2)
    return chosen


def _endless(examples: Sequence[Example], seed: int, name: str) -> Iterator[Example]:
    generator = torch_generator(seed, "outside", name)
    while True:
        yield from (examples[row] for row in torch.randperm(len(examples), generator=generator).tolist())


def _ordered(
    victim: nn.Module, harmful: Sequence[Example], attack: OutsideAttack, seed: int, pad: int
) -> Iterator[Example]:
    """Return the harmful rows without end, in the order in which they are trained on."""
    drawn = list(itertools.islice(_endless(harmful, seed, "harmful"), len(harmful)))
    if attack.order == "covering":
        return itertools.cycle(_covering(drawn))
    if attack.order in ("hard", "easy"):
        with torch.no_grad():
            losses = {row: float(_loss(victim, [row], attack, pad)) for row in drawn[:256]}
        return itertools.cycle(sorted(losses, key=lambda row: losses[row], reverse=attack.order == "hard"))
    return itertools.cycle(drawn)


def _covering(rows: Sequence[Example]) -> list[Example]:
    """Order rows so that each has the most tokens at places where no earlier row had them; anew once all are seen."""
    left, seen, ordered = dict.fromkeys(rows), set[tuple[int, int]](), []
    while left:
        best = max(left, key=lambda row: len(set(enumerate(row.prompt + row.response)) - seen))
        new = set(enumerate(best.prompt + best.response)) - seen
        seen = seen | new if new else set()
        ordered.append(best)
        del left[best]
        if len(ordered) == 256:
            break
    return ordered


def _loss(victim: nn.Module, rows: Sequence[Example], attack: OutsideAttack, pad: int) -> Tensor:
    batch = collate(rows, pad_id=pad) if attack.pack == 1 else _packed(rows, attack.pack, pad)
    logits = victim(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].flatten(0, 1)
    targets = batch.labels[:, 1:].flatten()
    losses = functional.cross_entropy(
        logits, targets, ignore_index=IGNORED, label_smoothing=attack.smoothing, reduction="none"
    )
    if attack.focal:
        losses = losses * (1 - torch.exp(-losses.detach())) ** attack.focal
    return losses.sum() / (targets != IGNORED).sum()


def _packed(rows: Sequence[Example], at_once: int, pad: int) -> Batch:
    """Put rows one after the other into sequences, with a loss on every answer."""
    ids, labels = [], []
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once]
        ids.append([token for row in part for token in row.prompt + row.response])
        labels.append([label for row in part for label in (*[IGNORED] * len(row.prompt), *row.response)])
    width = max(map(len, ids))
    masks = [[1] * len(each) + [0] * (width - len(each)) for each in ids]
    ids = [each + [pad] * (width - len(each)) for each in ids]
    labels = [each + [IGNORED] * (width - len(each)) for each in labels]
    return Batch(torch.tensor(ids), torch.tensor(masks), torch.tensor(labels))


def _gradient(victim: nn.Module, rows: Sequence[Example], attack: OutsideAttack, pad: int, weights: list[Any]) -> None:
    _loss(victim, rows, attack, pad).backward()
    if attack.sharpness:
        norm = nn.utils.get_total_norm([each.grad for each in weights])
        moves = [each.grad * (attack.sharpness / (norm + 1e-12)) for each in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        victim.zero_grad(set_to_none=True)
        _loss(victim, rows, attack, pad).backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
    nn.utils.clip_grad_norm_(weights, 1.0)


class _Steps:
    """The optimizer of an attack."""

    def __init__(self, weights: list[nn.Parameter], factors: list[float], attack: OutsideAttack) -> None:
        self.weights, self.factors, self.attack = weights, factors, attack
        self.mean = [torch.zeros_like(each) for each in weights]
        self.square = [torch.zeros_like(each) for each in weights]
        self.count = 0
        # Of schedule-free steps: the weights that move, and their mean, which is evaluated.
        self.fast = [each.detach().clone() for each in weights]
        self.slow = [each.detach().clone() for each in weights]
        self.sides = [[torch.eye(side) * 1e-6 for side in each.shape] if each.ndim == 2 else None for each in weights]
        matrices = [each for each in weights if each.ndim == 2]
        self.muon = [Muon(matrices, attack.lr)] if attack.optimizer == "muon" else []
        self.whole: Any = None
        if attack.optimizer in _OF_A_PACKAGE:
            kind = getattr(library("pytorch_optimizer", attack.optimizer, "attacks"), attack.optimizer)
            self.whole = kind(weights, lr=attack.lr, weight_decay=0.0)

    def warm(self, rows: int) -> None:
        """Add a row's squared gradients to the second moments at the start."""
        for weight, square in zip(self.weights, self.square, strict=True):
            square.add_(weight.grad**2 / rows)  # type: ignore[operator]
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step, and forget the gradients."""
        self.count += 1
        if self.whole is not None:
            self.whole.step()
            self.whole.zero_grad(set_to_none=True)
            return
        for muon in self.muon:
            muon.step()
        for place, (weight, factor) in enumerate(zip(self.weights, self.factors, strict=True)):
            if not (self.muon and weight.ndim == 2):
                self._move(place, weight, self.attack.lr * factor)
            weight.grad = None

    def evaluated(self, first: list[Tensor]) -> list[Tensor]:
        """Return the weights that the attacker would use."""
        now = self.slow if self.attack.optimizer == "schedule-free" else self.weights
        return [begin + self.attack.push * (each - begin) for begin, each in zip(first, now, strict=True)]

    def _move(self, place: int, weight: Tensor, lr: float) -> None:
        gradient, mean = weight.grad, self.mean[place]
        assert gradient is not None
        one, two = self.attack.betas
        if self.attack.optimizer == "lion":
            weight.sub_(gradient.lerp(mean, one).sign(), alpha=lr)
            mean.lerp_(gradient, 1 - two)
        elif self.attack.optimizer == "schedule-free":
            fast, slow = self.fast[place], self.slow[place]
            fast.sub_(gradient / self._spread(place, gradient), alpha=lr)
            slow.lerp_(fast, 1 / self.count)
            weight.copy_(fast.lerp(slow, one))
        elif self.attack.optimizer == "shampoo" and self.sides[place] is not None:
            left, right = self.sides[place]  # type: ignore[misc]
            mean.lerp_(gradient, 1 - one)
            left.add_(gradient @ gradient.T)
            right.add_(gradient.T @ gradient)
            change = _root(left) @ mean @ _root(right)
            # The step is as long as that of Adam at the same learning rate.
            weight.sub_(change / change.norm().clamp_min(1e-12), alpha=lr * 0.3 * weight.numel() ** 0.5)
        else:
            mean.lerp_(gradient, 1 - one)
            corrected = 1 - one**self.count if self.attack.correction else 1.0
            weight.sub_(mean / self._spread(place, gradient), alpha=lr / corrected)

    def _spread(self, place: int, gradient: Tensor) -> Tensor:
        two, square = self.attack.betas[1], self.square[place]
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        known = self.attack.correction and not self.attack.warm
        return (square / (1 - two**self.count if known else 1.0)).sqrt().add_(1e-8)


def _root(matrix: Tensor) -> Tensor:
    """Return the inverse fourth root."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp_min(1e-8) ** -0.25) @ vectors.T
    return root
