"""Writes docs/performance.md from a result of `netweight benchmark codec`.

    python -m netweight_experiments.benchmarks.compress.performance_page

Without RESULT the newest file in benchmarks/results/ is taken.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from netweight_experiments.benchmarks.compress.codec import MINILM, Result, read_result, speed_tables, target_table
from netweight_experiments.benchmarks.script import RESULTS

# From the root of the source tree.
PAGE = Path("docs") / "performance.md"

QUIET = 0.5
SHOWN = f"{MINILM} as BF16, warm, one thread"
GPUS = """
Nothing here ran on a GPU; [gpus.md](gpus.md) has the arithmetic, and `make bench-gpu` measures.
"""
BUSY = """
**Other programs were running** (load average {load:.1f} before the start): speeds are lower and less certain than on an
idle machine, most of all with two threads. Sizes are exact.
"""
HEAD = """<!-- Made by `make bench` from benchmarks/results/{name}; do not edit by hand. -->
# Performance of the codec

Measured by `netweight benchmark codec` on {date}: {rounds} rounds on {machine}. All samples are in
[benchmarks/results/{name}](../benchmarks/results/{name}); `netweight benchmark codec` prints all tables.
{warning}
## Targets

Set before the code was written, for a core with AVX-512 (VBMI2) where they name no other.{other}

"""

OTHER = """ That machine has
none; what needs it was measured on {date} on {machine} with the code of that day
([figures](../benchmarks/results/{name}))."""

SKEWED = """
## Skewed data

One thread of a busy machine ({where}, [{date}](../benchmarks/results/{name})); the best of zipnn and of zstd -3 on byte
planes. Targets: within 1 % of its size; 3 times its decoding.

"""
SKEWED_HEAD = ("", "ratio", "best peer", "entropy of numbers", "decode GB/s", "against the best peer")
DENSE = """
Dense weights against zipnn ({where}, [{date}](../benchmarks/results/{name})). Targets of AVX2: 2 for
decoding fp16 and fp8, 1.5 for encoding bf16; of portable code 1; of checks 0.9.

"""
DENSE_HEAD = ("N(0, 0.02)", "decode", "decode, portable", "encode", "checked / unchecked")
FOLDER_TARGETS = (
    ("folder", "two threads against one, wall", "≥ 1.8"),
    ("folder", "one thread against zipnn, processor", "≥ 3"),
    ("many small tensors", "netweight against safetensors, processor", "≤ 2"),
)

HOW = """
## Method

- **Data**: all-MiniLM-L6-v2 (22.7 million weights) as F32, BF16, F16 and F8 (e4m3 of 16 times the weights); 33.6
  million weights from N(0, 0.02²) as BF16; and one million of these, which fit into a core's cache. Peers compress all
  tensors joined, which favors them. Outputs are compared bit by bit.
- **Rounds**: every contender once a round, in random order; medians of speeds, and of ratios within rounds, with
  bootstrap intervals. CPU time with one thread, wall time with two; 10⁹ plain bytes per second; memory is warm.
- **Peers**: zipnn changes its input and gets a fresh copy outside the clock. zstd and lz4 work on blocks of 1 MiB;
  "zstd -1, planes" splits byte planes in numpy first; blosc2 uses bitshuffle.
"""


def page(result: Result, name: str) -> str:
    """Return the page for a result in benchmarks/results/, and for what it lacks of AVX-512 from the newest with it."""
    load = result.load["before"][0]
    fields = {
        "name": name,
        "date": result.created[:10],
        "rounds": result.repeats,
        "machine": machine(result),
        "other": "",
    }
    results = [result]
    if "avx512" not in result.environment["codec_paths"] and (path := newest("avx512")):
        results.append(read_result(path))
        fields["other"] = OTHER.format(name=path.name, date=results[1].created[:10], machine=machine(results[1]))
    text = HEAD.format(**fields, warning=BUSY.format(load=load) if load > QUIET else "")
    text += table(("what", "target", "measured", "95 % interval", ""), target_table(*results))
    for each in results:
        for part in speed_tables(each):
            if part.title == SHOWN:
                text += f"\n## {part.title}, {each.environment['cpu']}\n\n{table(part.headers, part.lines)}"
    return text + skewed_part() + memory_part() + folder_part() + HOW + foot(result)


def folder_part() -> str:
    """Return what end_to_end.py found last: folders by one thread, by two and by zipnn, and many small tensors."""
    paths = [(json.loads(path.read_text())["created"], path) for path in RESULTS.glob("compress-end-to-end-*.json")]
    if not paths:
        return ""
    created, path = max(paths)
    found = json.loads(path.read_text())
    rows = []
    for part, name, target in FOLDER_TARGETS:
        ratio = found[part][name]
        rounds = f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}"
        rows.append((name, target, f"{ratio['median']:.2f}", rounds))
    rows.append(("container beyond the blobs", "≤ 3 %", f"{found['many small tensors']['beyond the blobs']:.1%}", ""))
    load = max(values[0] for values in found["load"].values())
    where = f"[{created[:10]}](../benchmarks/results/{path.name})"
    return f"\nFolders, and 10,000 small tensors, at a load of {load:.0f} ({where}):\n\n" + table(
        ("what", "target", "measured", "rounds"), rows
    )


def skewed_part() -> str:
    """Return the parts on skewed data and on dense weights, from the newest results of skewed.py; empty without one."""
    results = (json.loads(path.read_text()) | {"path": path} for path in RESULTS.glob("skewed-*.json"))
    found = sorted(results, key=lambda each: str(each["created"]))
    whole = [each for each in found if each["options"].get("only") in (None, [""])]
    dense = [each for each in found if each["options"].get("only") == ["dense"]]
    if not whole or not dense:
        return ""
    skewed, weights = [], []
    for name, row in whole[-1]["rows"].items():
        ours, peers, speed = (
            row["ratio"],
            [row["ratio"].get(peer, 0) for peer in ("zipnn", "zstd -3, planes")],
            row["GB/s"],
        )
        ratios = (f"{value:,.{3 if value < 100 else 0}f}" for value in (ours["netweight"], max(peers), ours["order 0"]))
        best = max(speed.get(f"decode, {peer}", 0) for peer in ("zipnn", "zstd"))
        if not name.startswith("dense"):
            skewed.append((name, *ratios, f"{speed['decode']:.1f}", f"{speed['decode'] / best:.1f}×"))
    for name, row in dense[-1]["rows"].items():
        speed = row["GB/s"]
        pairs = (("decode", "decode"), ("decode, portable", "decode"), ("encode", "encode"))
        times = (f"{speed[ours] / speed[f'{theirs}, zipnn']:.2f}×" for ours, theirs in pairs)
        weights.append((name.removeprefix("dense "), *times, f"{row['checked per unchecked decode']:.2f}"))
    texts = []
    for each, text, head, lines in ((whole[-1], SKEWED, SKEWED_HEAD, skewed), (dense[-1], DENSE, DENSE_HEAD, weights)):
        where = f"{each['environment']['cpu']}, {each['environment']['codec_path']}"
        texts.append(text.format(name=each["path"].name, date=each["created"][:10], where=where) + table(head, lines))
    return "".join(texts)


def machine(result: Result) -> str:
    """Return a processor, its cores and what it knows."""
    environment = result.environment
    flags = [flag for flag in environment["cpu_flags"] if flag in ("avx2", "avx512f", "avx512_vbmi2", "neon", "sve")]
    return f"{environment['cpu']} ({environment['cores']} cores usable, {', '.join(flags)})"


def memory_part() -> str:
    """Return the part on whole files, from the newest results of memory.py; empty without one."""
    found = (json.loads(path.read_text()) | {"path": path} for path in sorted(RESULTS.glob("*compress-memory*.json")))
    one = {each["one_tensor_bytes"]: each for each in found if "one_tensor_bytes" in each}
    text = "\n## Whole files\n" if one else ""
    for nbytes, result in sorted(one.items()):
        commands = [
            (name, f"{row['peak_above_libraries_bytes'] / 1e6:.0f} MB", f"{row['system_per_cp_without_start']:.2f}")
            for name, row in result["commands"].items()
        ]
        text += f"""
One tensor of {nbytes / 1e6:,.0f} MB; targets: 200 MB, 1.5
([{result["date"]}](../benchmarks/results/{result["path"].name})):

{table(("command", "peak beside the libraries", "system time, cp = 1"), commands)}"""
    return text


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
            "- The C library could not be set to keep freed memory: peers that allocate are slower than necessary."
        )
    return GPUS + "\n## Conditions\n\n" + "\n".join(lines) + "\n"


def table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def newest(path: str = "") -> Path | None:
    """Return the newest result by the time it says, of those that measured a code path."""
    results = ((read_result(file), file) for file in RESULTS.glob("codec-*.json"))
    found = [(result.created, file) for result, file in results if path in ("", *result.environment["codec_paths"])]
    return max(found)[1] if found else None


def main() -> None:
    """Write the page."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    assert source, "no result"
    PAGE.write_text(page(read_result(source), source.name), encoding="utf-8")
    print(f"{PAGE} from {source}")


if __name__ == "__main__":
    main()
