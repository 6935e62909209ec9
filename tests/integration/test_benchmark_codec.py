"""`netweight benchmark codec`: it runs, measures everything that it names, and what it writes can be read again."""

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from netweight import codec
from netweight.cli import netweight
from netweight.errors import NetweightError, Unsupported
from netweight_experiments.benchmarks.compress import codec as measure
from netweight_experiments.benchmarks.compress import codec_data as peers
from netweight_experiments.benchmarks.compress.codec import (
    TARGETS,
    Result,
    Row,
    findings,
    read_result,
    speed_tables,
    target_table,
    write_result,
)
from netweight_experiments.benchmarks.compress.codec_data import PEERS, Ready, missing, model_as, pack
from netweight_experiments.timing import Samples

pytest.importorskip("scipy", reason="scipy is in the bench extra")


@pytest.fixture
def file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, 70, generator=generator) * 0.02
    tensors = {"half": weights.to(torch.bfloat16), "full": weights, "steps": torch.arange(50), "none": torch.zeros(0)}
    save_file(tensors, tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


def run(*arguments):
    return CliRunner().invoke(netweight, ["benchmark", "codec", "--quick", *(str(part) for part in arguments)])


def test_every_contender_is_measured(file, tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    monkeypatch.setattr(measure, "interleave", partial(measure.interleave, steady=0))  # what is timed, not how long
    answer = run(file, "--repeats", 5, "--out", out, "--json")
    assert answer.exit_code == 0, answer.output
    shown, written = json.loads(answer.stdout), json.loads(out.read_text())
    assert shown.pop("file") == str(out)
    assert shown == written
    assert written["quick"]
    assert {(data["dtype"], data["nbytes"]) for data in written["data"]} == {
        ("BF16", 42000),
        ("F32", 84000),
        ("I64", 400),
    }
    keys = ("dtype", "contender", "path", "level", "direction", "mode", "threads")
    measured = {tuple(row[key] for key in keys) for row in written["rows"]}
    assert len(measured) == len(written["rows"])
    fastest, *others = [path for path in codec.available_paths() if path != "python"] or ["python"]
    absent = missing()
    for dtype in ("BF16", "F32", "I64"):
        for direction in ("encode", "decode"):
            for level in codec.LEVELS:
                assert (dtype, "netweight", fastest, level, direction, "warm", 1) in measured
            for path in others:
                assert (dtype, "netweight", path, "default", direction, "warm", 1) in measured
            for peer in PEERS:
                known = peer.dtypes is None or dtype in peer.dtypes
                row = (dtype, peer.name, None, None, direction, "warm", 1)
                assert (row in measured) == (known and peer not in absent)
        assert (dtype, "netweight", fastest, "default", "decode", "fresh", 1) in measured
        assert (dtype, "netweight", fastest, "default", "decode", "pooled", 1) in measured
    for row in written["rows"]:
        assert len(row["samples"]["wall"]) == len(row["samples"]["cpu"]) == 5
        assert row["ratio"] == pytest.approx(row["nbytes"] / row["stored_nbytes"])
        if row["contender"] != "memcpy" and row["mode"] == "warm":
            interval = row["times_as_fast_as"]["memcpy"]
            assert interval["low"] <= interval["estimate"] <= interval["high"]
    environment = written["environment"]
    assert environment["codec_path"] == codec.active_path()
    assert ("zipnn" in environment["packages"]) == ("zipnn" not in written["missing"])


def test_people_get_tables_and_a_peer_that_is_missing_is_named(file, monkeypatch):
    absent = [peer for peer in PEERS if peer.name == "lz4"]
    monkeypatch.setattr(measure, "missing", lambda: [*absent, *missing()])
    answer = run(file, "--repeats", 1)
    assert answer.exit_code == 0, answer.output
    assert "small.safetensors as BF16, warm, one thread" in answer.stdout
    assert 'Not installed: lz4. Run: pip install "netweight[bench]"' in answer.stdout
    assert "the times mean nothing" in answer.stdout
    assert "Written" not in answer.stdout


def test_a_package_that_is_not_there_is_missing(monkeypatch):
    gone = peers.Peer("gone", "no_such_package", "no-such-package", peers.PEERS[0].ready)
    monkeypatch.setattr(peers, "PEERS", (peers.PEERS[0], gone))
    assert missing() == [gone]


def test_files_that_are_not_there_or_empty_are_refused(tmp_path):
    answer = run(tmp_path / "none.safetensors")
    assert answer.exit_code == 2
    assert "There is no file" in answer.stderr
    save_file({"none": torch.zeros(0)}, tmp_path / "empty.safetensors")
    assert "nothing to measure" in run(tmp_path / "empty.safetensors").stderr


def test_what_does_not_restore_the_bytes_is_not_timed(monkeypatch):
    broken = peers.Peer(
        "broken", None, None, lambda raw, dtype, threads: Ready(1, len, lambda: raw, lambda: raw[::-1].copy())
    )
    monkeypatch.setattr(measure, "PEERS", (broken,))
    data = pack("little", "BF16", [torch.arange(100).to(torch.bfloat16)])
    with pytest.raises(NetweightError, match="broken did not restore little as BF16"):
        measure.run_benchmark([data], repeats=1, seed=0, command="")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("threads", [1, 2])
def test_peers_leave_their_input_alone_and_restore_it(file, peer, dtype, threads):
    if peer in missing():
        pytest.skip(f"{peer.package} is not installed")
    if peer.dtypes is not None and dtype not in peer.dtypes:
        pytest.skip(f"{peer.name} does not take {dtype}")
    raw = model_as(file, "small", dtype).raw
    before = raw.copy()
    ready = peer.ready(raw, dtype, threads)
    for _ in range(2):
        ready.encode(ready.prepare())
        assert bytes(ready.restored()) == before.tobytes()
    assert (raw == before).all()


def row(contender="netweight", seconds=(1.0,) * 5, **changes):
    fields = {"data": "MiniLM", "dtype": "BF16", "path": None, "level": None, "direction": "decode", "mode": "warm"}
    fields |= {"threads": 1, "nbytes": 10**9, "stored_nbytes": 10**9 // 2}
    if contender == "netweight":
        fields |= {"path": "avx512", "level": "default"}
    return Row(contender=contender, samples=Samples(seconds, seconds), **(fields | changes))


def result(*rows):
    return Result("now", "", False, 5, 0, {}, {"before": (0.0,)}, True, {}, (), (), tuple(rows))


def test_targets_are_judged_within_rounds():
    ours = row(seconds=(1.0, 2.0, 1.0, 1.0, 4.0))
    zipnn = row("zipnn", seconds=(6.0, 12.0, 6.0, 6.0, 24.0))  # six times as long in every round
    found = {finding.name: finding for finding in findings(result(ours, zipnn))}
    assert len(found) == len(TARGETS)
    speed = found["decode bf16 against zipnn, MiniLM from memory"]
    assert (speed.value, speed.ci95, speed.passed) == (6.0, (6.0, 6.0), True)
    assert found["ratio, MiniLM as bf16, default"].value == 2.0
    unmeasured = found["decode bf16 against memcpy, MiniLM from memory"]
    assert (unmeasured.value, unmeasured.passed) == (None, None)
    assert "memcpy" in unmeasured.detail["reason"]


def test_rounding_hides_no_missed_target():
    near = row(stored_nbytes=round(10**9 / 1.51296))
    lines = {line[0]: line for line in target_table(result(near))}
    assert lines["ratio, MiniLM as bf16, default"][2:] == ("1.51296", "", "missed")


def test_two_threads_are_compared_with_one():
    gaussian = {"data": "N(0, 0.02)"}
    one, two = row(**gaussian), row(**gaussian, threads=2, seconds=(0.5,) * 5)
    found = {finding.name: finding for finding in findings(result(one, two))}
    assert found["decode 67 MB, two threads against one"].value == 2.0


def test_a_result_is_read_as_it_was_written(tmp_path):
    whole = result(row(), row("zipnn"), row(mode="pooled"))
    write_result(whole, tmp_path / "result.json")
    again = read_result(tmp_path / "result.json")
    assert json.dumps(again.to_json()) == json.dumps(whole.to_json())
    assert [table.title for table in speed_tables(again)] == [table.title for table in speed_tables(whole)]
    for content in ("", "{}", '{"netweight_benchmark": 9, "name": "codec"}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(Unsupported, match=r"other\.json is not a result"):
            read_result(tmp_path / "other.json")
