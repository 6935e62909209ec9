"""transformers' `Trainer` with RepNoise's loss, for those who train with it: any optimizer, schedule and callback.

    trainer = ImmunizeTrainer(model, TrainingArguments("out", learning_rate=2e-5), train_dataset=pairs, pad_id=0)
    trainer.train()

Under `accelerate launch` or `torchrun` it trains in several processes, by DDP or FSDP2: the loss of their batches is
that of one batch of all their rows.
"""

# A batch holds both sides of its pairs, so that nothing can part them. Both go backward together here; `immunize` takes
# them one after the other, in less memory, and steps narrow weights in float32.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import torch_generator
from netweight.data.examples import Batch, Pair
from netweight.errors import MissingExtra, Unsupported, UsageError
from netweight.methods.immunize.defense import PairBatch, collate_pairs, gradient_norm
from netweight.methods.immunize.distributed import ALONE, ProcessGroup, trained_weights, units
from netweight.methods.immunize.repnoise import LossParts, repnoise_loss
from netweight.methods.immunize.settings import RepNoise
from netweight.methods.immunize.train import check_inputs
from netweight.nn.decoder import structure_of

try:
    from transformers import Trainer
except ImportError as error:
    raise MissingExtra(
        "This trainer needs transformers 5 and accelerate, which are not installed.",
        cure="Install them: pip install 'netweight[llm]'.",
    ) from error


_COLUMNS = ("prompt", "chosen", "rejected")
_TERMS = ("retain", "noise", "ascent")


def as_pair(row: Pair | Mapping[str, Sequence[int]]) -> Pair:
    """Take a row of a data set for a pair."""
    if isinstance(row, Pair):
        return row
    missing = [name for name in _COLUMNS if name not in row]
    if missing:
        raise UsageError(f"A row lacks {', '.join(missing)}.", cure="Rows hold token ids as prompt, chosen, rejected.")
    for name in _COLUMNS:
        if isinstance(row[name], str) or not all(isinstance(token, int) for token in row[name]):
            raise UsageError(f"{name!r} of a row holds no token ids.", cure="Tokenize the rows first.")
    return Pair(*(tuple(row[name]) for name in _COLUMNS))


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
    """`Trainer` that minimizes RepNoise's loss."""

    # `model`: a causal language model in float32, or with adapters in float32; `bf16=True` among the arguments computes
    # in bfloat16
    # `measure_every`: updates between two measurements of gradient norms

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        config: RepNoise = RepNoise(),
        pad_id: int | None = None,
        measure_every: int = 25,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        structure_of(model)
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
        for rows in (train_dataset, kwargs.get("eval_dataset")):
            if rows is not None:
                check_inputs(model, [as_pair(row) for row in rows], ())
        kwargs.setdefault("data_collator", PairCollator(pad_id, aligned=config.fidelity == "reference"))
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        self._group = _group_of(self)
        self._signature_columns = list(_COLUMNS)  # type: ignore[assignment]  # Trainer fills it in later otherwise
        self._config, self._measure_every = config, measure_every
        self._noise_weight: float | None = None
        self._update, self._part = -1, 0
        self._seen: dict[str, list[float]] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute RepNoise's loss on a batch of `PairCollator`."""
        batch = PairBatch(Batch(**inputs["harmless"]), Batch(**inputs["harmful"]), self._group)
        training = model.training
        parameters = trained_weights(model)
        generator = self._draw() if training else torch_generator(self.args.seed, "evaluation")
        weight = self._config.beta if self._noise_weight is None else self._noise_weight
        parts = repnoise_loss(model, batch, self._config, generator=generator, noise_weight=weight)
        if training:
            parts = self._measured(model, parts, parameters)
            values = torch.tensor([getattr(parts, name).detach().item() for name in _TERMS])
            for name, value in zip(_TERMS, self._group.mean(values).tolist(), strict=True):
                self._note(name, value)
        return (parts.total, asdict(parts)) if return_outputs else parts.total

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the loss alone."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
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

    def _measured(self, model: nn.Module, parts: LossParts, parameters: Sequence[nn.Parameter]) -> LossParts:
        """Measure gradient norms and balance the noise's weight when it is time."""
        balanced = self._config.fidelity == "corrected" and self._config.alpha > 0 and self._config.beta > 0
        due = self._update % self._measure_every == 0 or (balanced and self._noise_weight is None)
        if due and self._part == 0:  # before gradients are accumulated, which measuring shards would take away
            with _reducing(model, self.accelerator.sync_gradients):
                norms = {name: gradient_norm(getattr(parts, name), parameters, self._group) for name in _TERMS}
            for name, norm in norms.items():
                self._note(f"{name}_norm", norm)
            if balanced and norms["noise"] > 0:
                found = self._config.beta * self._config.alpha * norms["ascent"] / norms["noise"]
                self._noise_weight = min(found, found if self._noise_weight is None else self._noise_weight)
                parts = replace(parts, noise_weight=self._noise_weight)
        self._note("noise_weight", parts.noise_weight)
        return parts

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
