"""Linear bases against scikit-learn and dense algebra: exact, streaming, and from files."""

import numpy
import pytest
import torch

from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.methods.space.fit import fit_matrix, fit_streaming
from netweight.nn import matrix as matrices
from netweight.nn.matrix import MatrixFile
from netweight.nn.pca import orthonormality


class MatrixArray:
    """A matrix in memory."""

    def __init__(self, values):
        self.shape, self._values = tuple(values.shape), values

    def rows(self, start, stop):
        return self._values[start:stop].to(torch.float32, copy=True)

    def columns(self, start, stop, out):
        out.copy_(self._values[:, start:stop])


def rows_of(count=60, length=90, *, seed=0, rank=None):
    """Rows with a falling spectrum, unequal columns and a mean far from 0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rank = rank or min(count, length)
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -0.7
    return (
        normal(count, rank) * values @ normal(rank, length) * (0.2 + normal(length) ** 2) + 3 * normal(length)
    ).float()


@pytest.fixture(params=["array", "file"])
def stored(request, tmp_path, monkeypatch):
    """Makes a matrix of each kind, in blocks of few rows."""
    monkeypatch.setattr(matrices, "_BYTES", 4 * 90 * 16)

    def make(values):
        if request.param == "file":
            numpy.save(tmp_path / "rows.npy", values.numpy())
            return MatrixFile(tmp_path / "rows.npy")
        return MatrixArray(values)

    return make


def oracle(values, components, standardize):
    """Scores, components and variances by numpy in fp64."""
    wide = values.double().numpy()
    wide = wide - wide.mean(axis=0)
    if standardize:
        wide = wide / wide.std(axis=0, ddof=1)
    left, values, right = numpy.linalg.svd(wide, full_matrices=False)
    found = [(left * values)[:, :components], right[:components], values**2 / (len(wide) - 1)]
    return [torch.from_numpy(numpy.ascontiguousarray(one)) for one in found]


@pytest.mark.parametrize("standardize", [False, True])
def test_the_exact_fit_is_the_singular_value_decomposition(stored, standardize):
    values = rows_of()
    fit = fit_matrix(stored(values), 12, standardize=standardize)
    scores, components, variances = oracle(values, 12, standardize)
    signs = (fit.basis.components * components).sum(dim=1).sign().float()
    assert fit.solver == "dual"
    torch.testing.assert_close(fit.basis.variances, variances[:12], rtol=1e-5, atol=0)
    assert fit.basis.total == pytest.approx(float(variances.sum()), rel=1e-5)
    torch.testing.assert_close(fit.basis.components * signs[:, None], components.float(), rtol=0, atol=2e-4)
    torch.testing.assert_close(fit.scores * signs, scores.float(), rtol=1e-4, atol=1e-4 * float(scores.abs().max()))
    torch.testing.assert_close(
        fit.basis.project(values)[0], fit.scores, rtol=1e-3, atol=1e-4 * float(scores.abs().max())
    )
    torch.testing.assert_close(fit.scores.var(dim=0), fit.basis.variances.float(), rtol=1e-4, atol=0)
    assert orthonormality(fit.basis.components) < 1e-5
    assert (fit.scores.abs().max(dim=0).values == fit.scores.max(dim=0).values).all()


@pytest.mark.parametrize("standardize", [False, True])
def test_streaming_finds_what_the_exact_fit_finds(stored, standardize):
    values = rows_of(400, 90)
    exact = fit_matrix(stored(values), 6, standardize=standardize, solver="dual")
    fit = fit_streaming(stored(values), 6, standardize=standardize, most_passes=30, tolerance=1e-9)
    assert fit.solver == "streaming"
    cosines = torch.linalg.svdvals(fit.basis.components @ exact.basis.components.T)
    assert float(cosines.min()) > 1 - 1e-4
    torch.testing.assert_close(fit.basis.variances, exact.basis.variances, rtol=1e-3, atol=0)
    assert fit.basis.total == pytest.approx(exact.basis.total, rel=1e-5)
    assert all(later >= earlier - 1e-6 for earlier, later in zip(fit.passes, fit.passes[1:], strict=False))
    torch.testing.assert_close(fit.basis.project(values)[0], fit.scores, rtol=1e-3, atol=1e-3)
    assert orthonormality(fit.basis.components) < 1e-5
    few = fit_streaming(stored(values), 6, standardize=standardize, most_passes=2)
    assert 0.97 < few.captured / exact.captured < 1 + 1e-5


def test_a_constant_column_neither_matters_nor_divides_by_zero():
    values = torch.cat([rows_of(), torch.full((60, 1), 7.0)], dim=1)
    for solver in ("dual", "streaming"):
        fit = fit_matrix(MatrixArray(values), 4, standardize=True, solver=solver)
        assert torch.isfinite(fit.scores).all()
        assert float(fit.basis.components[:, -1].abs().max()) < 1e-6
        assert fit.basis.total == pytest.approx(90, rel=1e-4)


def test_points_and_scores_are_each_others_inverse():
    fit = fit_matrix(MatrixArray(rows_of()), 5, standardize=True)
    scores = torch.randn(3, 5)
    torch.testing.assert_close(fit.basis.project(fit.basis.point(scores))[0], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", ["dual", "streaming"])
def test_what_cannot_be_fitted_is_named(solver):
    def fit(values, components):
        return fit_matrix(MatrixArray(values), components, solver=solver)

    with pytest.raises(UsageError, match="at most 59 components, not 60"):
        fit(rows_of(), 60)
    with pytest.raises(UsageError, match=r"have 8 principal components, not 20\. Ask for 8"):
        fit(rows_of(rank=8), 20)
    with pytest.raises(UsageError, match="are the same"):
        fit(torch.ones(9, 4), 2)
    with pytest.raises(UsageError, match="at most 0 components"):
        fit(rows_of(1), 1)
    with pytest.raises(UsageError, match="has no principal components"):
        fit(rows_of(1), None)
    for bad in (float("nan"), float("inf")):
        values = rows_of()
        values[37, 11] = bad
        with pytest.raises(UsageError, match=f"Row 37 contains {bad} in column 11"):
            fit(values, 3)


def test_files_that_are_no_matrices(tmp_path):
    (tmp_path / "text.npy").write_text("not numpy")
    with pytest.raises(CorruptBlob, match=r"not a \.npy file"):
        MatrixFile(tmp_path / "text.npy")
    numpy.save(tmp_path / "cube.npy", numpy.zeros((2, 3, 4)))
    numpy.save(tmp_path / "whole.npy", numpy.zeros((2, 3), int))
    for name in ("cube", "whole"):
        with pytest.raises(Unsupported, match="two dimensions"):
            MatrixFile(tmp_path / f"{name}.npy")
    numpy.save(tmp_path / "cut.npy", numpy.zeros((20, 30)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    with pytest.raises(CorruptBlob, match="shorter than its header states"):
        MatrixFile(tmp_path / "cut.npy")
    numpy.save(tmp_path / "good.npy", numpy.zeros((20, 30)))
    with pytest.raises(UsageError, match="20 rows"):
        MatrixFile(tmp_path / "good.npy", 5, 21)
    assert MatrixFile(tmp_path / "good.npy", 5, 9).shape == (4, 30)
