"""Measures netweight's levels alone, on tensors of models in bf16: sizes, and processor times relative to `default`.

One thread, one code path, all levels in turns in one process; every decoded byte is compared. Of `--models`, files of
safetensors, the tensors are taken in the order of the file, up to `--most` bytes of each; all of MiniLM follows.

    python -m netweight_experiments.benchmarks compress.levels --models FILE …
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netweight import codec
from netweight.toys import minilm
from netweight_experiments.benchmarks.compress.codec_data import model_as
from netweight_experiments.benchmarks.compress.peers import file_sets, measure_levels


def main(
    *, models: tuple[Path, ...] = (), most: int = 64 << 20, rounds: int = 7, levels: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Measure the levels, or those given."""
    found: dict[str, Any] = {"path": codec.active_path(), "sets": []}
    sets = [data for file in models for data in file_sets(file, most)]
    sets.append(model_as(minilm.weights_file(), "MiniLM", "BF16"))
    for data in sets:
        found["sets"].append(measure_levels(data, levels or codec.LEVELS, rounds))
        yield found
