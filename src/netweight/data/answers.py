"""Read what a language model answered: the final answer after its thoughts, in a form that phrases can be found in."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

_ENDS = ("</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]", "<|END_THINKING|>", "◁/think▷")
_BEGINS = ("<think>", "<thinking>", "<thought>", "<reasoning>", "[THINK]", "<|START_THINKING|>", "◁think▷")
_FINAL_CHANNEL = "<|channel|>final<|message|>"
_CHANNEL = "<|channel|>"
_SAME = str.maketrans({
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\u02b9\u2032\u0060\u00b4\uff07", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\uff02", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
})  # fmt: skip


@final
@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    text: str
    """The final answer, after the model's thoughts; empty where a thought did not end."""
    finished: bool
    """Whether the thoughts ended, or there were none."""


def final_answer(text: str, *, in_thought: bool = False) -> Answer:
    """Return what a model answered after its thoughts.

    Args:
        text: All that the model wrote, special tokens of thoughts included.
        in_thought: Whether the prompt had opened a thought already.

    Returns:
        The text after the last end of a thought. A thought that did not end has no answer.
    """
    if _FINAL_CHANNEL in text:
        return Answer(re.split(r"<\|(?:end|return)\|>", text.rpartition(_FINAL_CHANNEL)[2])[0].strip(), True)
    if _CHANNEL in text:
        return Answer("", False)
    end, length = max((text.rfind(mark), len(mark)) for mark in _ENDS)
    begin = max(text.rfind(mark) for mark in _BEGINS)
    if end >= 0 and begin < end:
        return Answer(text[end + length :].strip(), True)
    if begin >= 0 or in_thought:
        return Answer("", False)
    return Answer(text.strip(), True)


def thought_marks() -> tuple[str, ...]:
    """Return the texts that begin and end thoughts, which tokenizers may hold as special tokens."""
    return (*_BEGINS, *_ENDS, _CHANNEL, "<|message|>", "<|end|>", "<|return|>", "<|start|>")


def normalized(text: str) -> str:
    """Return text in a form in which phrases are found however they are typed.

    Apostrophes, quotation marks and dashes become the ASCII ones, all spaces single ones, invisible characters vanish,
    and letters lose their case.
    """
    return " ".join(unicodedata.normalize("NFKC", text.translate(_SAME)).translate(_SAME).casefold().split())


def holds_phrase(text: str, phrases: Iterable[str]) -> bool:
    """Return whether a text holds one of some phrases, both normalized."""
    plain = normalized(text)
    return any(normalized(phrase) in plain for phrase in phrases)
