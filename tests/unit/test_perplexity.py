"""Perplexity against a plain loop, its intervals against known cases, windows and refusals."""

import math
from types import SimpleNamespace

import pytest
import torch

from netweight.errors import UsageError
from netweight.metrics.perplexity import (
    IGNORED,
    Losses,
    causal_losses,
    compare,
    cut_windows,
    encoder_decoder_losses,
    perplexity,
)

pytest.importorskip("scipy", reason="scipy is in the evidence extra")


class Bigram(torch.nn.Module):
    """Logits that depend on the input token alone; what transformers' models look like from outside."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0)) * 2

    def forward(self, input_ids, labels=None, use_cache=True):
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


def surprise(model, given, wanted):
    row = [float(value) for value in model.table[given]]
    return math.log(sum(math.exp(value) for value in row)) - row[wanted]


def test_windows_do_not_overlap_and_the_rest_is_dropped():
    assert cut_windows(list(range(10)), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for ids, size in (([1, 2], 3), ([1, 2], 1), ([], 2)):
        with pytest.raises(UsageError, match="cannot be cut"):
            cut_windows(ids, size)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_causal_losses_are_those_of_a_plain_loop(batch):
    model = Bigram()
    windows = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(1))
    found = causal_losses(model, windows, batch=batch)
    expected = [sum(surprise(model, w[i], int(w[i + 1])) for i in range(4)) for w in windows.tolist()]
    assert found.tokens == (4,) * 6
    assert found.nats == pytest.approx(expected, rel=1e-5)
    per_word = perplexity(found, tokens_per_word=1.5, seed=0)
    assert per_word.estimate == pytest.approx(math.exp(1.5 * sum(expected) / 24), rel=1e-5)
    assert per_word.low < per_word.estimate < per_word.high
    assert per_word.n == 6


def test_targets_of_an_encoder_decoder_are_scored_up_to_their_padding():
    model = Bigram()
    labels = torch.tensor([[3, 4, IGNORED], [5, IGNORED, IGNORED]])
    given = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": labels}
    found = encoder_decoder_losses(model, [given])
    assert found.tokens == (2, 1)
    assert found.nats == pytest.approx([surprise(model, 1, 3) + surprise(model, 2, 4), surprise(model, 4, 5)], rel=1e-5)


def test_pieces_count_by_their_tokens():
    losses = Losses((2.0, 6.0, 1.0, 3.0, 4.0), (1, 3, 1, 1, 2))
    assert losses.mean == pytest.approx(2.0)
    assert perplexity(losses, seed=0).estimate == pytest.approx(math.exp(2.0))


def test_pairs_are_compared_piece_by_piece():
    generator = torch.Generator().manual_seed(0)
    base = (torch.rand(50, generator=generator) * 400).tolist()
    worse = [value + 4 + 0.4 * float(torch.rand((), generator=generator)) for value in base]
    ours, theirs = Losses(tuple(worse), (40,) * 50), Losses(tuple(base), (40,) * 50)
    ratio = compare(ours, theirs, tokens_per_word=2.0, seed=0)
    mean = (sum(worse) - sum(base)) / 2000
    assert ratio.estimate == pytest.approx(math.exp(2 * mean))
    assert ratio.low > 1.2
    assert ratio.high - ratio.low < 0.01  # far narrower than of either alone
    same = compare(theirs, theirs, seed=0)
    assert (same.estimate, same.low, same.high) == (1, 1, 1)
    with pytest.raises(UsageError, match="same pieces"):
        compare(ours, Losses(ours.nats, (39,) * 50), seed=0)


def test_a_broken_model_has_infinite_perplexity():
    broken = Losses((1.0, math.nan, 1.0, 1.0, 1.0), (1,) * 5)
    assert perplexity(broken, seed=0).estimate == math.inf
    assert perplexity(Losses((1e6,) * 5, (1,) * 5), seed=0).estimate == math.inf
