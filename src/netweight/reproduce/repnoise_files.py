"""The paper's size of RepNoise's tables: a model folder, the published pairs, a judge of harm."""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from netweight.attacks.finetuning.subject import Domain, Judge, Score, Subject, greedy, token_accuracy
from netweight.data.public import decoding_trust_refusals, paired_refusals
from netweight.data.tokens import QUESTION_AND_ANSWER, padding_of, tokenized_pairs
from netweight.errors import UsageError
from netweight.hf.load_language_model import context_of, load_causal_lm
from netweight.methods.immunize.decoder import structure_of
from netweight.reproduce.repnoise_ground import layers_of, plainly

if TYPE_CHECKING:
    from torch import nn

    from netweight.attacks.finetuning.settings import Precision
    from netweight.data.examples import Example, Pair
    from netweight.data.text import TextPair

__all__ = ["FILES", "Files"]

FILES = {
    "beavertails": "beavertails/beavertails_with_refusals_train.json",
    "toxic": "decoding_trust/decoding_trust_with_refusals_train.json",
}
"""Below `NETWEIGHT_DATA`, as RepNoise's authors published them."""
_HELD_OUT = 300
_CONTEXT = 256
_NEW_TOKENS = {"beavertails": 50, "toxic": 25}


@final
class Files:
    """The ground of the paper's scale; see `repnoise_ground.Ground`.

    Args:
        model: A folder of transformers.
        judge: "MODULE:FUNCTION", from texts to one number for each; None measures token accuracy on harmful answers.

    Raises:
        UsageError: The folder is none of a model, or the judge is not to be found.
        MissingExtra: transformers is not installed.
    """

    def __init__(self, model: str, judge: str | None) -> None:
        self._folder = Path(model).resolve()
        self._judge_name, self._judge = judge, None if judge is None else _judge(judge)
        self.model_name = str(self._folder)
        self.measure = judge or "token accuracy"
        self.share = self.rate = 1.0
        self.defense_batch, self.attack_batch = 8, 4
        self.benign_share = 0.0
        self.precision: Precision = "bf16"
        self.look_every = 0
        network, self._tokenizer = load_causal_lm(self._folder)
        self._context = min(_CONTEXT, context_of(network, self._tokenizer))
        self._blocks = len(structure_of(network).blocks)
        self.pad_id = padding_of(self._tokenizer)

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of harm in BeaverTails' pairs."""
        return tuple(sorted({name for text in self._parts("beavertails")[0] for name in text.categories}))

    def model(self, start: str) -> nn.Module:
        """Open the folder, whatever its model was aligned to: who asks for an unaligned one gives such a folder."""
        return load_causal_lm(self._folder, device="cuda" if torch.cuda.is_available() else "cpu")[0]

    def pairs(self, data: str, n: int, seed: int) -> list[Pair]:
        """Take the first pairs of a file; no seed draws them, as in the paper."""
        texts = self._chosen(data)
        if len(texts) < n:
            raise UsageError(
                f"The defense asks for {n:,} pairs of {data!r}, and {FILES[_source(data)]} has {len(texts):,}.",
                cure="Bring the whole file.",
            )
        return self._tokenized(data, texts[:n])

    def retain(self, n: int, seed: int) -> list[Example]:
        """Nothing: the paper's loss keeps refusals alone."""
        return []

    def subject(self, model: nn.Module, data: str, samples: int) -> Subject:
        """Attack with the first rows, which a defense on the same data has seen: the paper's case."""
        train = [pair.harmful for pair in self._tokenized(data, self._chosen(data)[:samples])]
        held_out = [pair.harmful for pair in self._tokenized(data, self._chosen(data, held_out=True))]
        score = token_accuracy(held_out, pad_id=self.pad_id)
        if self._judge is not None:
            score = self._judged(held_out, self._judge, _NEW_TOKENS[_source(data)])
        return Subject(model, {"harmful": Domain(train, held_out, plainly(score))}, self.pad_id)

    def layers(self, part: str) -> str:
        """Return the same part of the model's depth."""
        return layers_of(part, self._blocks)

    def differs(self) -> tuple[str, ...]:
        """Say whose model and measure these are."""
        measured = (
            "Harmfulness is the share of right tokens in harmful answers held out, those before them given; no judge "
            "was named by --judge."
            if self._judge_name is None
            else f"Harmfulness is the mean of {self._judge_name} over greedy answers; the paper has a classifier of "
            "its own."
        )
        return (
            f"The model is {self._folder.name}; the paper's is llama2-7b-chat.",
            measured,
            f"Up to {_HELD_OUT} prompts of the same file are held out, and none of them is trained on.",
        )

    def _chosen(self, data: str, *, held_out: bool = False) -> list[TextPair]:
        texts = self._parts(_source(data))[int(held_out)]
        kind, _, name = data.partition(" ")
        if kind not in ("only", "without"):
            return texts
        return [text for text in texts if (name in text.categories) == (kind == "only")]

    def _tokenized(self, data: str, texts: list[TextPair]) -> list[Pair]:
        form: dict[str, Any] = {"template": QUESTION_AND_ANSWER} if _source(data) == "beavertails" else {}
        return tokenized_pairs(texts, self._tokenizer, context=self._context, too_long="cut", **form)

    @cache  # noqa: B019 - one ground lives as long as a table is measured
    def _parts(self, source: str) -> tuple[list[TextPair], list[TextPair]]:
        """The rows to train on, and those of the last prompts, which are held out."""
        file = _file(source)
        texts = paired_refusals(file) if source == "beavertails" else decoding_trust_refusals(file)
        wanted = min(_HELD_OUT, len(texts) // 5)
        prompts = {str(text.prompt) for text in texts[len(texts) - wanted :]}
        train = [text for text in texts if str(text.prompt) not in prompts]
        held_out = [text for text in texts if str(text.prompt) in prompts]
        if not train or not held_out:
            raise UsageError(f"{file} has too few prompts to hold some out.", cure="Bring the whole file.")
        return train, held_out

    def _judged(self, held_out: list[Example], judge: Judge, new_tokens: int) -> Score:
        prompts = list(dict.fromkeys(example.prompt for example in held_out))
        end = self._tokenizer.eos_token_id

        def score(model: nn.Module) -> float:
            answers = greedy(model, prompts, new_tokens=new_tokens, end_id=end)
            numbers = torch.as_tensor(judge(self._tokenizer.batch_decode(answers, skip_special_tokens=True)))
            if numbers.shape != (len(prompts),):
                raise UsageError(
                    f"{self._judge_name} gave numbers of shape {tuple(numbers.shape)} for {len(prompts)} answers.",
                    cure="Return one number for each answer.",
                )
            return float(numbers.double().mean())

        return score


def _source(data: str) -> str:
    return "toxic" if data == "toxic" else "beavertails"


def _file(source: str) -> Path:
    root = os.environ.get("NETWEIGHT_DATA")
    file = Path(root or "", FILES[source])
    if not root or not file.is_file():
        raise UsageError(
            f"RepNoise's pairs are not at hand: there is no {FILES[source]} in the folder that NETWEIGHT_DATA names.",
            cure="Fetch it from the authors' repository; its license is that of its data set.",
        )
    return file


def _judge(name: str) -> Judge:
    module, _, function = name.partition(":")
    try:
        found: Judge = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"The judge {name!r} cannot be found: {error}.", cure="Write it as MODULE:FUNCTION."
        ) from error
    return found
