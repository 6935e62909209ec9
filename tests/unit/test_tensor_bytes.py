"""The bytes of a tensor whatever its strides are; one value counts as contiguous with any stride."""

import numpy as np
import pytest
import torch

from netweight import codec
from netweight.core.digests import digest_tensor
from netweight.core.tensor_bytes import row_major_bytes

ODD = {
    "one value of a few": lambda: torch.arange(10.0)[::5][1:],
    "an expanded scalar": lambda: torch.tensor(2.0).expand(1),
    "one of bfloat16": lambda: torch.arange(10).bfloat16()[::3][:1],
    "none, from numpy": lambda: torch.from_numpy(np.lib.stride_tricks.as_strided(np.zeros(1), (0,), (0,))),
    "a scalar": lambda: torch.tensor(3.0),
    "a transposed matrix": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "an expanded row": lambda: torch.arange(3.0).expand(2, 3),
}


@pytest.mark.parametrize("name", ODD)
def test_bytes_digest_and_codec_take_every_stride(name):
    tensor = ODD[name]()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert bytes(row_major_bytes(tensor).tolist()) == bytes(plain.reshape(-1).view(torch.uint8).tolist())
    assert digest_tensor(tensor) == digest_tensor(plain)
    assert torch.equal(codec.decode(codec.encode(tensor)), plain)
