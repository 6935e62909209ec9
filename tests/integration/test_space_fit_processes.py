"""Fits that are killed and go on, and fits by several processes."""

import functools
import signal
from pathlib import Path

import numpy
import pytest
import streamed_rows
import torch
import warm

from netweight.core.engines import in_process, local_processes
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.methods.space.fit import MatrixShard, fit_shards, fit_streaming
from netweight.nn import matrix
from netweight.nn.matrix import MatrixFile

PROGRAM = Path(__file__).parents[1] / "support" / "streamed_rows.py"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    draw = numpy.random.default_rng(0)
    values = (draw.standard_normal((130, 40)) * numpy.arange(1, 41) ** -0.5) @ draw.standard_normal((40, 70)) + 2
    path = tmp_path_factory.mktemp("rows") / "rows.npy"
    numpy.save(path, values.astype(numpy.float32))
    return path


@pytest.fixture(scope="module")
def whole(file):
    return fit_streaming(MatrixFile(file), 5, **streamed_rows.SETTINGS)


def assert_same(found, whole, scores=None):
    torch.testing.assert_close(found.basis.components, whole.basis.components, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.basis.variances, whole.basis.variances, rtol=1e-5, atol=0)
    assert found.passes == pytest.approx(whole.passes, rel=1e-5)
    torch.testing.assert_close(found.scores, whole.scores, rtol=1e-3, atol=1e-3)


def test_a_killed_fit_goes_on(file, whole, tmp_path, monkeypatch):
    """Killed in an iteration and in the last pass; no block that was added up is read again."""
    monkeypatch.setattr(matrix, "_BYTES", matrix._BYTES)
    folder = tmp_path / "kept"
    for blocks in (11, 20):  # of 7 in each of 5 passes, and the first row
        killed = warm.run(PROGRAM, file, folder, blocks)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    found, read = streamed_rows.fit(file, folder, -1)
    assert read == 5 * 7 + 1 - (11 + 20)
    assert_same(found, whole)
    with pytest.raises(UsageError, match="contains a fit with other settings"):
        fit_streaming(MatrixFile(file), 4, folder=folder, digest="these", **streamed_rows.SETTINGS)
    with pytest.raises(UsageError, match="contains a fit with other settings"):
        fit_streaming(MatrixFile(file), 5, folder=folder, digest="those", **streamed_rows.SETTINGS)
    kept = folder / "state.safetensors"
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(CorruptBlob, match="to start again from the beginning"):
        fit_streaming(MatrixFile(file), 5, folder=folder, digest="these", **streamed_rows.SETTINGS)


def shards_of(file):
    return [MatrixShard(str(file), 0, 50), MatrixShard(str(file), 50, 90), MatrixShard(str(file), 90)]


def test_shards_in_processes_of_their_own_are_summed(file, tmp_path):
    engine = functools.partial(local_processes, workers=2)
    settings = {**streamed_rows.SETTINGS, "most_passes": 1}
    found = fit_shards(shards_of(file), 5, folder=tmp_path / "kept", engine=engine, **settings)
    assert_same(found, fit_streaming(MatrixFile(file), 5, **settings))


def test_shards_that_were_done_are_not_done_again(file, whole, tmp_path):
    """The engine fails in the third pass, having done one of its shards."""
    carried = []

    def failing(fn, items, /):
        for index, outcome in in_process(fn, items):
            carried.append(items[index])
            yield index, outcome
            if len(carried) == 7:
                raise KeyboardInterrupt

    settings = {"folder": tmp_path / "kept", **streamed_rows.SETTINGS}
    with pytest.raises(KeyboardInterrupt):
        fit_shards(shards_of(file), 5, engine=failing, **settings)
    found = fit_shards(shards_of(file), 5, engine=failing, **settings)
    assert len(carried) == 5 * 3
    assert_same(found, whole)


def test_a_shard_that_fails_is_named(file, tmp_path):
    bad = numpy.load(file)
    bad[3, 4] = numpy.nan
    numpy.save(tmp_path / "bad.npy", bad)
    shards = [MatrixShard(str(file)), MatrixShard(str(tmp_path / "bad.npy"))]
    with pytest.raises(NetweightError, match=r"bad\.npy.* failed: .*Row 133 contains nan in column 4"):
        fit_shards(shards, 5, folder=tmp_path / "kept", engine=in_process)
    numpy.save(tmp_path / "other.npy", numpy.zeros((4, 5)))
    with pytest.raises(UsageError, match="not parts of one matrix"):
        fit_shards([shards[0], MatrixShard(str(tmp_path / "other.npy"))], 5, folder=tmp_path / "kept")
