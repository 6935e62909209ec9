"""Folders whose weights are rounded: what is written, restored, verified, inspected and said."""

import json
import re
import struct

import numpy as np
import pytest
from click.testing import CliRunner
from folders_under_test import content, simple_weights, transformers_folder, weights, write_safetensors
from rounding_under_test import change

import netweight
from netweight import cli, codec
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store import open_store


def run(*arguments):
    return CliRunner().invoke(cli.netweight, [str(argument) for argument in arguments], catch_exceptions=False)


def a_model(folder):
    """A folder with tensors that are rounded and others that are not."""
    transformers_folder(folder)
    tensors = [
        ("layer.weight", "BF16", (64, 48), weights("BF16", (64, 48))),
        ("layer.bias", "BF16", (64,), weights("BF16", (64,))),
        ("wide.weight", "F32", (30, 40), weights("F32", (30, 40))),
        ("double.weight", "F64", (10, 4), weights("F64", (10, 4))),
        ("positions", "I64", (4, 10), weights("I64", (4, 10))),
    ]
    write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return a_model(tmp_path / "m")


def found(findings):
    return {finding.name: finding for finding in findings}


def test_matrices_of_floats_are_rounded_and_the_rest_is_not(model, tmp_path):
    summary = netweight.compress_folder(model, "net", mantissa_bits=1, block_size=32)
    assert (summary.rounded, summary.tensors) == (2, 5)
    before, after = open_store(model), open_store("net")
    for name in before.names():
        raw, rounded = before.content(name), after.content(name, check=True)
        info = after.rounding(name)
        if name in ("layer.weight", "wide.weight"):
            assert (info.mantissa_bits, info.block_size, info.fidelity) == (1, 32, "corrected")
            assert 0 < change(raw, rounded, info.dtype) == info.worst_change <= info.bound
        else:
            assert info is None
            assert bytes(raw) == bytes(rounded)
    assert summary.worst_change == max(after.rounding(n).worst_change for n in ("layer.weight", "wide.weight"))
    assert summary.bound == codec.relative_bound(1)
    lossless = netweight.compress_folder(model, "lossless")
    assert summary.stored_nbytes < 0.8 * lossless.stored_nbytes
    assert (lossless.rounded, lossless.bound, lossless.worst_change) == (0, 0, 0)


def test_the_manifest_records_it(model, tmp_path):
    netweight.compress_folder(model, "net", mantissa_bits=1, block_size=None)
    manifest = json.loads((tmp_path / "net" / "netweight.json").read_bytes())
    assert manifest["rounding"] == {"mantissa_bits": 1, "block_size": None, "fidelity": "corrected"}
    (entry,) = (entry for entry in manifest["files"] if entry["kind"] == "compressed")
    assert entry["rounded"] == 2
    assert 0 < entry["worst_change"] <= entry["bound"]
    file = tmp_path / "net" / "model.net.safetensors"
    raw = file.read_bytes()
    metadata = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"]
    assert json.loads(metadata["netweight"])["version"] == 1
    netweight.compress_folder(model, "lossless")
    manifest = json.loads((tmp_path / "lossless" / "netweight.json").read_bytes())
    assert "rounding" not in manifest


def test_what_is_restored_is_the_rounded_model(model, tmp_path):
    netweight.compress_folder(model, "net", mantissa_bits=2)
    summary = netweight.decompress_folder("net", "back")
    assert summary.rounded == 2
    assert 0 < summary.worst_change <= summary.bound
    rounded, back = open_store("net"), open_store("back")
    for name in back.names():
        assert bytes(back.content(name)) == bytes(rounded.content(name))
    plain, restored = content(model), content(tmp_path / "back")
    assert plain.pop("model.safetensors") != restored.pop("model.safetensors")
    assert plain == restored
    one_more = netweight.verify("back", "net")
    assert found(one_more)["largest relative change"].value == 0
    assert all(finding.passed is not False for finding in one_more)


def test_verify_proves_the_bound(model):
    netweight.compress_folder(model, "net", mantissa_bits=0, block_size=64)
    for arguments in (("net", "m"), ("m", "net")):
        findings = found(netweight.verify(*arguments))
        assert findings["rounded tensors beyond their bound"].value == 0
        assert findings["rounded tensors beyond their bound"].n == 2
        assert (findings["tensors that differ"].value, findings["tensors that differ"].n) == (0, 3)
        largest = findings["largest relative change"]
        assert largest.passed is True
        assert largest.detail["measured"] is True
        assert largest.target == codec.relative_bound(0)
    alone = found(netweight.verify("net"))["largest relative change"]
    assert (alone.detail["measured"], alone.value) == (False, largest.value)


@pytest.mark.parametrize("what", ["one weight", "a zero", "a bias"])
def test_verify_finds_the_weight_that_is_too_far(model, what):
    netweight.compress_folder(model, "net", mantissa_bits=3)
    raw = bytearray((model / "model.safetensors").read_bytes())
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    at = start + 2 * (64 * 48 + 5 if what == "a bias" else 777)
    number = struct.unpack("<H", raw[at : at + 2])[0]
    raw[at : at + 2] = struct.pack("<H", 0 if what == "a zero" else number ^ 0x40)
    (model / "model.safetensors").write_bytes(raw)
    findings = found(netweight.verify("net", model))
    name = "tensors that differ" if what == "a bias" else "rounded tensors beyond their bound"
    assert findings[name].passed is False
    assert ("layer.bias" if what == "a bias" else "layer.weight") in findings[name].detail["which"][0]
    assert (findings["largest relative change"].passed is False) == (what != "a bias")
    assert sum(finding.passed is False for finding in findings.values()) == (1 if what == "a bias" else 2)


def test_damage_is_found(model, tmp_path):
    netweight.compress_folder(model, "net", mantissa_bits=3)
    file = tmp_path / "net" / "model.net.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 16
    file.write_bytes(raw)
    findings = found(netweight.verify("net"))
    assert findings["damaged tensors"].value == 1
    with pytest.raises(CorruptBlob):
        netweight.decompress_folder("net", "back")


def test_the_commands_say_that_it_is_lossy(model, tmp_path):
    answer = run("compress", "m", "net", "--mantissa-bits", 1, "--block-size", 0)
    assert answer.exit_code == 0
    assert "Lossy: 2 of 5 tensors are rounded to 1 mantissa bit. The largest change of a weight is 0." in answer.stderr
    assert " of itself, within the bound of 0.2000. The others are kept bit for bit." in answer.stderr
    answer = run("verify", "net", "--against", "m")
    assert answer.exit_code == 0
    assert re.search(r"met +largest relative change: 0\.\d+ of a weight, within the bound of 0\.2000", answer.stdout)
    assert "identical" not in answer.stdout
    assert "These are not the original weights" in run("decompress", "net", "back").stderr
    inspected = run("inspect", "net").stdout
    assert re.search(r"layer\.weight .* 1 bit +0\.2000 +0\.\d{4}", inspected)
    assert re.search(r"layer\.bias .* all bits +- +-", inspected)
    (report,) = (t for t in json.loads(run("inspect", "net", "--json").stdout)["tensors"] if t["name"] == "wide.weight")
    assert report["rounding"]["mantissa_bits"] == 1
    assert 0 < report["rounding"]["worst_change"] <= report["rounding"]["bound"] == 0.2
    summary = json.loads(run("compress", "m", "again", "--mantissa-bits", 1, "--json").stdout)
    assert (summary["rounded"], summary["bound"]) == (2, codec.relative_bound(1))
    assert "Lossy" not in run("compress", "m", "lossless").output


def test_single_files(tmp_path):
    file = simple_weights(tmp_path / "w.safetensors")
    summary = netweight.compress_folder(file, tmp_path / "n.safetensors", mantissa_bits=3)
    assert summary.rounded == 2
    assert netweight.decompress_folder(tmp_path / "n.safetensors", tmp_path / "b.safetensors").rounded == 2
    assert all(f.passed is not False for f in netweight.verify(tmp_path / "n.safetensors", file))
    vectors = simple_weights(tmp_path / "v.safetensors", shape=(300,))
    answer = run("compress", vectors, tmp_path / "nv.safetensors", "--mantissa-bits", "3")
    assert "Nothing was rounded" in answer.stdout


def test_an_interrupted_run_goes_on_only_with_the_same_rounding(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    broken = source / "model-00002-of-00002.safetensors"
    whole = broken.read_bytes()

    def interrupted(name):
        """What a run that was killed in the second shard leaves."""
        from netweight.methods.compress import compress_folder

        original = compress_folder.write_compressed

        def stopping(shard, target, **options):
            if target.name.startswith(broken.stem):
                raise KeyboardInterrupt
            return original(shard, target, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compress_folder, "write_compressed", stopping)
            with pytest.raises(KeyboardInterrupt):
                netweight.compress_folder(source, tmp_path / name, mantissa_bits=3)

    interrupted("same")
    assert netweight.compress_folder(source, tmp_path / "same", mantissa_bits=3).resumed > 0
    interrupted("other")
    netweight.compress_folder(source, tmp_path / "other", mantissa_bits=1)
    netweight.compress_folder(source, tmp_path / "fresh", mantissa_bits=1)
    assert content(tmp_path / "other") == content(tmp_path / "fresh")
    assert broken.read_bytes() == whole


def test_bad_settings_are_refused_before_work(model, tmp_path):
    for options in ({"mantissa_bits": 9}, {"mantissa_bits": 2, "block_size": -1}, {"fidelity": "other"}):
        with pytest.raises(UsageError):
            netweight.compress_folder(model, "net", **options)
    with pytest.raises(Unsupported, match="defined for BF16, not for F32"):
        netweight.compress_folder(model, "net", mantissa_bits=2, fidelity="reference")
    assert not (tmp_path / "net").exists()
    assert run("compress", "m", "net", "--mantissa-bits", "8").exit_code == 2
    manifest = netweight.compress_folder(model, "net", mantissa_bits=2)
    assert manifest.rounded == 2
    path = tmp_path / "net" / "netweight.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rounding": {"mantissa_bits": 12}}))
    with pytest.raises(CorruptBlob, match="damaged"):
        netweight.decompress_folder("net", "back")


def test_rounded_numbers_of_all_kinds_are_compared(tmp_path):
    """The audit's own comparison, with numbers at the bound and beyond it."""
    from netweight.methods.compress.verify import largest_change

    assert largest_change(np.float32([1.0, 2]).tobytes(), np.float32([1.5, 2]).tobytes(), "F32") == 1 / 3
    assert largest_change(np.float16([2.0]).tobytes(), np.float16([1.5]).tobytes(), "F16") == 1 / 3
    same = np.array([0x7FC1, 0x7F80, 0x8000, 0x0001], "<u2").tobytes()
    assert largest_change(same, same, "BF16") == 0
    for left, right in ((0x7FC1, 0x7FC2), (0x7F80, 0x7F7F), (0x0000, 0x8000), (0x0001, 0x0000), (0x0000, 0x0001)):
        pair = [np.array([number], "<u2").tobytes() for number in (left, right)]
        assert largest_change(*pair, "BF16") in (1.0, np.inf)
