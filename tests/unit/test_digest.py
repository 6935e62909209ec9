import dataclasses
import enum
import math
from pathlib import Path

import numpy
import pydantic
import pytest
import torch

from netweight.core.digests import canonical_json, digest_bytes, digest_config, digest_file, digest_tensor
from netweight.errors import UsageError


def test_golden_digests():
    assert digest_bytes(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"
    assert digest_config({"b": [1, 2.5, None], "a": "ü"}) == digest_bytes('{"a":"ü","b":[1,2.5,null]}'.encode())


def test_a_file_has_the_digest_of_its_bytes(tmp_path):
    content = bytes(range(256)) * 20_000  # more than one block
    (tmp_path / "file").write_bytes(content)
    assert digest_file(tmp_path / "file") == digest_bytes(content)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (0, 3)])
def test_a_tensor_has_the_digest_of_its_contiguous_bytes(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    expected = digest_bytes(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
    assert digest_tensor(tensor) == expected


def test_strides_gradients_and_parameters_do_not_matter():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest_tensor(tensor.T) == digest_tensor(tensor.T.contiguous()) != digest_tensor(tensor)
    assert digest_tensor(torch.nn.Parameter(tensor)) == digest_tensor(tensor)
    assert digest_tensor(tensor.numpy().T) == digest_tensor(tensor.T)
    assert digest_tensor(numpy.float32(1.5)) == digest_tensor(torch.tensor(1.5))


class Level(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(frozen=True)
class Settings:
    level: Level
    path: Path
    sizes: tuple[int, ...]


class Model(pydantic.BaseModel):
    level: Level
    inner: Settings


def test_equal_configurations_have_one_canonical_form():
    plain = {"sizes": [1, 2], "path": "a/b", "level": "fast"}
    settings = Settings(Level.FAST, Path("a/b"), (1, 2))
    assert digest_config(settings) == digest_config(plain)
    assert canonical_json(Model(level=Level.FAST, inner=settings)) == canonical_json({"inner": plain, "level": "fast"})
    assert canonical_json({"names": {"b", "a"}}) == '{"names":["a","b"]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1: 2, "a": 3}, Settings])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(UsageError):
        digest_config({"key": value})


def test_nan_is_allowed_in_results_only():
    assert canonical_json([math.nan], allow_nan=True) == "[NaN]"
