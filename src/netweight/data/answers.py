"""Read what a language model answered: the final answer after its thoughts, in a form that phrases can be found in."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

# The begin and the end of a thought, as families write them: DeepSeek and Qwen, EXAONE, Seed, Magistral, Command,
# Kimi, Sky-T1, MedGemma, Gemma 4, and Granite, whose marks are plain text.
_THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<unused94>thought", "<unused95>"),
    ("<|channel>thought", "<channel|>"), ("Here is my thought process:", "Here is my response:"),
)  # fmt: skip
_BEGINS, _ENDS = (tuple(marks) for marks in zip(*_THOUGHTS, strict=True))
_OPEN = re.compile(rf"({'|'.join(map(re.escape, _BEGINS))})\s*\Z")
_EMPTY = re.compile("|".join(rf"{re.escape(begin)}\s*{re.escape(end)}\s*\Z" for begin, end in _THOUGHTS))
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_ANY_BEGIN = re.compile(rf"\A\s*(?:{'|'.join(map(re.escape, _BEGINS))})\s*")
# Marks of other families are recognized by their name: <reflection>, <|thinking|>, [REASONING], in any case.
_NAME = r"[\w:.-]*(?:think|thought|reasoning|reflect|scratchpad|monologue|analysis)[\w:.-]*"
# Other words in brackets are headings.
_SHORT = r"(?:think|thought|reasoning)[\w-]*"
_NAMED = re.compile(rf"<\|{_NAME}\|>|<{_NAME}>|\[{_SHORT}\]", re.IGNORECASE)
_NAMED_END = re.compile(rf"<\|(?:/|end_?(?:of_)?){_NAME}\|>|</{_NAME}>|\[/{_SHORT}\]", re.IGNORECASE)
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
    """True if the thoughts ended, or there were none."""


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
    ends = [(text.rfind(mark), len(mark)) for mark in _ENDS]
    begins = [text.rfind(mark) for mark in _BEGINS]
    ends += [(mark.start(), len(mark[0])) for mark in _NAMED_END.finditer(text)]
    begins += [named.start()] if (named := _NAMED.match(text, len(text) - len(text.lstrip()))) else []
    (end, length), begin = max(ends), max(begins)
    if end >= 0 and begin < end:
        return Answer(text[end + length :].strip(), True)
    if begin >= 0 or in_thought:
        return Answer("", False)
    return Answer(text.strip(), True)


def is_thought_mark(token: str) -> bool:
    """Return whether a token is a mark of thoughts or of channels, which must stay in a text that is read."""
    return token in thought_marks() or any(each.fullmatch(token) for each in (_NAMED, _NAMED_END))


@final
@dataclass(frozen=True)
class OpenThought:
    """A thought that the end of a prompt opens for the model."""

    begin: int
    """Position of the mark in the prompt."""
    text: str
    """The mark with the spaces after it."""
    end: str
    """The mark that closes the thought."""


def open_thought(prompt: str) -> OpenThought | None:
    """Return the thought that the end of a prompt opens; None if it opens none."""
    mark = _OPEN.search(prompt)
    return mark and OpenThought(mark.start(), mark.group(), dict(_THOUGHTS)[mark[1]])


def empty_thought(prompt: str) -> int | None:
    """Return where an empty thought begins with which a prompt ends; None if it does not end with one."""
    mark = _EMPTY.search(prompt)
    return mark and mark.start()


def part_thought(answer: str) -> tuple[str, str]:
    """Return the thought of an answer, with its end and without its begin, and what follows; ("", answer) without."""
    ends = list(_ANY_END.finditer(answer))
    if not ends:
        return "", answer
    return _ANY_BEGIN.sub("", answer[: ends[-1].end()]), answer[ends[-1].end() :]


def thought_marks() -> tuple[str, ...]:
    """Return the texts that begin and end thoughts, which tokenizers may hold as special tokens."""
    words = (mark for mark in (*_BEGINS, *_ENDS) if " " not in mark)
    marks = (mark.removesuffix("thought") if mark.endswith(">thought") else mark for mark in words)
    return (*marks, _CHANNEL, "<|message|>", "<|end|>", "<|return|>", "<|start|>")


def normalized(text: str) -> str:
    """Return text in a form in which phrases are found however they are typed.

    Apostrophes, quotation marks and dashes become the ASCII ones, all spaces single ones, invisible characters vanish,
    and letters lose their case.
    """
    return " ".join(unicodedata.normalize("NFKC", text.translate(_SAME)).translate(_SAME).casefold().split())


def holds_phrase(text: str, phrases: Iterable[str]) -> bool:
    """Return whether a text holds one of some phrases in whole words, both normalized.

    "I will not" is not in "I will note", and "I cannot" is not in "Hawaii cannot". Scripts without spaces between
    words, such as Chinese, and those that write particles onto words, such as Korean, have no such borders.
    """
    plain = normalized(text)
    return any(_holds_words(plain, phrase) for phrase in _all_normalized(tuple(phrases)))


# Callers ask about the same phrases for each of thousands of answers.
@lru_cache(maxsize=64)
def _all_normalized(phrases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(normalized, phrases))


def _holds_words(text: str, phrase: str) -> bool:
    place = text.find(phrase)
    while place >= 0:
        end = place + len(phrase)
        if not _in_one_word(text[place - 1 : place], phrase[:1]) and not _in_one_word(phrase[-1:], text[end : end + 1]):
            return True
        place = text.find(phrase, place + 1)
    return False


def _in_one_word(first: str, second: str) -> bool:
    """Return whether no word ends between two characters: both are digits or letters of a script with two cases."""
    return all(each.isdigit() or each.lower() != each.upper() for each in (first, second))
