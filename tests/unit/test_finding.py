import dataclasses
import math

import numpy
import pytest
import torch

from netweight.errors import UsageError
from netweight.report import Finding
from netweight.report.finding import encode_json


@pytest.mark.parametrize(
    ("value", "better", "target", "passed"),
    [
        (1.0, "higher", 1.0, True),
        (0.99, "higher", 1.0, False),
        (0.99, "lower", 1.0, True),
        (1.01, "lower", 1.0, False),
        (5, None, (4, 6), True),
        (4, "higher", (4, 6), True),
        (7, "higher", (4, 6), False),
        (7, None, (4, math.inf), True),
        (True, None, True, True),
        (False, None, True, False),
        (3, None, 3, True),
        (3, None, 4, False),
        (3, "higher", None, None),
        (None, "higher", 3, None),
        (math.nan, "higher", 3, False),
        (math.nan, "lower", 3, False),
        (math.nan, None, (0, 3), False),
        (math.inf, "higher", 3, True),
    ],
)
def test_passed_follows_from_value_target_and_direction(value, better, target, passed):
    assert Finding("x", value, better=better, target=target).passed is passed


def test_scalars_of_numpy_and_torch_become_plain_numbers():
    finding = Finding(
        "x",
        torch.tensor(0.5, dtype=torch.bfloat16),
        n=numpy.int64(3),
        ci95=(numpy.float32(0), torch.tensor([1.0])),
        seeds=(numpy.uint8(7),),
        target=numpy.float64(0.25),
        better="higher",
        detail={"count": numpy.int16(2), "list": (1, numpy.bool_(True))},
    )
    assert finding.value == 0.5
    assert type(finding.value) is float
    assert type(finding.n) is int
    assert finding.ci95 == (0.0, 1.0)
    assert finding.seeds == (7,)
    assert finding.detail == {"count": 2, "list": [1, True]}
    assert finding.passed is True


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": " "}, "needs a name"),
        ({"value": "1"}, "value is '1'"),
        ({"value": numpy.zeros(2)}, "value is"),
        ({"ci95": (2, 1)}, "ci95"),
        ({"ci95": (1,)}, "ci95"),
        ({"better": "more"}, "higher"),
        ({"target": math.nan}, "NaN"),
        ({"target": (0, math.nan)}, "target"),
        ({"n": 0}, "n is 0"),
        ({"n": 2.5}, "n is 2.5"),
        ({"detail": {"x": object()}}, "not a JSON value"),
        ({"detail": {1: 2}}, "must be texts"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields, says):
    with pytest.raises(UsageError, match=says):
        Finding(**{"name": "x", "value": 1.0, **fields})


def test_a_finding_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Finding("x", 1).value = 2


def test_stored_findings_with_unknown_or_missing_fields_are_refused():
    with pytest.raises(UsageError, match="surprise"):
        Finding.from_json({"name": "x", "value": 1, "surprise": 2})
    with pytest.raises(UsageError, match="lacks name or value"):
        Finding.from_json({"name": "x"})


def test_a_stored_verdict_is_not_trusted():
    stored = Finding("x", 1.0, better="higher", target=2.0).to_json()
    assert Finding.from_json({**stored, "passed": True}).passed is False


def test_encoding_names_what_is_not_json():
    with pytest.raises(TypeError, match="set"):
        encode_json({"a": [{1, 2}]})
