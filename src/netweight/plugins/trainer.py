"""transformers' `Trainer`, training layer by layer, for models that stay compressed while they train.

Checkpoints are folders that `from_pretrained` loads. Their weights are written and read as they are in memory: no
weight but one is ever dense. Needs transformers 5 and accelerate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

import netweight.plugins.transformers  # noqa: F401  with it, `from_pretrained` loads the checkpoints
from netweight.codec.header import torch_dtype
from netweight.core.lazy import extra
from netweight.errors import LayerwiseConflict, UsageError
from netweight.methods.compress.runtime.checkpoint import load_checkpoint, save_checkpoint
from netweight.methods.compress.runtime.layerwise import LayerwiseOptimizer
from netweight.plugins.saving import identity, save_folder, untied
from netweight.store import TensorInfo, open_store

with extra("llm", "This trainer needs transformers 5 and accelerate"):
    from transformers import PreTrainedModel, Trainer
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_optimizer import is_optimizer_factory

_OPTIMIZER = "optimizer.net.safetensors"
_CHECKPOINT = "checkpoint-"

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class LayerwiseTraining(_Base):
    """Makes any subclass of `Trainer` train layer by layer: `class Mine(LayerwiseTraining, Seq2SeqTrainer): ...`."""

    # A gradient is used up during the backward pass, as soon as it exists. What this means for `TrainingArguments`:
    #
    # - `max_grad_norm`, 1.0 by default, needs the norm of all gradients before the first update. Without accumulation
    #   every batch then goes forward and backward twice, first to measure and then to update. 0 makes one pass and does
    #   not clip; infinity makes two without clipping, and so finds a bad gradient before anything is updated.
    # - `gradient_accumulation_steps` above 1 keeps the gradients of all layers until the last pass.
    # - Checkpoints hold the weights of a compressed model and every optimizer state compressed. `from_pretrained` loads
    #   the folder of a checkpoint, `train(resume_from_checkpoint=...)` continues from it exactly, and a checkpoint that
    #   a kill left incomplete is passed over, or refused by its name.

    def __init__(self, *args: Any, stochastic_rounding: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stochastic_rounding = stochastic_rounding
        _refuse(self.args)
        if self.optimizer is not None:
            raise LayerwiseConflict(
                "`optimizers` contains an optimizer.",
                cure="Name its class: optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-4}).",
            )

    # ---- what Trainer calls, in the order in which it does ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; afterwards the model can be trained in any other way."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(str(self.args.output_dir))
        elif resume_from_checkpoint:
            _refuse_incomplete(Path(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self.optimizer is not None:
                self._layerwise.close()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the layer by layer optimizer of the class, options and groups that `Trainer` would choose."""
        trained: Any = self.model if model is None else model
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(trained)
        elif self._layerwise.closed:
            # `train` was called again, and continues from there.
            state = self._layerwise.state_dict()
            self.optimizer = self._make_optimizer(trained)
            self.optimizer.load_state_dict(state)
        return self.optimizer

    def _make_optimizer(self, model: Any) -> LayerwiseOptimizer:
        optimizer_class, options = self._class_and_options(model)
        args = self.args
        several = args.gradient_accumulation_steps > 1
        return LayerwiseOptimizer(
            model,
            optimizer_class,
            accumulation_steps=args.gradient_accumulation_steps,
            last_pass=(lambda: bool(self.accelerator.gradient_state.sync_gradients)) if several else None,
            clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
            stochastic_rounding=self._stochastic_rounding,
            seed=args.seed,
            groups=self._groups(model),
            **options,
        )

    def _class_and_options(self, model: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        chosen, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        if is_optimizer_factory(chosen) or {"params", "model", "optimizer_dict"} & options.keys():
            raise LayerwiseConflict(
                f"The optimizer {self.args.optim} needs all gradients of the model at once.",
                cure="Choose one that steps each parameter by its own gradient, such as optim='adamw_torch'.",
            )
        return chosen, options

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        """Parameters with and without weight decay, as `Trainer` divides them."""
        decayed = set(self.get_decay_parameter_names(model))
        groups = []
        for member, decay in ((True, self.args.weight_decay), (False, 0.0)):
            named = [p for name, p in model.named_parameters() if p.requires_grad and (name in decayed) == member]
            groups.append({"params": named, "weight_decay": decay})
        return groups

    @property
    def _layerwise(self) -> LayerwiseOptimizer:
        """The optimizer within the wrapper that accelerate put around it."""
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(inner, LayerwiseOptimizer)
        return inner

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Go forward and backward, twice where clipping needs it; the weights are updated on the way."""

        def step() -> torch.Tensor:
            return super(LayerwiseTraining, self).training_step(model, inputs, num_items_in_batch)

        loss: torch.Tensor = self._layerwise.step(step) if self._layerwise.two_passes else step()
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        """The norm of all gradients before they were clipped; it was done."""
        return self._layerwise.grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor | None:
        """That norm if it was measured: there are no gradients any more to measure it by, and 0 would be wrong."""
        return grad_norm

    # ---- checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, complete as soon as it holds the trainer's state, which is written last."""
        folder = Path(self._get_output_dir(trial)) / f"{_CHECKPOINT}{self.state.global_step}"
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir) / _OPTIMIZER, nn.Module(), self._layerwise)
        scheduler: Any = self.lr_scheduler
        torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        file = Path(checkpoint) / _OPTIMIZER
        if not file.is_file():
            raise UsageError(
                f"{checkpoint} contains no {_OPTIMIZER}.",
                cure="Name a checkpoint that a LayerwiseTrainer saved, without `save_only_model`.",
            )
        load_checkpoint(file, nn.Module(), self._layerwise)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


@final
class LayerwiseTrainer(LayerwiseTraining, Trainer):
    """transformers' `Trainer`, training layer by layer: see `LayerwiseTraining` for what differs."""


def _refuse(args: Any) -> None:
    """Refuse, before anything runs, what cannot be combined with updates during the backward pass."""
    conflict, cure = "", ""
    if args.world_size > 1 or args.n_gpu > 1:
        conflict = f"There are {max(args.world_size, args.n_gpu)} processes or devices: DistributedDataParallel and its"
        conflict += " like reduce gradients after they would have been used up."
        cure = "Train in one process on one device, or in your own loop with LayerwiseOptimizer(reduce=...)."
    elif args.fp16:
        conflict = "fp16=True scales the loss, and needs all gradients before the first update."
        cure = "Use bf16=True, or weights in bf16."
    elif (args.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        conflict = "The model would use reentrant checkpointing, which goes backward one segment at a time."
        cure = 'Pass activation_checkpointing_kwargs={"use_reentrant": False}.'
    elif args.auto_find_batch_size:
        conflict = "auto_find_batch_size repeats steps, of which some updates have happened already."
        cure = "Leave it out."
    if conflict:
        raise LayerwiseConflict(conflict, cure=cure)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _refuse_incomplete(checkpoint: Path) -> None:
    if not _is_complete(checkpoint):
        raise UsageError(
            f"{checkpoint} is not a complete checkpoint: its {TRAINER_STATE_NAME}, which is written last, is missing.",
            cure="Name another one, or pass resume_from_checkpoint=True for the last complete one.",
        )


def _last_complete(folder: str) -> str:
    """The complete checkpoint of most steps."""
    checkpoints = {
        int(path.name.removeprefix(_CHECKPOINT)): path
        for path in Path(folder).glob(f"{_CHECKPOINT}*")
        if path.name.removeprefix(_CHECKPOINT).isdecimal() and _is_complete(path)
    }
    if not checkpoints:
        raise UsageError(f"{folder} contains no complete checkpoint.", cure="Train without resume_from_checkpoint.")
    return str(checkpoints[max(checkpoints)])


# ---- weights of a checkpoint, for any Trainer ------------------------------------------------------------------------


def save(trainer: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
    """Save a compressed model that is none of transformers', as `Trainer` saves such a one."""
    folder = Path(output_dir if output_dir is not None else str(trainer.args.output_dir))
    model = trainer.model
    save_folder(model, folder, untied(state_dict or model.state_dict()), lambda plain: None)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    torch.save(trainer.args, folder / "training_args.bin")


def load_best_model(trainer: Any) -> None:
    """Read the weights of the best checkpoint."""
    read_folder(str(trainer.state.best_model_checkpoint), trainer.model)


def load_from_checkpoint(trainer: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
    """Read the weights of a checkpoint."""
    read_folder(resume_from_checkpoint, trainer.model if model is None else model)


def read_folder(folder: str | Path, model: nn.Module) -> None:
    """Read the weights of a compressed folder into a model of the same make, one after another."""
    own, file = model.state_dict(), Path(folder) / "model.net.safetensors"
    # An optimizer's states lie beside the file.
    with open_store(file if file.is_file() else folder) as store:
        stored = set(store.names())
        if stored - own.keys() and stored <= _converted(model, own):
            loaded: Any = type(model)
            model.load_state_dict(loaded.from_pretrained(folder).state_dict())
            return
        there = {identity(own[name]) for name in stored & own.keys()}
        missing = sorted(name for name, value in own.items() if identity(value) not in there)
        others = sorted(stored - own.keys())
        misfits = sorted(name for name in stored & own.keys() if not _fits(store.info(name), own[name]))
        if missing or others or misfits:
            differences = (
                ("lacks", missing),
                ("has in addition", others),
                ("has with other shapes or dtypes", misfits),
            )
            listed = (f"it {how} {', '.join(names[:5])}" for how, names in differences if names)
            raise UsageError(
                f"{folder} is of another model: {'; '.join(listed)}.",
                cure="Create the model with the configuration with which it was saved.",
            )
        with torch.no_grad():
            for name in store.names():
                own[name].copy_(store.get(name, check=True))


def _converted(model: nn.Module, tensors: dict[str, Any]) -> set[str]:
    """The names in files of weights that transformers renames, or merges, when it loads them."""
    if not isinstance(model, PreTrainedModel):
        return set()
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    return set(revert_weight_conversion(model, shapes))


def _fits(info: TensorInfo, tensor: torch.Tensor) -> bool:
    return tuple(info.shape) == tuple(tensor.shape) and torch_dtype(info.dtype) == tensor.dtype
