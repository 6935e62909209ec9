import doctest

import pytest
from torch import nn

from netweight import Select
from netweight.core import names
from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

NAMES = [
    "embed.weight",
    "layers.0.attn.to_q.weight",
    "layers.0.attn.to_v.weight",
    "layers.1.attn.to_q.weight",
    "layers.1.attn.to_v.weight",
    "head.weight",
]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["**"], NAMES),
        (["*.weight"], ["embed.weight", "head.weight"]),
        (["**.to_v.*"], [NAMES[2], NAMES[4]]),
        (["layers.*.attn.to_{q,v}.weight", "!layers.0.**"], [NAMES[3], NAMES[4]]),
        (["!layers.**"], ["embed.weight", "head.weight"]),
        (["{embed,layers.1.attn.{to_q,to_v}}.weight"], [NAMES[0], NAMES[3], NAMES[4]]),
        (["layers.1.**", "embed.weight"], [NAMES[0], NAMES[3], NAMES[4]]),
        (["e*.we*t"], ["embed.weight"]),
        (["**.**.head.**.weight.**"], ["head.weight"]),
    ],
)
def test_patterns_choose_in_the_given_order(patterns, expected):
    assert Select(*patterns).keys(NAMES) == expected


@pytest.mark.parametrize("pattern", ["layers.0.atn.to_q.weight", "!layers.0.atn.to_q.weight", "**.atn.to_q.*"])
def test_a_pattern_without_a_match_is_answered_with_the_nearest_names(pattern):
    with pytest.raises(NameNotFound, match=r"none of the 6 names.*layers\.0\.attn\.to_q\.weight") as caught:
        Select("**", pattern).keys(NAMES)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("pattern", ["a..b", "", ".a", "a.", "a**", "{a,b", "a}b", "{a,b}}", "{1,2}" * 20])
def test_malformed_patterns_are_refused(pattern):
    with pytest.raises(UsageError):
        Select(pattern)


def test_no_pattern_is_refused():
    with pytest.raises(UsageError, match="at least one pattern"):
        Select()


def test_hostile_patterns_and_names_end_quickly():
    with pytest.raises(NameNotFound):
        Select("**.a.**.a.**.a.**.a.**.z").keys([".".join("a" * 30)])


@pytest.fixture
def tied():
    model = nn.Sequential()
    model.embed = nn.Embedding(5, 3)
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    model.alias = model.head
    return model


def test_tied_parameters_appear_once(tied):
    assert list(Select("**").parameters(tied)) == ["embed.weight"]
    assert list(Select("head.*").parameters(tied)) == ["head.weight"]
    assert Select("head.*").parameters(tied)["head.weight"] is tied.embed.weight


def test_shared_modules_appear_once_and_the_model_is_none_of_its_modules(tied):
    assert Select("**").modules(tied) == {"embed": tied.embed, "head": tied.head}
    assert Select("alias").modules(tied) == {"alias": tied.head}


def test_errors_say_what_was_searched(tied):
    with pytest.raises(NameNotFound, match="none of the 3 modules"):
        Select("body").modules(tied)
    with pytest.raises(NameNotFound, match="there are no parameters"):
        Select("body").parameters(nn.ReLU())


def test_of_takes_what_a_caller_may_have():
    assert Select.of("a") == Select("a") == Select.of(["a"]) == Select.of(Select("a"))
    assert Select("a", "!b") != Select("a")
    assert repr(Select("a", "!b")) == "Select('a', '!b')"
    assert hash(Select("a")) == hash(Select("a"))


def test_nearest_names_of_short_words():
    assert nearest_names("levle", ["output", "level", "subject"])[0] == "level"
    assert nearest_names("anything", []) == []


def test_the_examples_in_the_documentation_hold():
    assert doctest.testmod(names) == doctest.TestResults(failed=0, attempted=1)
