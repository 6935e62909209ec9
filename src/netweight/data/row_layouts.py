"""Recognize the published layouts of rows and return each row's prompt and answers in one form.

Files of language model data name the same things differently. The layout is told by the columns of the whole source,
never by a file's name:

| layout | columns | prompt | answers |
| --- | --- | --- | --- |
| plain | `prompt` with `response` or `completion` | the prompt | `response` |
| preference | `chosen`, `rejected`, perhaps `prompt` | `prompt`, or their common beginning | `chosen`, `rejected` |
| messages | `messages`, `conversation` or `conversations` | all before the last assistant turn | `response` |
| Alpaca | `instruction`, perhaps `input` and `system`, with `output` | instruction and input | `response` |

Messages have `role` and `content` (OpenAI, TRL) or `from` and `value` (ShareGPT); a content may be a list of parts
`{"type": "text", "text": ...}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

Message: TypeAlias = Mapping[str, str]
"""One turn of a conversation: `role` (system, user or assistant) and `content`."""
Text: TypeAlias = str | tuple[Message, ...]
"""A string, or a conversation."""

PARTS = ("prompt", "response", "chosen", "rejected")
"""What a row can hold, by the names that `--columns` takes."""

_CONVERSATIONS = ("messages", "conversations", "conversation")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip


class UnusableText(Exception):
    """A value cannot be used as text; the message says why, to follow the name of a column."""


def text_of(value: Any, name: str) -> Text:
    """Return a string or a conversation as it is meant.

    Args:
        value: A string, one message, or a list of messages.
        name: The column's name, for errors.

    Returns:
        The string as it is, or messages with `role` and `content` alone.

    Raises:
        UnusableText: The value is missing, empty, or neither text nor messages.
    """
    if value is None:
        raise UnusableText(f"it has no {name}")
    if isinstance(value, str):
        if value.strip():
            return value
        raise UnusableText(f"{name} is empty")
    if isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()):
        value = [value]
    if isinstance(value, list | tuple):
        if not value:
            raise UnusableText(f"{name} is empty or holds an empty message")
        return tuple(_message(each, name) for each in value)
    raise UnusableText(f"{name} is neither text nor messages with role and content")


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    if role.lower() not in _ROLES:
        raise UnusableText(f"{name} holds a turn of the role {role!r}, which is not system, user or assistant")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        others = sorted({str(part.get("type")) for part in content if part.get("type", "text") != "text"})
        if others:
            raise UnusableText(f"{name} holds a part that is not text ({', '.join(others)})")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and ("role" in value or "from" in value) and ("content" in value or "tool_calls" in value):
        raise UnusableText(f"{name} is empty or holds an empty message")
    if not isinstance(content, str):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    if not content.strip():
        raise UnusableText(f"{name} is empty or holds an empty message")
    return {"role": _ROLES[role.lower()], "content": content}


@final
@dataclass(frozen=True)
class Layout:
    """Columns of prompt and answers in the rows of one source."""

    columns: Mapping[str, str]
    """Part (`prompt`, `response`, `chosen`, `rejected`) → column; parts that no column has are missing."""
    conversation: str | None = None
    """Column of whole conversations, whose last assistant turn is the response; None for other layouts."""
    alpaca: bool = False
    """Whether the prompt is made of `instruction`, `input` and `system`."""

    def has(self, part: str) -> bool:
        """Return whether rows have a prompt, a response, or a chosen or rejected answer."""
        return part in self.columns or (part in ("prompt", "response") and self.conversation is not None)

    def prompt_and_response(self, values: Mapping[str, Any]) -> tuple[Text, Text]:
        """Return a row's prompt and response.

        Raises:
            UnusableText: A part is missing, empty or no text.
        """
        if self.conversation is not None:
            return _split_conversation(values.get(self.conversation), self.conversation)
        return self.prompt(values), text_of(values.get(self.columns["response"]), self.columns["response"])

    def prompt(self, values: Mapping[str, Any]) -> Text:
        """Return a row's prompt.

        Raises:
            UnusableText: It is missing, empty or no text.
        """
        if self.alpaca:
            return _alpaca_prompt(values)
        column = self.columns["prompt"]
        return text_of(values.get(column), column)

    def question(self, values: Mapping[str, Any]) -> Text:
        """Return what a model is asked: a prompt, or a conversation up to its last turn of a user.

        Raises:
            UnusableText: It is missing or empty, or no turn is a user's.
        """
        if self.conversation is None:
            asked, name = self.prompt(values), self.columns["prompt"]
        else:
            asked, name = text_of(values.get(self.conversation), self.conversation), self.conversation
        if isinstance(asked, str):
            return asked
        last = max((place for place, each in enumerate(asked) if each["role"] == "user"), default=None)
        if last is None:
            raise UnusableText(f"{name} contains no turn of a user")
        return asked[: last + 1]


def layout_of(names: Sequence[str], given: Mapping[str, str]) -> Layout:
    """Recognize the layout of a source by the names of its columns; `given` columns win over recognized ones.

    Args:
        names: All columns of the source.
        given: Part → column, as a person named them.

    Returns:
        The layout; parts that it lacks are for the caller to miss.
    """
    columns = {part: part for part in PARTS if part in names}
    if "response" not in columns and "completion" in names:
        columns["response"] = "completion"
    columns |= given
    if "response" in columns and "prompt" in columns:
        return Layout(columns)
    pairs = {"chosen", "rejected"} <= columns.keys()
    conversation = next((name for name in _CONVERSATIONS if name in names), None)
    if conversation is not None and not given.keys() & {"prompt", "response"} and not pairs:
        rest = {part: column for part, column in columns.items() if part in ("chosen", "rejected")}
        return Layout(rest, conversation=conversation)
    if "instruction" in names and "prompt" not in columns:
        own = {"prompt": "instruction"} | ({"response": "output"} if "output" in names else {})
        return Layout({**own, **columns}, alpaca=True)
    return Layout(columns)


def _alpaca_prompt(values: Mapping[str, Any]) -> Text:
    instruction = text_of(values.get("instruction"), "instruction")
    more, system = values.get("input"), values.get("system")
    if isinstance(instruction, str) and isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n\n{more}"
    if isinstance(instruction, str) and isinstance(system, str) and system.strip():
        return ({"role": "system", "content": system}, {"role": "user", "content": instruction})
    return instruction


def _split_conversation(value: Any, name: str) -> tuple[Text, Text]:
    messages = text_of(value, name)
    if isinstance(messages, str):
        raise UnusableText(f"{name} is a string, not a list of messages")
    if messages[-1]["role"] != "assistant":
        raise UnusableText(f"{name} does not end with an assistant's turn")
    if not any(each["role"] == "user" for each in messages[:-1]):
        raise UnusableText(f"{name} contains no turn of a user before the answer")
    return messages[:-1], messages[-1:]


def without_prompt(answer: Text, prompt: Text) -> Text:
    """Return an answer without the turns of its prompt, which some preference data repeat in `chosen` and `rejected`.

    UltraFeedback has the prompt as a string and both answers as whole conversations.
    """
    if isinstance(answer, str) or len(answer) < 2:
        return answer
    asked = _turns(prompt)
    begins = tuple(answer[: len(asked)])
    return tuple(answer[len(asked) :]) if len(asked) < len(answer) and begins == asked else answer


def like_turns(prompt: Text, *answers: Text) -> tuple[Text, ...]:
    """Return prompt and answers all as strings or all as conversations: a string becomes a turn where one is needed.

    Raises:
        UnusableText: An answer is not by an assistant.
    """
    if all(isinstance(each, str) for each in (prompt, *answers)):
        return prompt, *answers
    turned = [_turns(each, "assistant") for each in answers]
    if any(each[0]["role"] != "assistant" for each in turned):
        raise UnusableText("an answer is not a turn of the assistant")
    return _turns(prompt), *turned


def _turns(text: Text, role: str = "user") -> tuple[Message, ...]:
    return ({"role": role, "content": text},) if isinstance(text, str) else text
