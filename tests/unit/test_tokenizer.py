"""The tokenizer that tables train for themselves: nothing of a text is lost, and training is deterministic."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netweight.data.public import SPECIAL_TOKENS, train_bpe
from netweight.errors import UsageError

pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = [f"the {animal} sees the {other}, and {n} more\n" for animal in ("cat", "dog", "ω") for other in ("owl", "ant")
         for n in range(9)]  # fmt: skip
DIGEST = (
    "import hashlib, sys; from netweight.data.public import train_bpe; "
    "print(hashlib.sha256(train_bpe(eval(sys.argv[1]), 300).backend_tokenizer.to_str().encode()).hexdigest())"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 320)


@given(st.text())
def test_decoding_gives_every_text_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.unk_token_id not in tokenizer(text.replace("<", ""))["input_ids"]


def test_what_is_frequent_becomes_short_and_special_tokens_come_first(tokenizer):
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(3)] == list(SPECIAL_TOKENS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert 259 < len(tokenizer) <= 320
    assert len(tokenizer(" the")["input_ids"]) == 1
    assert len(tokenizer(" xyz")["input_ids"]) == 4
    assert len(train_bpe([], 259)) == 259


def test_neither_order_nor_process_nor_threads_matter():
    here = hashlib.sha256(train_bpe(TEXTS, 300).backend_tokenizer.to_str().encode()).hexdigest()
    again = hashlib.sha256(train_bpe(TEXTS[::-1], 300).backend_tokenizer.to_str().encode()).hexdigest()
    command = [sys.executable, "-W", "ignore", "-c", DIGEST, repr(TEXTS)]
    there = subprocess.run(
        command, env={**os.environ, "RAYON_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    assert here == again == there.stdout.strip()


def test_too_few_tokens_are_refused():
    with pytest.raises(UsageError, match=r"cannot have 258 tokens.*259 or more"):
        train_bpe(TEXTS, 258)
