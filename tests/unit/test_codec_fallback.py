"""Life without the native module: a process in which it cannot be imported."""

import json
import os
import subprocess
import sys

import numpy as np
import torch

from netweight import codec

PRELUDE = "import sys; sys.modules['netweight.codec._native'] = None; import json, warnings\n"


def run(program, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    if not variables:
        environment.pop("NETWEIGHT_REQUIRE_NATIVE", None)
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def test_everything_works_and_says_so_once(tmp_path):
    tensor = (torch.randn(30, 100, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    (tmp_path / "native.nwt").write_bytes(codec.encode(tensor, level="max"))
    torch.save(tensor, tmp_path / "tensor.pt")
    program = """
import torch
from netweight import codec
folder = sys.argv[1]
tensor = torch.load(folder + "/tensor.pt", weights_only=True)
blob = open(folder + "/native.nwt", "rb").read()
out = torch.empty_like(tensor)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    same = codec.encode(tensor, level="max", threads=2) == blob
    same_raw = codec.encode_raw(tensor.view(torch.int16).numpy(), "BF16", tensor.shape, level="max") == blob
    decoded = torch.equal(codec.decode(blob, check=True), tensor)
    raw = codec.decode_raw(blob).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    codec.decode_into(blob, out, check=True)
    rows = torch.equal(codec.decode_rows(blob, 3, 20), tensor[3:20])
    part = torch.equal(codec.fill(torch.empty_like(tensor[3:20]), blob, 300, 2000), tensor[3:20])
codec.trim_pool()
print(json.dumps({
    "paths": codec.available_paths(), "active": codec.active_path(), "same": same, "same_raw": same_raw,
    "decoded": decoded, "raw": raw, "into": torch.equal(out, tensor), "rows": rows, "part": part,
    "info": codec.info(blob).shape,
    "warned": [(w.category.__name__, str(w.message)) for w in caught],
}))
"""
    answer = run(program, str(tmp_path))
    assert answer.stderr == ""
    found = json.loads(answer.stdout)
    assert found["paths"] == ["python"]
    assert found["active"] == "python"
    assert found["info"] == [30, 100]
    assert all(found[what] for what in ("same", "same_raw", "decoded", "raw", "into", "rows", "part"))
    ((category, message),) = found["warned"]
    assert category == "RuntimeWarning"
    assert "pure Python" in message
    assert "compiler" in message


def test_asking_for_it_by_name_warns_nobody(recwarn):
    array = np.arange(2000, dtype=np.uint16)
    assert codec.encode(array, path="python") == codec.encode(array)
    assert codec.decode_raw(codec.encode(array), path="python").tobytes() == array.tobytes()
    assert not recwarn.list


def test_errors_are_the_same():
    program = """
from netweight import codec, errors
blob = codec.encode_raw(bytes(600), "U8", [600], path="python")
for call in (
    lambda: codec.decode_raw(blob[:-1]),
    lambda: codec.decode_raw(blob[:3] + b"\\3" + blob[4:]),
    lambda: codec.encode_raw(b"123", "F32", [1]),
    lambda: codec.encode_raw(b"123", "F128", [1]),
    lambda: codec.encode_raw(b"123", "U8", [3], path="avx512"),
):
    try:
        warnings.simplefilter("ignore")
        call()
    except errors.NetweightError as error:
        print(type(error).__name__, error)
"""
    answer = run(program)
    assert answer.stderr == ""
    kinds = [line.split()[0] for line in answer.stdout.splitlines()]
    assert kinds == ["CorruptBlob", "Unsupported", "UsageError", "Unsupported", "UsageError"]
    assert "Choose auto, python." in answer.stdout


def test_it_can_be_forbidden():
    answer = run("import netweight.codec", NETWEIGHT_REQUIRE_NATIVE="1")
    assert answer.returncode != 0
    assert "MissingExtra" in answer.stderr
    assert "Install a C++20 compiler" in answer.stderr


def test_the_doctor_and_reports_name_it():
    program = """
from netweight.cli import netweight
from netweight.report import report
print(report._default_environment()["codec_path"], file=sys.stderr)
netweight(["doctor", "--json"])
"""
    answer = run(program)
    assert answer.stderr == "python\n"
    found = json.loads(answer.stdout)
    assert answer.returncode == 1
    assert found["environment"]["codec_path"] == "python"
    assert any("pure Python" in problem for problem in found["problems"])
