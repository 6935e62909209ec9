"""The loss of a causal language model in chunks of tokens, so that its logits never exist whole.

Logits are as wide as the vocabulary: of 512 tokens and a vocabulary of 151,936 they take 0.9 GB in training, in bf16
and in fp32 and with their gradients, about as much as all weights of a model of half a billion. Here the logits of
some tokens are calculated, turned into these tokens' loss and gradients, and dropped, before those of the next.
Nothing is calculated twice, since the gradient of a sum is known before the backward pass begins; that only
multiplies it with the factor of the sum. Where the head is updated by tiles, its rows come in blocks instead of the
tokens (`loss_by_rows.py`). `torch.nn.functional.linear_cross_entropy` does so as well, but on a CPU in
twenty times the time, and with a loss that is rounded to the weight's dtype.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.runtime.loss_by_rows import LossByRows, collector_for
from netweight.methods.compress.runtime.tensor import CompressedTensor

# Logits at once, by default: 64 MB in fp32.
_NUMBERS = 1 << 24
# The label of a token that has no loss, as everywhere in torch and transformers.
_IGNORED = -100


@final
class chunk_loss:
    """Calculate the training loss of a causal language model in chunks of tokens.

    Until `close`, or the end of the `with` block, calls of the model with `labels` return an output without logits.
    Calls without labels, such as generation, and calls without gradients do not change. The loss differs from the
    model's own only by the order in which it is added up. The gradient of a head of bf16 is rounded once for each chunk
    instead of once for all, as with gradient accumulation.

    Args:
        model: A causal language model of transformers, dense or compressed, perhaps with adapters of peft.
        tokens: Tokens at once, at least 1; None for as many as have about 16.8 million logits. With None, a head that a
            `LayerwiseOptimizer` updates by tiles (a large one on the CPU) comes in blocks of rows instead, if there
            are no more tokens in a batch than columns in the head: then neither the head nor its gradient exists whole.

    Raises:
        Unsupported: The model has no head that is a linear layer, has a loss of its own, or changes its logits after
            the head, as models with a softcap do. This is found out by calling the model once with four tokens.
        UsageError: `tokens` is less than 1, or the model has a chunked loss already.

    Examples:
        >>> with netweight.chunk_loss(model):  # doctest: +SKIP
        ...     model(input_ids=ids, labels=ids).loss.backward()
    """

    def __init__(self, model: Any, *, tokens: int | None = None) -> None:
        if tokens is not None and tokens < 1:
            raise UsageError(f"tokens is {tokens}.", cure="Choose 1 or more, or None.")
        self._owner = _owner_of(model)
        self._head = _head_of(self._owner)
        self._tokens = tokens
        # True if the current call returns no logits.
        self._chunks = False
        self._had_loss = False
        self._own_loss = self._owner.loss_function
        _check(self._owner, self._head)
        self._head.forward = self._forward_of_head  # type: ignore[method-assign, assignment]
        self._owner.loss_function = self._loss
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def close(self) -> None:
        """Give the model its own loss again."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._head.forward
        self._owner.loss_function = self._own_loss

    def __enter__(self) -> chunk_loss:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a call of the model -----------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        as_tuple = options.get("return_dict") is False or getattr(self._owner.config, "return_dict", True) is False
        self._chunks = torch.is_grad_enabled() and options.get("labels") is not None and not as_tuple
        self._had_loss = False

    def _forward_of_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._chunks else F.linear(hidden, self._head.weight, self._head.bias)

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Transformers' loss, of the head's inputs in place of its logits where a call is chunked."""
        if not self._chunks:
            own: torch.Tensor = self._own_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
            )
            return own
        self._had_loss = True
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets, hidden = shift_labels.reshape(-1).to(logits.device), logits.reshape(-1, logits.shape[-1])
        count: Any = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        count = count.to(logits.device) if isinstance(count, torch.Tensor) else count
        weight, bias, dtype = self._head.weight, self._head.bias, _dtype_of_products(hidden)
        by_rows = collector_for(weight, len(hidden)) if self._tokens is None else None
        if by_rows is not None:
            total: torch.Tensor = LossByRows.apply(hidden, weight, bias, targets, ignore_index, dtype, by_rows)  # type: ignore[no-untyped-call]
        else:
            tokens = self._tokens or max(1, _NUMBERS // weight.shape[0])
            total = _ChunkedLoss.apply(hidden, weight, bias, targets, tokens, ignore_index, dtype)  # type: ignore[no-untyped-call]
        mean: torch.Tensor = total / count
        return mean

    def _after(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if not self._chunks or output is None:
            self._chunks = False
            return output
        self._chunks = False
        if not self._had_loss:
            raise Unsupported(
                f"{type(model).__name__} was called with labels and did not calculate a loss from its logits.",
                cure="Train it without chunk_loss.",
            )
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def _owner_of(model: Any) -> Any:
    """The model of transformers in a model of peft, which calculates the loss, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head_of(model: Any) -> nn.Linear:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = type(model).__name__
    if not isinstance(head, nn.Linear) or not hasattr(model, "loss_function"):
        raise Unsupported(
            f"{name} does not have a linear output head and a loss function of transformers.",
            cure="chunk_loss is for causal language models of transformers.",
        )
    if "forward" in vars(head):
        raise UsageError(
            f"The head of {name} has a forward method of its own, perhaps another chunk_loss.",
            cure="Close that first.",
        )
    return head


@torch.no_grad()
def _check(model: Any, head: nn.Linear) -> None:
    """Refuse a model whose logits are not the outputs of its head, or whose loss is not the cross-entropy of these."""
    name, inputs = type(model).__name__, []
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise Unsupported(f"{name} has a loss of its own.", cure="Train it without chunk_loss.")
    ids = torch.arange(4, device=head.weight.device)[None]
    handle = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    trained = model.training
    try:
        logits = model.eval()(input_ids=ids).logits
    finally:
        handle.remove()
        model.train(trained)
    if len(inputs) != 1 or not torch.equal(logits, F.linear(inputs[0], head.weight, head.bias)):
        raise Unsupported(
            f"{name} changes its logits after the head, as with a softcap or a scale.",
            cure="Train it without chunk_loss.",
        )


class _ChunkedLoss(Function):
    """The sum of the cross-entropies of all tokens, with its gradients ready."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tokens: int,
        ignored: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        dense = (weight.dense() if isinstance(weight, CompressedTensor) else weight.detach()).to(dtype)
        added = None if bias is None else bias.detach().to(dtype)
        needs = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if needs[0] else None
        to_weight = torch.zeros_like(dense) if needs[1] else None
        to_bias = torch.zeros(len(dense), device=hidden.device) if needs[2] else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), tokens):
                part, targets = hidden[start : start + tokens].detach().to(dtype), labels[start : start + tokens]
                logits = F.linear(part, dense, added).float()
                has_loss = targets != ignored
                places = targets.where(has_loss, 0)[:, None]
                sums = logits.logsumexp(1, keepdim=True)
                losses = (sums - logits.gather(1, places))[:, 0]
                total += losses.where(has_loss, 0).sum()
                # The gradient of a token's loss is the probabilities, minus 1 at its label.
                slopes = logits.sub_(sums).exp_()
                slopes.scatter_add_(1, places, torch.full_like(sums, -1))
                slopes *= has_loss[:, None]
                if to_bias is not None:
                    to_bias += slopes.sum(0)
                slopes = slopes.to(dtype)
                if to_hidden is not None:
                    to_hidden[start : start + tokens] = slopes @ dense
                if to_weight is not None:
                    to_weight.addmm_(slopes.t(), part)
        ctx.gradients = (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None or bias is None else to_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UsageError(
                "The backward pass of a chunked loss can run only once, because its gradients are used up.",
                cure="Call the model again, or train without chunk_loss.",
            )
        return *(None if each is None else each.mul_(slope) for each in gradients), None, None, None, None


def _dtype_of_products(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which the head would calculate."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if dtype == torch.float16:
        raise Unsupported(
            "The gradients of logits would underflow in float16, as they are not scaled yet.",
            cure="Train in bfloat16 or float32, or without chunk_loss.",
        )
    return dtype
