"""Render conversations through a tokenizer's chat template, once, so that a prompt is what the model is asked.

Templates differ in ways that turn rows into something else without a word. Here each way is handled or refused by name:
templates without a system role (its text goes before the first user turn), templates that require turns to alternate
(neighboring turns of one role are joined), templates that open a thought (the answer closes an empty thought),
templates that ignore `add_generation_prompt` (the header of the answer's turn belongs to the prompt), templates that
read a content only as a list of parts, and options that the template does not have. A template that writes the present
date gets the same one every day, so that the same rows are the same prompts tomorrow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from netweight.core.names import not_found
from netweight.data.answers import empty_thought, is_thought_mark, open_thought, part_thought
from netweight.data.row_layouts import Message, Text, UnusableText
from netweight.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "netweight-probe"
_NEXT_PROBE = "netweight-question"
# The date of all prompts: that of Llama's templates where no date is given. A macro before the template writes it; the
# line break behind the macro is not part of the text, as transformers trims blocks.
_DATE = datetime(2024, 7, 26)
_CLOCK = "{% macro strftime_now(format) %}{{ format"
_CLOCK += "".join(f" | replace('%{code}', '{_DATE.strftime('%' + code)}')" for code in "aAwdbBmyYHIpMSfjUW")
_CLOCK += f" | replace('%-d', '{_DATE.day}') | replace('%-m', '{_DATE.month}') }}}}{{% endmacro %}}\n"


@final
class ChatTemplate:
    """A tokenizer's chat template with options.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        options: Options of the template, such as `{"enable_thinking": False}`.

    Raises:
        UsageError: The tokenizer has no chat template.
        NameNotFound: The template has no such option.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise UsageError(
                "The tokenizer has no chat template, which conversations need.",
                cure="Put the model's chat_template.jinja into its folder (in Python, tokenizer.chat_template = ...), "
                "or give rows of plain text.",
            )
        self._tokenizer, self._options = tokenizer, dict(options or {})
        try:
            template = str(tokenizer.get_chat_template())
        except ValueError as error:
            named = ", ".join(tokenizer.chat_template)
            raise UsageError(
                f"The tokenizer has several chat templates ({named}), and none is the default.",
                cure="Save the tokenizer with one of them as tokenizer.chat_template.",
            ) from error
        self._variables = _variables(template)
        self._template = _CLOCK + template if "strftime_now" in template else template
        cure = "Restore chat_template.jinja, or chat_template in tokenizer_config.json."
        # True if a content is a list of parts, the only form that templates of multimodal models read.
        self._parts = False
        try:
            if not self._shows_probe():
                self._parts = True
                if not self._shows_probe():
                    raise UsageError("The tokenizer's chat template leaves out the user's turn.", cure=cure)
        except _TemplateRefusal as refusal:
            if refusal.broken:
                raise UsageError(
                    f"The tokenizer's chat template is not well-formed: {refusal}.", cure=cure
                ) from refusal
            self._parts = False
        for name in self._options:
            if name not in self._variables:
                raise not_found(f"The chat template has no option {name!r}.", name, self._variables)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return a conversation as text, up to where the model's answer begins.

        Raises:
            UnusableText: The template refuses the conversation in every form.
        """
        return self._sides(messages, ())[0]

    def prompt_and_answer(self, messages: Sequence[Message], answer: Sequence[Message]) -> tuple[str, str]:
        """Return a conversation as text up to the answer, and the answer as text with the end of its turn.

        Args:
            messages: The conversation before the answer.
            answer: Turns of the answer, the first an assistant's.

        Raises:
            UnusableText: The template refuses the conversation in every form, or does not show the answer.
        """
        sides = self._sides(messages, answer)
        said = part_thought(answer[0]["content"])[1].split()
        if said and said[0] not in sides[1]:
            raise UnusableText("the chat template leaves out the assistant's answer")
        thoughts = (each.get("reasoning_content", "").strip() for each in answer)
        if not all(thought in sides[1] for thought in thoughts):
            raise UnusableText("the chat template leaves out the thought of the answer (reasoning_content)")
        return sides

    def _sides(self, messages: Sequence[Message], answer: Sequence[Message]) -> tuple[str, str]:
        error = ""
        for form in (_as_it_is, _system_first, _alternating):
            prompt = form(messages)
            try:
                before = self._render(prompt, add_generation_prompt=True)
                whole = self._render([*prompt, *answer], add_generation_prompt=False) if answer else ""
            except _TemplateRefusal as refusal:
                error = error or str(refusal)
                continue
            if form is _as_it_is and not _shows_system(prompt, before):
                continue
            before = before + self._header(prompt, before)
            return before, self._answer(before, whole, answer) if answer else ""
        raise UnusableText(f"the chat template refuses the conversation ({error or 'it leaves out the system turn'})")

    def _shows_probe(self) -> bool:
        return _PROBE in self._render([{"role": "user", "content": _PROBE}], add_generation_prompt=True)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        turns: list[dict[str, Any]] = [dict(message) for message in messages]
        if self._parts:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        # Families of models give the thought different names in their templates.
        for turn in turns:
            if "reasoning_content" in turn:
                turn |= dict.fromkeys(("reasoning", "thinking"), turn["reasoning_content"])
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=add_generation_prompt,
                    chat_template=self._template, **self._options,
                )
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, IndexError, KeyError) as error:
            broken, reason = isinstance(error, TemplateSyntaxError), str(error).strip() or type(error).__name__
            # An error that the template itself raises does not depend on its options.
            if self._variables and not (broken or type(error) is TemplateError):
                reason += f"; --template sets its options: {', '.join(self._variables)}"
            raise _TemplateRefusal(reason, broken) from error

    def _header(self, messages: Sequence[Message], before: str) -> str:
        """Return the header of the answer's turn where the template ignores `add_generation_prompt`."""
        try:
            if self._render(messages, add_generation_prompt=False) != before:
                return ""
            probed = self._render([*messages, {"role": "assistant", "content": _PROBE}], add_generation_prompt=False)
        except _TemplateRefusal:
            return ""
        place = probed.rfind(_PROBE)
        header = probed[len(before) : place] if probed.startswith(before) and place >= 0 else ""
        return header if header.strip() else ""

    def _answer(self, before: str, whole: str, answer: Sequence[Message]) -> str:
        """Return what the template writes after the prompt."""
        if whole.startswith(before):
            return whole[len(before) :]
        closed = empty_thought(before)
        if closed is not None and whole.startswith(before[:closed]):
            return whole[closed:]
        opened = open_thought(before)
        if opened is None or not whole.startswith(before[: opened.begin]):
            raise UnusableText("the chat template renders the prompt differently when an answer follows")
        rest = whole[opened.begin :]
        thought, said = part_thought(answer[0]["content"])
        # In this case the template leaves out the thought of an answer.
        if thought and opened.end not in rest:
            place = rest.find(said.strip())
            if not said.strip() or place < 0:
                raise UnusableText("the chat template does not show the answer after its thought")
            return thought + said[: len(said) - len(said.lstrip())] + rest[place:]
        return rest[len(opened.text) :] if rest.startswith(opened.text) else f"\n{opened.end}\n\n{rest}"

    def check_marks(self, messages: Sequence[Message], answer: Sequence[Message] = ()) -> None:
        """Refuse questions and answers that contain a mark of the template: they went through a template before.

        Args:
            messages: The conversation before the answer, of which earlier answers are not looked at.
            answer: Turns of the answer, without the end of the turn.

        Raises:
            UnusableText: A text contains a special token that the template writes around turns.
        """
        questions = [each for each in messages if each["role"] != "assistant"]
        for mark in self._marks:
            for name, turns in (("prompt", questions), ("answer", answer)):
                if any(mark in each["content"] for each in turns):
                    raise UnusableText(
                        f"its {name} contains {mark}, which the chat template writes itself, so that it would be put "
                        "into the template twice"
                    )

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        """Special tokens that the template writes around turns, except those of thoughts."""
        try:
            turns: list[Message] = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
            text = self._render(turns, add_generation_prompt=True)
        except _TemplateRefusal:
            return ()
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values())
        own = dict.fromkeys((*map(str, self._tokenizer.all_special_tokens), *added))
        return tuple(token for token in own if token and token in text and not is_thought_mark(token))

    def end_of_turn(self) -> str:
        """Return the text that the template writes after an assistant's answer; empty if none.

        The text of a turn's end is what a model learned to write when an answer is over, whatever the tokenizer calls
        its end of sequence. Some templates write no end, or none after the last answer: there the text between an
        answer and the next turn of the user is returned, such as GLM's mark of that turn.
        """
        return self._end

    @cached_property
    def _end(self) -> str:
        turns: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _PROBE}]
        try:
            whole = self._render(turns, add_generation_prompt=False)
        except _TemplateRefusal:
            return ""
        end = whole.rpartition(_PROBE)[2] if _PROBE in whole else ""
        if end.strip() or _PROBE not in whole:
            return end
        try:
            longer = self._render([*turns, {"role": "user", "content": _NEXT_PROBE}], add_generation_prompt=False)
        except _TemplateRefusal:
            return end
        between, found, _ = longer.rpartition(_PROBE)[2].partition(_NEXT_PROBE)
        return between if found else end


def note_on_unused_template(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Text], *, chat: bool) -> str:
    """Return a sentence that says that rows do not go through the tokenizer's chat template; empty if they do.

    Args:
        tokenizer: The model's.
        prompts: Prompts of the rows; conversations always go through the template.
        chat: Whether plain prompts do, too.
    """
    if chat or not tokenizer.chat_template or not any(isinstance(prompt, str) for prompt in prompts):
        return ""
    return (
        "The rows are plain text, so the tokenizer's chat template is not used. A model that is asked through its "
        "template may behave otherwise; --chat uses the template."
    )


class _TemplateRefusal(Exception):
    """The template raised an error for a conversation.

    Args:
        message: The error's own message.
        broken: Whether the template itself cannot be parsed, whatever the conversation.
    """

    def __init__(self, message: str, broken: bool) -> None:
        super().__init__(message)
        self.broken = broken


def _as_it_is(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """Put the text of system turns before the first user turn."""
    texts = [each["content"] for each in messages if each["role"] == "system"]
    turns = [each for each in messages if each["role"] != "system"]
    place = next((place for place, each in enumerate(turns) if each["role"] == "user"), None)
    if not texts or place is None:
        return turns
    first = {"role": "user", "content": "\n\n".join([*texts, turns[place]["content"]])}
    return [*turns[:place], first, *turns[place + 1 :]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Join neighboring turns of one role, after system turns went before the first user turn."""
    turns: list[Message] = []
    for each in _system_first(messages):
        if turns and turns[-1]["role"] == each["role"]:
            turns[-1] = {"role": each["role"], "content": f"{turns[-1]['content']}\n\n{each['content']}"}
        else:
            turns.append(each)
    return turns


def _shows_system(messages: Sequence[Message], text: str) -> bool:
    """Return whether the text of every system turn is in what the template made of it."""
    return all(each["content"].strip() in text for each in messages if each["role"] == "system")


def _variables(template: str) -> list[str]:
    """Return the names that a template reads and does not set: its options."""
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import loopcontrols

    given = {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"}
    try:
        parsed = Environment(extensions=[loopcontrols, _generation_extension()]).parse(template)
    except TemplateSyntaxError:
        return sorted(set(re.findall(r"[A-Za-z_]\w*", template)) - given)
    return sorted(meta.find_undeclared_variables(parsed) - given)


def _generation_extension() -> Any:
    """Return a jinja extension that reads the blocks `{% generation %}` of transformers as their content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body)

    return Generation
