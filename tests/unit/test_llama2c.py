"""Tokenizers of llama2.c against its own algorithm: bytes and pieces, then the best merge again and again."""

import itertools
import struct

import pytest

from netweight.errors import Unsupported, UsageError
from netweight.hf.llama2c_tokenizer import llama2c_pieces, llama2c_tokenizer
from netweight.hf.load_tokenizer import load_tokenizer

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models

SENTENCES = [
    "Once upon a time, there was a little girl named Lily.",
    "  two  spaces, a tab\tand\nnew lines\n\n",
    "Zoë paid 5 € – naïve? 日本 🙂",
    "= = Description = = \n unk of 7 @.@ 5 kg",
    "",
]


def merge_by_hand(pieces, text):
    """The loop of llama2.c: a space before the text, characters or their bytes, the best pair merged until none is."""
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    tokens = []
    for character in " " + text if text else "":
        encoded = character.encode()
        tokens += [ids[encoded]] if encoded in ids else [byte + 3 for byte in encoded]
    while True:
        pairs = [
            (pieces[ids[union]][1], -place, ids[union])
            for place, (left, right) in enumerate(itertools.pairwise(tokens))
            if (union := pieces[left][0] + pieces[right][0]) in ids
        ]
        if not pairs:
            return tokens
        _, place, best = max(pairs)
        tokens[-place : 2 - place] = [best]


def vocabulary(pieces):
    special = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    return [(piece, 0.0) for piece in special] + pieces


def write(path, pieces):
    content = struct.pack("<I", 7)
    path.write_bytes(content + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in pieces))
    return path


def test_a_small_vocabulary_is_split_as_by_hand(tmp_path):
    words = [b" ", b"a", b"b", b"c", b"ab", b"bc", b" a", b"abc", b" ab", "é".encode()]
    pieces = vocabulary([(piece, -float(number)) for number, piece in enumerate(words)])
    made = llama2c_tokenizer(write(tmp_path / "tok.bin", pieces))
    assert llama2c_pieces(tmp_path / "tok.bin") == pieces
    for text in ("abc", "a bc abc", "cab", "éab ü", "  bca"):
        assert made(text)["input_ids"] == merge_by_hand(pieces, text)
        assert made.decode(made(text)["input_ids"]) == text


def test_a_published_vocabulary_is_split_as_by_hand(data_folder):
    (file,) = (data_folder / "weights" / "stories260K_hf").glob("tok*.bin")
    pieces, made = llama2c_pieces(file), llama2c_tokenizer(file)
    assert len(made) == len(pieces) == 512
    for text in SENTENCES:
        assert made(text)["input_ids"] == merge_by_hand(pieces, text), text
        assert made.decode(made(text)["input_ids"]) == text
    assert 0 in made("an <unk> word")["input_ids"]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:3000], lambda b: b"", lambda b: b[:4] + b"\xff" * 99]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    file = write(tmp_path / "tok.bin", vocabulary([(b"a", -1.0)]))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Unsupported, match=r"tok\.bin"):
        llama2c_tokenizer(file)


def test_a_folder_with_a_tokenizer_of_its_own_keeps_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="cannot be opened as a model with its tokenizer"):
        load_tokenizer(tmp_path)
    write(tmp_path / "tok512.bin", vocabulary([]))
    assert len(load_tokenizer(tmp_path)) == 259
    chat_models.chatml().save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) > 259


def test_a_damaged_tokenizer_is_not_replaced_by_another_beside_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path / "tok512.bin", vocabulary([]))
    with pytest.raises(UsageError, match="tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).get_vocab()
