"""Texts come out unchanged; what is missing is named with the cure."""

import pytest

from netweight.data import public as texts
from netweight.errors import MissingExtra, UsageError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    return tmp_path / "text"


def test_texts_come_out_as_they_are(folder):
    for name in ("wikitext2-valid", "wikitext2-test", "tinyshakespeare"):
        (folder / f"{name}.txt").write_text(f" \n {name} – ünïcode \n", encoding="utf-8")
    assert texts.wikitext2("valid") == " \n wikitext2-valid – ünïcode \n"
    assert texts.wikitext2("test") == " \n wikitext2-test – ünïcode \n"
    assert texts.tiny_shakespeare() == " \n tinyshakespeare – ünïcode \n"
    assert texts.count_words(texts.tiny_shakespeare()) == 3


def test_questions_are_split_as_their_source_says(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the llm extra")
    import pyarrow

    rows = [
        {"question": f"q{n}", "context": "c", "answer": f"a{n}", "split": split, "table_id": "t"}
        for n, split in enumerate(("train", "dev", "train", "test"))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "wikisql_12k.parquet")
    assert texts.wikisql("train") == [texts.SourceAndTarget("q0\nc", "a0"), texts.SourceAndTarget("q2\nc", "a2")]
    assert texts.wikisql("test") == [texts.SourceAndTarget("q3\nc", "a3")]


def test_translations_are_lines_of_two_files(folder):
    (folder / "wmt14-de-en.src").write_text("eins\nzwei\n", encoding="utf-8")
    with pytest.raises(MissingExtra, match=r"wmt14-de-en\.ref.*sacrebleu -t wmt14 -l de-en --echo ref > "):
        texts.wmt14_german_english()
    (folder / "wmt14-de-en.ref").write_text("one\ntwo\n", encoding="utf-8")
    assert texts.wmt14_german_english()[1] == texts.SourceAndTarget("translate German to English: zwei", "two")
    (folder / "wmt14-de-en.ref").write_text("one\n", encoding="utf-8")
    with pytest.raises(UsageError, match="2 lines"):
        texts.wmt14_german_english()


def test_what_is_missing_is_named(folder, monkeypatch):
    with pytest.raises(MissingExtra, match=r"contains no text/wikitext2-test\.txt"):
        texts.wikitext2("test")
    with pytest.raises(UsageError, match="'train'"):
        texts.wikitext2("train")
    with pytest.raises(UsageError, match="'valid'"):
        texts.wikisql("valid")
    monkeypatch.delenv("NETWEIGHT_DATA")
    with pytest.raises(MissingExtra, match=r"NETWEIGHT_DATA is not set.*text/tinyshakespeare\.txt"):
        texts.tiny_shakespeare()
