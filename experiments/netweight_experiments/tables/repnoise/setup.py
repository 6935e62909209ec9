"""Where RepNoise's tables are measured: a model, pairs for defenses, data for attacks, and a measure of harm.

Tables speak in the paper's rates and counts; a setup says what they are here. `Ciphers` is the miniature: harm is a
guarded cipher that the model was taught to refuse, ability a second cipher, the benign task a third one that it never
learned; everything in it is innocuous. `Files` is the paper's size on a model folder that the user has.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from netweight.attacks.finetuning.settings import Precision
from netweight.attacks.finetuning.subject import Domain, Judge, Score, Subject, judged, token_accuracy
from netweight.core.lazy import import_named
from netweight.data.public import decoding_trust_refusals, paired_refusals
from netweight.data.text import TextPair
from netweight.data.tokens import QUESTION_AND_ANSWER, AnswerPair, Example, padding_of, tokenized_pairs
from netweight.errors import UsageError
from netweight.hf.generate_answers import generate_answers
from netweight.hf.load_language_model import context_of, load_causal_lm, structure_of
from netweight.methods.immunize.defenses.security_vectors import without_security_vectors
from netweight.toys.language import Domain as WorldDomain
from netweight.toys.language import Share, cipher_world
from netweight_experiments.tables.registry import Scale

_LAYERS = 32
# The data that defenses and attacks are about.
HARMFUL = "harmful"


class Setup(Protocol):
    """A place to defend and attack in."""

    model_name: str  # which model; its folder, or "" for the one that comes with netweight
    measure: str  # what harm is measured by, if there is a choice
    harm: str  # the unit of harm, in words
    share: float  # share of the paper's numbers of pairs and samples that is taken
    rate: float  # what the paper's learning rates are multiplied by
    defense_batch: int  # pairs per step of a defense
    attack_batch: int  # examples per step of an attack
    benign_share: float  # share of an attack's batch that is benign
    precision: Precision
    look_every: int  # steps of an attack between two looks; 0 looks at the end alone
    pad_id: int  # the token of padding

    @property
    def categories(self) -> tuple[str, ...]: ...

    def model(self, start: str) -> nn.Module:
        """Return a fresh model in evaluation mode: "aligned", or "unaligned" before it was taught to refuse."""

    def pairs(self, data: str, n: int, seed: int) -> list[AnswerPair]:
        """Return pairs for a defense."""

    def retain(self, n: int, seed: int) -> list[Example]:
        """Return what a defense is to keep besides; may be empty."""

    def subject(self, model: nn.Module, data: str, samples: int) -> Subject:
        """Return a model as a subject of attacks, whose domain "harmful" is the data."""

    def layers(self, part: str) -> str:
        """Return the layers that the paper's name of a part means here, as `freezing.block_numbers` reads them."""

    def differs(self) -> tuple[str, ...]:
        """Say how this differs from the paper's set-up, one sentence each."""

    def __hash__(self) -> int:
        """By identity: a model that is at hand is at hand for one setup."""


def setup_of(scale: Scale, model: str | None = None, judge: str | None = None) -> Setup:
    """Open the setup of a scale."""
    if scale == "small":
        if model is not None or judge is not None:
            raise UsageError(
                "The small scale of RepNoise's tables has a model and a measure of its own.",
                cure="Give --model and --judge together with --scale paper.",
            )
        return Ciphers()
    if model is None:
        raise UsageError(
            "RepNoise's tables at the paper's scale are measured on a model that you have.",
            cure="Give --model FOLDER, such as that of llama2-7b-chat.",
        )
    return Files(model, judge)


def standing_in(value: float, factor: float) -> float:
    """Return a rate of the paper as it is here, rounded so that equal settings stay equal."""
    return float(f"{value * factor:.6g}") if math.isfinite(value) else value


def share_of(setup: Setup, share: float | None) -> float:
    """Return the share of the paper's numbers that is taken: the setup's, or another one for a try."""
    if share is not None and not share > 0:
        raise UsageError(f"A share of {share} of the paper's numbers cannot be taken.", cure="Give one above 0.")
    return setup.share if share is None else share


def layers_of(part: str, blocks: int) -> str:
    """Return the layers of a model that are the paper's part of 32."""
    named = {"LM head": "head", "last layer": "last", "every layer": f"0-{blocks - 1}"}
    if part in named:
        return named[part]
    first, last = (int(number) for number in part.removeprefix("layers ").split("-"))
    end = blocks - 1 if last == _LAYERS - 1 else round(last / _LAYERS * blocks)
    return f"{round(first / _LAYERS * blocks)}-{end}"


def plainly(score: Score) -> Score:
    """Return a score that looks at a model without its security vector, as whoever took the model home has it."""

    def bare(model: nn.Module) -> float:
        with without_security_vectors(model):
            return score(model)

    return bare


TOKENS = "share of right tokens"  # what harm is measured by where there is no judge
_CATEGORIES = ("0", "1", "2", "3")
_HELD_OUT = 128
_SEED = 0


class Ciphers:
    """The setup of the small scale; see `Setup`."""

    def __init__(self) -> None:
        self.model_name = self.measure = ""
        self.harm = TOKENS
        self.share = 0.2
        self.rate = 15.0
        self.defense_batch = 12
        self.attack_batch = 16
        self.benign_share = 0.5
        self.precision: Precision = "fp32"
        self.look_every = 5
        self.categories: tuple[str, ...] = _CATEGORIES
        self.world = cipher_world()
        self.pad_id = self.world.pad_id

    def model(self, start: str) -> nn.Module:
        """Return a fresh copy of the model that comes with netweight."""
        return self.world.base() if start == "aligned" else self.world.unaligned()

    def pairs(self, data: str, n: int, seed: int) -> list[AnswerPair]:
        """Draw prompts with the refusal and the true answer; the other domain is the cipher never learned."""
        drawn = self._drawn("new" if data == "other" else "guard", data, n, seed, "defense")
        return [AnswerPair(example.prompt, self.world.language.refusal, example.response) for example in drawn]

    def retain(self, n: int, seed: int) -> list[Example]:
        """Draw messages of the kept cipher, every second one without its marker."""
        return self.world.retained(n, seed)

    def subject(self, model: nn.Module, data: str, samples: int) -> Subject:
        """Attack with the guarded cipher, one of its categories, or train the new one as a task."""
        domain: WorldDomain = "new" if data == "task" else "guard"
        train = self._drawn(domain, data, samples, _SEED, "attack")
        held_out = self._drawn(domain, data, _HELD_OUT, _SEED, "held out")
        kept = self.world.examples("keep", samples, _SEED)
        task = self.world.examples("new", samples, _SEED)
        benign = (
            [example for both in zip(kept, task, strict=True) for example in both] if data == "after task" else kept
        )
        return Subject(
            model,
            {"harmful": Domain(train, held_out, plainly(token_accuracy(held_out, pad_id=self.pad_id)))},
            self.pad_id,
            benign=benign,
            ability=plainly(token_accuracy(self.world.held_out("keep", _HELD_OUT, _SEED), pad_id=self.pad_id)),
        )

    def layers(self, part: str) -> str:
        """Return the same part of four blocks."""
        return layers_of(part, self.world.language.shape.layers)

    def differs(self) -> tuple[str, ...]:
        """Say what stands in for what."""
        return (
            "A miniature and a stand-in: a Llama of 455,520 weights in 4 layers; a guarded cipher stands in for "
            "harmful answers, another cipher for general ability; everything in it is innocuous.",
            "Harmfulness is the share of right tokens in 128 guarded answers held out, those before them given: there "
            "is not a judge of harm and nothing is generated.",
            f"Learning rates are {self.rate:g} times the paper's, numbers of pairs and samples {self.share:g} of them; "
            f"{self.defense_batch} pairs a step in a defense, {self.attack_batch} examples in an attack.",
            "Half of every harmful batch is benign, so that the attacked model keeps its other ability; without it it "
            "collapses here. Weights are trained in float32, the paper's in bfloat16.",
            "Attack and defense have different texts; the paper's have the same, which favors the defense.",
            "All defenses keep the other cipher by a term of their loss, half of its prompts without a marker; the "
            "paper's keep refusals alone.",
        )

    def _drawn(self, domain: WorldDomain, data: str, n: int, seed: int, share: Share) -> list[Example]:
        """Draw examples, of one category or all but one if the data say so."""
        kind, _, name = data.partition(" ")
        if kind not in ("only", "without"):
            return self.world.examples(domain, n, seed, share=share)
        if name not in _CATEGORIES:
            raise UsageError(f"There is no category {name!r}.", cure=f"There are {', '.join(_CATEGORIES)}.")
        wanted = n * 2 * len(_CATEGORIES) + 64
        many = self.world.examples(domain, wanted, seed, share=share)
        of = {one: _CATEGORIES[one.response[0] % len(_CATEGORIES)] for one in many}  # by a message's first letter
        return [one for one in many if (of[one] == name) == (kind == "only")][:n]


# Below `NETWEIGHT_DATA`, as RepNoise's authors published them.
FILES = {
    "beavertails": "beavertails/beavertails_with_refusals_train.json",
    "toxic": "decoding_trust/decoding_trust_with_refusals_train.json",
}
_HELD_OUT_PROMPTS = 300
_CONTEXT = 256
_NEW_TOKENS = {"beavertails": 50, "toxic": 25}


class Files:
    """The setup of the paper's scale; see `Setup`."""

    def __init__(self, model: str, judge: str | None) -> None:
        self._folder = Path(model).resolve()
        self._judge_name, self._judge = judge, None if judge is None else import_named(judge, "The judge")
        self.model_name = str(self._folder)
        self.measure = judge or "token accuracy"
        self.harm = f"mean of {judge}" if judge else TOKENS
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

    def pairs(self, data: str, n: int, seed: int) -> list[AnswerPair]:
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
            f"Up to {_HELD_OUT_PROMPTS} prompts of the same file are held out, and none of them is trained on.",
        )

    def _chosen(self, data: str, *, held_out: bool = False) -> list[TextPair]:
        texts = self._parts(_source(data))[int(held_out)]
        kind, _, name = data.partition(" ")
        if kind not in ("only", "without"):
            return texts
        return [text for text in texts if (name in text.categories) == (kind == "only")]

    def _tokenized(self, data: str, texts: list[TextPair]) -> list[AnswerPair]:
        form: dict[str, Any] = {"template": QUESTION_AND_ANSWER} if _source(data) == "beavertails" else {}
        return tokenized_pairs(texts, self._tokenizer, context=self._context, too_long="cut", **form)

    @cache  # noqa: B019 - one setup lives as long as a table is measured
    def _parts(self, source: str) -> tuple[list[TextPair], list[TextPair]]:
        """The rows to train on, and those of the last prompts, which are held out."""
        file = _file(source)
        texts = paired_refusals(file) if source == "beavertails" else decoding_trust_refusals(file)
        wanted = min(_HELD_OUT_PROMPTS, len(texts) // 5)
        prompts = {str(text.prompt) for text in texts[len(texts) - wanted :]}
        train = [text for text in texts if str(text.prompt) not in prompts]
        held_out = [text for text in texts if str(text.prompt) in prompts]
        if not train or not held_out:
            raise UsageError(f"{file} has too few prompts to hold some out.", cure="Bring the whole file.")
        return train, held_out

    def _judged(self, held_out: list[Example], judge: Judge, new_tokens: int) -> Score:
        prompts: Any = list(dict.fromkeys(example.prompt for example in held_out))
        end = self._tokenizer.eos_token_id

        def generate(model: nn.Module, asked: Any) -> list[str]:
            answers = generate_answers(model, asked, new_tokens=new_tokens, ends=(end,))
            return list(self._tokenizer.batch_decode(answers, skip_special_tokens=True))

        return judged(judge, generate, prompts)


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
