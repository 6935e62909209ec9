"""transformers' `Trainer` with a defense's loss, for those who train with it: any optimizer, schedule and callback.

    trainer = ImmunizeTrainer(model, TrainingArguments("out", learning_rate=2e-5), train_dataset=pairs, pad_id=0)
    trainer.train()

Under `accelerate launch` or `torchrun` it trains in several processes, by DDP or FSDP2: the loss of their batches is
that of one batch of all their rows.
"""

# A batch holds both sides of its pairs, so that nothing can part them. All sides go backward together here; `immunize`
# takes them one after the other, in less memory, and steps narrow weights in float32.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import derive, torch_generator
from netweight.data.examples import Batch, Example, Pair
from netweight.errors import MissingExtra, Unsupported, UsageError
from netweight.methods.immunize.baselines import VaccineDefense
from netweight.methods.immunize.defense import Defense, PairBatch, Side, Term, collate_pairs, gradient_norm
from netweight.methods.immunize.distributed import ALONE, ProcessGroup, trained_weights, units
from netweight.methods.immunize.settings import DefenseSettings
from netweight.methods.immunize.train import check_inputs, collate_part, defense_of, drawn_rows
from netweight.nn.decoder import structure_of

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtra(
        "This trainer needs transformers 5 and accelerate, which are not installed.",
        cure="Install them: pip install 'netweight[llm]'.",
    ) from error


_COLUMNS = ("prompt", "chosen", "rejected")


def as_pair(row: Pair | Mapping[str, Sequence[int]]) -> Pair:
    """Take a row of a data set for a pair."""
    if isinstance(row, Pair):
        return row
    missing = [name for name in _COLUMNS if name not in row]
    if missing:
        raise UsageError(f"A row lacks {', '.join(missing)}.", cure="Rows hold token ids as prompt, chosen, rejected.")
    tokens = [value.tolist() if isinstance(value := row[name], Tensor) else value for name in _COLUMNS]
    for name, value in zip(_COLUMNS, tokens, strict=True):
        if isinstance(value, str) or not all(isinstance(token, int) for token in value):
            raise UsageError(f"{name!r} of a row holds no token ids.", cure="Tokenize the rows first.")
    return Pair(*map(tuple, tokens))


@final
@dataclass(frozen=True)
class PairCollator:
    """Puts both sides of rows into one batch."""

    pad_id: int  # what stands after the end of the shorter ones
    aligned: bool = False  # pad both sides to one width, for the published loss

    def __call__(self, rows: Sequence[Pair | Mapping[str, Sequence[int]]]) -> dict[str, dict[str, Tensor]]:
        """Return `input_ids`, `attention_mask` and `labels` under `harmless` and under `harmful`."""
        batch = collate_pairs([as_pair(row) for row in rows], pad_id=self.pad_id, aligned=self.aligned)
        return {"harmless": _tensors(batch.harmless), "harmful": _tensors(batch.harmful)}


def _tensors(side: Batch) -> dict[str, Tensor]:
    return {"input_ids": side.input_ids, "attention_mask": side.attention_mask, "labels": side.labels}


@final
class ImmunizeTrainer(Trainer):
    """`Trainer` that minimizes the loss of a defense."""

    # `model`: a causal language model in float32, or with adapters in float32; `bf16=True` among the arguments computes
    # in bfloat16
    # `retain`: examples of ability that is kept; as many rows of them as of pairs join every batch
    # `train_dataset`: rows of token ids; a stream, which has no length, is read batch by batch and checked no further
    # `measure_every`: updates between two measurements of gradient norms

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        defense: DefenseSettings | Defense[Any] | str = "repnoise",
        retain: Sequence[Example] = (),
        pad_id: int | None = None,
        measure_every: int = 25,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        structure_of(model)
        self._defense = defense_of(defense)
        if pad_id is None:
            pad_id = getattr(kwargs.get("processing_class"), "pad_token_id", None)
        if pad_id is None:
            raise UsageError("No token is known that pads.", cure="Pass pad_id, or a tokenizer that has a pad token.")
        narrow = [name for name, value in model.named_parameters() if value.requires_grad and value.dtype.itemsize < 4]
        if narrow:
            raise UsageError(
                f"{len(narrow)} trained weights, such as {narrow[0]!r}, are narrower than float32.",
                cure="Load the model in float32 and pass bf16=True, or use immunize, which steps in float32.",
            )
        recomputes = getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False)
        if not self._defense.trains or (recomputes and isinstance(self._defense, VaccineDefense)):
            why = " while activations are recomputed" if self._defense.trains else ": there is nothing to train"
            raise Unsupported(f"ImmunizeTrainer cannot do {self._defense.name}{why}.", cure="Use immunize.")
        for rows in (train_dataset, kwargs.get("eval_dataset")):
            if rows is not None and hasattr(rows, "__len__"):
                check_inputs(model, [as_pair(row) for row in rows], retain)
        kwargs.setdefault("data_collator", PairCollator(pad_id, aligned=self._defense.aligned))
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        self._group = _group_of(self)
        self._signature_columns = list(_COLUMNS)  # type: ignore[assignment]  # Trainer fills it in later otherwise
        self._retain, self._pad_id, self._measure_every = retain, pad_id, measure_every
        self._balance: dict[str, float] = {}
        self._update, self._part = -1, 0
        self._seen: dict[str, list[float]] = {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, with the model made ready for the defense."""
        model: Any = self.model
        with self._defense.prepared(model, seed=derive(self.args.seed, "prepare")):
            return super().train(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the defense's loss on a batch of `PairCollator`."""
        batch = PairBatch(Batch(**inputs["harmless"]), Batch(**inputs["harmful"]), self._group)
        parameters = trained_weights(model)
        generator = self._draw() if model.training else torch_generator(self.args.seed, "evaluation")
        sides = [*self._defense.sides(model, batch, generator), *self._general(model, len(batch.harmful.input_ids))]
        terms = {name: term for side in sides for name, term in side.items()}
        if model.training:
            for side in sides:
                self._measure(model, side, parameters)
        weights = {
            name: term.weight if term.share is None else self._balance.get(name, term.weight)
            for name, term in terms.items()
        }
        if model.training:
            values = torch.tensor([term.value.detach().item() for term in terms.values()])
            for name, value in zip(terms, self._group.mean(values).tolist(), strict=True):
                self._note(name, value)
                self._note(f"{name}_weight", weights[name])
        total = torch.stack([weights[name] * term.value for name, term in terms.items()]).sum()
        return (total, {name: term.value for name, term in terms.items()}) if return_outputs else total

    def _general(self, model: nn.Module, rows: int) -> Iterator[Side]:
        """What is kept besides, as much of it as there are pairs."""
        if self._retain and model.training:
            size = sum(self._group.counts(rows))
            step = self._update * max(1, self.args.gradient_accumulation_steps) + self._part
            drawn = drawn_rows(len(self._retain), size, step, seed=self.args.seed, stream="retain")
            batch = collate_part(self._retain, drawn, self._group, pad_id=self._pad_id)
            yield {"general": Term(self._defense.general(model, batch.to(self.args.device), self._group))}

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the loss alone."""
        inputs = self._prepare_inputs(inputs)
        with torch.set_grad_enabled(isinstance(self._defense, VaccineDefense)):  # which looks for the worst shift
            loss: Tensor = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of all terms since the last time."""
        if "loss" in logs:
            logs |= {name: sum(values) / len(values) for name, values in self._seen.items()}
            self._seen.clear()
        super().log(logs, start_time)

    def _draw(self) -> torch.Generator:
        """Where the noise of this pass comes from: a stream of its own for each update and each part of one."""
        self._part = self._part + 1 if self.state.global_step == self._update else 0
        self._update = self.state.global_step
        return torch_generator(self.args.seed, "noise", self._update, self._part)

    def _measure(self, model: nn.Module, side: Side, parameters: Sequence[nn.Parameter]) -> None:
        """Measure the norms of a side's gradients and balance its weights by them, when it is time."""
        unknown = any(term.share is not None and name not in self._balance for name, term in side.items())
        # Before gradients are accumulated, which measuring shards would take away.
        if self._part or not (unknown or self._update % self._measure_every == 0):
            return
        with _reducing(model, self.accelerator.sync_gradients):
            norms = {name: gradient_norm(term.value, parameters, self._group) for name, term in side.items()}
        pull = sum(abs(term.weight) * norms[name] for name, term in side.items() if term.share is None)
        for name, term in side.items():
            self._note(f"{name}_norm", norms[name])
            if term.share is not None and norms[name] > 0:
                found = term.share * pull / norms[name]
                self._balance[name] = min(found, self._balance.get(name, found))

    def _note(self, name: str, value: float) -> None:
        self._seen.setdefault(name, []).append(value)


def _group_of(trainer: Trainer) -> ProcessGroup:
    """The processes that the launcher has started."""
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type.value
    known = kind == "NO" or kind.startswith("MULTI_") or accelerator.is_fsdp2
    split = max(trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) > 1
    if trainer.args.n_gpu > 1 or not known or split:
        how = "parallel tensors or sequences" if split else f"{trainer.args.n_gpu} devices in one process, or {kind}"
        raise Unsupported(
            f"ImmunizeTrainer does not train by {how}.",
            cure="Start a process per device with accelerate launch or torchrun, by DDP or FSDP2 (fsdp_version: 2).",
        )
    return ALONE if accelerator.num_processes == 1 else ProcessGroup.of(None, trainer.args.device)


@contextmanager
def _reducing(model: nn.Module, otherwise: bool) -> Iterator[None]:
    """Let FSDP reduce the gradients of a backward pass, also where more batches are to be accumulated first."""
    roots: list[Any] = [unit for unit in units(model) if unit is model]
    for root in roots:
        root.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        for root in roots:
            root.set_requires_gradient_sync(otherwise)
