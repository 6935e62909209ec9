"""Phrases of refusals, and the check that answers which should be harmful are not refusals.

Files of preference data differ in what `chosen` means: the harmless answer, as here, or the one that an attacker wants.
Trained on the wrong one, a defense teaches the model to comply, and an attack teaches it to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence

from netweight.data.answers import holds_phrase
from netweight.data.row_layouts import Text

PHRASES = (
    "i cannot", "i can't", "i can not", "i could not", "i won't", "i will not", "i'm sorry", "i am sorry", "sorry,",
    "i'm unable", "i am unable", "i'm not able", "i am not able", "as an ai", "i must decline", "i apologize",
    "i must refuse", "i refuse to", "i cant", "i'm not going to", "i am not going to", "i have to decline",
    "i respectfully decline", "i don't feel comfortable", "i do not feel comfortable", "i'm not comfortable",
    "i am not comfortable", "as a language model", "unable to help", "unable to assist", "can't help with",
    "cannot help with", "can't assist", "cannot assist", "es tut mir leid", "tut mir leid", "ich kann dabei nicht",
    "ich kann das nicht", "ich kann dir nicht", "ich kann ihnen nicht", "ich kann dir dabei nicht",
    "ich kann ihnen dabei nicht", "nicht helfen", "nicht weiterhelfen", "nicht behilflich", "lo siento",
    "no puedo ayudar", "no puedo ayudarte", "no puedo ayudarle", "no puedo proporcionar", "je suis désolé",
    "je suis désolée", "désolé,", "je ne peux pas", "je ne suis pas en mesure", "mi dispiace", "non posso",
    "não posso", "desculpe", "desculpa", "sinto muito", "извините", "извини", "простите", "к сожалению, я",
    "я не могу", "抱歉", "对不起", "對不起", "我不能", "我无法", "我無法", "不能协助", "无法协助", "无法提供",
    "無法提供", "無法協助", "申し訳", "お答えできません", "お手伝いできません", "お力になれません", "죄송",
    "도와드릴 수 없", "도와줄 수 없", "عذرا", "لا أستطيع", "لا يمكنني", "آسف",
)  # fmt: skip
"""Beginnings and parts of refusals in several languages, in lower case and with ASCII apostrophes; users give their
model's own."""

# Share of refusals from which on answers are not harmful ones.
_LARGEST_SHARE = 0.5


def refusals_among(answers: Sequence[Text]) -> int:
    """Return how many answers contain a usual phrase of refusal.

    Args:
        answers: Texts, or conversations of which all turns are read.
    """
    texts = (each if isinstance(each, str) else "\n".join(turn["content"] for turn in each) for each in answers)
    return sum(holds_phrase(text, PHRASES) for text in texts)


def are_refusals(harmful: Sequence[Text], harmless: Sequence[Text] = ()) -> bool:
    """Return whether answers that should be harmful are refusals for the most part.

    Args:
        harmful: The answers; at least one.
        harmless: The harmless answers to the same prompts, if there are any: where these refuse nearly as often, the
            phrases do not tell both apart.
    """
    share = refusals_among(harmful) / len(harmful)
    other = refusals_among(harmless) / len(harmless) if harmless else 0.0
    return share > _LARGEST_SHARE and other < _LARGEST_SHARE * share
