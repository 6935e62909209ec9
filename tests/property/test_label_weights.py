"""What the label's pass over tensors counts, against numpy on the whole tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from netweight.labels import weights
from netweight.labels.measure import label
from netweight.labels.weights import measure_weights

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def rows_of_one_value(tensor):
    flat = tensor.reshape(tensor.shape[0], -1).contiguous()
    raw = flat.view(torch.uint8).reshape(len(flat), flat.shape[1], -1).numpy()
    alike = (raw == raw[:, :1]).all(axis=(1, 2))
    zero = (raw == 0).all(axis=(1, 2))
    return int(alike.sum()), int(zero.sum())


@settings(max_examples=30)
@given(st.data())
def test_counts_are_those_of_numpy(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
    for row in range(0, len(tensor), 3):
        tensor[row] = data.draw(st.sampled_from([0, 1]))
    if tensor.is_floating_point() and data.draw(st.booleans()):
        tensor.view(-1)[0], tensor.view(-1)[-1] = float("nan"), float("inf")
    file = tmp_path_factory.mktemp("label") / "model.safetensors"
    save_file({"a": tensor}, file)
    piece, chunk = weights._PIECE, data.draw(st.sampled_from([1 << 10, 1 << 20]))
    try:  # pieces no longer than a chunk, so that rows go on from piece to piece in large tensors
        weights._PIECE = chunk
        facts = measure_weights([file]).tensors[0]
    finally:
        weights._PIECE = piece
    assert facts.count == tensor.numel()
    if tensor.is_floating_point():
        assert facts.nans == int(torch.isnan(tensor).sum())
        assert facts.infinities == int(torch.isinf(tensor).sum())
    if tensor.ndim >= 2 and tensor[0].numel() > 1 and not tensor.is_complex():
        assert (facts.constant_rows, facts.zero_rows) == rows_of_one_value(tensor)
        assert facts.rows == len(tensor)


def test_rows_that_cross_pieces(tmp_path):
    tensor = torch.randn(7, 300_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensor[1], tensor[2], tensor[6] = 0, 1.5, 0
    tensor[3, :-1], tensor[3, -1] = 2, 3  # one value but for the last element
    tensor[4, 0], tensor[4, 1:] = 3, 2  # one value but for the first
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    facts = measure_weights([tmp_path / "model.safetensors"]).tensors[0]
    assert (facts.rows, facts.constant_rows, facts.zero_rows) == (7, 3, 2)


def test_the_net_weight_is_that_of_the_compressed_file(tmp_path):
    from netweight.store.reader import open_store
    from netweight.store.writer import StoreWriter

    tensors = {"a": torch.randn(300, 1000).bfloat16(), "b": torch.randn(1000), "c": torch.arange(100)}
    tensors["d"] = tensors["a"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    facts = measure_weights([tmp_path / "model.safetensors"])
    with StoreWriter(tmp_path / "net.safetensors") as writer:
        for name, tensor in tensors.items():
            if name != "d":
                writer.add(name, tensor)
    with open_store(tmp_path / "net.safetensors") as store:
        assert facts.net == sum(store.info(name).stored_nbytes for name in store.names())
    compressed = measure_weights([tmp_path / "net.safetensors"])
    assert compressed.net == facts.net
    assert compressed.gross == facts.gross - facts.tensors[3].nbytes
    assert [[tensor.name for tensor in group] for group in facts.duplicates] == [["a", "d"]]


def test_narrower_types_are_found_only_where_every_value_fits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "bf16": torch.randn(1000, generator=generator).bfloat16().float(),
        "f16": torch.randn(1000, generator=generator).half().float(),
        "neither": torch.randn(1000, generator=generator),
        "almost": torch.randn(1000, generator=generator).bfloat16().float(),
        "too_large_for_f16": torch.tensor([1e30, 1.0]).bfloat16().float(),
        "f32": torch.randn(1000, generator=generator).double(),
        "nan": torch.tensor([float("nan"), 1.0]),
    }
    tensors["almost"][-1] = np.pi
    save_file(tensors, tmp_path / "model.safetensors")
    facts = measure_weights([tmp_path / "model.safetensors"])
    assert {tensor.name: tensor.narrower for tensor in facts.tensors} == {
        "bf16": "BF16", "f16": "F16", "neither": None, "almost": None, "too_large_for_f16": "BF16", "f32": "F32",
        "nan": "BF16",
    }  # fmt: skip


def test_nan_is_found_in_every_type_of_eight_bits(tmp_path):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        save_file({"a": every}, tmp_path / "model.safetensors")
        facts = measure_weights([tmp_path / "model.safetensors"]).tensors[0]
        assert (facts.nans, facts.infinities) == (int(every.float().isnan().sum()), int(every.float().isinf().sum()))


def test_a_checkpoint_gives_the_same_facts_as_safetensors(tmp_path):
    tensors = {"a": torch.randn(64, 64), "b": torch.randn(8).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "model.pt")
    plain = measure_weights([tmp_path / "model.safetensors"])
    pickled = measure_weights([], [tmp_path / "model.pt"])
    assert (pickled.gross, pickled.net) == (plain.gross, plain.net)
    assert {tensor.name for tensor in pickled.tensors} == {"state_dict.a", "state_dict.b"}


@settings(max_examples=15)
@given(st.data())
def test_the_bits_of_the_parts_add_up_to_the_bits_of_a_number(tmp_path_factory, data):
    """As they are printed, in two decimals."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    tensors = {str(n): (torch.randn(size, generator=generator) * 10**n).to(dtype) for n, size in enumerate(sizes)}
    file = tmp_path_factory.mktemp("label") / "model.safetensors"
    save_file(tensors, file)
    whole, *parts = [row for row in label(file).rows if row.unit == "bits per number"]
    assert len(parts) == 4
    printed = [float(row.value.split()[0]) for row in (whole, *parts)]
    assert printed[0] == pytest.approx(sum(printed[1:]), abs=1e-6)
