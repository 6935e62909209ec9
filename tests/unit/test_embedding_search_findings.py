"""What comparisons of searches say: counts by hand, intervals, verdicts in plain words, the section of a report."""

import math

import pytest

pytest.importorskip("scipy", reason="scipy is in the evidence extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

from tiny_diffusion import picture

from netweight.attacks.embedding_search.report import (
    SubjectRoles,
    grid_figure,
    search_findings,
    search_table,
    soonest,
    steps_ratio,
    success_figure,
    times_of,
    verdict,
)
from netweight.attacks.embedding_search.search import (
    Comparison,
    SearchEvaluation,
    SearchTrial,
    TargetImage,
    TargetSearches,
)
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import UsageError

SETTINGS = SearchSettings(steps=80, restarts=1, images=2, starts=("original", "noise"))


def trial(start, steps, *, last=80, score=0.3, first=0.1):
    outcome = "resisted" if steps is None else "found"
    looks = (
        SearchEvaluation(0, (first, first), None, 0.0),
        SearchEvaluation(steps or last, (score, score + 0.1), 0.5, 0.4),
    )
    return SearchTrial(start, 0, outcome, steps, steps or last, looks if steps != 0 else looks[:1])


def run(subject, target, seed, trained, *steps):
    trials = tuple(
        trial(start, one, score=0.3 if one is None else 0.85)
        for start, one in zip(("original", "noise"), steps, strict=True)
    )
    return TargetSearches(subject, target, trained, seed, f"xxh3-128:{subject}{target}{seed}", trials)


def comparison():
    runs = []
    for target in ("a", "b", "c"):
        for seed in (0, 1):
            runs += [
                run("original", target, seed, True, 0, 20),
                run("plain", target, seed, True, 10 + 10 * seed, None),
                run("robust", target, seed, True, None, 80 if target == "a" else None),
            ]
            runs += [run(name, f"{target}?", seed, False, None, None) for name in ("original", "plain", "robust")]
    order = ("original", "plain", "robust")
    runs.sort(key=lambda one: order.index(one.subject))
    return Comparison(tuple(runs), SETTINGS, "correlation")


def test_the_soonest_start_counts_and_censored_times_stay_censored():
    assert soonest(run("plain", "a", 0, True, 40, 20)) == (20.0, True)
    assert soonest(run("plain", "a", 0, True, 40, 20), "original") == (40.0, True)
    assert soonest(run("plain", "a", 0, True, None, None)) == (80.0, False)
    lost = SearchTrial("noise", 0, "diverged", None, 3, ())
    assert soonest(TargetSearches("plain", "a", True, 0, "d", (lost,))) is None
    assert times_of([TargetSearches("plain", "a", True, 0, "d", (lost,))]) is None
    times = times_of(comparison().of("robust", trained=True))
    assert (times.n, times.events) == (6, 2)
    assert times.clusters == ("a", "a", "b", "b", "c", "c")


def test_findings_hold_what_was_counted_by_hand():
    found = {
        finding.name: finding for finding in search_findings(comparison(), SubjectRoles("original", "plain", 5), seed=0)
    }
    back = found["planted images recovered, robust"]
    assert back.value == pytest.approx(100 / 3)
    assert back.ci95[0] == pytest.approx(9.68, abs=0.01)  # Wilson, 2 of 6
    assert back.detail["by start"] == {"original": "0 of 6", "noise": "2 of 6"}
    assert found["never-trained images recovered, plain"].value == 0
    steps = found["steps to recover planted images, plain"]
    assert (steps.value, steps.baseline, steps.n) == (10, 0, 6)
    assert math.isinf(found["steps to recover planted images, robust"].value)
    own = found["similarity from the own prompt, plain"]
    assert own.value == pytest.approx(0.1)
    gap = found["best similarity, planted above never-trained, plain"]
    assert gap.value == pytest.approx((0.9) - 0.35)
    resistance = found["resistance against plain, robust"]
    assert resistance.value == 8  # longer than 80 steps against 10: at least eight times
    assert resistance.detail["what is known"] == "at least 8"
    assert resistance.passed
    assert resistance.target == 5
    assert "resistance against plain, original" not in found
    with pytest.raises(UsageError, match="no searches on 'nobody'"):
        search_findings(comparison(), SubjectRoles("nobody"), seed=0)


def test_no_ratio_is_told_where_there_is_none():
    whole = comparison()
    assert steps_ratio(whole.of("plain", trained=True), whole.of("original", trained=True), seed=0) is None
    assert steps_ratio(whole.of("plain", trained=True)[:4], whole.of("plain", trained=True), seed=0) is None
    found = {finding.name: finding for finding in search_findings(whole, SubjectRoles("original", "robust"), seed=0)}
    # The base was not recovered: all that is sure of the ratio is that it may be next to nothing.
    assert found["resistance against robust, plain"].value == 0


def test_verdicts_never_say_erased_and_look_at_controls():
    whole = comparison()
    assert "6 of 6 recovered, half of them by step 0, 6 of them without a search" in verdict(whole, "original")[1]
    assert "6 of 6 recovered, half of them by step 10" in verdict(whole, "plain")[1]
    assert "none of 6 recovered in searches of 80 steps" in verdict(whole, "plain")[1]
    assert "2 of 6 recovered, fewer than half" in verdict(whole, "robust")[1]
    assert verdict(whole, "robust")[1].endswith("Strongest start: noise, which succeeds in 2 of 6 runs.")
    painting = Comparison(
        tuple([run("m", "a", 0, True, 20, None), run("m", "b", 0, False, 40, None)]), SETTINGS, "correlation"
    )
    assert "does not show that the model stores the memorized images" in verdict(painting, "m")[1]
    alone = Comparison((run("m", "a", 0, True, 20, None),), SETTINGS, "correlation")
    assert "it is unknown what the search generates" in verdict(alone, "m")[1]
    assert not any("erased" in verdict(whole, name)[1] for name in whole.subjects)


def test_failed_searches_fail_a_finding():
    whole = comparison()
    failed = Comparison(whole.runs, SETTINGS, "correlation", (("plain", "a", "ValueError: no"),))
    last = search_findings(failed, SubjectRoles(), seed=0)[-1]
    assert last.passed is False
    assert last.detail["reasons"] == ["plain, a: ValueError: no"]


def test_figures_and_tables_tell_what_was_found(tmp_path):
    whole = comparison()
    figure = success_figure(whole, trained=True)
    assert "plain: half of the pictures are recovered by step 10 (n = 6)" in figure.alt
    assert "robust: fewer than half of the pictures are recovered by step 80" in figure.caption
    assert success_figure(Comparison(whole.runs[:1], SETTINGS, "c"), trained=False) is None
    rows = {(row[0], row[1], row[2]): row for row in search_table(whole).rows}
    assert rows["plain", "planted", "original"][3:7] == (6, 6, 0, 10)
    assert rows["robust", "planted", "noise"][4:7] == (2, 0, "> 80")
    assert len(rows) == 12


def test_a_grid_needs_the_images_of_its_searches(tmp_path):
    with pytest.raises(UsageError, match=r"net\.safetensors"):
        grid_figure(comparison(), [TargetImage("a", "a", picture(0))], tmp_path)
