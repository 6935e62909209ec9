"""Rows of a label about conversation with a language model: chat template, end tokens, context length."""

from __future__ import annotations

from typing import Any

from netweight.core.quantities import many
from netweight.labels.identify_subject import LabelSubject, canonical, read_config
from netweight.labels.ingredients import added_tokens, chat_template
from netweight.labels.label import Row, RowGroup


def speech_group(subject: LabelSubject) -> RowGroup:
    """Return the rows about how a language model speaks, without running it.

    Args:
        subject: What the label is about.
    """
    template = chat_template(subject.folder)
    rows = [
        _template_row(template),
        _ends_row(subject),
        *_context_rows(subject.config),
    ]
    return RowGroup(title="Conversation", anchor="speech", rows=tuple(rows), basis="configuration files")


def end_tokens(subject: LabelSubject) -> list[int]:
    """Return the ids of the tokens that end an answer, from `generation_config.json`, else from `config.json`.

    Args:
        subject: What the label is about.
    """
    text = subject.config.get("text_config")
    places = [
        read_config(subject.folder / "generation_config.json"),
        subject.config,
        text if isinstance(text, dict) else {},
    ]
    for place in places:
        ends = place.get("eos_token_id")
        if isinstance(ends, int) and not isinstance(ends, bool):
            return [ends]
        if isinstance(ends, list) and ends:
            return [int(each) for each in ends if isinstance(each, int)]
    return []


def _template_row(template: str | None) -> Row:
    if template is None:
        return Row(key="chat_template", title="Chat template", value="none (a base model, or not stated)")
    features = [
        *(["a system role"] if "system" in template else []),
        *(["tools"] if "tools" in template else []),
        *(["thinking"] if "<think>" in template or "enable_thinking" in template else []),
    ]
    value = f"yes, with {', '.join(features)}" if features else "yes"
    return Row(key="chat_template", title="Chat template", value=value, basis=f"{len(template):,} characters")


def _ends_row(subject: LabelSubject) -> Row:
    ends = end_tokens(subject)
    if not ends:
        return Row(key="end_tokens", title="Tokens that end an answer", value="not stated", state="warning")
    names = _token_names(subject)
    shown = ", ".join(names.get(each, str(each)) for each in ends[:3])
    return Row(
        key="end_tokens", title="Tokens that end an answer", value=shown, number=len(ends),
        basis=many(len(ends), "token"), detail={"ids": ends},
    )  # fmt: skip


def _token_names(subject: LabelSubject) -> dict[int, str]:
    decoder = read_config(subject.folder / "tokenizer_config.json").get("added_tokens_decoder")
    names: dict[int, str] = {}
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        if str(number).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            names[int(number)] = token["content"]
    return names or added_tokens(subject.folder)


def _context_rows(config: dict[str, Any]) -> list[Row]:
    text = config.get("text_config")
    place = text if isinstance(text, dict) else config
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        length = place.get(key)
        if isinstance(length, int):
            return [Row(
                key="context", title="Longest context", value=f"{length:,} tokens", number=length, unit="tokens",
                basis=f"{key} of config.json: {canonical(length)}",
            )]  # fmt: skip
    return []
