"""Recognize the published layouts of rows and return each row's prompt and answers in one form.

Files of language model data name the same things differently. The layout is told by the columns of the whole source,
never by a file's name:

| layout | columns | prompt | answers |
| --- | --- | --- | --- |
| plain | `prompt` with `response` or `completion` | the prompt | `response` |
| preference | `chosen`, `rejected`, perhaps `prompt` or a conversation | that, or their common beginning | both |
| messages | `messages`, `conversation` or `conversations` | all before the last assistant turn | `response` |
| Alpaca | `instruction`, perhaps `input` or `context`, with `output` | instruction and input | `response` |

Messages have `role` and `content` (OpenAI, TRL) or `from` and `value` (ShareGPT); a content may be a list of parts
`{"type": "text", "text": ...}`. A column may hold messages as JSON text, or as lists of roles and of contents. The
thought before an answer is `reasoning_content`, `reasoning` or `thinking`. In every layout a column `system`,
`system_prompt` or `system_message` goes before the prompt, and so do the pairs of earlier questions and answers in a
column `history`.

What would change the meaning of a row and is not read, such as tools, pictures, calls of tools, a context that is not
in the prompt, or a mark that an answer is not to be learned, makes the row unusable: without it the model would be
asked or taught something else.
"""

from __future__ import annotations

import ast
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

Message: TypeAlias = Mapping[str, str]
"""One turn of a conversation: `role` (system, user or assistant) and `content`."""
Text: TypeAlias = str | tuple[Message, ...]
"""A string, or a conversation."""

PARTS = ("prompt", "response", "chosen", "rejected")
"""Parts of a row, by the names that `--columns` takes."""

_SYSTEMS = ("system", "system_prompt", "system_message")
# Columns of the input beside an instruction: Dolly says "context", HarmBench "ContextString".
_INPUTS = ("input", "context", "ContextString")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_UNREAD = ("tools", "functions", "images", "image", "videos", "video", "audios", "audio", "chat_template_kwargs")
"""Columns beside the text that change what a model is asked."""
_LEARNED = ("weight", "train", "training", "loss")
_CALLS = ("tool_calls", "function_call")
# Categories of spaces, control and format characters.
_INVISIBLE = ("Zs", "Zl", "Zp", "Cc", "Cf")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip


class UnusableText(Exception):
    """A value cannot be used as text.

    Args:
        reasons: The reasons, each to follow the name of a column.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def is_blank(text: str) -> bool:
    """Return whether a text has no visible character: only spaces, control and format characters (zero-width space)."""
    return not any(unicodedata.category(character) not in _INVISIBLE for character in text)


def text_of(value: Any, name: str) -> Text:
    """Return a string or a conversation as it is meant.

    Args:
        value: A string, one message, or a list of messages, which a table may hold as JSON text.
        name: The column's name, for errors.

    Returns:
        The string as it is, or messages with `role` and `content`, and `reasoning_content` where they have it.

    Raises:
        UnusableText: The value is missing, empty, or neither text nor messages.
    """
    if value is None:
        raise UnusableText(f"it has no {name}")
    if isinstance(value, str):
        if is_blank(value):
            raise UnusableText(f"{name} is empty")
        _check_characters(value, name)
        value = _messages_in(value)
        if isinstance(value, str):
            return value
    if isinstance(value, Mapping) and _is_message(value):
        value = _by_message(value)
    if isinstance(value, list | tuple):
        if not value:
            raise UnusableText(f"{name} is empty or contains an empty message")
        return tuple(_message(each, name) for each in value)
    raise UnusableText(f"{name} is neither text nor messages with role and content")


def _by_message(value: Mapping[str, Any]) -> Any:
    """Return the messages of one mapping: itself, or one of each place where its entries are lists of one length."""
    lists = {key: entry for key, entry in value.items() if isinstance(entry, list | tuple)}
    roles = value.get("role", value.get("from"))
    if not isinstance(roles, list | tuple) or {len(entry) for entry in lists.values()} != {len(roles)}:
        return [value]
    return [{key: entry[place] for key, entry in lists.items()} for place in range(len(roles))]


def _messages_in(text: str) -> Any:
    """Return the messages that a text is the JSON of, or Python's way of writing them; other texts as they are."""
    if not text.lstrip().startswith(("[{", "[ {", "[\n")):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, list) and value and all(isinstance(each, dict) and _is_message(each) for each in value):
            return value
    return text


def _is_message(value: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    role = value["from"] if value.get("role") is None and "from" in value else value.get("role")
    content = value["value"] if value.get("content") is None and "value" in value else value.get("content")
    if not isinstance(role, str):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    if role.lower() not in _ROLES:
        raise UnusableText(f"{name} contains a turn of the role {role!r}, which is not system, user or assistant")
    if any(value.get(key) for key in _CALLS):
        raise UnusableText(f"{name} contains a call of a tool, which is not supported")
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        content = "".join(_text_of_part(part, name) for part in content)
    if content is None and ("content" in value or "value" in value):
        raise UnusableText(f"{name} is empty or contains an empty message")
    if not isinstance(content, str):
        raise UnusableText(f"{name} is neither text nor messages with role and content")
    if is_blank(content):
        raise UnusableText(f"{name} is empty or contains an empty message")
    _check_characters(content, name)
    thought = next((text for key in _THOUGHTS if isinstance(text := value.get(key), str) and not is_blank(text)), None)
    _check_characters(thought or "", name)
    more = {} if thought is None else {"reasoning_content": thought}
    return {"role": _ROLES[role.lower()], "content": content, **more}


def _text_of_part(part: Mapping[str, Any], name: str) -> str:
    """Return the text of one part of a content; parts of other kinds are refused."""
    kind = part.get("type")
    text = part.get("text") if part.get("text") is not None else part.get("content")
    others = [key for key, entry in part.items() if key not in ("type", "text", "content") and entry is not None]
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise UnusableText(f"{name} contains a part that is not text ({kind or ', '.join(others) or 'of no type'})")
    return text


def _check_characters(text: str, name: str) -> None:
    """Refuse half of a pair of code units, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableText(f"{name} contains half of a character (a lone surrogate such as \\ud83d)") from error


def _check_learned(value: Any, name: str) -> None:
    """Refuse a conversation whose answer is marked as one that is not to be learned.

    The marks are OpenAI's weight, axolotl's train and training, and AgentInstruct's loss.

    The marks are of one message each, so a conversation is given as it was read.
    """
    messages = _messages_in(value) if isinstance(value, str) else value
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    if not isinstance(last, Mapping):
        return
    marks = [f"{key} {str(last[key]).lower()}" for key in _LEARNED if last.get(key) in (0, 0.0, False)]
    if marks:
        raise UnusableText(f"the answer of {name} is marked as not to be learned ({', '.join(marks)})")


def _check_unread(values: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Refuse a row with something beside its text that changes what a model is asked."""
    unread = [key for key in _UNREAD if key not in columns and _is_given(values.get(key))]
    if unread:
        raise UnusableText(f"it has {' and '.join(unread)} beside its text, which are not read")


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0) and value != "[]"


@final
@dataclass(frozen=True)
class PromptColumns:
    """Columns of prompt and answers in the rows of one source."""

    columns: Mapping[str, str]
    """Part (`prompt`, `response`, `chosen`, `rejected`) → column; parts that no column has are missing."""
    conversation: str | None = None
    """Column of whole conversations, whose last assistant turn is the response; None for other layouts."""
    alpaca: bool = False
    """True if the prompt is made of `instruction` and `input`."""

    def has(self, part: str) -> bool:
        """Return whether rows have a prompt, a response, or a chosen or rejected answer."""
        return part in self.columns or (part in ("prompt", "response") and self.conversation is not None)

    def prompt_and_response(self, values: Mapping[str, Any]) -> tuple[Text, Text]:
        """Return a row's prompt and response.

        Raises:
            UnusableText: A part is missing, empty or no text.
        """
        if self.conversation is not None:
            _check_learned(values.get(self.conversation), self.conversation)
            prompt, response = _split_conversation(values.get(self.conversation), self.conversation)
            return _after_context(prompt, values, self), response
        return self.prompt(values), text_of(values.get(self.columns["response"]), self.columns["response"])

    def prompt(self, values: Mapping[str, Any]) -> Text:
        """Return a row's prompt.

        Raises:
            UnusableText: It is missing, empty or no text.
        """
        column = self.columns["prompt"]
        prompt = _alpaca_prompt(values) if self.alpaca else text_of(values.get(column), column)
        return _after_context(prompt, values, self)

    def question(self, values: Mapping[str, Any]) -> Text:
        """Return what a model is asked: a prompt, or a conversation up to its last turn of a user.

        Raises:
            UnusableText: It is missing or empty, or no turn is a user's.
        """
        if self.conversation is None:
            question, name = self.prompt(values), self.columns["prompt"]
        else:
            question, name = text_of(values.get(self.conversation), self.conversation), self.conversation
            question = _after_context(question, values, self)
        if isinstance(question, str):
            return question
        last = max((place for place, each in enumerate(question) if each["role"] == "user"), default=None)
        if last is None:
            raise UnusableText(f"{name} contains no turn of a user")
        return question[: last + 1]


def layout_of(names: Sequence[str], given: Mapping[str, str]) -> PromptColumns:
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
        return PromptColumns(columns, alpaca=columns["prompt"] == "instruction")
    pairs = {"chosen", "rejected"} <= columns.keys()
    conversation = next((name for name in _CONVERSATIONS if name in names), None)
    if conversation is not None and not given.keys() & {"prompt", "response"} and not pairs:
        rest = {part: column for part, column in columns.items() if part in ("chosen", "rejected")}
        return PromptColumns(rest, conversation=conversation)
    if "instruction" in names and "prompt" not in columns:
        own = {"prompt": "instruction"} | ({"response": "output"} if "output" in names else {})
        return PromptColumns({**own, **columns}, alpaca=True)
    return PromptColumns(columns)


def with_shared_prompt(layout: PromptColumns, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> PromptColumns:
    """Return a layout whose prompt is a conversation that both answers of a pair follow, where the rows have that.

    Args:
        layout: The layout by the names of columns.
        names: All columns of the source.
        rows: Values of each row: a conversation that ends with an answer is none that another answer follows.
    """
    column = next((name for name in _CONVERSATIONS if name in names), None)
    if column is None or layout.has("prompt") or not {"chosen", "rejected"} <= layout.columns.keys():
        return layout
    for values in rows:
        try:
            conversation = text_of(values.get(column), column)
        except UnusableText:
            # The error is named when the row is read.
            continue
        if isinstance(conversation, str) or conversation[-1]["role"] != "user":
            return layout
    return replace(layout, columns={**layout.columns, "prompt": column})


def _alpaca_prompt(values: Mapping[str, Any]) -> Text:
    instruction = text_of(values.get("instruction"), "instruction")
    for name in _INPUTS:
        value = values.get(name)
        if not (value is None or isinstance(value, str) or value != value):
            raise UnusableText(f"{name} is not text")
    more = next((text for name in _INPUTS if isinstance(text := values.get(name), str) and not is_blank(text)), "")
    return f"{instruction}\n\n{more}" if isinstance(instruction, str) and more else instruction


def _after_context(prompt: Text, values: Mapping[str, Any], layout: PromptColumns) -> Text:
    """Return a prompt after the system text and the earlier turns that columns of their own hold."""
    _check_unread(values, [*layout.columns.values(), *([layout.conversation] if layout.conversation else [])])
    others = {name: value for name, value in values.items() if name not in layout.columns.values()}
    texts = (others.get(name) for name in _SYSTEMS)
    system = next((text for text in texts if isinstance(text, str) and not is_blank(text)), None)
    before: list[Message] = []
    _check_inputs(prompt, system or "", others)
    if system is not None and not (isinstance(prompt, tuple) and prompt[0]["role"] == "system"):
        before.append({"role": "system", "content": system})
    history = others.get("history")
    for pair in history if isinstance(history, list | tuple) else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(each, str) for each in pair):
            raise UnusableText("history is not a list of pairs of a question and an answer")
        before += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return (*before, *_turns(prompt)) if before else prompt


def _check_inputs(prompt: Text, system: str, values: Mapping[str, Any]) -> None:
    """Refuse a row with a context that is neither in its prompt nor in its system text."""
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    shown = "\n".join([system, *texts])
    for name in _INPUTS:
        value = values.get(name)
        if isinstance(value, str) and not is_blank(value) and value.strip() not in shown:
            raise UnusableText(f"it has {name} beside its prompt, which is not read")


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
    turns = _turns(prompt)
    begins = tuple(answer[: len(turns)])
    return tuple(answer[len(turns) :]) if len(turns) < len(answer) and begins == turns else answer


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
    turns = _turns(prompt)
    if turns[-1]["role"] == "assistant":
        raise UnusableText("the prompt ends with a turn of the assistant, so that the answer would follow an answer")
    return turns, *turned


def _turns(text: Text, role: str = "user") -> tuple[Message, ...]:
    return ({"role": role, "content": text},) if isinstance(text, str) else text
