"""Principal components of a matrix on disk, of known spectrum, beside peers: time, memory, what is captured; as JSON.

    python -m netweight_experiments.benchmarks space.fit peers --work FOLDER
    python -m netweight_experiments.benchmarks space.fit large --work FOLDER

Both take --threads N (1) and --output FILE. Every fit runs in a process of its own; its peak is VmHWM of that process,
its time that of its processor, from the open file to components and scores.

The matrix, fp32 in a .npy file, is made so that its centered spectrum is known exactly: mean + U S V + s W, where V and
W are rows of one cosine transform of the columns with random signs, U are columns of another one of the permuted rows,
S falls as i^-0.55 over 1,500 dimensions, and s is a tenth of its 1,000th value. The eigenvalues of the centered Gram
matrix are S² + s² and s², its eigenvectors U; the best k components are Uᵀ times the centered matrix, in norm 1.

peers  netweight's exact fit from the file, scikit-learn's randomized PCA and torch.svd_lowrank (given the centered
       matrix) with their defaults, in memory, one after another.
large  netweight's streaming fit alone: the peers need several times the matrix in memory. What was made and fitted is
       kept in FOLDER (26 GB of matrix at full size, and 2 GB), and goes on where it was stopped, with the time that it
       had taken until it was last kept.
"""

import importlib.metadata
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy
import torch

from netweight.core.atomic_writes import publish
from netweight.core.progress import Progress
from netweight.core.seeds import numpy_generator
from netweight.methods.space.fit import fit_matrix, fit_streaming
from netweight.nn.matrix import MatrixFile
from netweight.nn.pca import orthonormality
from netweight_experiments.benchmarks.script import peak_bytes
from netweight_experiments.memory import in_fresh_process

POWER, SIGNAL = 0.55, 1500
CHUNK = 512
PEERS = ("netweight", "scikit-learn", "torch")


@dataclass(frozen=True)
class Known:
    """A matrix of known spectrum."""

    rows: int
    columns: int
    seed: int = 0

    @property
    def signal(self):
        return min(SIGNAL, self.rows // 2)

    @property
    def singular(self):
        scale = 0.3 * (self.rows * self.columns) ** 0.5
        return scale * numpy.arange(1, self.signal + 1) ** -POWER

    @property
    def noise(self):
        return 0.1 * self.singular[min(1000, self.signal) - 1]

    @property
    def total(self):
        """Trace of the centered Gram matrix."""
        return float((self.singular**2).sum() + (self.rows - 1) * self.noise**2)

    def best(self, components):
        """What so many components can capture of it."""
        return float((self.singular[:components] ** 2).sum() + components * self.noise**2)

    def cosines(self, numbers):
        """Rows of the transform of columns, by their numbers, with the columns' signs."""
        signs = numpy_generator(self.seed, "signs").choice([-1.0, 1.0], self.columns)
        angles = numpy.outer(numbers, (numpy.arange(self.columns) + 0.5) * (numpy.pi / self.columns))
        return (numpy.cos(angles, out=angles) * (signs * (2 / self.columns) ** 0.5)).astype(numpy.float32)

    def left(self, start, stop, count):
        """Rows of the first columns of U."""
        places = numpy_generator(self.seed, "places").permutation(self.rows)[start:stop] + 0.5
        angles = numpy.outer(places, numpy.arange(1, count + 1)) * (numpy.pi / self.rows)
        return (2 / self.rows) ** 0.5 * numpy.cos(angles)

    def offset(self):
        """What is added to every row."""
        return numpy_generator(self.seed, "mean").standard_normal(self.columns).astype(numpy.float32)

    def mean_row(self):
        """Mean of the rows: what was added, and what the rows of W leave."""
        left = numpy.zeros(self.columns)
        for start in range(0, self.rows, CHUNK):
            numbers = numpy.arange(self.signal + 1 + start, self.signal + 1 + min(start + CHUNK, self.rows))
            left += self.cosines(numbers).sum(axis=0, dtype=numpy.float64)
        return (self.offset() + self.noise * left / self.rows).astype(numpy.float32)

    def write(self, path, progress):
        """Write the matrix, from the row where an earlier run was stopped."""
        part = path.with_suffix(".part")
        if path.exists():
            return
        right = (self.cosines(numpy.arange(1, self.signal + 1)) * self.singular[:, None]).astype(numpy.float32)
        mean = self.offset()
        with open(part, "ab") as file, progress.task("Making the matrix", self.rows, unit="rows") as task:
            if file.tell() == 0:
                header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.columns)}
                numpy.lib.format.write_array_header_1_0(file, header)
                file.flush()
            with open(part, "rb") as begun:
                numpy.lib.format.read_magic(begun)
                numpy.lib.format.read_array_header_1_0(begun)
                offset = begun.tell()
            done = (file.tell() - offset) // (4 * self.columns)
            file.truncate(offset + done * 4 * self.columns)
            task.update(done)
            for start in range(done, self.rows, CHUNK):
                stop = min(start + CHUNK, self.rows)
                values = self.cosines(numpy.arange(self.signal + 1 + start, self.signal + 1 + stop))
                values *= self.noise
                values += self.left(start, stop, self.signal).astype(numpy.float32) @ right
                values += mean
                values.tofile(file)
                task.update(stop - start)
        publish(part, path)


def ours(file, components):
    fit = fit_matrix(MatrixFile(file), components, solver="dual")
    return fit.basis.components, fit.scores


def scikit_learn(file, components):
    from sklearn.decomposition import PCA  # type: ignore[import-untyped]

    model = PCA(components, svd_solver="randomized", random_state=0)
    scores = model.fit_transform(numpy.load(file))
    return torch.from_numpy(model.components_), torch.from_numpy(scores)


def torch_lowrank(file, components):
    torch.manual_seed(0)
    values = torch.from_numpy(numpy.load(file))
    values -= values.mean(dim=0)
    left, singular, right = torch.svd_lowrank(values, q=components)
    return right.T, left * singular


WAYS = dict(zip(PEERS, (ours, scikit_learn, torch_lowrank), strict=True))


def fit_alone(given):
    """In a process of its own: one peer's fit, measured, and its components written."""
    peer, work, count, threads = given
    torch.set_num_threads(threads)
    began = peak_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    components, _ = WAYS[peer](Path(work, "matrix.npy"), count)
    took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    numpy.save(Path(work, "components.npy"), components.numpy())
    return {**took, "peak": peak_bytes(), "peak before": began}


def judged(known, file, progress):
    """What the components that were written capture of the matrix, and where they lie: one more pass."""
    components = torch.from_numpy(numpy.load(file.with_name("components.npy")))
    count, matrix = len(components), MatrixFile(file)
    mean = torch.from_numpy(known.mean_row())
    exact, captured = torch.zeros(count, known.columns), 0.0
    with progress.task("Judging", known.rows, unit="rows") as task:
        for start in range(0, known.rows, CHUNK):
            stop = min(start + CHUNK, known.rows)
            rows = matrix.rows(start, stop) - mean
            captured += float((rows @ components.T).double().square().sum())
            exact.addmm_(torch.from_numpy(known.left(start, stop, count)).float().T, rows)
            task.update(stop - start)
    exact /= exact.norm(dim=1, keepdim=True)
    products = components @ exact.T
    return {
        "captured of best": captured / known.best(count),
        "captured of all": captured / known.total,
        "mean squared cosine": float(torch.linalg.svdvals(products.double()).square().mean()),
        "orthonormality": orthonormality(components),
    }


def peers(known, work, components, rounds, threads, progress):
    found = {peer: [] for peer in PEERS}
    for number in range(rounds):
        for peer in PEERS:
            row = in_fresh_process(fit_alone, [peer, str(work), components, threads], threads=threads)
            if number == 0:
                row |= judged(known, work / "matrix.npy", progress)
            found[peer].append(row)
            progress.note(f"{peer}: {row}")
    (work / "components.npy").unlink()
    return {"fits": found}


def large(known, work, components, passes, tolerance, progress):
    file, timed = work / "matrix.npy", work / "seconds.json"
    before = json.loads(timed.read_text()) if timed.exists() else {"cpu": 0.0, "wall": 0.0, "peak": 0}
    wall, cpu = time.perf_counter(), time.process_time()

    def spent():
        now = {"cpu": before["cpu"] + time.process_time() - cpu, "wall": before["wall"] + time.perf_counter() - wall}
        return {**now, "peak": max(before["peak"], peak_bytes())}

    class Timed:
        """Rows that note the time whenever they are read."""

        def __init__(self, matrix):
            self.shape, self._matrix = matrix.shape, matrix

        def rows(self, start, stop):
            timed.write_text(json.dumps(spent()))
            return self._matrix.rows(start, stop)

    if not (work / "components.npy").exists():
        fit = fit_streaming(
            Timed(MatrixFile(file)), components, most_passes=passes, tolerance=tolerance,
            folder=work / "fit", digest=json.dumps(asdict(known)), progress=progress,
        )  # fmt: skip
        timed.write_text(json.dumps({**spent(), "captured after each pass": fit.passes}))
        numpy.save(work / "components.npy", fit.basis.components.numpy())
        del fit
    took = json.loads(timed.read_text())
    return {**took, "core minutes": took["cpu"] / 60, **judged(known, file, progress)}


def main(
    which: Literal["peers", "large"],
    /,
    *,
    work: Annotated[Path, "folder for the matrix"],
    rows: int | None = None,
    columns: int | None = None,
    components: int = 1000,
    passes: Annotated[int, "of iteration at most"] = 6,
    tolerance: float = 2e-3,
    rounds: int = 1,
    threads: int = 1,
):
    os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    full = (4_000, 50_000) if which == "peers" else (65_000, 100_000)
    known, progress = Known(rows or full[0], columns or full[1]), Progress()
    work.mkdir(parents=True, exist_ok=True)
    known.write(work / "matrix.npy", progress)
    if which == "peers":
        found = peers(known, work, components, rounds, threads, progress)
    else:
        found = large(known, work, components, passes, tolerance, progress)
    return {"known": asdict(known), "scikit-learn": importlib.metadata.version("scikit-learn"), **found}
