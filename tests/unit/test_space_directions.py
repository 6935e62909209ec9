"""Labels and directions of a weight space, against scikit-learn, plain numpy and directions that are known."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_spaces import known_scores
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import r2_score, roc_auc_score

from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.methods.space.directions import (
    Design,
    bootstrap_cosine,
    decorrelated,
    direction_of,
    fit_direction,
    logistic,
    ridge,
)
from netweight.methods.space.labels import LabelColumn, Labels, read_labels
from netweight.methods.space.points import Direction
from netweight.metrics.intervals import area_under_roc, explained_variance

few = settings(max_examples=15, deadline=None)


def cosine(one, other):
    return float(torch.nn.functional.cosine_similarity(torch.as_tensor(one), torch.as_tensor(other), dim=0))


# --- labels


def test_labels_are_read_alike_from_every_kind_of_file(tmp_path):
    rows = [{"name": "b", "beard": 1, "width": 0.5}, {"name": "a", "beard": 0, "width": None}]
    texts = {
        "x.csv": "name,beard,width\nb,1,0.5\na,no,\n",
        "y.csv": "name;beard;width\nb;yes;0.5\na;0;NA\n",
        "x.tsv": "name\tbeard\twidth\nb\ttrue\t0.5\na\tfalse\t?\n",
        "x.json": json.dumps(rows),
        "y.json": json.dumps({row["name"]: {k: v for k, v in row.items() if k != "name"} for row in rows}),
        "x.jsonl": "\n".join(map(json.dumps, rows)) + "\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        labels = read_labels(tmp_path / name, ["a", "b", "c"])
        assert labels["beard"].values[:2].tolist() == [0, 1]
        assert labels["beard"].known.tolist() == [True, True, False]
        assert labels["width"].known.tolist() == [False, True, False]
        assert labels["beard"].kind == "binary"


@pytest.mark.parametrize(
    ("name", "text", "columns", "said"),
    [
        ("x.csv", "name,beard\nmodel-1,1\nmodel-01,0\n", None, r"'model-01', which is not in the space.*'model-1'"),
        ("x.csv", "name,beard\nmodel-1,1\nmodel-1,0\n", None, "twice"),
        ("x.csv", "who,beard\nmodel-1,1\n", None, "no column 'name'"),
        ("x.csv", "name,beard\nmodel-1,1\n", ["bread"], "no column 'bread'.*beard"),
        ("x.csv", "name,beard\nmodel-1,bushy\n", None, "'bushy' of 'model-1' in 'beard'"),
        ("x.csv", "name,beard\nmodel-1\n", None, "line 2"),
        ("x.csv", "name,beard\nmodel-1,inf\n", None, "infinity"),
        ("x.csv", "name\nmodel-1\n", None, "no label"),
        ("x.csv", "name,beard\n", None, "no rows"),
        ("x.txt", "model-1", None, "a format that is not supported"),
        ("x.json", "{", None, "not JSON"),
        ("x.json", "[1]", None, "not a list of JSON objects"),
        ("y.csv", None, None, "There is no file"),
    ],
)
def test_bad_labels_are_refused_by_name(tmp_path, name, text, columns, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        read_labels(tmp_path / name, ["model-1", "model-2"], columns=columns)


def test_a_text_column_is_no_obstacle_if_another_is_asked_for(tmp_path):
    (tmp_path / "x.csv").write_text("name,prompt,beard\na,a man,1\nb,a woman,0\n")
    assert list(read_labels(tmp_path / "x.csv", ["a", "b"], columns=["beard"]).columns) == ["beard"]


def test_a_direction_of_one_class_is_refused():
    scores, labels, _ = known_scores(20)
    ones = Labels(labels.names, {"beard": LabelColumn("beard", torch.ones(20)), **{}})
    with pytest.raises(UsageError, match=r"one value alone, 1, in 20 models.*both classes"):
        fit_direction(scores, ones, "beard")
    rare = torch.zeros(20)
    rare[3] = 1
    with pytest.raises(UsageError, match="only 1 models of one class, and 5 are needed"):
        fit_direction(scores, Labels(labels.names, {"beard": LabelColumn("beard", rare)}), "beard")
    with pytest.raises(NameNotFound, match="'bread'"):
        fit_direction(scores, labels, "bread")
    with pytest.raises(UsageError, match="its own confounder"):
        fit_direction(scores, labels, "beard", confounders=["beard"])
    with pytest.raises(UsageError, match="labels of 20 models"):
        fit_direction(scores[:10], labels, "beard")


# --- regressions, against scikit-learn


@few
@given(st.integers(8, 40), st.integers(1, 60), st.floats(0.01, 100), st.integers(0, 2**31))
def test_ridge_is_that_of_scikit_learn(count, components, penalty, seed):
    noise = np.random.default_rng(seed)
    x, y, w = noise.normal(size=(count, components)), noise.normal(size=count), noise.uniform(0.1, 3, count)
    ours = ridge(Design.of(torch.tensor(x) + 5), torch.tensor(y), torch.tensor(w), penalty=penalty)
    theirs = Ridge(alpha=penalty, solver="svd").fit(x + 5, y, sample_weight=w)
    assert np.allclose(ours.weights, theirs.coef_, atol=1e-7)
    assert ours.intercept == pytest.approx(theirs.intercept_, abs=1e-6)


def test_ridge_chooses_as_leaving_each_model_out_would():
    scores, labels, _ = known_scores(40, 60)
    design, y = Design.of(scores), labels["width"].values
    ours = ridge(design, y, torch.ones(40, dtype=torch.float64))
    penalties = [design.penalty(10.0**power) for power in range(3, -5, -1)]
    theirs = RidgeCV(alphas=penalties, store_cv_results=True).fit(scores.double().numpy(), y.numpy())
    assert ours.penalty == pytest.approx(theirs.alpha_)
    assert ours.loss == pytest.approx(theirs.cv_results_.mean(0).min(), rel=1e-6)
    assert np.allclose(ours.weights, theirs.coef_, atol=1e-8)


@few
@given(st.integers(12, 40), st.integers(1, 50), st.floats(0.1, 100), st.integers(0, 2**31))
def test_logistic_is_that_of_scikit_learn(count, components, penalty, seed):
    noise = np.random.default_rng(seed)
    x, y = noise.normal(size=(count, components)), np.arange(count) % 3 == 0
    w = np.where(y, 2.0, 1.0)
    ours = logistic(Design.of(torch.tensor(x)), torch.tensor(y), torch.tensor(w), penalty=penalty)
    theirs = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit(x, y, sample_weight=w)
    assert np.allclose(ours.weights, theirs.coef_[0], atol=1e-4)
    assert ours.intercept == pytest.approx(theirs.intercept_[0], abs=1e-3)


def test_logistic_predicts_models_left_out_without_refitting():
    scores, labels, _ = known_scores(40, 6, noise=1.0)
    positive, ones = labels["beard"].positive, torch.ones(40, dtype=torch.float64)
    ours = logistic(Design.of(scores), positive, ones, penalty=3.0)
    losses = []
    for out in range(40):
        weights = ones.clone()
        weights[out] = 0
        said = logistic(Design.of(scores), positive, weights, penalty=3.0)(scores[out : out + 1])
        losses.append(float(torch.nn.functional.softplus(-said if positive[out] else said)))
    assert ours.loss == pytest.approx(np.mean(losses), rel=0.01)


def test_held_out_scores_are_those_of_scikit_learn_and_cover():
    noise = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        truth = noise.random(80) < 0.4
        said = noise.normal(size=80).round(1) + truth
        interval = area_under_roc([(said, truth)])
        assert interval.estimate == pytest.approx(roc_auc_score(truth, said))
        covered.append(interval.low <= 0.76025 <= interval.high)  # Φ(1/√2)
    assert 0.88 <= np.mean(covered) <= 1
    y = noise.normal(size=50)
    said = y + noise.normal(size=50)
    assert explained_variance(said, y, np.full(50, y.mean())).estimate == pytest.approx(r2_score(y, said))
    with pytest.raises(UsageError, match="both classes"):
        area_under_roc([(y, y > 9)])
    with pytest.raises(UsageError, match="vary"):
        explained_variance(y, 0 * y, 0 * y)


# --- directions


@pytest.mark.parametrize("kind", ["encoder", "difference", "decoder"])
@pytest.mark.parametrize(("column", "axis"), [("beard", 0), ("width", 1)])
def test_a_known_direction_is_found(kind, column, axis):
    scores, labels, axes = known_scores(400)
    found = fit_direction(scores, labels, column, kind=kind)
    assert found.length == pytest.approx(1)
    assert cosine(found.vector, axes[axis]) > 0.9
    [finding] = found.findings
    assert finding.value > 0.85
    assert finding.ci95[0] <= finding.value <= finding.ci95[1]
    assert finding.n == 400
    along = scores.double() @ found.vector
    assert found.deviation == pytest.approx(float(along.std()))
    assert found.reach == pytest.approx(float(along.max()), rel=1e-5)
    assert torch.allclose(found.step(2.0), 2 * found.deviation * found.vector)
    assert torch.allclose(found.step(-1.0, "reach"), -found.reach * found.vector)


def test_nothing_is_read_where_nothing_is():
    scores, labels, _ = known_scores(200, 300)
    noise = torch.Generator().manual_seed(5)
    chance = {
        "x": LabelColumn("x", torch.rand(200, generator=noise)),
        "y": LabelColumn("y", torch.rand(200, generator=noise) < 0.5),
    }
    empty = Labels(labels.names, chance)
    for kind in ("encoder", "decoder"):
        assert fit_direction(scores, empty, "x", kind=kind).findings[0].value < 0.1
        assert fit_direction(scores, empty, "y", kind=kind).findings[0].value == pytest.approx(0.5, abs=0.12)


def test_unknown_models_are_left_out():
    scores, labels, _ = known_scores(100)
    values = labels["beard"].values.clone()
    values[60:] = torch.nan
    some = Labels(labels.names, {"beard": LabelColumn("beard", values)})
    same = Labels(labels.names[:60], {"beard": LabelColumn("beard", values[:60])})
    one, other = (fit_direction(scores[:n], each, "beard") for n, each in ((100, some), (60, same)))
    assert torch.equal(one.vector, other.vector)
    assert one.findings[0].value == other.findings[0].value


def test_an_encoder_is_the_joint_regression():
    scores, labels, _ = known_scores(150, correlated=0.7)
    found = fit_direction(scores, labels, "beard", confounders=["width", "hue"])
    sides = np.stack([labels[name].values.numpy() for name in ("beard", "width", "hue")], 1)
    expected = LinearRegression().fit(sides, scores.double().numpy()).coef_[:, 0]
    assert cosine(found.vector, expected) == pytest.approx(1, abs=1e-10)


def test_joint_regression_undoes_a_correlation_of_labels():
    scores, labels, axes = known_scores(400, correlated=0.7)
    alone = fit_direction(scores, labels, "beard")
    joint = fit_direction(scores, labels, "beard", confounders=["width"])
    assert abs(cosine(alone.vector, axes[1])) > 0.4
    assert abs(cosine(joint.vector, axes[1])) < 0.1


@pytest.mark.parametrize("kind", ["decoder", "difference"])
def test_other_kinds_leave_what_confounders_read(kind):
    scores, labels, _ = known_scores(300, correlated=0.7)
    found = fit_direction(scores, labels, "beard", kind=kind, confounders=["width", "hue"])
    for name in ("width", "hue"):
        assert abs(cosine(found.vector, fit_direction(scores, labels, name, kind="decoder").vector)) < 1e-8


def test_attributes_that_cannot_be_told_apart_are_named():
    scores, labels, _ = known_scores(60)
    twice = Labels(labels.names, {**labels.columns, "goatee": LabelColumn("goatee", 3 * labels["beard"].values)})
    with pytest.raises(UsageError, match=r"'beard' is a combination of 'goatee'"):
        fit_direction(scores, twice, "beard", confounders=["goatee"])
    with pytest.raises(UsageError, match="nothing is left"):
        fit_direction(scores, twice, "beard", kind="decoder", confounders=["goatee"])


@few
@given(st.integers(2, 5), st.integers(0, 2**31))
def test_decorrelation_has_no_order_and_is_idempotent(count, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(30, 8, generator=generator)
    made = [
        direction_of(scores, torch.randn(8, generator=generator), name=str(number), kind="decoder")
        for number in range(count + 1)
    ]
    first, others = made[0], made[1:]
    rest = decorrelated(scores, first, others)
    assert all(abs(rest.cosine(other)) < 1e-10 for other in others)
    assert cosine(rest.vector, decorrelated(scores, first, others[::-1]).vector) == pytest.approx(1)
    assert cosine(rest.vector, decorrelated(scores, rest, others).vector) == pytest.approx(1)
    assert cosine(rest.vector, decorrelated(scores, first, [*others, others[0]]).vector) == pytest.approx(1)
    assert decorrelated(scores, first, []) is first


def test_resampling_tells_a_stable_direction_from_noise():
    scores, labels, _ = known_scores(150, 20)
    noise = torch.rand(150, generator=torch.Generator().manual_seed(1))
    both = Labels(labels.names, {**labels.columns, "noise": LabelColumn("noise", noise)})
    for kind in ("encoder", "decoder"):
        stable, loose = (bootstrap_cosine(scores, both, name, kind=kind, resamples=30) for name in ("beard", "noise"))
        assert stable.ci95[0] > 0.85
        assert loose.value < stable.value - 0.1
    with pytest.raises(UsageError, match="20 or more"):
        bootstrap_cosine(scores, labels, "beard", resamples=5)


def test_reference_is_the_pseudo_inverse_with_confounders_in_order():
    scores, labels, _ = known_scores(50, correlated=0.7)
    inverse = np.linalg.pinv(scores.double().numpy())
    beard, width, hue = (inverse @ labels[name].values.numpy() for name in ("beard", "width", "hue"))
    plain = fit_direction(scores, labels, "beard", fidelity="reference")
    assert np.allclose(plain.vector, beard, rtol=1e-9, atol=1e-12)
    assert torch.allclose(plain.step(3.0, "raw"), 3 * plain.vector)

    def without(vector, other):
        return vector - (vector @ other) / (other @ other) * other

    for names, expected in (
        (["width", "hue"], without(without(beard, width), hue)),
        (["hue", "width"], without(without(beard, hue), width)),
    ):
        found = fit_direction(scores, labels, "beard", confounders=names, fidelity="reference")
        assert np.allclose(found.vector, expected, rtol=1e-9, atol=1e-12)
    gap = Labels(labels.names, {"x": LabelColumn("x", torch.tensor([torch.nan, *range(49)]))})
    with pytest.raises(UsageError, match="1 models lack a label"):
        fit_direction(scores, gap, "x", fidelity="reference")


def test_reference_gives_these_numbers():
    """Golden: computed by hand with numpy's pinv on these four models."""
    scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [0.0, -2.0]])
    labels = Labels(("a", "b", "c", "d"), {"x": LabelColumn("x", torch.tensor([1.0, 1.0, 0.0, 0.0]))})
    assert fit_direction(scores, labels, "x", fidelity="reference").vector.tolist() == pytest.approx([0.5, 0.25])


def test_a_direction_comes_back_bit_for_bit_and_knows_its_space():
    scores, labels, _ = known_scores(60)
    first, second = (fit_direction(scores, labels, name, kind="difference") for name in ("beard", "width"))
    again = Direction.from_json(json.loads(json.dumps(first.to_json())))
    assert torch.equal(again.vector, first.vector)
    assert again.to_json() == first.to_json()
    assert again.findings == first.findings
    assert first.cosine(second) == pytest.approx(cosine(first.vector, second.vector))
    again.check(scores)
    with pytest.raises(UsageError, match="another space"):
        again.check(scores + 1)
    with pytest.raises(UsageError, match="no unit"):
        first.step(1.0, "meters")
    for damaged in ({}, {**first.to_json(), "vector": [float("nan")] * 3}, {**first.to_json(), "size": 3}):
        with pytest.raises(CorruptBlob):
            Direction.from_json(damaged)
    with pytest.raises(UsageError, match="length 0"):
        direction_of(scores, torch.zeros(12), name="x", kind="encoder")
