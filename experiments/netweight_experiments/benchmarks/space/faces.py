"""All that is aimed at in a space of drawn faces, measured on one bank: probes, edits, samples and inversion.

    python -m netweight_experiments.benchmarks.space.faces [BANK]

BANK is a folder of `python -m netweight_experiments.toys.face_bank`, by default the few hundred people in the
package; the
other one was trained with `--start independent`. `gauge.py` reads attributes off adapters, `use.py` edits,
samples and inverts; this script runs both and says of every target whether it is met. A miniature.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from netweight.core.environment import describe
from netweight.report.finding import Finding
from netweight.toys.faces_pipeline import FACES_BANK
from netweight_experiments.benchmarks.script import RESULTS, script, today, write

PARTS = ("directions", "edits", "samples", "inversion")
STRONG_TARGET, MEAN_TARGET = 0.8, 0.55


def run(part, *arguments):
    """What another benchmark writes, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        module = f"netweight_experiments.benchmarks.space.{part}"
        subprocess.run([sys.executable, "-m", module, *map(str, arguments), "--output", output], check=True)
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
    parser = script(__doc__, whole=True)
    parser.add_argument("bank", type=Path, nargs="?", default=FACES_BANK.parent)
    parser.add_argument("--independent", type=Path, help="a bank whose adapters each began from another seed")
    ours, others = sys.argv[1:], []
    if "--" in ours:  # what follows is for use.py
        ours, others = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    options = parser.parse_args(ours)
    banks = [options.bank, *([options.independent] if options.independent else [])]
    gauge = run("gauge", *banks)
    use = run("use", options.bank, "--only", *PARTS, *others)
    targets = [*probes(gauge["rows"]), *aimed(use)]
    for each in targets:
        told = {True: "met", False: "missed", None: ""}[each.passed]
        print(f"{each.name}: {each.value} {each.ci95 or ''} (baseline {each.baseline}, target {each.target}) {told}")
    values = {
        "what": "what is aimed at in a space of adapters of drawn faces: a miniature",
        "date": today(),
        "environment": describe(),
        "seeds": "see the parts",
        "targets": [each.to_json() for each in targets],
        "gauge": gauge,
        "use": use,
    }
    write(options.output or RESULTS / "space" / f"faces-{use['models']}-{today()}.json", values)


if __name__ == "__main__":
    main()
