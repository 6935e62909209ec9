"""Laws of banks: whatever the ranks, dtypes and shards, every range of rows is the adapters that were added."""

import shutil

import torch
from adapters_under_test import close, random_adapter, same
from hypothesis import given
from hypothesis import strategies as st

from netweight import AdapterBank, read_adapter, write_adapter
from netweight.nn.lora import AdapterStack
from netweight.store.bank.shards import BankWriter
from netweight.store.lora_formats.naming import flat, namings

SHAPES = st.dictionaries(
    st.sampled_from(["unet.conv_in", "unet.conv_out", "unet.time_embedding.linear_1", "text_encoder.text_projection"]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    min_size=1,
)
SCALES = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=4)
RANKS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(
    st.data(), SHAPES, DTYPES, st.booleans(), st.integers(1, 2000),
    st.lists(st.tuples(RANKS, SCALES, st.booleans()), min_size=1, max_size=12),
)  # fmt: skip
def test_every_range_is_the_adapters_added(tmp_path_factory, data, shapes, dtype, compress, shard_bytes, kinds):
    adapters = [
        random_adapter(seed, shapes=shapes, ranks=ranks, scales=scales, dtype=dtype)
        for seed, (ranks, scales, _) in enumerate(kinds)
    ]
    folder = tmp_path_factory.mktemp("law") / "bank"
    with BankWriter(folder, compress=compress, shard_bytes=shard_bytes) as writer:
        for number, (adapter, (_, _, flushed)) in enumerate(zip(adapters, kinds, strict=True)):
            writer.add(str(number), adapter)
            if flushed:
                writer.flush()
    bank = AdapterBank.open(folder)
    bank.verify()
    assert bank.names == [str(number) for number in range(len(adapters))]
    start = data.draw(st.integers(0, len(adapters) - 1))
    stop = data.draw(st.integers(start + 1, len(adapters)))
    stack, expected = bank.stack(start, stop), AdapterStack.of(adapters[start:stop])
    for name in expected.modules:
        for part in ("down", "up", "scale", "ranks"):
            assert torch.equal(getattr(stack, part)[name], getattr(expected, part)[name])
    number = data.draw(st.integers(0, len(adapters) - 1))
    assert same(bank.adapter(number), adapters[number])
    shutil.rmtree(folder.parent)


@given(
    SHAPES,
    RANKS,
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4),
    DTYPES,
    st.sampled_from(["diffusers", "peft", "kohya"]),
)
def test_every_layout_keeps_the_change(tmp_path_factory, shapes, ranks, scales, dtype, layout):
    adapter = random_adapter(0, shapes=shapes, ranks=ranks, scales=scales, dtype=dtype)
    folder = tmp_path_factory.mktemp("law") / "adapter"
    write_adapter(adapter, folder, layout=layout)
    found = read_adapter(folder)
    assert close(found, adapter)
    assert layout != "peft" or all(torch.equal(found.factors[n].up, adapter.factors[n].up) for n in adapter.factors)
    shutil.rmtree(folder.parent)


TABLES = [table for table in namings() if table.component != "text_encoder"]


@given(
    st.sampled_from([(table, entry, index) for table in TABLES for entry in table.entries
                     for index in range(len(entry.diffusers)) if ":" not in entry.diffusers[index]]),
    st.lists(st.integers(0, 99), min_size=4, max_size=4),
)  # fmt: skip
def test_the_way_back_from_flattened_names(which, numbers):
    table, entry, index = which
    module = entry.diffusers[index]
    for number in numbers:
        module = module.replace("#", str(number), 1)
    found = table.match(flat(module), flattened=True, names="diffusers")
    assert found.pieces(1, 1, table.component)[0].module == f"{table.component}.{module}"
    authors = table.of_diffusers(f"{table.component}.{module}")
    again = table.match(flat(authors.authors), flattened=True, names="authors")
    assert again.entry.diffusers[authors.index] == authors.entry.diffusers[authors.index]
