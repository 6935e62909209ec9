"""All that is aimed at in a space of drawn faces, measured on one bank: probes, edits, samples and inversion.

    python benchmarks/space_faces.py [BANK] [--independent BANK] [--output FILE] [-- options of space_use.py]

BANK is a folder of `python -m netweight_experiments.toys.face_bank`, by default the few hundred people in the
package; the
other one was trained with `--start independent`. `space_gauge.py` reads attributes off adapters, `space_use.py` edits,
samples and inverts; this script runs both and says of every target whether it is met. A miniature.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from netweight.core.environment import describe
from netweight.report.finding import Finding
from netweight.toys.faces_pipeline import FACES_BANK

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "space"
PARTS = ("directions", "edits", "samples", "inversion")
STRONG_TARGET, MEAN_TARGET = 0.8, 0.55


def run(script, *arguments):
    """What another benchmark writes, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        subprocess.run([sys.executable, HERE / script, *map(str, arguments), "--output", output], check=True)
        return json.loads(output.read_text())


def probes(rows):
    """Targets of attributes read off adapters: on strong ones, and against raw factors."""
    most = max(row["n"] for row in rows)
    found = {(row["start"], row["kernel"]): row for row in rows if row["n"] == most}
    parts = []
    for start in dict.fromkeys(row["start"] for row in rows):
        ours = found[start, "changes"]
        parts.append(
            Finding(f"R² of strong attributes, {start} starts, changes", ours["strong"], n=most, better="higher",
                    target=STRONG_TARGET if start == "shared" else None, detail=ours["r_squared"])
        )  # fmt: skip
        for other in ("factors", "regauged"):
            parts.append(
                Finding(f"mean R², {start} starts, changes; baseline: {other}", ours["mean"], n=most, better="higher",
                        baseline=found[start, other]["mean"], target=MEAN_TARGET if start == "independent" else None)
            )  # fmt: skip
    return parts


def aimed(use):
    """Findings of the other benchmark that have a target."""
    found = [Finding.from_json(each) for part in PARTS for each in use.get(part, ()) if "name" in each]
    return [each for each in found if each.target is not None]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bank", type=Path, nargs="?", default=FACES_BANK.parent)
    parser.add_argument("--independent", type=Path, help="a bank whose adapters each began from another seed")
    parser.add_argument("--output", type=Path)
    ours, others = sys.argv[1:], []
    if "--" in ours:  # what follows is for space_use.py
        ours, others = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    options = parser.parse_args(ours)
    banks = [options.bank, *([options.independent] if options.independent else [])]
    gauge = run("space_gauge.py", *banks)
    use = run("space_use.py", options.bank, "--only", *PARTS, *others)
    targets = [*probes(gauge["rows"]), *aimed(use)]
    for each in targets:
        told = {True: "met", False: "missed", None: ""}[each.passed]
        print(f"{each.name}: {each.value} {each.ci95 or ''} (baseline {each.baseline}, target {each.target}) {told}")
    today = datetime.date.today().isoformat()
    output = options.output or RESULTS / f"faces-{use['models']}-{today}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "what": "what is aimed at in a space of adapters of drawn faces: a miniature",
        "date": today,
        "environment": describe(),
        "seeds": "see the parts",
        "targets": [each.to_json() for each in targets],
        "gauge": gauge,
        "use": use,
    }
    output.write_text(json.dumps(values, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
