"""A report with one of everything, for the tests of its JSON, its page and its look in a browser."""

import math

import numpy

from netweight.report import Finding
from netweight.report import plots as figures
from netweight.report.finding import Column, Table
from netweight.report.report import Report

ENVIRONMENT = {"netweight": "0.1.0", "packages": {"torch": "2.13.0"}, "cpu_flags": ["avx2", "avx512f"], "gpu": None}


def findings():
    return [
        Finding("ratio", 1.5131, ci95=(1.512, 1.514), n=7, better="higher", target=1.513, baseline=1.5, seeds=(1, 2)),
        Finding("just missed", 1.51297, better="higher", target=1.513, detail={"why": ["a", {"b": math.inf}]}),
        Finding("same bits", True, target=True, n=103, command="netweight verify x --against y"),
        Finding("peak memory", 123456789, unit="bytes", better="lower"),
        Finding("LPIPS", None, detail={"reason": "no backbone was given"}),
        Finding("diverged loss", math.nan, unit="nats", better="lower", target=3.0),
        Finding("a name " + "that_is_long_and_has_no_space_" * 4, 1e-9, target=(0, 1)),
    ]


def all_figures():
    rng = numpy.random.default_rng(0)
    x = list(range(10))
    y = [math.exp(-0.2 * i) for i in x]
    band = ([v * 0.9 for v in y], [v * 1.1 for v in y])
    return [
        figures.bars({"a": [1, 2], "b": [2, 1]}, ["p", "q"], alt="Bars <&>", errors={"a": [(0.5, 1.5), (1, 3)]}),
        figures.lines({"u": (x, y), "v": (x, y)}, alt="Lines", caption="Loss", log="y", bands={"u": band}),
        figures.image_grid(
            [[rng.random((8, 8, 3)), (rng.random((8, 8)) * 255).astype("uint8"), None]],
            rows=["target"],
            columns=["1", "2", "3"],
            alt="Images",
        ),
    ]


def wide_table():
    columns = ["row", *(Column(f"column number {i}", "points", "higher") for i in range(14))]
    return Table("Wide", columns, [["first", *range(14)], ["second", *[None] * 14]], notes=["A note."])


def report_of_everything():
    report = Report(
        "Everything <script>alert(1)</script>",
        summary="One of each.",
        command="netweight everything --with=" + "long" * 40,
        seeds=(0,),
        inputs={"model.safetensors": "xxh3-128:" + "0f" * 16},
        environment=ENVIRONMENT,
    )
    report.section(
        "First",
        findings(),
        figures=all_figures(),
        tables=[wide_table()],
        intro="One paragraph.\n\nAnother.",
        question="Does it hold?",
        warnings=["Mind <b>this</b>."],
    )
    return report.section("Second", [Finding("fine", 1.0, target=(0, 2))]).section("Third", [Finding("told", 2)])
