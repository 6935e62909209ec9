"""Rows of text become token ids that cannot shift against each other; what is wrong with them is named by row."""

import csv
import functools
import gzip
import json
import lzma

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from netweight.errors import MissingExtra, NameNotFound, UsageError

transformers = pytest.importorskip("transformers", reason="tokenizers come with the llm extra")

from netweight.data import public, text, tokens  # noqa: E402
from netweight.data.public import train_bpe  # noqa: E402
from netweight.data.rows import read_rows  # noqa: E402
from netweight.methods.immunize.pairs import collate_pairs  # noqa: E402

ROWS = [
    {"prompt": "How do I boil an egg?", "chosen": " I would rather not say.", "rejected": " Eight minutes in water."},
    {"prompt": 'Name a tree, "please"', "chosen": " No.", "rejected": " An oak,\nor a beech."},
]
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def byte_pairs():
    return train_bpe([json.dumps(row) for row in ROWS] * 3, 300)


@pytest.fixture
def tokenizer():
    return byte_pairs()


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path, rows):
    writer = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the llm extra")
    import pyarrow

    writer.write_table(pyarrow.Table.from_pylist(rows), path)


def delimited(path, delimiter):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ROWS[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def test_every_format_gives_the_same_pairs(tmp_path, tokenizer):
    lines = "".join(json.dumps(row) + "\n\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    columns = {name: {str(n): row[name] for n, row in enumerate(ROWS)} for name in ROWS[0]}
    (tmp_path / "pandas.json").write_text(json.dumps(columns), encoding="utf-8")
    delimited(tmp_path / "a.csv", ",")
    delimited(tmp_path / "a.tsv", "\t")
    parquet(tmp_path / "a.parquet", ROWS)
    expected = tokens.load_pairs(ROWS, tokenizer, context=64)
    assert len(expected) == 2
    for file in sorted(tmp_path.iterdir()):
        assert tokens.load_pairs(file, tokenizer, context=64) == expected, file.name
    datasets = pytest.importorskip("datasets", reason="datasets is in the llm extra")
    assert tokens.load_pairs(datasets.Dataset.from_list(ROWS), tokenizer, context=64) == expected


def test_ids_say_the_text_and_labels_the_answer_alone(tokenizer):
    pairs = tokens.load_pairs(ROWS, tokenizer, context=64)
    end = tokenizer.eos_token_id
    for row, pair in zip(ROWS, pairs, strict=True):
        assert tokenizer.decode(pair.prompt) == row["prompt"]
        assert tokenizer.decode(pair.chosen[:-1]) == row["chosen"]
        assert tokenizer.decode(pair.rejected[:-1]) == row["rejected"]
        assert pair.chosen[-1] == pair.rejected[-1] == end
    batch = collate_pairs(pairs, pad_id=tokens.padding_of(tokenizer))
    labels = batch.harmful.labels[1]
    assert tokenizer.decode(labels[labels >= 0].tolist()[:-1]) == ROWS[1]["rejected"]
    assert (
        batch.harmful.input_ids[0, : len(pairs[0].prompt)] == batch.harmless.input_ids[0, : len(pairs[0].prompt)]
    ).all()


def test_what_a_tokenizer_merges_across_the_border_does_not_move_it(tokenizer):
    """Here prompt and answer together have other tokens at the border than the prompt alone."""
    merged = train_bpe(["abab abab abab"], 270)
    (pair,) = tokens.load_pairs([{"prompt": "aba", "chosen": "b ab", "rejected": "bb"}], merged, context=32)
    assert merged("abab ab")["input_ids"][: len(pair.prompt)] != list(pair.prompt)
    assert list(pair.prompt) == merged("aba")["input_ids"]
    assert merged.decode(pair.chosen[:-1]) == "b ab"
    assert merged.decode(pair.rejected[:-1]) == "bb"


SAID = st.text(min_size=1, max_size=12) | st.sampled_from(["<pa", "d>", "</s>", " egg", "?\n\n"])


@given(prompt=SAID, chosen=SAID, rejected=SAID)
def test_whatever_the_text_both_sides_say_it_behind_one_prompt(prompt, chosen, rejected):
    assume(all(side.strip() for side in (prompt, chosen, rejected)) and chosen != rejected)
    tokenizer = byte_pairs()
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    (pair,) = tokens.load_pairs([row], tokenizer, context=200)
    assert pair.prompt == tuple(tokenizer(prompt)["input_ids"]), "as when the model is asked"
    for answer, ids in ((chosen, pair.chosen), (rejected, pair.rejected)):
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode([*pair.prompt, *ids]) == prompt + answer.removesuffix("</s>") + "</s>"


def with_beginning(kind):
    """A tokenizer with a beginning, an end and a space before the first word, like Llama's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "?", "▁what", "▁yes", "yes", ":"])}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation()]
    )
    specials = [("<s>", 1), ("</s>", 2), ("<pad>", 0)]
    made.post_processor = processors.TemplateProcessing(single=kind, special_tokens=specials)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="?"
    )


@pytest.mark.parametrize(
    ("kind", "begins"), [("<s> $A </s>", (1,)), ("<s> $A", (1,)), ("$A </s>", ()), ("$A", ()), ("<pad> <s> $A", (0, 1))]
)
def test_a_beginning_is_kept_and_no_end_parts_prompt_from_answer(kind, begins):
    tokenizer = with_beginning(kind)
    rows = [{"prompt": "what:", "response": "yes"}]
    (example,) = tokens.load_examples(rows, tokenizer, context=8)
    assert example.prompt == (*begins, 4, 7)
    assert example.response == (6, 2), "behind a colon there is no space before yes"


def test_an_end_that_is_also_the_beginning_is_not_put_before_a_text():
    tokenizer = with_beginning("$A </s>")
    tokenizer.bos_token = "</s>"
    (example,) = tokens.load_examples([{"prompt": "what:", "response": "yes"}], tokenizer, context=8)
    assert example.prompt == (4, 7)


def test_conversations_are_rendered_by_the_chat_template(tokenizer):
    chatty = train_bpe([json.dumps(row) for row in ROWS] * 3, 300)
    chatty.chat_template = CHAT
    asked = conversation(("system", "Be brief."), ("user", "How?"))
    rows = [
        {
            "prompt": asked,
            "chosen": conversation(("assistant", "No.")),
            "rejected": conversation(("assistant", "So."), ("user", "And?"), ("assistant", "Thus.")),
        }
    ]
    (pair,) = tokens.load_pairs(rows, chatty, context=99)
    assert chatty.decode(pair.prompt) == "<system>Be brief.</s><user>How?</s><assistant>"
    assert chatty.decode(pair.chosen) == "No.</s>"
    assert chatty.decode(pair.rejected) == "So.</s><user>And?</s><assistant>Thus.</s>"
    assert pair.chosen[-1] == chatty.eos_token_id
    (plain,) = tokens.load_examples([{"prompt": "How?", "response": "So."}], chatty, context=99, template="chat")
    assert chatty.decode(plain.prompt) == "<user>How?</s><assistant>"
    assert chatty.decode(plain.response) == "So.</s>"
    chatty.chat_template = "{{ messages | length }}" + CHAT
    with pytest.raises(UsageError, match="row 0: the chat template renders the prompt differently when chosen follows"):
        tokens.load_pairs(rows, chatty, context=99)
    with pytest.raises(UsageError, match="no chat template"):
        tokens.load_pairs(rows, tokenizer, context=99)


def test_a_prompt_may_be_what_both_answers_begin_with(tokenizer):
    """As TRL's data sets have it, for strings and conversations."""
    joined = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in ROWS]
    assert tokens.any_pairs(joined, tokenizer) == tokens.load_pairs(ROWS, tokenizer, context=64)
    chatty = train_bpe([json.dumps(row) for row in ROWS] * 3, 300)
    chatty.chat_template = CHAT
    asked, answers = conversation(("user", "How?")), [conversation(("assistant", text)) for text in ("No.", "So.")]
    apart = [{"prompt": asked, "chosen": answers[0], "rejected": answers[1]}]
    rows = [{"chosen": asked + answers[0], "rejected": asked + answers[1], "score_chosen": 0.5}]
    assert (
        tokens.any_pairs(rows, chatty)
        == tokens.any_pairs(apart, chatty)
        == tokens.load_pairs(apart, chatty, context=64)
    )
    for chosen, rejected in (("No", "Yes"), ("So", "So far"), ("So", "So")):
        with pytest.raises(UsageError, match="row 0: chosen and rejected do not begin with a common prompt"):
            tokens.any_pairs([{"chosen": chosen, "rejected": rejected}], tokenizer)
    with pytest.raises(NameNotFound, match=r"no column 'prompt'.*promt"):
        tokens.any_pairs([{"promt": "How?", "chosen": "I will not", "rejected": "I will"}], tokenizer)


def test_templates_stand_around_the_text(tokenizer):
    rows = [{"prompt": "Why {answer}?", "response": "So {prompt}."}]
    (found,) = tokens.load_examples(rows, tokenizer, context=64, template=tokens.QUESTION_AND_ANSWER)
    assert tokenizer.decode(found.prompt) == "Question: Why {answer}?\nAnswer:"
    assert tokenizer.decode(found.response[:-1]) == "\nSo {prompt}."
    with pytest.raises(UsageError, match=r"does not contain \{prompt\} exactly once"):
        tokens.Template("Question:")


@pytest.mark.parametrize(
    ("row", "trouble"),
    [
        ({"prompt": "a", "chosen": "b"}, "it has no rejected"),
        ({"prompt": "a", "chosen": None, "rejected": "c"}, "it has no chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "rejected is empty"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": "a", "chosen": "b c", "rejected": " b\n c "}, "both answers are the same"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is neither text nor messages"),
        ({"prompt": [], "chosen": "c", "rejected": "b"}, "prompt is empty or contains an empty message"),
        ({"prompt": [{"role": "user"}], "chosen": "c", "rejected": "b"}, "prompt is neither text nor messages"),
        (
            {"prompt": "a", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
            "some of it is a conversation and some is not",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "category": 3}, "its category is of a kind"),
    ],
)
def test_rows_that_are_no_pairs_are_named(tmp_path, tokenizer, row, trouble):
    file = write_lines(tmp_path / "pairs.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(UsageError, match=rf"pairs\.jsonl has a row that cannot be used\. line 2: {trouble}.*Correct"):
        tokens.load_pairs(file, tokenizer, context=64)


def test_all_rows_with_trouble_are_counted(tmp_path, tokenizer):
    file = write_lines(tmp_path / "pairs.jsonl", [ROWS[0]] + 9 * [{"prompt": "", "chosen": "", "rejected": "x"}])
    with pytest.raises(UsageError, match=r"has 9 rows.*line 2: prompt is empty, chosen is empty; .*and 4 more\."):
        tokens.load_pairs(file, tokenizer, context=64)


def test_what_is_too_long_is_named_or_cut_on_request(tmp_path, tokenizer):
    file = write_lines(tmp_path / "pairs.jsonl", [*ROWS, ROWS[0] | {"rejected": " " + "egg " * 30}])
    with pytest.raises(UsageError, match=r"a row .*line 3: prompt and rejected have \d+ tokens, the context 64.*cut"):
        tokens.load_pairs(file, tokenizer, context=64)
    whole = tokens.load_pairs(file, tokenizer, context=999)
    cut = tokens.load_pairs(file, tokenizer, context=64, too_long="cut")
    assert cut[:2] == whole[:2]
    assert cut[2].rejected == whole[2].rejected[: 64 - len(whole[2].prompt)]
    with pytest.raises(UsageError, match=r"line 1: its prompt of \d+ tokens fills the context of 8"):
        tokens.load_pairs(file, tokenizer, context=8, too_long="cut")
    alike = [{"prompt": "a", "chosen": "boil an egg now", "rejected": "boil an egg then"}]
    with pytest.raises(UsageError, match="both answers are the same within the context of 3 tokens"):
        tokens.load_pairs(alike, tokenizer, context=3, too_long="cut")


def test_missing_columns_come_with_the_nearest_names(tokenizer):
    renamed = [{"question": row["prompt"], "good": row["chosen"], "rejectd": row["rejected"]} for row in ROWS]
    with pytest.raises(NameNotFound, match=r"no column 'rejected'.*rejectd"):
        tokens.load_pairs(renamed, tokenizer, context=64, columns={"prompt": "question", "chosen": "good"})
    columns = {"prompt": "question", "chosen": "good", "rejected": "rejectd"}
    assert tokens.load_pairs(renamed, tokenizer, context=64, columns=columns) == tokens.load_pairs(
        ROWS, tokenizer, context=64
    )
    with pytest.raises(NameNotFound, match=r"no 'pompt' to give a column for"):
        tokens.load_pairs(ROWS, tokenizer, context=64, columns={"pompt": "question"})


def test_tokenizers_that_lack_something(tokenizer):
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UsageError, match=r"no token for padding.*tokenizer\.pad_token = "):
        tokens.load_pairs(ROWS, bare, context=64)
    bare.pad_token = "</s>"
    with pytest.raises(UsageError, match="no end of sequence"):
        tokens.load_pairs(ROWS, bare, context=64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a"\n', r"line 1, is not JSON"),
        ("a.jsonl", "1\n", r"line 1, is not a JSON object"),
        ("a.jsonl", "[1]\n", r"is not a list of JSON objects"),
        ("a.jsonl", "\n", r"contains no rows"),
        ("a.json", '{"prompt": "a"}', r"is not a list of JSON objects"),
        ("a.csv", "prompt,chosen,rejected\na,b\n", r"line 2, does not have as many fields"),
        ("a.csv", 'prompt,chosen\n"a"b,c\n', r"is not well-formed"),
        ("a.jsonl.gz", "no gzip", r"cannot be unpacked"),
        ("a.parquet", "no parquet", r"cannot be read"),
        ("a.txt", "a", r"has a format that is not supported.*\.jsonl"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        text.text_pairs(tmp_path / name)


def test_public_sets_have_configurations_and_may_be_programs(tmp_path):
    pytest.importorskip("datasets", reason="datasets is in no extra")
    for name in ("one", "two"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "train.jsonl").write_text(json.dumps({"prompt": name}) + "\n", encoding="utf-8")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("one", "two"))
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    assert read_rows(f"hub:{tmp_path / 'set'}:two:train").rows[0].values == {"prompt": "two"}
    with pytest.raises(UsageError, match="hub:NAME:CONFIGURATION:SPLIT"):
        read_rows(f"hub:{tmp_path / 'set'}")
    for name in ("hub:", "hub::train", "hub:a:"):
        with pytest.raises(UsageError, match="does not name a data set"):
            read_rows(name)
    with pytest.raises(UsageError, match="too many parts"):
        read_rows("hub:a:b:c:d")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "program.py").write_text("raise SystemExit", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot be loaded: .*Give a copy of its rows as a file"):
        read_rows(f"hub:{tmp_path / 'program'}")


def test_a_folder_of_several_files_is_read_whole_or_refused(tmp_path):
    pytest.importorskip("datasets", reason="datasets is in no extra")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n', encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text("{}", encoding="utf-8")
    assert [row.values["prompt"] for row in read_rows(f"hub:{tmp_path}").rows] == ["a", "b"]
    (tmp_path / "c.csv").write_text("prompt\nc\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"several formats: a\.jsonl would be read, and c\.csv would not"):
        read_rows(f"hub:{tmp_path}")
    (tmp_path / "c.csv").unlink()
    (tmp_path / "b.jsonl").write_text('{"prompt": ["b"]}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"cannot be read: Couldn't cast.*Correct its files"):
        read_rows(f"hub:{tmp_path}")


def test_sources_that_are_none(tmp_path):
    with pytest.raises(UsageError, match=r"There is no file .*x\.jsonl"):
        text.text_pairs(tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match=r"has splits \(train, test\)"):
        text.text_pairs({"train": ROWS, "test": ROWS})
    with pytest.raises(UsageError, match="cannot be read from a int"):
        text.text_pairs(3)
    with pytest.raises(UsageError, match="Row 0 of the data set is not a mapping"):
        text.text_pairs([3])
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ä"}'.encode("latin-1"))
    with pytest.raises(UsageError, match="is not in UTF-8"):
        text.text_pairs(tmp_path / "latin.jsonl")


def beaver_row(number, *categories, safe=False):
    names = ("garden,plants", "kitchen", "self_praise")
    return {
        "prompt": f"Question {number}?",
        "response": f"Answer {number}. ",
        "category": {name: name in categories for name in names},
        "is_safe": safe,
    }


BEAVERS = [
    beaver_row(0, "kitchen"),
    beaver_row(1, safe=True),
    beaver_row(2, "garden,plants", "kitchen"),
    beaver_row(3, "self_praise"),
]


def test_beavertails_as_published(tmp_path, monkeypatch):
    folder = tmp_path / "beavertails" / "round0" / "30k"
    folder.mkdir(parents=True)
    (folder / "train.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, BEAVERS)).encode()))
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    found = public.beavertails()
    assert [(text.prompt, text.response, text.categories) for text in found] == [
        ("Question 0?", "Answer 0.", ("kitchen",)),
        ("Question 2?", "Answer 2.", ("garden,plants", "kitchen")),
        ("Question 3?", "Answer 3.", ("self_praise",)),
    ]
    assert [text.prompt for text in public.beavertails(safe=True)] == ["Question 1?"]
    kept, withheld = text.withhold(found, ["garden,plants"])
    assert [text.where for text in kept] == ["line 1", "line 4"]
    assert [text.where for text in withheld] == ["line 3"]
    with pytest.raises(NameNotFound, match=r"category 'kitchn'.*kitchen"):
        text.withhold(found, ["kitchn"])
    with pytest.raises(UsageError, match="leaves 0 rows"):
        text.withhold(found, ["kitchen", "self_praise"])
    with pytest.raises(NameNotFound, match=r"no split '30k'"):
        public.beavertails(split="30k")
    with pytest.raises(UsageError, match="line 1: its is_safe is neither true nor false"):
        public.beavertails(write_lines(tmp_path / "x.jsonl", [BEAVERS[0] | {"is_safe": "no"}]))
    with pytest.raises(UsageError, match="no row whose is_safe is False"):
        public.beavertails([BEAVERS[1]])


def test_beavertails_that_is_nowhere(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is in the llm extra")

    def offline(*arguments, **settings):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    with pytest.raises(
        MissingExtra, match=r"contains no beavertails/round0/330k/test\.jsonl\.gz.*no network.*Go online"
    ):
        public.beavertails(split="330k_test")


def test_paired_refusals_as_published(tmp_path, tokenizer):
    rows = [
        row | {"refusal": f"Question: {row['prompt']}\nAnswer:\n\nI'd rather not, {n}."}
        for n, row in enumerate(BEAVERS)
    ]
    columns = {name: {str(n): row[name] for n, row in enumerate(rows)} for name in rows[0]}
    file = tmp_path / "with_refusals.json"
    file.write_text(json.dumps(columns), encoding="utf-8")
    found = public.paired_refusals(file)
    assert [text.where for text in found] == ["row 0", "row 2", "row 3"]
    assert (found[1].chosen, found[1].rejected) == ("I'd rather not, 2.", "Answer 2.")
    assert found[1].categories == ("garden,plants", "kitchen")
    pairs = tokens.tokenized_pairs(found, tokenizer, context=64, template=tokens.QUESTION_AND_ANSWER)
    assert tokenizer.decode(pairs[1].prompt) == "Question: Question 2?\nAnswer:"
    assert tokenizer.decode(pairs[1].chosen[:-1]) == "\nI'd rather not, 2."
    rows[2]["refusal"], rows[3]["refusal"] = rows[0]["refusal"], "Question: Question 3?\nAnswer: \n"
    with pytest.raises(UsageError, match="row 2: its refusal is to another prompt; row 3: its refusal is empty"):
        public.paired_refusals(rows)


def test_decoding_trust_as_published(tmp_path, tokenizer):
    rows = [
        {"type": kind, "prompt": {"text": f"The {kind} sky", "toxicity": 0.1}, "continuation": {"text": "is blue."}}
        for kind in ("toxic", "non_toxic", "toxic_test")
    ]
    file = write_lines(tmp_path / "training_dataset.jsonl", rows)
    (found,) = public.decoding_trust(file, kind="non_toxic")
    assert found.prompt.endswith("\nPrompt: The non_toxic sky\nContinuation:")
    assert (found.response, found.where) == (" is blue.", "line 2")
    untyped = [{key: value for key, value in row.items() if key != "type"} for row in rows]
    assert len(public.decoding_trust(untyped)) == 3
    rows[0]["refusal"] = "User: Refuse it.\nPrompt: The toxic sky\nContinuation: I will not."
    (pair,) = public.decoding_trust_refusals(rows[:1])
    assert (pair.chosen, pair.rejected) == (" I will not.", " is blue.")
    tokens.tokenized_pairs([pair], tokenizer, context=200)
    rows[0]["prompt"]["text"] = ""
    with pytest.raises(UsageError, match="row 0: prompt contains no text"):
        public.decoding_trust(rows)


def test_pairs_that_repeat_each_other_are_counted():
    notes = []
    rows = [{"prompt": "a", "chosen": "no", "rejected": f"yes{' ' * (number % 3)}"} for number in range(9)]
    rows.append({"prompt": "b", "chosen": "no", "rejected": "yes"})
    assert len(text.text_pairs(rows, report=notes.append)) == 10
    assert "Only 2 of the 10 pairs" in notes[0]
    text.text_pairs(rows[:1] + rows[-1:], report=notes.append)
    assert len(notes) == 1
