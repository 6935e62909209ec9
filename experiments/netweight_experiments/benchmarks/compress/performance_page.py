"""Writes docs/performance.md from a result of `netweight benchmark codec`.

    python -m netweight_experiments.benchmarks.compress.performance_page

Without RESULT the newest file in benchmarks/results/ is taken.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from netweight_experiments.benchmarks.compress.codec import MINILM, Result, read_result, speed_tables, target_table
from netweight_experiments.benchmarks.compress.codec_data import GAUSSIAN, IN_CACHE
from netweight_experiments.benchmarks.script import RESULTS

# From the root of the source tree.
PAGE = Path("docs") / "performance.md"

QUIET = 0.5
GPUS = """
## GPUs

Nothing here was run on a GPU. What netweight's kernels should reach there by arithmetic:
[models-on-gpus.md](models-on-gpus.md). Which form of weights belongs to which batch size on which memory:
[formats-on-gpus.md](formats-on-gpus.md). `make bench-gpu` measures both.
"""
BUSY = """
**Other programs were running** (load average {load:.1f} before the start), so the speeds are lower and less certain
than on a quiet machine, those with two threads most of all. Sizes are exact.
"""
VERDICTS = {True: "met", False: "missed", None: ""}
HEAD = """<!-- Made by `make bench` from benchmarks/results/{name}; do not edit by hand. -->
# Performance of the codec

`netweight benchmark codec` measures netweight's codec and its peers in one process, `make bench` also writes this page.
The figures below were measured on {date} ({rounds} rounds) on {machine}.
All samples are in [benchmarks/results/{name}](../benchmarks/results/{name}).
{warning}
## Targets

The targets were set for a core with AVX-512 (VBMI2), before the code was written. A target that is missed stays here.

"""

LIMITS = """
What memcpy reached in the same rounds bounds what a decoder can reach, since it writes as many bytes. Where a target
is met in cache and missed from memory, it is the machine's memory that sets the pace, and on a shared machine also what
its other tenants do with it:

"""

HOW = """
## How it is measured

- **Data**: all 22.7 million trained weights of all-MiniLM-L6-v2, as published (F32) and rounded to BF16, F16 and F8
  (e4m3 of 16 times the weights); 33.6 million weights drawn from N(0, 0.02²) as BF16; and one million of these, which
  stay in a core's cache. Whole models come from memory, whose speed no code changes: the rows of memcpy tell it.
  netweight compresses tensor by tensor, as it does in files, small tensors included; peers get all tensors joined,
  which favors them.
- **Rounds**: in every round every contender is measured once, in an order drawn anew. A speed is the median over the
  rounds, a ratio of speeds the median of the ratios within rounds, with its 95 % bootstrap interval.
- **Clock**: with one thread the CPU time of the process, all its threads included, since other programs on the machine
  disturb it least; with two threads the time that passes. GB/s are 10⁹ plain bytes per second.
- **Warm**: netweight, blosc2 and memcpy write into memory that is there; for peers that allocate what they return the
  C library is told to keep freed memory. In every round a contender that takes less than a second runs once untimed,
  since some machines make the first touch of memory that rested for a second several times as slow as the next; then it
  runs for about 20 ms, and the median of these runs is the round's sample.
- **New outputs**: every decoded tensor is new memory from the system, and all are kept until the last is there, as when
  a model is loaded; zipnn returns new memory always. “Pooled” is the same with netweight's pool of freed outputs, its
  normal mode. The C library's memory management is as every program has it.
- **Fairness**: zipnn changes its input in place, so it gets a fresh copy for each run, made outside the clock, and as
  many threads as the others. zstd and lz4 work on blocks of 1 MiB. “zstd -1, planes” splits numbers into byte planes,
  with the sign moved to the end, in numpy, as one does by hand. blosc2 uses its bitshuffle filter.
- Every contender's output is compared with the input bit by bit before anything is timed.
"""


def page(result: Result, name: str) -> str:
    """Return the page for a result that lies in benchmarks/results/ under a name."""
    environment = result.environment
    flags = [flag for flag in environment["cpu_flags"] if flag in ("avx2", "avx512f", "avx512_vbmi2", "neon", "sve")]
    machine = f"{environment['cpu']} ({environment['cores']} cores usable, {', '.join(flags)})"
    load = result.load["before"][0]
    warning = BUSY.format(load=load) if load > QUIET else ""
    text = HEAD.format(name=name, date=result.created[:10], rounds=result.repeats, machine=machine, warning=warning)
    text += table(("what", "target", "measured", "95 % interval", ""), target_table(result))
    text += limits(result) + HOW
    text += "\n## All measurements\n"
    for part in speed_tables(result):
        text += f"\n### {part.title}\n\n{table(part.headers, part.lines)}"
    return text + memory_part() + foot(result)


def limits(result: Result) -> str:
    """Return what memcpy reached in the same rounds: what this machine's memory leaves to any decoder."""
    lines = []
    for data, where in ((IN_CACHE, "in cache"), (MINILM, "from memory"), (GAUSSIAN, "from memory")):
        row = result.find(contender="memcpy", data=data, dtype="BF16", direction="decode", mode="warm", threads=1)
        ratio = None if row is None else result.against(row, "zipnn")
        if row is not None and ratio is not None:
            lines.append(f"- {where} ({data}): {row.gbps():.1f} GB/s, {ratio.estimate:.1f} times as fast as zipnn")
    find = {"contender": "memcpy", "data": GAUSSIAN, "dtype": "BF16", "direction": "decode", "mode": "warm"}
    one, two = result.find(threads=1, **find), result.find(threads=2, **find)
    if one is not None and two is not None:
        lines.append(f"- two threads ({GAUSSIAN}, 67 MB): {result.speedup(two, one).estimate:.2f} times as fast as one")
    if not lines:
        return ""
    return LIMITS + "\n".join(lines) + "\n"


def memory_part() -> str:
    """Return the part on whole folders, from the newest result of memory.py; empty without one."""
    results = sorted(RESULTS.glob("*-compress-memory.json"))
    if not results:
        return ""
    found = json.loads(results[-1].read_text())
    rows = []
    for name, peak in found["memory"].items():
        target = "" if peak["target_bytes"] is None else f"≤ {peak['target_bytes'] / 1e6:.0f} MB"
        rows.append((f"peak memory, {name}", target, f"{peak['peak_bytes'] / 1e6:.0f} MB", VERDICTS[peak["met"]]))
    for name, times in found["seconds"].items():
        target = "" if times["target_s"] is None else f"≤ {times['target_s']:g} s"
        rows.append((name, target, f"{times['median_s']:.3f} s", VERDICTS[times["met"]]))
    largest, total = (found["model"][key] / 1e6 for key in ("largest_tensor_bytes", "tensors_bytes"))
    return f"""
## Whole folders

Measured on {found["date"]} by `benchmarks.compress.memory` of netweight_experiments, with {found["threads"]}
thread(s) on a model of {total:.0f} MB whose largest tensor has {largest:.0f} MB; all values are in
[benchmarks/results/{results[-1].name}](../benchmarks/results/{results[-1].name}).

{table(("what", "target", "measured", ""), rows)}"""


def foot(result: Result) -> str:
    """Return what a reader must know of the machine and of what is missing."""
    before, after = (f"{result.load[when][0]:.1f}" for when in ("before", "after"))
    lines = [f"- Load average of the machine: {before} before, {after} after (1.0 is the benchmark itself)."]
    packages = ", ".join(f"{name} {version}" for name, version in result.environment["packages"].items())
    lines.append(f"- Python {result.environment['python']}, {packages}.")
    lines += [f"- Not installed and not measured: {name}." for name in result.missing]
    lines += [f"- Left out: {text}." for text in result.left_out]
    if not result.warm_heap:
        lines.append(
            "- The C library could not be told to keep freed memory: peers that allocate are slower than they need."
        )
    return GPUS + "\n## Conditions\n\n" + "\n".join(lines) + "\n"


def table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def newest() -> Path:
    """Return the newest result by the time it says."""
    return max(RESULTS.glob("codec-*.json"), key=lambda path: read_result(path).created)


def main() -> None:
    """Write the page."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    PAGE.write_text(page(read_result(source), source.name), encoding="utf-8")
    print(f"{PAGE} from {source}")


if __name__ == "__main__":
    main()
