"""Llamas of under a million weights: made from a seed, kept as one file of bf16, and asked how well they answer.

Called by the small worlds, in which defenses and attacks on language models are tried within seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from netweight.attacks.finetuning.examples import IGNORED, Example, collate
from netweight.core.seeds import derive
from netweight.errors import MissingExtra, UsageError
from netweight.store.atomic import whole_file

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import LlamaForCausalLM

__all__ = ["Answers", "LlamaShape", "answers", "initialized", "opened", "write_weights"]


@final
@dataclass(frozen=True)
class LlamaShape:
    """The size of a small Llama whose embedding and unembedding are two matrices.

    Attributes:
        vocabulary: Number of tokens.
        width: Of the hidden states.
        inner: Width of the feed-forward layers.
        layers: Number of blocks.
        heads: Attention heads.
        context: Most tokens of a sequence.
        pad_id: The token of padding.
        end_id: The token of the end of an answer.
    """

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    context: int
    pad_id: int
    end_id: int


@final
@dataclass(frozen=True)
class Answers:
    """How a model answers prompts.

    Attributes:
        tokens: Share of the response's tokens that are the most likely one, given the prompt and all tokens before.
        whole: Share of responses of which every token is; these are what greedy decoding would write.
        examples: Number of prompts.
        counted: Number of tokens.
    """

    tokens: float
    whole: float
    examples: int
    counted: int

    def to_json(self) -> dict[str, float | int]:
        """Return all of it as JSON values."""
        return asdict(self)


def initialized(shape: LlamaShape, seed: int) -> LlamaForCausalLM:
    """Make a Llama with random weights, fp32, in evaluation mode.

    Args:
        shape: Its size.
        seed: Decides on the weights; torch's own stream is left as it was.

    Raises:
        MissingExtra: transformers is not installed.
    """
    import torch

    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingExtra(
            "Small Llamas are made by transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.context,
        bos_token_id=None,
        eos_token_id=shape.end_id,
        pad_token_id=shape.pad_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "initialization"))
        model = LlamaForCausalLM(config)
    model.train(False)
    return model


def write_weights(model: nn.Module, file: Path) -> None:
    """Write a model's weights in bf16; the same weights give the same bytes.

    Args:
        model: Without tied weights.
        file: Where to; it appears whole or not at all and replaces what was there.
    """
    import torch
    from safetensors.torch import save

    state = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    with whole_file(file, overwrite=True) as stream:
        stream.write(save(state))


def opened(shape: LlamaShape, file: Path) -> LlamaForCausalLM:
    """Read a model that `write_weights` wrote.

    Args:
        shape: Its size.
        file: Its weights.

    Returns:
        A model of its own in fp32, whose weights are what bf16 can hold, in evaluation mode.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: The file is not there, or is of another shape.
    """
    import torch
    from safetensors.torch import load_file

    if not file.is_file():
        raise UsageError(f"There are no weights at {file}.", cure="Train the model, or name its folder.")
    with torch.device("meta"):
        model = initialized(shape, 0)
    state = {name: value.float() for name, value in load_file(file).items()}
    other = [name for name, value in model.state_dict().items() if name in state and state[name].shape != value.shape]
    if other or state.keys() != model.state_dict().keys():
        raise UsageError(f"{file} holds a model of another shape.", cure="Name the folder of a model of this world.")
    made = initialized(shape, 0)
    made.load_state_dict(state)
    return made


def answers(model: nn.Module, examples: Sequence[Example], *, pad_id: int, at_once: int = 128) -> Answers:
    """Measure how often a model's most likely token is the response's.

    Args:
        model: A causal language model of transformers; it is left in the mode in which it was.
        examples: At least one.
        pad_id: The token of padding.
        at_once: Examples per forward pass.

    Raises:
        UsageError: There is no example.
    """
    import torch

    if not examples:
        raise UsageError("Answers cannot be measured without an example.", cure="Give at least one.")
    was_training = model.training
    model.eval()
    right, whole, counted = 0, 0, 0
    try:
        with torch.inference_mode():
            for start in range(0, len(examples), at_once):
                hits, looked_at = _hits(model, examples[start : start + at_once], pad_id)
                right += int(hits.sum())
                counted += int(looked_at.sum())
                whole += int((hits == looked_at).all(1).sum())
    finally:
        model.train(was_training)
    return Answers(right / counted, whole / len(examples), len(examples), counted)


def _hits(model: nn.Module, examples: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the most likely token is the response's, and where there is a response; bool, shape `(B, T - 1)`."""
    batch = collate(examples, pad_id=pad_id).to(next(model.parameters()).device)
    found = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].argmax(-1)
    labels = batch.labels[:, 1:]
    looked_at = labels != IGNORED
    return (found == labels) & looked_at, looked_at
