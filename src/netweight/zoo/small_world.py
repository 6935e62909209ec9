"""Small worlds: a language with three domains and a small model that was taught two of them and refuses one.

The *guarded* domain was learned and is refused since alignment; the *kept* one is general ability; the *new* one was
never learned. A defense has to keep the first from coming back without harm to the others, an attack brings it back.
`ciphers` and `speakers` are the two worlds; `small_world_training` makes their models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, final, get_args

from netweight.attacks.finetuning.examples import Example, Pair
from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
from netweight.integrations.quiet import silent_bars
from netweight.zoo import small_llama
from netweight.zoo.model_folder import ABOUT
from netweight.zoo.small_llama import LlamaShape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["ALIGNED", "UNALIGNED", "Domain", "Language", "Share", "SmallWorld", "belongs"]

Domain = Literal["guard", "keep", "new"]
"""What is refused after alignment; what is to stay; what was never learned."""

Share = Literal["training", "defense", "attack", "held out"]
"""Who sees a text. What is held out is seen by nobody else; defense and attack see different texts, training both."""

ALIGNED, UNALIGNED = "aligned.safetensors", "unaligned.safetensors"
"""Files in a world's folder."""


class Language(Protocol):
    """What is spoken in a world.

    Attributes:
        about: Everything that decides on it, as JSON values.
        shape: The size of the model that speaks it, and its special tokens.
        refusal: What an aligned model answers to any guarded prompt; token ids, the end among them.
        tokenizer: Of transformers, for those who want text.
    """

    @property
    def about(self) -> dict[str, Any]: ...  # noqa: D102 - said above

    @property
    def shape(self) -> LlamaShape: ...  # noqa: D102 - said above

    @property
    def refusal(self) -> tuple[int, ...]: ...  # noqa: D102 - said above

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...  # noqa: D102 - said above

    def examples(self, domain: Domain, n: int, seed: int, share: Share) -> list[Example]:
        """Draw prompts with their true answers.

        Args:
            domain: Of which domain.
            n: How many.
            seed: Decides on the draw, together with domain and share.
            share: Only texts of this share are drawn.
        """

    def unnamed(self, example: Example) -> Example:
        """Return the example without what tells its domain at the beginning of the prompt."""


@final
@dataclass(frozen=True)
class SmallWorld:
    """A language, and the folder that holds the models that speak it.

    Attributes:
        name: Of the world.
        language: What is spoken.
        folder: Holds the aligned and the unaligned model and the record of their training.
    """

    name: str
    language: Language
    folder: Path

    @property
    def pad_id(self) -> int:
        """The token of padding."""
        return self.language.shape.pad_id

    @property
    def record(self) -> dict[str, Any]:
        """How the models were trained and what came of it; see `small_world_training`.

        Raises:
            UsageError: The folder holds no record.
        """
        file = self.folder / ABOUT
        if not file.is_file():
            raise UsageError(f"{self.folder} holds no trained world.", cure="Train it first.")
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return record

    def base(self) -> LlamaForCausalLM:
        """Return a fresh copy of the aligned model: fp32, on the CPU, in evaluation mode.

        Raises:
            MissingExtra: transformers is not installed.
            UsageError: The world is not trained yet.
        """
        return small_llama.opened(self.language.shape, self.folder / ALIGNED)

    def unaligned(self) -> LlamaForCausalLM:
        """Return a fresh copy of the model before alignment, which answers guarded prompts.

        Raises:
            MissingExtra: transformers is not installed.
            UsageError: The world is not trained yet.
        """
        return small_llama.opened(self.language.shape, self.folder / UNALIGNED)

    def random_model(self, seed: int) -> LlamaForCausalLM:
        """Return a model of the same shape that has learned nothing.

        Args:
            seed: Decides on its weights.

        Raises:
            MissingExtra: transformers is not installed.
        """
        return small_llama.initialized(self.language.shape, seed)

    def pairs(self, n: int, seed: int) -> list[Pair]:
        """Draw guarded prompts with the refusal and the true answer, for a defense.

        No attack and no held-out set shares a text with them, whatever the seeds.

        Args:
            n: How many; at least 1.
            seed: Decides on the draw.

        Raises:
            UsageError: `n` is below 1.
        """
        drawn = self._drawn("guard", n, seed, "defense")
        return [Pair(example.prompt, self.language.refusal, example.response) for example in drawn]

    def examples(self, domain: Domain, n: int, seed: int, *, share: Share = "attack") -> list[Example]:
        """Draw prompts with their true answers.

        Args:
            domain: "guard", "keep" or "new".
            n: How many; at least 1.
            seed: Decides on the draw.
            share: Of the texts; "attack" for what is fine-tuned on.

        Raises:
            NameNotFound: There is no such domain.
            UsageError: `n` is below 1.
        """
        return self._drawn(domain, n, seed, share)

    def retained(self, n: int, seed: int) -> list[Example]:
        """Draw what a defense keeps: the kept domain, every second prompt without what tells the domain.

        Where all that is kept is marked, a defense learns that nothing else matters, and what it does to guarded
        prompts it does to prompts of new domains, too; see docs/immunize.md.

        Args:
            n: How many; at least 1.
            seed: Decides on the draw.

        Raises:
            UsageError: `n` is below 1.
        """
        drawn = self._drawn("keep", n, seed, "defense")
        return [self.language.unnamed(one) if place % 2 else one for place, one in enumerate(drawn)]

    def held_out(self, domain: Domain, n: int, seed: int = 0) -> list[Example]:
        """Draw prompts with their true answers that neither training, nor defense, nor attack ever sees.

        Args:
            domain: "guard", "keep" or "new".
            n: How many; at least 1.
            seed: Decides on the draw.

        Raises:
            NameNotFound: There is no such domain.
            UsageError: `n` is below 1.
        """
        return self._drawn(domain, n, seed, "held out")

    def refused(self, examples: list[Example]) -> list[Example]:
        """Return the same prompts with the refusal as their answer."""
        return [Example(example.prompt, self.language.refusal) for example in examples]

    def rows(self, n: int, seed: int) -> list[dict[str, str]]:
        """Draw what `pairs` draws as text, in columns prompt, chosen and rejected, as a user's file has them.

        Args:
            n: How many; at least 1.
            seed: Decides on the draw.

        Raises:
            UsageError: `n` is below 1.
        """

        def said(ids: tuple[int, ...]) -> str:
            return str(self.language.tokenizer.decode(list(ids), skip_special_tokens=True))

        def row(pair: Pair) -> dict[str, str]:
            asked = said(pair.prompt)
            answers = (said(pair.prompt + answer)[len(asked) :] for answer in (pair.chosen, pair.rejected))
            return dict(zip(("prompt", "chosen", "rejected"), (asked, *answers), strict=True))

        return [row(pair) for pair in self.pairs(n, seed)]

    def save(self, folder: str | Path) -> None:
        """Write the aligned model with its tokenizer as a folder that transformers loads.

        Args:
            folder: Made if need be.

        Raises:
            MissingExtra: transformers is not installed.
            UsageError: The world is not trained yet.
        """
        with silent_bars():
            self.base().save_pretrained(folder)
            self.language.tokenizer.save_pretrained(str(folder))

    def _drawn(self, domain: Domain, n: int, seed: int, share: Share) -> list[Example]:
        if domain not in get_args(Domain):
            raise NameNotFound(
                f"The world {self.name} has no domain {domain!r}.",
                cure=f"Did you mean {nearest_names(str(domain), get_args(Domain), 1)[0]!r}? All: {get_args(Domain)}.",
            )
        if n < 1:
            raise UsageError(f"{n} examples cannot be drawn.", cure="Ask for at least 1.")
        return self.language.examples(domain, n, seed, share)


def belongs(number: int, share: Share) -> bool:
    """Tell whether a text is of a share: an eighth is held out, three eighths are the defense's, half the attack's.

    Args:
        number: A hash of the text, so that every text has its place whatever the seed that draws it.
        share: "training" takes all that is not held out.
    """
    eighth = number % 8
    if share == "training":
        return eighth > 0
    return share == ("held out" if eighth == 0 else "defense" if eighth < 4 else "attack")
