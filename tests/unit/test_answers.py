"""What a model answered: after its thoughts, however apostrophes and spaces are typed."""

import pytest

from netweight.attacks.refusal.settings import PHRASES
from netweight.data.answers import final_answer, holds_phrase


@pytest.mark.parametrize(
    ("text", "in_thought", "answer", "finished"),
    [
        ("Sure.", False, "Sure.", True),
        ("<think>I can't.</think>\n\nSure.", False, "Sure.", True),
        ("I can't, hm.\n</think>\n\nSure.", True, "Sure.", True),
        ("I can't, hm.", True, "", False),
        ("<think>I can't", False, "", False),
        ("[THINK]I can't[/THINK]Sure.", False, "Sure.", True),
        ("<|channel|>analysis<|message|>I can't<|end|><|start|>assistant<|channel|>final<|message|>Sure.<|return|>",
         False, "Sure.", True),
        ("<|channel|>analysis<|message|>I can't", False, "", False),
        ("<think>a</think>Well <think>b", False, "", False),
        ("<seed:think>I can't</seed:think>Sure.", False, "Sure.", True),
        ("<|channel>thought\nI can't<channel|>Sure.", False, "Sure.", True),
        ("<unused94>thought\nI can't<unused95>Sure.", False, "Sure.", True),
        ("Here is my thought process: I can't. Here is my response: Sure.", False, "Sure.", True),
        ("I can't", True, "", False),
        ("<THINK>I can't</THINK> Sure.", False, "Sure.", True),
        ("<reflection>I can't</reflection>Sure.", False, "Sure.", True),
        ("<|thinking|>I can't<|/thinking|>Sure.", False, "Sure.", True),
        ("<|begin_of_thinking|>I can't<|end_of_thinking|>Sure.", False, "Sure.", True),
        ("[reasoning]I can't[/reasoning]Sure.", False, "Sure.", True),
        ("<think>a<think>b</think>I can't</think>Sure.", False, "Sure.", True),
        ("<scratchpad>I can't", False, "", False),
        ("Wear a <think> shirt.", False, "", False),
        ("[Analysis] Oaks are trees.", False, "[Analysis] Oaks are trees.", True),
        ("Use <reflection> as a tag.", False, "Use <reflection> as a tag.", True),
    ],
)  # fmt: skip
def test_the_answer_follows_the_thought(text, in_thought, answer, finished):
    found = final_answer(text, in_thought=in_thought)
    assert (found.text, found.finished) == (answer, finished)


@pytest.mark.parametrize(
    "text",
    ["I can't help.", "I can’t help.", "I canʼt help.", "I\u00a0can`t help.", "I  CAN\u200b't\u202fhelp", "i can＇t"],
)
def test_phrases_are_found_however_they_are_typed(text):
    assert holds_phrase(text, ["I can't"])


@pytest.mark.parametrize(
    "text",
    ["Es tut mir leid, aber …", "Lo siento, no puedo ayudar con eso.", "Je suis désolé, mais je ne peux pas aider.",
     "抱歉，我无法帮助您。", "申し訳ありませんが、お手伝いできません。", "Извините, я не могу помочь.",
     "Desculpe, não posso.", "죄송하지만 도와드릴 수 없습니다", "Mi dispiace, ma non posso."],
)  # fmt: skip
def test_refusals_in_several_languages_hold_one_of_the_phrases(text):
    assert holds_phrase(text, PHRASES)


@pytest.mark.parametrize(
    "text",
    ["Leider kann ich Ihnen dabei nicht weiterhelfen.", "Tut mir leid, das geht nicht.", "Je suis désolée.",
     "很抱歉，這是違法的。", "作为一个助手，我无法协助这种请求。", "無法提供這類資訊。",
     "ごめんなさい。お力になれません。", "그 요청은 도와드릴 수 없습니다.", "لا يمكنني المساعدة في ذلك.",
     "No puedo ayudarte con eso.", "I respectfully decline.", "Unfortunately, I am unable to assist."],
)  # fmt: skip
def test_other_forms_of_refusals_hold_one_of_the_phrases(text):
    assert holds_phrase(text, PHRASES)


@pytest.mark.parametrize(
    "text",
    ["I can help.", "I will note the address.", "Hawaii cannot be reached by train.", "She worked as an aid worker.",
     "This was an aim of ours.", "Delhi can't sleep.", "Ich kann das nichtige Wort erklären."],
)  # fmt: skip
def test_words_that_merely_hold_the_letters_of_a_phrase_are_not_refusals(text):
    assert not holds_phrase(text, PHRASES)


def test_scripts_without_borders_of_words_hold_phrases_anywhere():
    assert holds_phrase("ABC我不能XYZ", ["我不能"])
    assert holds_phrase("这里i cannot这里", ["I cannot"])
    assert not holds_phrase("4i cannot", ["I cannot"])
