"""Laws of compression: any safetensors file comes back byte for byte, through any level, and rows are rows."""

import json
import struct
import tempfile
from pathlib import Path

import numpy
from folders_under_test import head
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import NetweightError
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.methods.compress.verify import verify
from netweight.store import open_store
from netweight.store.safetensors import BITS, nbytes_of

TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)
SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple),
    st.integers(0, 3000).map(lambda n: (n,)),
)


@st.composite
def tensors(draw):
    """A tensor of any safetensors dtype, any shape that ends on a whole byte, any bits."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(SHAPES)
    if dtype.startswith(("F4", "F6")):
        shape = (*shape, 4)
    nbytes = nbytes_of(dtype, shape)
    seed = draw(st.integers(0, 1000))
    kind = draw(st.sampled_from(["random", "zero", "gaussian"]))
    if kind == "zero":
        return dtype, shape, bytes(nbytes)
    generator = numpy.random.default_rng(seed)
    if kind == "random":
        return dtype, shape, generator.bytes(nbytes)
    values = generator.normal(0, 0.02, nbytes // 4 + 1).astype("<f4")
    return dtype, shape, values.tobytes()[:nbytes]


@st.composite
def files(draw):
    """The bytes of a valid safetensors file with names, order, metadata and padding of all kinds."""
    names = draw(st.lists(TEXT.filter(lambda name: name != "__metadata__"), unique=True, max_size=5))
    entries, offset, data = {}, 0, []
    for name in names:
        dtype, shape, content = draw(tensors())
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
        data.append(content)
    if draw(st.booleans()):
        entries["__metadata__"] = draw(st.dictionaries(TEXT, TEXT, max_size=3))
    order = draw(st.permutations(list(entries)))
    padding = b" " * draw(st.integers(0, 20))
    return head({name: entries[name] for name in order}, padding=padding) + b"".join(data)


@given(files(), st.sampled_from(["fast", "default", "high", "max"]), st.integers(1, 3))
def test_any_file_comes_back_byte_for_byte(data, level, threads):
    with tempfile.TemporaryDirectory() as place:
        source, net, back = (Path(place) / name for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
        source.write_bytes(data)
        compress_folder(source, net, level=level, threads=threads)
        assert all(finding.passed is not False for finding in verify(net, against=source))
        decompress_folder(net, back)
        assert back.read_bytes() == data


@given(files())
def test_a_store_tells_the_same_of_both(data):
    with tempfile.TemporaryDirectory() as place:
        source, net = Path(place) / "a.safetensors", Path(place) / "b.safetensors"
        source.write_bytes(data)
        compress_folder(source, net)
        with open_store(source) as plain, open_store(net) as packed:
            assert plain.names() == packed.names()
            for name in plain.names():
                mine, theirs = plain.info(name), packed.info(name)
                assert (mine.dtype, mine.shape, mine.nbytes) == (theirs.dtype, theirs.shape, theirs.nbytes)
                assert bytes(plain.content(name)) == bytes(packed.content(name, check=True))
                assert theirs.stored_nbytes <= mine.nbytes * 1.001 + 64


@given(files(), st.data())
def test_compression_is_deterministic(data, draw):
    threads = draw.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as place:
        source, first, second = (Path(place) / name for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
        source.write_bytes(data)
        compress_folder(source, first, threads=1)
        compress_folder(source, second, threads=threads)
        assert first.read_bytes() == second.read_bytes()


@given(files(), st.data())
def test_damage_is_never_silent(data, draw):
    """A changed or cut file is refused or found by the audit, unless the change is in spaces or descriptions."""
    with tempfile.TemporaryDirectory() as place:
        source, net, back = (Path(place) / name for name in ("a.safetensors", "b.safetensors", "c.safetensors"))
        source.write_bytes(data)
        compress_folder(source, net)
        packed = bytearray(net.read_bytes())
        if draw.draw(st.booleans()):
            packed = packed[: draw.draw(st.integers(0, len(packed) - 1))]
        else:
            packed[draw.draw(st.integers(0, len(packed) - 1))] ^= draw.draw(st.integers(1, 255))
        net.write_bytes(packed)
        try:
            decompress_folder(net, back)
        except NetweightError:
            assert not back.exists()
            return
        assert tensors_of(back.read_bytes()) == tensors_of(data)


def tensors_of(data):
    """The tensors in the bytes of a safetensors file, by name."""
    length = struct.unpack("<Q", data[:8])[0]
    entries, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], payload[slice(*entry["data_offsets"])])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_name_or_read(data):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "x.safetensors"
        path.write_bytes(data)
        refused = None
        try:
            open_store(path).close()
        except NetweightError as error:
            refused = error
        assert refused is None or ("x.safetensors" in str(refused) and refused.exit_code == 3)
