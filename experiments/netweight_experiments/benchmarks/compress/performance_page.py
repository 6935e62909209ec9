"""Writes docs/performance.md from a result of `netweight benchmark codec`.

    python -m netweight_experiments.benchmarks compress.performance_page

Without RESULT the newest file in benchmarks/results/ is taken.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netweight_experiments.benchmarks.compress.codec import MINILM, Result, read_result, speed_tables, target_table
from netweight_experiments.benchmarks.script import RESULTS

# From the root of the source tree.
PAGE = Path("docs") / "performance.md"

BUSY_WITH_ITSELF = 1.2  # the load average at the end of a benchmark of one thread beside which nothing runs
QUIET, PEERS = 0.5, ("zipnn", "zstandard", "lz4", "blosc2")
LEFT_OUT = ("memcpy", "zstd -1", "zstd -1, planes", "blosc2 bitshuffle + lz4")  # in the results only
SHOWN = f"{MINILM} as BF16, warm, one thread"
BUSY = """
**Other programs were running** (load average {load:.1f}). The speeds are therefore lower and less certain than on
an idle machine.
"""
HEAD = """<!-- Made by `make bench` from benchmarks/results/{name}; do not edit by hand. -->
# Performance of the codec

The codec is the part of netweight that compresses tensors and restores them. This page gives its speed on a CPU and the
size of its results, in comparison with other programs. [Results of compression](compress-results.md) has the speed of
whole models that train or generate, and [GPUs](gpus.md) has the speeds on GPUs.

In short:

- A bf16 model shrinks to about two thirds of its size.
- On one core with AVX-512, the codec restores the bf16 weights of MiniLM {memory_zipnn} as fast as zipnn does. This is
  nearly as fast as memory is copied ({memory_memcpy}).
- {met} of the {all} targets in [the first set of targets](#targets) are met. A **target** is a limit that was set
  before the measurement.

The measurements are from several days, machines and versions of the codec. Each section names its own. Do not compare
figures of different sections with each other.

These words occur in all tables:

- The **ratio** is the original size divided by the compressed size. Higher is better.
- **Encoding** is compressing, and **decoding** is restoring.
- **GB/s** are gigabytes of uncompressed data per second. Higher is better.
- `fast`, `default`, `high` and `max` are the **levels** of netweight. Each makes smaller files than the one before and
  takes longer to write them.
- "avx512", "avx2" and "portable" are code for processors with these vector instructions, and code that needs none. All
  three give the same bytes.
- **MiniLM** is the model all-MiniLM-L6-v2, with 22.7 million weights.
"""

TARGETS_HEAD = """
## Targets

Each row is one target of `netweight benchmark codec`, run on {date}: {rounds} rounds on {machine}
([result](../benchmarks/results/{name}); [method](#method)).
{warning}
How to read a row:

- "against zipnn" and "against memcpy" (copying memory): the speed divided by the speed of that program, so that 2×
  means twice as fast.
- "in cache": one million weights, which fit into the cache of a core. "from memory": data that do not fit.
- "fresh outputs": every call returns new memory. In all other rows, outputs go to memory that was used before.
- Rows for one thread are for AVX-512, unless they name other code.
- The targets of the ratios were reached by a prototype of the format on these data (rounded down).{other}

"""

OTHER = """
- That machine has no AVX-512. The rows that need it were measured on {date} on {machine}, with the code of that day
  ([result](../benchmarks/results/{name}))."""

SPEEDS = """
## Speed and ratio on a whole model

Each row is one program that compresses and restores all weights of MiniLM in bf16, with one thread ({cpu}, {date}).
"netweight avx2, default" is the level `default` with code for AVX2. Since that day, the AVX2 code has a faster
encoder; [another section](#ordinary-weights-in-all-types) has its speed.

"""
SKEWED = """
## Skewed data

In skewed data some values occur much more often than others. Examples are weights with many zeros, masks, and token
ids. Each row is one kind of data. The second column is the ratio of netweight, and the third is the higher ratio of two
other programs, zipnn and zstd -3. The last number is the speed of decoding, divided by the faster of these two
programs. zstd gets the first bytes of all numbers together, then all second bytes, and so on, which suits it better.

There are two targets: the compressed data are at most 1 % larger than those of the best other program, and decoding is
3 times as fast. Measured with one thread on {where}, while other programs were running
([result of {date}](../benchmarks/results/{name})).

"""
SKEWED_HEAD = (
    "data",
    "netweight's ratio",
    "best ratio of the others",
    "decode GB/s",
    "decode: speed / best of the others",
    "result",
)
SKEWED_NAMES = {
    "int64 positions": "int64 positions 0, 1, 2, …",
    "int64 positions of 512": "int64 positions 0 to 511, repeated",
    "AdamW's exp_avg, an embedding's": "AdamW's exp_avg of an embedding, most rows 0",
    "AdamW's exp_avg_sq, an embedding's": "AdamW's exp_avg_sq of an embedding, most rows 0",
    "XOR of bf16 checkpoints": "bitwise difference (XOR) of two bf16 checkpoints",
}
"""Rows of a result → what a reader is shown, where it differs."""
DENSE = """
### Ordinary weights in all types

Each row is one type of random weights, drawn from N(0, 0.02), on {where}
([result of {date}](../benchmarks/results/{name})). The speeds of decoding and encoding are divided by those of zipnn,
so that 2× means twice as fast. The last column is the speed of decoding while checksums are verified, divided by the
speed without verification. Misses of these targets are marked:

- decoding F16 and both F8 types: at least 2×
- encoding BF16: at least 1.5×
- decoding with portable code: at least 1×
- with checksums: at least 0.9

"""
DENSE_HEAD = (
    "type",
    "decode / zipnn",
    "decode with portable code / zipnn",
    "encode / zipnn",
    "with checksums / without",
)
PEERS_HEAD = """
## Levels, and other programs

Each row of the first table is one program or one level of netweight, and each column is one set of tensors. The
numbers are ratios; higher is better.

- The sets are parts of models: the first 34 MB of qwen2.5-coder-0.5b, 8 million weights of MiniLM in several types, and
  the states of AdamW (`exp_avg` and `exp_avg_sq`) from a training. The weights of qwen2.5-coder-0.5b were converted
  from a 4-bit file; ordinary bf16 weights may have other ratios.
- netweight compresses each tensor by itself. The other programs get all tensors of a set as one piece. In the rows
  "tensor by tensor", they also get each tensor by itself.
- "–" means that the program cannot read this type, or that the set is one tensor, for which both rows would be the
  same.

Measured on {date} on {machine} ([result](../benchmarks/results/{name}), {versions}).

"""
WHOLE_FILES = """
## Whole files against lmzip

lmzip is another program that compresses the weights of models. Each row is one command on one file:
`netweight compress --threads 1` or `lmz compress -j 1` (lmzip {version}). The time is processor time, that of the
program and of the operating system together; lower is better. It includes the start of Python, reading and writing.
For the small file, the start of Python takes most of netweight's time. Differences of a few percent are chance: `high`
is not faster than `default`.

The weights of qwen2.5-coder-0.5b were converted from a 4-bit file; ordinary bf16 weights may have other ratios.
Measured on {date} on {machine} ([result](../benchmarks/results/{name})), at a load average of up to {load:.0f}; the
programs took turns, and the times are medians of {rounds} runs.

"""
LEVELS = """
## Levels with AVX2

Each row is one level of netweight on tensors in bf16, with code for {path}. The times are processor times of one
thread, divided by those of `default`; lower is better. The targets of `high` are at most 3 × to encode and at most
1.5 × to decode; misses are marked. On qwen2.5-coder-0.5b, `default` itself encodes at less than half its speed on
MiniLM with AVX2, because the exponents lie too far apart for its fast lookup. So the time of `high` relative to it is
lower there.

`high` tells apart values that occur often, such as zeros, and stores chunks without such values in the way of
`default`. In the two sections above, it did not do so yet: MiniLM was 0.07 % smaller, and on AVX2 it took twice as long
to encode and 1.5 × as long to decode as now. The bits of qwen2.5-coder-0.5b are the same.

For qwen2.5-coder-0.5b, decoding takes two passes. One decodes numbers of values and symbols (39 % of the time). The
other puts elements together from these numbers and their raw bits (45 %). Checksums take 2 %. These changes did not
meet the target:

- passes over half as many elements at a time: 1.7 × the time of `default`, as before
- one bit of the mantissa less in the symbols: 4 % less time to decode, and 0.2 % larger
- one bit more: 21 % more time, and not smaller
- masks and positions of raw bits by fewer instructions: no measurable difference

We believe that the limit lies in the two passes. One pass would have to correct rare symbols before it reads raw bits.

Measured on {date} on {machine} ([result](../benchmarks/results/{name})),
while other programs were running (load average {load:.0f} on {cores} cores). The values are medians of {rounds} rounds
in one process, in which the levels take turns.

"""
HIGH_TARGETS = {"encode": 3, "decode": 1.5}
"""Way → most that `high` is to take, in times of `default`."""
PEERS_BUSY = """**Other programs were running** (load average {load:.0f} on {cores} cores): only relative times can be
compared with other tables. """
PEERS_SPEED = """
The second table gives the speeds of the same programs on {data} ({dtype}), with one thread, by processor time. They are
medians of {rounds} rounds in one process, in which the programs take turns. {others}The last two columns are the time
of a program, divided by the time of netweight's level `default`: 2 means twice the time, so lower is better.

"""
FOLDER_TARGETS = (
    ("folder", ("two threads against one, wall", "compression: speed with two threads / with one", True, 1.8)),
    ("folder", ("one thread against zipnn, processor", "compression with one thread: speed / zipnn's", True, 3)),
    (
        "many small tensors",
        (
            "netweight against safetensors, processor",
            "10,000 small tensors: time to read all / time of safetensors for a plain file",
            False,
            2,
        ),
    ),
)
"""Part of a result → its key, what a reader is shown, whether the target is a lower bound, and the target."""
FOLDERS = """
## Folders, and many small tensors

The first two rows are about the compression of a folder of {megabytes} MB (bf16 numbers drawn from N(0, 0.02), in two
files). For them, higher is better. The last two rows are about reading a file of 10,000 small tensors. For them, lower
is better. The files stay in the system's cache ({where}).

Other programs were running (load average {load:.0f} on 2 cores). A second thread therefore had to share its core, and
on an idle machine the value of the first row may be much higher.

"""
WHOLE = """
## Memory of commands

Each row is one command on a file with one tensor, of 400 MB or of 2,800 MB. Lower is better in all columns.

- **Peak** is the largest memory in addition to that of the loaded libraries. Its target is at most 200 MB; all commands
  meet it.
- **System time / cp** is the processor time that the operating system spends for the command, mostly reading and
  writing, divided by that of `cp`. The computing of the command itself is not counted. Its target is at most 1.5.

"""
HOW = """
## Method

This section is about [the targets](#targets) and about [the whole model](#speed-and-ratio-on-a-whole-model). The data
are MiniLM, 33.6 million weights drawn from N(0, 0.02²), and one million of these weights, which fit into a core's
cache. The other programs compress all tensors of a model as one piece; netweight compresses each tensor by itself. All
outputs are compared with the input bit by bit. Every program runs once in each round, in random order. Speeds are
medians over rounds, ratios of speeds are medians of ratios within rounds, and intervals come from the bootstrap. With
one thread, processor time is measured; with two threads, elapsed time.
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
    shown = [result]
    if "avx512" not in result.environment["codec_paths"] and (path := newest("avx512")):
        shown.append(read_result(path))
        fields["other"] = OTHER.format(name=path.name, date=shown[1].created[:10], machine=machine(shown[1]))
    rows = [tuple(cell.replace(" to ", "–") for cell in row) for row in target_table(*shown)]
    measured = {row[0]: row[2] for row in rows}
    fields |= {
        "memory_zipnn": measured["decode bf16 against zipnn, MiniLM from memory"],
        "memory_memcpy": measured["decode bf16 against memcpy, MiniLM from memory"],
        "met": str(sum(row[-1] == "met" for row in rows)),
        "all": str(len(rows)),
    }
    text = HEAD.format(**fields)
    targets = TARGETS_HEAD.format(**fields, warning=BUSY.format(load=load) if load > QUIET else "")
    targets += table(("what", "target", "measured", "95 % interval", "result"), rows)
    for each in shown:
        for part in speed_tables(each):
            if part.title == SHOWN:
                kept = [number for number, name in enumerate(part.headers) if not name.startswith("×")]
                rows = [line for line in part.lines if line[0] not in LEFT_OUT]
                lines = [tuple(line[number] for number in kept) for line in (part.headers, *rows)]
                head = ("program, level", *lines[0][1:])
                text += SPEEDS.format(cpu=each.environment["cpu"], date=each.created[:10]) + table(head, lines[1:])
    others = peers_part() + whole_files_part() + levels_part() + skewed_part() + memory_part() + folder_part()
    return text + others + targets + HOW + foot(result)


def results(*patterns: str) -> list[dict[str, Any]]:
    """Return results by their files' names, the newest last, with where they lie and when they were made."""
    paths = [path for pattern in patterns for path in RESULTS.glob(pattern)]
    found = [json.loads(path.read_text()) | {"file": path.relative_to(RESULTS).as_posix()} for path in sorted(paths)]
    return sorted(({"created": each.get("date", "")} | each for each in found), key=lambda each: str(each["created"]))


def folder_part() -> str:
    """Return what end_to_end.py found last: folders by one thread, by two and by zipnn, and many small tensors."""
    known = results("compress-end-to-end-*.json", "compress/end-to-end-*.json")
    if not known:
        return ""
    found = known[-1]
    rows = []
    for part, (key, name, least, bound) in FOLDER_TARGETS:
        ratio = found[part][key]
        rounds = f"{min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f}"
        met = ratio["median"] >= bound if least else ratio["median"] <= bound
        target = f"{'≥' if least else '≤'} {bound:g}"
        rows.append((name, target, f"{ratio['median']:.2f}", rounds, "met" if met else "missed"))
    beyond = found["many small tensors"]["beyond the blobs"]
    name = "10,000 small tensors: size of the file without the compressed tensors, as a share of these"
    rows.append((name, "≤ 3 %", f"{beyond:.1%}", "", "met" if beyond <= 0.03 else "missed"))
    before = found["load"].values() if "load" in found else (found["load_average"], found["load_average_after"])
    load = max(values[0] for values in before)
    where = f"[{found['created'][:10]}](../benchmarks/results/{found['file']})"
    text = FOLDERS.format(megabytes=found["options"]["megabytes"], load=load, where=where)
    return text + table(("what", "target", "median", "smallest and largest round", "result"), rows)


def peers_part() -> str:
    """Return what peers.py found last: sizes on every set, and speeds on the first; empty without a result."""
    known = results("compress/peers-*.json")
    if not known:
        return ""
    found = known[-1]
    environment, parts = found["environment"], found["sets"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = {"date": found["created"][:10], "machine": environment["cpu"], "name": found["file"]}
    heads = ("program, level", *(f"{part['name']} ({part['dtype']})" for part in parts))
    names = list(dict.fromkeys(name for part in parts for name in part["rows"]))
    rows = []
    for name in names:
        ratios = (part["rows"].get(name, {}).get("ratio") for part in parts)
        rows.append((name, *("–" if ratio is None else f"{ratio:.4f}" for ratio in ratios)))
    text = PEERS_HEAD.format(**where, versions=versions) + table(heads, rows)
    first, load = parts[0], max(found["load_average"][0], found["load_average_after"][0])
    text += PEERS_SPEED.format(
        data=first["name"],
        dtype=first["dtype"],
        rounds=found["options"]["rounds"],
        others=PEERS_BUSY.format(load=load, cores=environment["cores"]) if load > BUSY_WITH_ITSELF else "",
    )
    speeds = []
    for name, row in first["rows"].items():
        cells = (f"{row[f'{way} GB/s']:.2f}" for way in ("encode", "decode"))
        times = (f"{row[f'{way}, times of netweight default']:.2f}" for way in ("encode", "decode"))
        speeds.append((name, f"{row['ratio']:.4f}", *cells, *times))
    head = (
        "program, level",
        "ratio",
        "encode GB/s",
        "decode GB/s",
        "time to encode / default",
        "time to decode / default",
    )
    return text + table(head, speeds)


def whole_files_part() -> str:
    """Return what whole_files.py found last; empty without a result."""
    known = results("compress/whole-files-*.json")
    if not known:
        return ""
    found = known[-1]
    rows = []
    for file in found["files"]:
        for name, row in file["rows"].items():
            times = row.get("compress seconds")
            seconds = "not measured" if times is None else f"{statistics.median(times):.2f} s"
            share = row.get("times of lmzip", {}).get("compress seconds")
            against = "not measured" if share is None else f"{share:.2f}"
            rows.append((file["file"], name, f"{row['nbytes']:,}", f"{row['ratio']:.4f}", seconds, against))
    text = WHOLE_FILES.format(
        version=found["versions"]["lmzip"],
        date=found["created"][:10],
        machine=found["environment"]["cpu"],
        name=found["file"],
        rounds=found["options"]["rounds"],
        load=max(found["load_average"][0], found["load_average_after"][0]),
    )
    return text + table(("file", "program", "bytes", "ratio", "time to compress", "time / lmzip's time"), rows)


def levels_part() -> str:
    """Return what levels.py found last; empty without a result."""
    known = results("compress/levels-*.json")
    if not known:
        return ""
    found = known[-1]
    rows = []
    for part in found["sets"]:
        for name, row in part["rows"].items():
            times = {way: row[f"{way}, times of netweight default"] for way in HIGH_TARGETS}
            missed = {way: name == "netweight high" and times[way] > most for way, most in HIGH_TARGETS.items()}
            shown = (f"{times[way]:.2f}{', missed' if missed[way] else ''}" for way in HIGH_TARGETS)
            rows.append((f"{part['name']}, {name.removeprefix('netweight ')}", f"{row['ratio']:.4f}", *shown))
    text = LEVELS.format(
        path=found["path"].upper(),
        date=found["created"][:10],
        machine=found["environment"]["cpu"],
        cores=found["environment"]["cores"],
        name=found["file"],
        rounds=found["options"]["rounds"],
        load=max(found["load_average"][0], found["load_average_after"][0]),
    )
    return text + table(("tensors, level", "ratio", "time to encode / default", "time to decode / default"), rows)


def skewed_part() -> str:
    """Return the parts on skewed data and on dense weights, from the newest results of skewed.py; empty without one."""
    found = results("skewed-*.json", "compress/skewed-*.json")
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
        ratios = (f"{value:,.{3 if value < 100 else 0}f}" for value in (ours["netweight"], max(peers)))
        best = max(speed.get(f"decode, {peer}", 0) for peer in ("zipnn", "zstd"))
        if not name.startswith("dense"):
            missed = [
                what
                for what, met in (
                    ("size", ours["netweight"] >= 0.99 * max(peers)),
                    ("speed", speed["decode"] >= 2.95 * best),
                )
                if not met
            ]
            result = f"missed: {' and '.join(missed)}" if missed else "met"
            cells = (f"{speed['decode']:.1f}", f"{speed['decode'] / best:.1f}×", result)
            skewed.append((SKEWED_NAMES.get(name, name), *ratios, *cells))
    for name, row in dense[-1]["rows"].items():
        speed = row["GB/s"]
        pairs = (("decode", "decode"), ("decode, portable", "decode"), ("encode", "encode"))
        times = (f"{speed[ours] / speed[f'{theirs}, zipnn']:.2f}×" for ours, theirs in pairs)
        share = row["checked per unchecked decode"]
        marked = f"{share:.2f}" + (", missed" if share < 0.895 else "")
        weights.append((name.removeprefix("dense "), *times, marked))
    texts = []
    for each, text, head, lines in ((whole[-1], SKEWED, SKEWED_HEAD, skewed), (dense[-1], DENSE, DENSE_HEAD, weights)):
        where = f"{each['environment']['cpu']}, {each['environment']['codec_path']}"
        texts.append(text.format(name=each["file"], date=each["created"][:10], where=where) + table(head, lines))
    return "".join(texts)


def machine(result: Result) -> str:
    """Return a processor, its cores and what it knows."""
    environment = result.environment
    flags = [flag for flag in environment["cpu_flags"] if flag in ("avx2", "avx512f", "avx512_vbmi2", "neon", "sve")]
    return f"{environment['cpu']} ({environment['cores']} cores usable, {', '.join(flags)})"


def memory_part() -> str:
    """Return the part on whole files, from the newest results of memory.py; empty without one."""
    found = results("*compress-memory*.json", "compress/memory-*.json")
    one = {each["one_tensor_bytes"]: each for each in found if "one_tensor_bytes" in each}
    if not one:
        return ""
    sizes, rows = sorted(one.items()), list[tuple[str, ...]]()
    for name in sizes[0][1]["commands"]:
        costs = [result["commands"][name] for _, result in sizes]
        peaks = [f"{each['peak_above_libraries_bytes'] / 1e6:.0f} MB" for each in costs]
        rows.append((name, *peaks, *(_marked(each["system_per_cp_without_start"], 1.5) for each in costs)))
    links = [f"[{nbytes / 1e6:,.0f} MB](../benchmarks/results/{each['file']})" for nbytes, each in sizes]
    head = (
        "command",
        *(f"peak, {link}" for link in links),
        *(f"system time / cp, {size / 1e6:,.0f} MB" for size, _ in sizes),
    )
    return WHOLE + table(head, rows)


def _marked(value: float, most: float) -> str:
    """Return a value with two digits, and whether it misses a target of at most `most`."""
    return f"{value:.2f}" + (", missed" if value > most else "")


def foot(result: Result) -> str:
    """Return the conditions of the measurement, and what is missing from it."""
    lines = list[str]()
    versions = result.environment["packages"].items()
    packages = ", ".join(f"{name} {version}" for name, version in versions if name in ("torch", "numpy", *PEERS))
    lines.append(f"- Python {result.environment['python']}, {packages}.")
    lines += [f"- Not installed and not measured: {name}." for name in result.missing]
    lines += [f"- Left out: {text}." for text in result.left_out]
    if not result.warm_heap:
        lines.append(
            "- The C library could not be set to keep freed memory: peers that allocate are slower than necessary."
        )
    return "\n## Conditions\n\n" + "\n".join(lines) + "\n"


def table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    head, *lines = (f"| {' | '.join(line)} |\n" for line in (headers, *rows))
    return "".join([head, "|---" + "|---:" * (len(headers) - 1) + "|\n", *lines])


def newest(path: str = "") -> Path | None:
    """Return the newest result by the time it says, of those that measured a code path."""
    known = ((read_result(file), file) for file in RESULTS.glob("codec-*.json"))
    found = [(result.created, file) for result, file in known if path in ("", *result.environment["codec_paths"])]
    return max(found)[1] if found else None


def main(source: Path | None = None, /) -> None:
    """Write the page."""
    source = source or newest()
    assert source, "no result"
    PAGE.write_text(page(read_result(source), source.name), encoding="utf-8")
    print(f"{PAGE} from {source}")
