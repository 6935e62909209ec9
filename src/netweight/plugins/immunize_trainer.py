"""A `Trainer` of transformers with the loss of a defense, for any optimizer, schedule and callback.

    trainer = ImmunizeTrainer(model, TrainingArguments("out", learning_rate=2e-5), train_dataset=pairs, pad_id=0)
    trainer.train()

Under `accelerate launch` or `torchrun` it trains in several processes, by DDP or FSDP2: the loss of their batches is
that of one batch of all their rows.
"""

# A batch holds both sides of its pairs, so that nothing can part them. Gradients are those of `immunize`, by the same
# function; optimizer, schedule, data and checkpoints are `Trainer`'s.

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netweight.core.lazy import extra
from netweight.core.seeds import derive, torch_generator
from netweight.data.tokens import AnswerPair, Batch, Example, any_pairs
from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.hf.load_language_model import context_of, frozen, structure_of
from netweight.methods.immunize.batches import collate_part, drawn_rows
from netweight.methods.immunize.defense import Defense, DefenseSettings
from netweight.methods.immunize.defenses.latent_adversarial import LatentAdversarialDefense
from netweight.methods.immunize.defenses.vaccine import VaccineDefense
from netweight.methods.immunize.distributed import ALONE, ProcessGroup, average_gradients, trained_weights, units
from netweight.methods.immunize.divergence import DivergenceMonitor
from netweight.methods.immunize.gradients import add_gradients
from netweight.methods.immunize.inputs import check_inputs
from netweight.methods.immunize.pairs import PairBatch, collate_pairs
from netweight.methods.immunize.settings import TrainingSettings
from netweight.methods.immunize.train import defense_of

with extra("llm", "This trainer needs transformers 5 and accelerate"):
    from transformers import Trainer, TrainingArguments, set_seed


@final
@dataclass(frozen=True)
class PairCollator:
    """Puts both sides of rows into one batch."""

    pad_id: int
    """Token id that pads shorter rows."""
    aligned: bool = False
    """True if both sides are padded to one width, as the published loss requires."""
    tokenizer: Any = None
    """Tokenizer for rows of text; None for rows of token ids."""
    context: int = 1 << 30
    """Largest number of tokens in a row of text."""

    def __call__(self, rows: Sequence[AnswerPair | Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
        """Return `input_ids`, `attention_mask` and `labels` under `harmless` and under `harmful`."""
        pairs = any_pairs(rows, self.tokenizer, context=self.context)
        batch = collate_pairs(pairs, pad_id=self.pad_id, aligned=self.aligned)
        return {"harmless": _tensors(batch.harmless), "harmful": _tensors(batch.harmful)}


def _tensors(side: Batch) -> dict[str, Tensor]:
    return {"input_ids": side.input_ids, "attention_mask": side.attention_mask, "labels": side.labels}


@final
class ImmunizeTrainer(Trainer):
    """`Trainer` that minimizes the loss of a defense."""

    # `model`: a causal language model in float32, or with adapters in float32; `bf16=True` among the arguments computes
    # in bfloat16
    # `retain`: examples of ability that is kept; as many rows of them as of pairs join every batch
    # `train_dataset`: rows of prompt, chosen and rejected as token ids, or of text as TRL has them (strings or
    # conversations, the prompt apart or in both answers) for the tokenizer in `processing_class`; a stream, which has
    # no length, is read batch by batch and checked no further
    # `measure_every`: updates between two measurements of gradient norms
    # `settings`: those of `immunize`; what they name (rate, batches, order of rows, clipping, frozen layers …) is then
    # by them and not by `args`, and the training is that of `immunize`

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        defense: DefenseSettings | Defense[Any] | str = "repnoise",
        retain: Sequence[Example] = (),
        pad_id: int | None = None,
        measure_every: int = 25,
        settings: TrainingSettings | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        structure_of(model)
        self._defense = defense_of(defense)
        if pad_id is None:
            pad_id = getattr(kwargs.get("processing_class"), "pad_token_id", None)
        if pad_id is None:
            raise UsageError(
                "The padding token is not known.", cure="Pass pad_id, or a tokenizer that has a pad token."
            )
        narrow = [name for name, value in model.named_parameters() if value.requires_grad and value.dtype.itemsize < 4]
        if narrow:
            raise UsageError(
                f"{len(narrow)} trained weights, such as {narrow[0]!r}, are narrower than float32.",
                cure="Load the model in float32 and pass bf16=True, or use immunize, which steps in float32.",
            )
        recomputes = getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False)
        if not self._defense.trains or (
            recomputes and isinstance(self._defense, VaccineDefense | LatentAdversarialDefense)
        ):
            why = " while activations are recomputed" if self._defense.trains else ": there is nothing to train"
            raise Unsupported(f"ImmunizeTrainer cannot train {self._defense.name}{why}.", cure="Use immunize.")
        tokenizer = kwargs.get("processing_class")
        context = 1 << 30 if tokenizer is None else context_of(model, tokenizer)  # type: ignore[arg-type]

        def checked(rows: Any) -> Any:
            if rows is None or not hasattr(rows, "__len__"):
                return rows
            pairs = any_pairs(rows, tokenizer, context=context)
            check_inputs(model, pairs, retain, context=None if settings is None else settings.context)
            return pairs

        train_dataset, evaluated = checked(train_dataset), checked(kwargs.pop("eval_dataset", None))
        kwargs.setdefault("data_collator", PairCollator(pad_id, self._defense.aligned, tokenizer, context))
        kwargs["eval_dataset"] = evaluated
        super().__init__(
            model, args if settings is None else _by(settings, args), train_dataset=train_dataset, **kwargs
        )
        self._group = _group_of(self)
        # A stream's columns that Trainer is to leave in place.
        self._signature_columns = ["prompt", "chosen", "rejected"]  # type: ignore[assignment]
        self._retain, self._pad_id, self._settings = retain, pad_id, settings
        self._measure_every = measure_every if settings is None else settings.measure_every
        self._update, self._part, self._divergence = -1, 0, DivergenceMonitor(model)
        self._seen: dict[str, list[float]] = {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, with the model made ready for the defense."""
        model: Any = self.model
        layers = None if self._settings is None else self._settings.frozen
        # The order of rows must be that of the first start, whatever was drawn since.
        set_seed(self.args.seed)
        with (
            nullcontext() if layers is None else frozen(model, layers),
            self._defense.preparation(model, seed=derive(self.args.seed, "prepare")),
        ):
            return super().train(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the rates of the settings, or else of the arguments."""
        if (settings := self._settings) is not None and self.lr_scheduler is None:
            stepped: Any = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                stepped, lambda step: settings.rate(step, num_training_steps) / settings.lr
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self._settings is None:
            return super()._get_train_sampler(train_dataset)
        return _EpochOrder(len(train_dataset or self.train_dataset), self.args.seed)  # type: ignore[arg-type]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradients of a batch of `PairCollator`."""
        model.train()
        batch = self._batch(inputs)
        # Gradients are averaged here, and not by DistributedDataParallel.
        network = model.module if isinstance(model, DistributedDataParallel) else model
        self._part = self._part + 1 if self.state.global_step == self._update else 0
        self._update = self.state.global_step
        # Before gradients are accumulated, which measuring shards would take away.
        measure = not self._part and self._update % self._measure_every == 0
        scale = 1 / self.current_gradient_accumulation_steps
        if (scaler := self.accelerator.scaler) is not None:
            scale *= float(scaler.scale(torch.ones((), device=self.args.device)))
        with self.compute_loss_context_manager(), _reducing(network, measure or self.accelerator.sync_gradients, self):
            terms = add_gradients(
                self._defense, network, batch, self._retained(len(batch.harmful.input_ids)), trained_weights(network),
                self._balance, draws=(self.args.seed, self._update, *filter(None, [self._part])), measure=measure,
                scale=scale,
            )  # fmt: skip
        if (problem := self._divergence.problem(terms)) is not None:
            what = f"Step {self._update + 1} of {self._defense.name} stopped: {problem}."
            raise TrainingStopped(what, cure="Give a lower rate, or less weight to the ascent.")
        if self.accelerator.sync_gradients:
            average_gradients(trained_weights(network), self._group)
        for name, term in terms.items():
            for suffix, value in (("", term.value), ("_weight", term.weight), ("_norm", term.norm)):
                if value is not None:
                    self._seen.setdefault(name + suffix, []).append(value)
        total = sum(term.weight * term.value for term in terms.values()) / self.current_gradient_accumulation_steps
        return torch.tensor(total, device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the defense's loss on a batch of `PairCollator`, as evaluation does."""
        groups = self._defense.term_groups(model, self._batch(inputs), torch_generator(self.args.seed, "evaluation"))
        terms = {name: term for group in groups for name, term in group.items()}
        weights = {n: self._balance.get(n, term.weight) if term.share else term.weight for n, term in terms.items()}
        total = torch.stack([weights[name] * term.value for name, term in terms.items()]).sum()
        return (total, {name: term.value for name, term in terms.items()}) if return_outputs else total

    def _batch(self, inputs: dict[str, Any]) -> PairBatch:
        sides: Any = self._prepare_inputs(inputs)
        return PairBatch(Batch(**sides["harmless"]), Batch(**sides["harmful"]), self._group)

    @property
    def _balance(self) -> dict[str, float]:
        """Weights that were found by gradient norms; checkpoints hold them, so that these go on to the same bits."""
        state: Any = self.state
        balance: dict[str, float] = state.stateful_callbacks.setdefault("netweight.balance", {})
        return balance

    def _retained(self, rows: int) -> Batch | None:
        """Return the retained rows, as many as there are pairs."""
        if not self._retain:
            return None
        size = sum(self._group.counts(rows)) if self._settings is None else self._settings.batch_size
        step = self._update * max(1, self.args.gradient_accumulation_steps) + self._part
        drawn = drawn_rows(len(self._retain), size, step, seed=self.args.seed, stream="retain")
        return collate_part(self._retain, drawn, self._group, pad_id=self._pad_id).to(self.args.device)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the loss alone."""
        with torch.set_grad_enabled(self._defense.looks_ahead):
            loss: Tensor = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of all terms since the last time."""
        if "loss" in logs:
            logs |= {name: sum(values) / len(values) for name, values in self._seen.items()}
            self._seen.clear()
        super().log(logs, start_time)


class _EpochOrder(torch.utils.data.Sampler[int]):
    """Rows in the order in which `immunize` takes them: another one in each pass."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self._pass = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._pass = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(drawn_rows(self._count, self._count, self._pass, seed=self._seed, stream="order"))


def _by(settings: TrainingSettings, given: TrainingArguments | None) -> TrainingArguments:
    """Set what settings name in the arguments of Trainer."""
    args = TrainingArguments() if given is None else copy.copy(given)
    args.learning_rate, args.num_train_epochs, args.seed = settings.lr, settings.epochs, settings.seed
    args.per_device_train_batch_size = max(1, settings.batch_size // args.world_size)
    args.max_grad_norm, args.weight_decay = settings.clip or 0.0, 0.0
    if settings.checkpoint_every is None:
        args.save_strategy = "no"
    else:
        args.save_steps = settings.checkpoint_every
    return args


def _group_of(trainer: Trainer) -> ProcessGroup:
    """The processes that the launcher has started."""
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type.value
    supported = kind == "NO" or kind.startswith("MULTI_") or accelerator.is_fsdp2
    split = max(trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) > 1
    if trainer.args.n_gpu > 1 or not supported or split:
        how = "parallel tensors or sequences" if split else f"{trainer.args.n_gpu} devices in one process, or {kind}"
        raise Unsupported(
            f"ImmunizeTrainer does not train by {how}.",
            cure="Start a process per device with accelerate launch or torchrun, by DDP or FSDP2 (fsdp_version: 2).",
        )
    return ALONE if accelerator.num_processes == 1 else ProcessGroup.of(None, trainer.args.device)


@contextmanager
def _reducing(model: nn.Module, reduce: bool, trainer: Trainer) -> Iterator[None]:
    """Let FSDP reduce the gradients of backward passes, also where more batches are to be accumulated first."""
    roots: list[Any] = [unit for unit in units(model) if unit is model]
    for root in roots:
        root.set_requires_gradient_sync(reduce)
    try:
        yield
    finally:
        for root in roots:
            root.set_requires_gradient_sync(trainer.accelerator.sync_gradients)
