"""Write the snapshots: `python tests/snapshots/make.py [PART]...`; without a part, all of them.

Parts: commands, outputs, formats, reading, names, tables, or one of the papers neuzip, repnoise, nemo, hyperfl and w2w
for its tables alone.

To be run with the version whose behavior is to be kept. A change that is meant is made in the file by hand, or by
running this again for that part and reading the difference line by line. `formats` writes new files as the current
version writes them: files of an older one, which users have, are then no longer read by any test. `reading` writes what
is found in the files that are there.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

# What is committed of the folder in which the cases ran.
FORMATS = (
    "one.net.safetensors", "rounded.net.safetensors", "folder-net", "folder-rounded", "bank", "bank-net",
    "published-bank", "published", "space", "space-alone", "beard.json", "edited.json", "gaussian.json",
    "inverted.json", "inverted.jsonl", "exported-diffusers", "exported-kohya", "exported-peft",
    "defended/immunize.json", "finetune/attacks.jsonl", "finetune/report.json", "usual.safetensors", "localized",
    "calibrated", "edited/forget", "edited/model_index.json", "edited/unet", "embedding/searches.jsonl",
    "embedding/found", "inversion/report.json", "federation/federation.json", "federation/federation.safetensors",
    "federation/report.json", "compress-run", "tables/neuzip-fig5-small/result.json",
)  # fmt: skip
EXPECTED_PUBLIC = "public_names.json"


def write(name, value):
    """Write a snapshot with one element of its second level per line."""
    lines = []
    for key, part in value.items():
        if isinstance(part, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in part.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}" if part else f" {json.dumps(key)}: {{}}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(part, ensure_ascii=False)}")
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def outputs(folder):
    """What all cases write, in a fresh folder."""
    import snapshot_cases as cases

    cases.prepare(folder)
    return {case: cases.call(folder, cases.arguments(case)) for case in cases.CASES}


def read_all(folder):
    """What all readers find."""
    import snapshot_reading as reading

    found = {}
    for name in reading.READERS:
        place = folder / name
        place.mkdir()
        reading.lay_out(place)
        found[name] = json.loads(json.dumps(reading.read(name, place)).replace(str(place), "@"))
    return found


def measured(folder, paper):
    """What a paper's tables measure; they share runs."""
    import snapshot_tables as tables

    return {name: tables.measure(name, folder) for name in tables.SMALL if name.startswith(paper)}


def twice(function, *arguments):
    """A function's values from two processes, as far as they agree."""
    from snapshot_golden import masked

    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as place:
            code = (
                f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import make; from pathlib import Path; "
                f"place = Path({place!r}); (place / 'w').mkdir(); "
                f"value = make.{function}(place / 'w', *{arguments!r}); (place / 'v').write_text(json.dumps(value))"
            )
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment.pop("NETWEIGHT_DATA", None)
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)
            found.append(json.loads((Path(place) / "v").read_text()))
    return {name: masked(value, found[1][name]) for name, value in found[0].items()}


def write_formats():
    """Keep what the cases write, and what readers find in it."""
    import snapshot_reading as reading

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        outputs(folder)
        reading.write_checkpoints(folder)
        shutil.rmtree(HERE / "formats", ignore_errors=True)
        for name in (*FORMATS, "dense.safetensors", "compressed.safetensors"):
            (HERE / "formats" / name).parent.mkdir(parents=True, exist_ok=True)
            if (folder / name).is_dir():
                shutil.copytree(folder / name, HERE / "formats" / name, ignore=shutil.ignore_patterns("*.html"))
            else:
                shutil.copy(folder / name, HERE / "formats" / name)
        ledger = HERE / "formats" / "finetune" / "attacks.jsonl"
        ledger.write_text(ledger.read_text().replace(str(folder.resolve()), "@"))


def main(parts):
    """Write the snapshots that are asked for."""
    from snapshot_commands import commands, recipe_keys, schema
    from snapshot_names import at_the_top, documented

    if "commands" in parts:
        write("commands.json", commands())
        write("recipe_keys.json", recipe_keys(schema()))
    if "outputs" in parts:
        from snapshot_cases import LOOSE
        from snapshot_golden import kind

        kept = twice("outputs")
        for case, key in LOOSE.items():
            kept[case]["json"][key] = kind(kept[case]["json"][key])
        write("outputs.json", kept)
    if "formats" in parts:
        write_formats()
    if {"formats", "reading"} & {*parts}:
        write("formats.json", twice("read_all"))
    if "names" in parts:
        kept = json.loads((HERE / EXPECTED_PUBLIC).read_text())
        kept |= {"top": at_the_top(), "documented": documented()}
        (HERE / EXPECTED_PUBLIC).write_text(json.dumps(kept, indent=1) + "\n")
    if not {*parts} <= {"commands", "outputs", "formats", "reading", "names"}:
        from snapshot_tables import PAPERS

        file = HERE / "tables.json"
        for paper in PAPERS if "tables" in parts else [part for part in parts if part in PAPERS]:
            found = twice("measured", paper)
            write(file.name, (json.loads(file.read_text()) if file.exists() else {}) | found)


if __name__ == "__main__":
    main(sys.argv[1:] or ["commands", "outputs", "formats", "names", "tables"])
