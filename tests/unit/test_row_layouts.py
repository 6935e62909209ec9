"""Rows as people have them: published layouts are read alike, and what cannot be used is named or left out."""

import json

import pytest

from netweight.data.text import text_examples, text_pairs, text_prompts
from netweight.errors import NameNotFound, UsageError


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


ASKED, SAID = "Name a tree.", "An oak."
CONVERSATION = turns(("system", "Be brief."), ("user", ASKED), ("assistant", SAID))
SAME = (tuple(turns(("system", "Be brief."), ("user", ASKED))), tuple(turns(("assistant", SAID))))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": ASKED, "response": SAID}, (ASKED, SAID)),
        ({"prompt": ASKED, "completion": SAID}, (ASKED, SAID)),
        ({"prompt": turns(("user", ASKED)), "completion": turns(("assistant", SAID))}, (SAME[0][1:], SAME[1])),
        ({"prompt": turns(("user", ASKED)), "response": SAID}, (SAME[0][1:], SAME[1])),
        ({"messages": CONVERSATION}, SAME),
        ({"conversation": CONVERSATION, "id": "x"}, SAME),
        ({"prompt": "id of the prompt", "messages": CONVERSATION}, SAME),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": ASKED},
                               {"from": "gpt", "value": SAID}]},
            SAME,
        ),
        ({"messages": turns(("developer", "Be brief."), *[(m["role"], m["content"]) for m in CONVERSATION[1:]])}, SAME),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]},
                          {"role": "assistant", "content": SAID, "tool_calls": None}]},
            (SAME[0][1:], SAME[1]),
        ),
        ({"instruction": ASKED, "input": "", "output": SAID}, (ASKED, SAID)),
        ({"instruction": ASKED, "input": "In a wood.", "output": SAID}, (f"{ASKED}\n\nIn a wood.", SAID)),
        ({"instruction": ASKED, "system": "Be brief.", "output": SAID}, SAME),
        ({"instruction": ASKED, "context": "In a wood.", "response": SAID}, (f"{ASKED}\n\nIn a wood.", SAID)),
        ({"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}], "system": "Be brief."},
         SAME),
        ({"messages": CONVERSATION, "system": "Be long."}, SAME),
        ({"prompt": ASKED, "response": SAID, "system_prompt": "Be brief."}, SAME),
        ({"prompt": ASKED, "response": SAID, "system": "", "history": []}, (ASKED, SAID)),
        (
            {"instruction": ASKED, "input": "", "output": SAID, "history": [["Hi.", "Hello."]]},
            (tuple(turns(("user", "Hi."), ("assistant", "Hello."), ("user", ASKED))), SAME[1]),
        ),
        ({"messages": json.dumps(CONVERSATION)}, SAME),
        ({"messages": {"role": [m["role"] for m in CONVERSATION], "content": [m["content"] for m in CONVERSATION]}},
         SAME),
        ({"messages": [{"from": None, "value": None, **CONVERSATION[0]},
                       {"from": "human", "value": ASKED, "role": None, "content": None}, CONVERSATION[2]]}, SAME),
        ({"messages": [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}, CONVERSATION[2]],
          "tools": [], "images": None}, (SAME[0][1:], SAME[1])),
        ({"messages": repr(CONVERSATION)}, SAME),
        ({"prompt": "[{not messages}]", "response": '["a"]'}, ("[{not messages}]", '["a"]')),
    ],
)  # fmt: skip
def test_published_layouts_are_read_alike(tmp_path, row, expected):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (example,) = text_examples(file)
    assert (example.prompt, example.response) == expected


def test_rated_answers_are_taken_by_their_label_and_the_others_counted():
    rows = [
        {"prompt": ASKED, "completion": SAID, "label": True},
        {"prompt": ASKED, "completion": "No.", "label": False},
    ]
    said = []
    for side, answer in (("chosen", SAID), ("rejected", "No.")):
        (example,) = text_examples(rows, pairs=side, report=said.append)
        assert example.response == answer
    assert [" ".join(each.split()[3:]) for each in said] == [
        "1 of 2 answers are labeled undesirable and were left out.",
        "1 of 2 answers are labeled desirable and were left out.",
    ]
    with pytest.raises(UsageError, match="no answer with the label"):
        text_examples(rows[:1], pairs="rejected", report=said.append)
    assert len(text_examples([{**rows[0], "label": "tree"}], pairs="rejected")) == 1


def test_a_history_that_is_none_is_named():
    with pytest.raises(UsageError, match="history is not a list of pairs"):
        text_examples([{"prompt": ASKED, "response": SAID, "history": ["Hi."]}])


def test_preference_data_gives_either_answer_and_may_repeat_the_prompt():
    plain = {"prompt": ASKED, "chosen": "No.", "rejected": SAID}
    assert [text_examples([plain], pairs=side)[0].response for side in ("chosen", "rejected")] == ["No.", SAID]
    whole = {
        "prompt": ASKED,
        "chosen": turns(("user", ASKED), ("assistant", "No.")),
        "rejected": turns(("user", ASKED), ("assistant", SAID)),
        "messages": turns(("user", ASKED), ("assistant", "No.")),
    }
    (pair,) = text_pairs([whole])
    assert (pair.prompt, pair.rejected) == (tuple(turns(("user", ASKED))), tuple(turns(("assistant", SAID))))
    shared = {"conversations": [{"from": "human", "value": ASKED}], "chosen": {"from": "gpt", "value": "No."},
              "rejected": {"from": "gpt", "value": SAID}}  # fmt: skip
    (pair,) = text_pairs([shared], columns={"prompt": "conversations"})
    assert pair.chosen == tuple(turns(("assistant", "No.")))
    with pytest.raises(NameNotFound, match="no column 'response'"):
        text_examples([plain])


def test_prompts_are_read_from_every_layout_and_are_never_pythons_repr():
    conversations = [{"prompt": turns(("user", ASKED))}, {"prompt": turns(("user", "Why?"), ("assistant", "So."))}]
    found, answered = text_prompts(conversations)
    assert not answered
    assert [each.prompt for each in found] == [tuple(turns(("user", ASKED))), tuple(turns(("user", "Why?")))]
    (found,), answered = text_prompts([{"messages": CONVERSATION}])
    assert found.prompt == SAME[0]
    (found,), answered = text_prompts([{"prompt": ASKED, "response": SAID}])
    assert answered
    (found,), _ = text_prompts([{"goal": ASKED}], columns={"prompt": "goal"})
    assert found.prompt == ASKED


BAD = (
    ({"prompt": None}, "it has no prompt"),
    ({}, "it has no prompt"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": 3}, "neither text nor messages"),
    ({"prompt": []}, "empty"),
    ({"prompt": turns(("assistant", "So."))}, "contains no turn of a user"),
    ({"prompt": turns(("tool", "{}"))}, "role 'tool'"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"not text \(image\)"),
    ({"prompt": [{"role": "user", "content": None}]}, "empty"),
    ({"prompt": [{"role": "user", "content": [{"image": "a.png"}, {"text": "a"}]}]}, r"not text \(image\)"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, r"not text \(text\)"),
    ({"prompt": "a", "tools": [{"name": "f"}]}, "it has tools beside its text, which are not read"),
    ({"prompt": "a", "images": ["a.png"], "chat_template_kwargs": {"x": 1}}, "images and chat_template_kwargs"),
    ({"prompt": "half \ud83d"}, "half of a character"),
    ({"prompt": [{"role": "user", "content": "half \ud83d"}]}, "half of a character"),
)


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_rows_without_a_prompt_are_named_or_left_out_on_request(row, reason):
    rows = [{"prompt": "a"}, row, {"prompt": "b"}]
    with pytest.raises(UsageError, match=f"row 1: .*{reason}.*--unusable drop"):
        text_prompts(rows)
    told = []
    found, _ = text_prompts(rows, unusable="drop", report=told.append)
    assert [each.prompt for each in found] == ["a", "b"]
    assert told[0].startswith("the data set: 1 of 3 rows were left out. row 1:")
    with pytest.raises(UsageError, match="no other row remains"):
        text_prompts([{"prompt": None}, row], unusable="drop")


@pytest.mark.parametrize(
    ("rows", "cure"),
    [
        ([{"question": ASKED, "response": SAID}], "--columns prompt=NAME"),
        ([{"prompt": ASKED, "respons": SAID}], "--columns response=NAME"),
        ([{"text": "Question: why? Answer: so."}], "--columns prompt=NAME"),
        ([{"prompt": "<|im_start|>user"}], "--columns response=NAME"),
    ],
)
def test_missing_columns_are_named_with_an_option_as_the_cure(rows, cure):
    with pytest.raises(NameNotFound, match=cure):
        text_examples(rows)


def test_rows_that_were_tokenized_already_are_named_as_such():
    with pytest.raises(UsageError, match=r"contains token ids \(input_ids\) .*Give the rows as text"):
        text_examples([{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]}])


def test_conversations_that_do_not_end_with_an_answer_are_no_examples():
    for messages in (turns(("user", ASKED)), turns(("user", ASKED), ("assistant", SAID), ("user", "Why?"))):
        with pytest.raises(UsageError, match="does not end with an assistant's turn"):
            text_examples([{"messages": messages}])
    with pytest.raises(UsageError, match="no turn of a user before"):
        text_examples([{"messages": turns(("assistant", SAID))}])


def test_answers_that_are_not_to_be_learned_or_hold_calls_are_not_taken():
    call = {"role": "assistant", "content": SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for answer, reason in (
        (call, "contains a call of a tool, which is not supported"),
        ({"role": "assistant", "content": SAID, "weight": 0}, "marked as not to be learned"),
        ({"role": "assistant", "content": SAID, "train": False}, "marked as not to be learned"),
        ({"role": "assistant", "content": SAID, "loss": False}, r"marked as not to be learned \(loss false\)"),
    ):
        with pytest.raises(UsageError, match=f"row 0: .*{reason}"):
            text_examples([{"messages": [*CONVERSATION[:2], answer]}])
    (example,) = text_examples([{"messages": [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 1, "train": True}]}])
    assert example.response == SAME[1]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_read_by_each_name(key):
    (example,) = text_examples([{"messages": [*CONVERSATION[:2], {**CONVERSATION[2], key: "Hm."}]}])
    assert example.response[0]["reasoning_content"] == "Hm."


def test_a_conversation_that_both_answers_follow_is_their_prompt():
    rows = [{"conversations": turns(("user", ASKED)), "chosen": turns(("assistant", "No."))[0],
             "rejected": turns(("assistant", SAID))[0], "kto_tag": True}]  # fmt: skip
    (pair,) = text_pairs(rows)
    assert (pair.prompt, pair.rejected) == (tuple(turns(("user", ASKED))), SAME[1])
    with pytest.raises(UsageError, match="prompt ends with a turn of the assistant"):
        text_pairs([{"prompt": CONVERSATION, "chosen": "No.", "rejected": SAID}])


FILES = {
    "lines.json": "{a}\n{b}\n", "list.jsonl": "[{a},\n {b}]", "plain.jsonl": "{a}\n\n{b}", "plain.json": "[{a}, {b}]",
    "new.ndjson": "{a}\r\n{b}\r\n", "mark.jsonl": "\ufeff{a}\n{b}",
}  # fmt: skip


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("name", FILES)
def test_json_is_read_by_its_content_packed_or_not(tmp_path, name, packed):
    import bz2
    import gzip
    import lzma

    parts = {
        "a": json.dumps({"prompt": ASKED, "response": SAID}),
        "b": json.dumps({"prompt": "Why?", "response": "So."}),
    }
    text = FILES[name].format(**parts).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[packed]
    (tmp_path / f"{name}{packed}").write_bytes(pack(text))
    found = text_examples(tmp_path / f"{name}{packed}")
    assert [each.prompt for each in found] == [ASKED, "Why?"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.csv", b"prompt,response,prompt\na,b,c\n", "two columns 'prompt'"),
        ("rows.jsonl", b'{"prompt": "a", "prompt": "b", "response": "c"}\n', "the name 'prompt' was given twice"),
        ("rows.jsonl", b"[" * 200_000, "nested too deeply"),
        ("rows.jsonl.gz", b"no archive", "cannot be unpacked"),
        ("rows.jsonl.bz2", b"no archive", "cannot be unpacked"),
        ("rows.jsonl.zst", b"x", "a format that is not supported"),
        ("rows.jsonl", '{"prompt": "a", "response": "b"}'.encode("utf-16"), "not in UTF-8"),
        ("rows.jsonl", '{"prompt": "a", "response": "b"}'.encode("utf-16-le"), "contains NUL characters, as text in"),
        ("rows.csv", "prompt,response\na,b\n".encode("utf-16-le"), "contains NUL characters, as text in"),
        ("rows.csv", b'prompt,response\n"a", "b"\n', "line 2, has a space before a quoted field"),
        ("rows.json", b'{"version": 1, "data": [{"prompt": "a", "response": "b"}]}', "Write the list under 'data'"),
    ],
)
def test_files_that_would_lose_something_are_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        text_examples(tmp_path / name)
    with pytest.raises(UsageError, match=r"is a folder.*hub:"):
        text_examples(tmp_path)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_tables_are_read_by_the_separator_of_their_header(tmp_path, separator):
    text = "\r\n".join([f"prompt{separator}response", '"Why, so; and|or?"' + separator + "Because."])
    (tmp_path / "rows.csv").write_bytes(("\ufeff" + text).encode())
    (found,) = text_examples(tmp_path / "rows.csv")
    assert (found.prompt, found.response) == ("Why, so; and|or?", "Because.")


@pytest.mark.parametrize(
    "text",
    [
        'sep=;\nprompt;response\n"Why, so; and|or?";Because.\n',
        '\r\n\r\nprompt,response\r\n"Why, so; and|or?",Because.\r\n',
        'prompt, response\n"Why, so; and|or?", "Because."\n',
        '"prompt"; "response"; "note, in words, and more, of it"\n"Why, so; and|or?"; "Because."; ""\n',
    ],
)
def test_headers_as_spreadsheets_write_them(tmp_path, text):
    (tmp_path / "rows.csv").write_bytes(text.encode())
    (found,) = text_examples(tmp_path / "rows.csv")
    assert (found.prompt, found.response) == ("Why, so; and|or?", "Because.")


@pytest.mark.parametrize("blank", ["\u200b", "\ufeff\u200d", "\u00a0\u2003", "\u2028\u00ad", "\x00"])
def test_invisible_text_is_no_text(blank):
    with pytest.raises(UsageError, match="row 1: prompt is empty"):
        text_prompts([{"prompt": ASKED}, {"prompt": blank}])
    with pytest.raises(UsageError, match="row 0: messages is empty or contains an empty message"):
        text_examples([{"messages": turns(("user", blank), ("assistant", SAID))}])
    assert text_examples([{"prompt": ASKED, "response": SAID, "system": blank}])[0].prompt == ASKED


def test_prompts_of_which_some_have_no_response_are_read_without_responses():
    notes = []
    rows = [{"prompt": ASKED, "response": None}, {"prompt": "Name a river.", "response": "The Po."}]
    prompts, answered = text_prompts(rows, report=notes.append)
    assert [each.prompt for each in prompts] == [ASKED, "Name a river."]
    assert (answered, notes) == (False, ["the data set: 1 of 2 rows have no response, so that no response is used."])


def test_columns_within_objects_are_named():
    with pytest.raises(NameNotFound, match="The column 'data' contains objects with 'prompt': write their fields as"):
        text_examples([{"data": {"prompt": ASKED, "response": SAID}}])


@pytest.mark.parametrize(("column", "true", "false"), [
    ("is_safe", True, False), ("is_safe", "True", "False"), ("label", "true", "false"), ("kto_tag", True, False),
])  # fmt: skip
def test_labels_of_answers_are_read_as_truth_values_and_as_their_text(column, true, false):
    rows = [
        {"prompt": f"{n}?", "response": "yes" if n % 2 else "no", column: false if n % 2 else true} for n in range(4)
    ]
    for side, answer in (("rejected", "yes"), ("chosen", "no")):
        reports = []
        found = text_examples(rows, pairs=side, report=reports.append)
        assert [each.response for each in found] == [answer] * 2
        assert "2 of 4 answers are labeled" in reports[0]
    assert len(text_examples(rows)) == 4


def test_labels_of_numbers_are_refused_where_either_may_be_meant():
    rows = [{"prompt": "a", "response": "b", "label": 1}, {"prompt": "c", "response": "d", "label": 0}]
    with pytest.raises(UsageError, match=r"'label' .* numbers 0 and 1.*true for harmless"):
        text_examples(rows, pairs="rejected")
    assert len(text_examples(rows)) == 2
    assert len(text_examples([{**row, "label": 7} for row in rows], pairs="rejected")) == 2


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), [
    ("\n\nHuman: hi\n\nAssistant: I would", "\n\nHuman: hi\n\nAssistant: I will", "\n\nHuman: hi\n\nAssistant:"),
    ("\n\nHuman: hi\n\nAssistant: No", "\n\nHuman: hi\n\nAssistant: No way", "\n\nHuman: hi\n\nAssistant:"),
    ("<|im_start|>assistant\nI would", "<|im_start|>assistant\nI will", "<|im_start|>assistant\n"),
    ("<|user|>\nhi<|assistant|>\nI am.", "<|user|>\nhi<|assistant|>\nI do.", "<|user|>\nhi<|assistant|>\n"),
    ("<s>[INST] a [/INST] b [INST] c [/INST] No", "<s>[INST] a [/INST] b [INST] c [/INST] No way",
     "<s>[INST] a [/INST] b [INST] c [/INST]"),
    ("Why? Because", "Why? Before", "Why?"),
    ("Why? So.", "Why? Thus.", "Why?"),
])  # fmt: skip
def test_a_prompt_that_both_answers_begin_with_ends_between_words(chosen, rejected, prompt):
    (pair,) = text_pairs([{"chosen": chosen, "rejected": rejected}])
    assert pair.prompt == prompt
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)


def test_conversations_that_differ_before_their_last_answer_are_refused():
    sides = {
        side: turns(("user", ASKED), ("assistant", said), ("user", "Why?"), ("assistant", said))
        for side, said in (("chosen", "No."), ("rejected", SAID))
    }
    with pytest.raises(UsageError, match="row 0: chosen and rejected differ before their last answer"):
        text_pairs([sides])
    texts = {side: f"\n\nHuman: a\n\nAssistant: {side}\n\nHuman: b\n\nAssistant: c" for side in sides}
    with pytest.raises(UsageError, match="row 0: chosen and rejected differ before their last answer"):
        text_pairs([texts])


def test_a_context_beside_the_prompt_is_read_or_the_row_is_refused():
    alpaca = {"instruction": ASKED, "input": "In a wood.", "output": SAID}
    whole = f"{ASKED}\n\nIn a wood."
    for columns in ({}, {"response": "output"}, {"prompt": "instruction", "response": "output"}):
        assert text_examples([alpaca], columns=columns)[0].prompt == whole
    for name in ("input", "context", "ContextString"):
        with pytest.raises(UsageError, match=f"row 0: it has {name} beside its prompt, which is not read"):
            text_prompts([{"Behavior": ASKED, name: "In a wood."}], columns={"prompt": "Behavior"})
        assert text_examples([{"prompt": whole, "response": SAID, name: "In a wood."}])[0].prompt == whole
        assert text_examples([{"prompt": ASKED, "response": SAID, name: " "}])[0].prompt == ASKED
    with pytest.raises(UsageError, match="it has context beside its prompt"):
        text_examples([{**alpaca, "context": "By a river."}])


def test_an_input_that_is_not_text_is_named():
    row = {"instruction": "Sum up.", "output": "Done."}
    with pytest.raises(UsageError, match="row 0: input is not text"):
        text_examples([{**row, "input": ["a"]}])
    assert text_examples([{**row, "input": float("nan")}])[0].prompt == "Sum up."
