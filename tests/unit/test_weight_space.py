"""Weight spaces against dense algebra and scikit-learn."""

import pytest
import torch
from adapters_under_test import PROJ_IN, close, random_adapter
from spaces_under_test import bank_of, dense, flat, random_adapters, sharing_adapters

from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.methods.space import basis, gram
from netweight.methods.space.basis import Sketch
from netweight.methods.space.fit import sketch_error
from netweight.methods.space.gram import StackBank, inner_products
from netweight.methods.space.space import WeightSpace
from netweight.nn import pca
from netweight.nn.lora import Adapter, AdapterStack, LowRank, combined
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.shards import BankWriter, joined, rows_of_adapter
from netweight.store.lora_formats.reading import plan_adapter, read_adapter
from netweight.store.lora_formats.writing import write_adapter


@pytest.fixture(scope="module")
def adapters():
    return random_adapters(24)


@pytest.fixture(scope="module")
def space(adapters):
    return WeightSpace.fit(bank_of(adapters[:20]), components=6)


def test_inner_products_are_those_of_dense_changes(adapters):
    one, other = AdapterStack.of(adapters[:5]), AdapterStack.of(random_adapters(4, seed=3, ranks=(2,)))
    expected = dense(adapters[:5]) @ dense(random_adapters(4, seed=3, ranks=(2,))).T
    torch.testing.assert_close(inner_products(one, other), expected, rtol=1e-12, atol=1e-10)


def test_scores_are_those_of_scikit_learn(space, adapters):
    decomposition = pytest.importorskip("sklearn.decomposition")
    oracle = decomposition.PCA(6, svd_solver="full")
    expected = torch.from_numpy(oracle.fit_transform(dense(adapters[:20]).numpy())).float()
    signs = (space.scores * expected).sum(dim=0).sign()
    torch.testing.assert_close(space.scores, expected * signs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(space.deviations, torch.from_numpy(oracle.explained_variance_).sqrt().float())
    new = torch.from_numpy(oracle.transform(dense(adapters[20:]).numpy())).float()
    found = torch.stack([space.project(one) for one in adapters[20:]])
    torch.testing.assert_close(found, new * signs, rtol=1e-5, atol=1e-5)
    point = space.scores[3] * 1.5
    expected = torch.from_numpy(oracle.inverse_transform((point * signs)[None].double().numpy()))[0]
    torch.testing.assert_close(flat(space.changes(point.double())), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense([space.adapter(point)])[0], expected, rtol=1e-5, atol=1e-5)
    mean = torch.from_numpy(oracle.mean_)
    torch.testing.assert_close(dense([space.mean_adapter])[0], mean, rtol=1e-5, atol=1e-5)


def test_changes_differentiate(space):
    point = space.scores[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda scores: flat(space.changes(scores)), point)


def test_saved_and_opened(space, adapters, tmp_path):
    bank = bank_of(adapters[:20])
    space.save(tmp_path / "space")
    space.save(tmp_path / "alone", standalone=True)
    point = space.scores[5] * 0.5
    grown = bank_of(adapters)
    for again in (
        WeightSpace.open(tmp_path / "space", bank), WeightSpace.open(tmp_path / "space", grown),
        WeightSpace.open(tmp_path / "alone"),
    ):  # fmt: skip
        assert again.names == space.names
        assert again.config == space.config
        assert torch.equal(again.scores, space.scores)
        assert torch.equal(again.deviations, space.deviations)
        torch.testing.assert_close(flat(again.changes(point)), flat(space.changes(point)))
        torch.testing.assert_close(again.project(adapters[21]), space.project(adapters[21]))
    with pytest.raises(UsageError, match="combinations of the adapters"):
        WeightSpace.open(tmp_path / "space")
    with pytest.raises(UsageError, match="another bank"):
        WeightSpace.open(tmp_path / "space", bank_of(random_adapters(20, seed=9)))
    damaged = tmp_path / "space" / "space.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CorruptBlob, match="digest"):
        WeightSpace.open(tmp_path / "space", bank)


def saved_and_opened(space, folder, bank):
    space.save(folder)
    return WeightSpace.open(folder, bank)


@pytest.mark.parametrize("how", [
    {"solver": "streaming", "sketch": 5}, {"representation": "factors"},
    {"representation": "factors", "standardize": False, "solver": "streaming"},
])  # fmt: skip
def test_every_representation_is_saved_and_opened(how, tmp_path):
    adapters = sharing_adapters(16)
    bank = bank_of(adapters)
    space = WeightSpace.fit(bank, components=3, **how)
    needs = bank if how.get("representation", "delta") == "delta" else None
    again = saved_and_opened(space, tmp_path / "space", needs)
    assert again.config == space.config
    assert again.accuracy == space.accuracy
    point = space.scores[1] * 2
    assert torch.equal(again.project(adapters[3]), space.project(adapters[3]))
    assert torch.equal(flat(again.changes(point)), flat(space.changes(point)))
    assert torch.equal(dense([again.adapter(point)]), dense([space.adapter(point)]))


def test_the_reference_s_mode_is_the_reference_s_arithmetic():
    """Sorted modules, A then B, standardized by the unbiased deviation, singular value decomposition."""
    adapters = sharing_adapters(20, same_scale=True)
    space = WeightSpace.fit(bank_of(adapters), components=5, representation="factors")
    rows = []
    for adapter in adapters:
        parts = [(adapter.factors[name].down, adapter.factors[name].up) for name in sorted(adapter.factors)]
        rows.append(torch.cat([part.flatten() for pair in parts for part in pair]))
    matrix = torch.stack(rows)
    mean, std = matrix.mean(dim=0), matrix.std(dim=0)
    left, values, right = torch.linalg.svd((matrix - mean) / std, full_matrices=False)
    signs = (space.basis.rows.components * right[:5]).sum(dim=1).sign()
    torch.testing.assert_close(space.basis.rows.mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(space.basis.rows.deviation, std, rtol=1e-5, atol=0)
    torch.testing.assert_close(space.basis.rows.components * signs[:, None], right[:5], rtol=0, atol=1e-5)
    torch.testing.assert_close(space.scores * signs, (left * values)[:, :5], rtol=1e-5, atol=1e-4)
    point = space.scores[4] * 0.7
    row = mean + std * (point @ space.basis.rows.components)
    name = sorted(adapters[0].factors)[0]
    (rows_of, columns), rank = adapters[0].factors[name].shape, 2
    down = row[: rank * columns].view(rank, columns)
    up = row[rank * columns : rank * columns + rows_of * rank].view(rows_of, rank)
    torch.testing.assert_close(space.changes(point)[name], up @ down)
    assert torch.autograd.gradcheck(lambda scores: flat(space.changes(scores)), point.double().requires_grad_())


def test_adapters_as_rows_are_read_by_columns_too(monkeypatch):
    adapters = sharing_adapters(20)
    bank = bank_of(adapters)
    layout = basis.RowLayout.of(bank)
    rows = basis.BankRows(bank, layout, 3, 19)
    whole = rows.rows(0, 16)
    for start, stop in (
        (0, layout.length),
        (0, 1),
        (5, 17),
        (7, layout.length - 2),
        (layout.length - 1, layout.length),
    ):
        out = torch.empty(16, stop - start)
        rows.columns(start, stop, out)
        assert torch.equal(out, whole[:, start:stop])
    once = WeightSpace.fit(bank, components=5, representation="factors")
    monkeypatch.setattr(pca, "_BYTES", 1)  # 64 columns at a time, which end within modules
    again = WeightSpace.fit(bank, components=5, representation="factors")
    torch.testing.assert_close(again.scores, once.scores, rtol=1e-4, atol=1e-4)


def test_rows_of_a_bank_in_which_one_lacks_a_module_are_refused_by_name():
    whole = sharing_adapters(4)
    lacking = Adapter(dict(list(whole[0].factors.items())[:1]))
    shapes = {name: change.shape for name, change in whole[0].factors.items()}
    for order in ((lacking, *whole), (*whole, lacking)):
        stack = joined(sorted(shapes), [rows_of_adapter(one, dict(sorted(shapes.items()))) for one in order])
        with pytest.raises(UsageError, match=r'has rank 0|does not change .* Use representation="delta"'):
            WeightSpace.fit(StackBank([str(number) for number in range(5)], stack), representation="factors")


def test_changes_through_matrices_and_through_factors_are_the_same():
    """Few components of many adapters are kept as matrices, many as the adapters' factors."""
    adapters = random_adapters(40, ranks=(1,))
    points = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    few = WeightSpace.fit(bank_of(adapters), components=4)
    many = WeightSpace.fit(bank_of(adapters), components=30)
    assert few.basis.combinations.dense
    assert not many.basis.combinations.dense
    padded = torch.cat([points, points.new_zeros(3, 26)], dim=1)
    torch.testing.assert_close(flat(few.changes(points)), flat(many.changes(padded)), rtol=1e-8, atol=1e-8)
    assert flat(few.changes(points[0].float())).dtype == torch.float32
    assert torch.autograd.gradcheck(lambda scores: flat(few.changes(scores)), points.requires_grad_())


def test_a_point_as_an_adapter_has_no_more_rank_than_its_modules(space):
    ranks = {name: change.rank for name, change in space.adapter(space.scores[0]).factors.items()}
    assert ranks == {"unet.mid.to_q": 5, "unet.mid.to_v": 6, "unet.up.to_q": 4}


def family(count):
    """Adapters that differ along three directions, and a little besides."""
    parts, noise = sharing_adapters(3, seed=4, same_scale=True), sharing_adapters(count, seed=5, same_scale=True)
    weights = torch.randn(count, 3, generator=torch.Generator().manual_seed(0)).tolist()
    return [combined([one, *parts], [0.1, *row]) for one, row in zip(noise, weights, strict=True)]


def test_appending_projects_and_says_when_to_fit_again(tmp_path):
    kin = sharing_adapters(60)
    space = WeightSpace.fit(bank_of(kin[:50]), components=8)
    appended = space.append(bank_of(kin[:55]))
    assert appended.added == 5
    assert appended.space.names[50:] == tuple(f"person-{number}" for number in range(50, 55))
    assert torch.equal(appended.space.scores[:50], space.scores)
    torch.testing.assert_close(appended.space.scores[52], space.project(kin[52]), rtol=1e-4, atol=1e-4)
    centered = dense(kin) - dense(kin[:50]).mean(dim=0)
    _, _, right = torch.linalg.svd(centered[:50], full_matrices=False)
    expected = (centered[50:55] @ right[:8].T).square().sum() / centered[50:55].square().sum()
    assert appended.captured == pytest.approx(float(expected), rel=1e-4)
    assert appended.refit is None
    again = saved_and_opened(appended.space, tmp_path / "space", bank_of(kin[:55]))
    assert (len(again.names), again.fitted) == (55, 50)
    many = sharing_adapters(70)
    assert "have been added to the 50" in again.append(bank_of(kin[:55] + many[55:])).refit
    relatives = family(55)
    few = WeightSpace.fit(bank_of(relatives[:50]), components=3)
    assert few.append(bank_of(relatives)).refit is None
    assert "of the new adapters" in few.append(bank_of(relatives[:50] + kin[:5])).refit
    with pytest.raises(UsageError, match="not that of the space"):
        space.append(bank_of(kin[5:60]))
    with pytest.raises(UsageError, match="not that of the space"):
        space.append(bank_of(kin[:50]))


def test_a_grown_bank_is_fitted_again_from_what_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(gram, "_block", lambda bank: 16)
    adapters = random_adapters(64)
    made = []
    products = gram.inner_products
    monkeypatch.setattr(gram, "inner_products", lambda *stacks: made.append(1) or products(*stacks))
    WeightSpace.fit(bank_of(adapters[:48]), components=3, folder=tmp_path)
    assert len(made) == 6
    again = WeightSpace.fit(bank_of(adapters), components=3, folder=tmp_path)
    assert len(made) == 6 + 4
    torch.testing.assert_close(again.scores, WeightSpace.fit(bank_of(adapters), components=3).scores)
    changed = [*random_adapters(1, seed=5), *adapters[1:]]
    found = WeightSpace.fit(bank_of(changed), components=3, folder=tmp_path)
    torch.testing.assert_close(found.scores, WeightSpace.fit(bank_of(changed), components=3).scores)


def test_halves_say_what_comes_back():
    """One strong direction comes back in both halves; the many weak ones do not."""
    strong, noise = sharing_adapters(2, seed=4), sharing_adapters(80, seed=5, same_scale=True)
    draw = torch.Generator().manual_seed(0)
    weights = 6 * torch.randn(80, generator=draw)
    adapters = [
        combined([one, strong[0]], [0.2, float(weight)]) for one, weight in zip(noise, weights, strict=True)
    ]  # fmt: skip
    halves = WeightSpace.fit(bank_of(adapters), components=20).accuracy.halves
    assert halves.agreement[1] > 0.98
    assert 0.2 < halves.agreement[20] < 0.9
    assert halves.fitted > halves.held_out > 0.5
    assert WeightSpace.fit(bank_of(adapters), components=20, halves=False).accuracy.halves is None
    assert WeightSpace.fit(bank_of(adapters), components=20).accuracy.warning is None


def test_a_space_that_explains_little_of_other_adapters_says_so():
    accuracy = WeightSpace.fit(bank_of(random_adapters(24)), components=10).accuracy
    assert accuracy.halves.held_out < 0.5
    assert f"explain {accuracy.halves.held_out:.0%} of adapters that they were not fitted to" in accuracy.warning


def test_a_sketch_is_unbiased_and_says_its_error():
    adapters = random_adapters(12, shapes={"m.to_q": (30, 24), "m.to_v": (9, 40)})
    stack, exact = AdapterStack.of(adapters), dense(adapters) @ dense(adapters).T
    drawn = []
    for seed in range(300):
        rows = Sketch(stack.shapes, 8, seed).rows(stack).double()
        drawn.append(rows @ rows.T)
    drawn = torch.stack(drawn)
    error = drawn.std(dim=0) / 300**0.5
    assert ((drawn.mean(dim=0) - exact).abs() < 5 * error).all()
    whole = Sketch(stack.shapes, 40, 0).rows(stack).double()
    torch.testing.assert_close(whole @ whole.T, exact, rtol=1e-5, atol=1e-3)
    bank = bank_of(adapters)
    errors = [sketch_error(bank, Sketch(stack.shapes, side, 0), 3) for side in (4, 16, 40)]
    assert errors[0].products > errors[1].products > errors[2].products
    assert errors[2].products < 1e-5
    assert errors[2].captured == pytest.approx(1, abs=1e-5)
    assert 0.3 < errors[0].captured < 1
    space = WeightSpace.fit(bank, components=3, solver="streaming", sketch=16, seed=0)
    assert space.accuracy.sketch == errors[1]


def test_what_cannot_be_fitted_is_named():
    adapters = random_adapters(10, dtype=torch.float32)
    with pytest.raises(UsageError, match=r"A bank of 1 has at most 0.*Add adapters"):
        WeightSpace.fit(bank_of(adapters[:1]))
    with pytest.raises(UsageError, match="A bank of 10 has at most 9"):
        WeightSpace.fit(bank_of(adapters), components=10)
    with pytest.raises(UsageError, match="have 4 principal components, not 7"):
        WeightSpace.fit(bank_of([*adapters[:5], *adapters[:5]]), components=7)
    assert WeightSpace.fit(bank_of([*adapters[:5], *adapters[:5]])).components == 4
    with pytest.raises(UsageError, match="are the same"):
        WeightSpace.fit(bank_of([adapters[0]] * 4))
    for how in ({"components": 0}, {"representation": "B"}, {"solver": "svd"}, {"sketch": 0}, {"passes": 0}):
        with pytest.raises(UsageError, match=next(iter(how))):
            WeightSpace.fit(bank_of(adapters), **how)
    with pytest.raises(UsageError, match=r"'person-1' has rank 2 in unet.mid.to_q, but others have rank 1"):
        WeightSpace.fit(bank_of(adapters), components=2, representation="factors")
    bad = bank_of(adapters)
    bad.stack(6, 7).up["unet.up.to_q"][0, 2, 0] = float("nan")
    for how in ({}, {"solver": "streaming"}):
        with pytest.raises(UsageError, match=r"'person-6' contains NaN or infinity in unet.up.to_q"):
            WeightSpace.fit(bad, components=2, **how)


def test_what_is_no_point_or_adapter_of_the_space_is_named(space, adapters):
    for scores in (torch.zeros(5), torch.zeros(2, 7), torch.zeros(1, 1, 6)):
        with pytest.raises(UsageError, match="not points of a space of 6"):
            space.changes(scores)
    with pytest.raises(UsageError, match="not points"):
        space.adapter(torch.zeros(2, 6))
    factors = dict(adapters[0].factors)
    some = Adapter({name: factors[name] for name in list(factors)[:2]})
    nothing = {
        name: LowRank(torch.zeros(1, one.shape[1]), torch.zeros(one.shape[0], 1)) for name, one in factors.items()
    }
    padded = Adapter({**nothing, **some.factors})
    torch.testing.assert_close(space.project(some), space.project(padded))
    with pytest.raises(NameNotFound, match=r"lacks 'unet.down.to_q'|lacks 'unet.mid.to_q'"):
        space.project(Adapter({"other": factors["unet.mid.to_q"]}))
    more = Adapter({**factors, "unet.up.to_k": factors["unet.up.to_q"]})
    with pytest.raises(NameNotFound, match=r"changes 'unet.up.to_k'.*nearest is 'unet.up.to_q'"):
        space.project(more)
    other = Adapter({**factors, "unet.up.to_q": factors["unet.mid.to_q"]})
    with pytest.raises(UsageError, match=r"in shape .*, but the space"):
        space.project(other)


def test_points_by_name_by_scores_and_drawn_are_adapters(tmp_path):
    space = WeightSpace.fit(bank_of(random_adapters(24, dtype=torch.float32)), components=5)
    assert repr(space) == "WeightSpace(24 adapters, 5 components, representation 'delta')"
    name = space.names[3]
    assert torch.equal(space.point(name).scores, space.scores[3])
    drawn = space.sample(seed=4)
    assert torch.equal(drawn.scores, space.sample(seed=4).scores)
    assert not torch.equal(drawn.scores, space.sample(seed=5).scores)
    assert torch.equal(space.point(drawn.scores).scores, drawn.scores)
    written = drawn.export(tmp_path / "new-person", rank=2, layout="peft")
    kept, whole = (dense([adapter]) for adapter in (read_adapter(written.path), drawn.adapter))
    lost = (kept - whole).norm() / whole.norm()
    assert written.relative_error == pytest.approx(float(lost), abs=1e-4)
    with pytest.raises(NameNotFound, match="nearest"):
        space.point("somebody")
    with pytest.raises(UsageError, match="not points of a space of 5"):
        space.point(torch.zeros(4))


def test_a_point_is_exported_without_its_bank_in_memory(tmp_path, monkeypatch):
    """Modules one after the other, summed over the bank; a convolution is written as one."""
    shapes = {"unet.conv_in": (6, 18), "unet.mid_block.attentions.0.proj_in": (5, 9)}
    with BankWriter(tmp_path / "bank", kernels={"unet.conv_in": (3, 3)}, base="owner/model", shard_bytes=1) as writer:
        for number in range(6):
            writer.add(str(number), random_adapter(number, shapes=shapes))
    space = WeightSpace.fit(AdapterBank.open(tmp_path / "bank"))
    expected = space.point("3").adapter
    space.save(tmp_path / "space", bank=tmp_path / "bank")
    monkeypatch.setattr(basis, "_KEPT_BYTES", 0)
    monkeypatch.setattr(basis, "_DENSE_BYTES", 1)
    monkeypatch.setattr(gram, "_READ", 2)
    read, stack = [], AdapterBank.stack
    space = WeightSpace.open(tmp_path / "space")
    counted = lambda *given: read.append((given[2] - given[1], len(given[3]))) or stack(*given)  # noqa: E731
    monkeypatch.setattr(AdapterBank, "stack", counted)
    assert close(expected, space.point("3").adapter)
    assert set(read) == {(2, 1)}  # adapters and modules at once
    written = space.point("3").export(tmp_path / "out", rank=2)
    best = expected.truncated(2)
    assert close(best.adapter, read_adapter(written.path))
    assert written.relative_error == pytest.approx(best.relative_error, rel=1e-4, abs=1e-7)
    assert plan_adapter(written.path).kernels == {"unet.conv_in": (3, 3)}
    assert plan_adapter(written.path).base == "owner/model"
    shard = sorted((tmp_path / "bank").glob("shard-*"))[0]
    data = bytearray(shard.read_bytes())
    data[-300] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptBlob, match=shard.name):
        WeightSpace.open(tmp_path / "space").point("3").export(tmp_path / "again")


@pytest.mark.filterwarnings("ignore")  # what peft and transformers say of each other
def test_a_language_models_point_is_opened_by_its_class(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    for number in range(3):
        torch.manual_seed(number)
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings
        ).save_pretrained(tmp_path / "loras" / str(number))
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank")
    point = WeightSpace.fit(bank).point("1")
    exported = point.export(tmp_path / "out", rank=2)
    assert exported.layout == "peft"
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(own, tmp_path / "loras" / "1")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("representation", ["delta", "factors"])
@pytest.mark.parametrize("standalone", [False, True])
def test_a_space_of_normalized_strengths_does_not_see_how_strong_adapters_are(tmp_path, representation, standalone):
    """The same adapters at strengths that differ a hundredfold make the same space, but for its unit."""
    adapters = [random_adapter(seed, ranks=(2,), scales=(1.0,)) for seed in range(9)]
    norms = sorted(adapter.norm() for adapter in adapters)
    factors = [10 ** (number / 4 - 1) for number in range(9)]
    for number, (adapter, factor) in enumerate(zip(adapters, factors, strict=True)):
        write_adapter(
            adapter.scaled(factor), tmp_path / "loras" / f"{number}", layout="peft", kernels={PROJ_IN: (2, 2)}
        )
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank")
    fitted = WeightSpace.fit(bank, representation=representation, strengths="normalized", components=7)
    fitted.save(tmp_path / "space", standalone=standalone, bank=tmp_path / "bank")
    space = WeightSpace.open(tmp_path / "space")
    strength = space.origin["strength"]
    for number, adapter in enumerate(adapters):
        torch.testing.assert_close(space.project(adapter.scaled(55.0)), space.scores[number], rtol=1e-3, atol=1e-4)
    assert norms[0] * factors[0] < strength < norms[-1] * factors[-1]
    if representation == "delta":
        kept = WeightSpace.fit(bank, components=7)
        assert kept.deviations[0] > 2 * kept.deviations[3]
        equal = StackBank(
            [str(n) for n in range(9)], AdapterStack.of([a.scaled(strength / a.norm()) for a in adapters])
        )
        plain = WeightSpace.fit(equal, components=8)
        again = WeightSpace.fit(bank, strengths="normalized", components=8)
        torch.testing.assert_close(plain.deviations, again.deviations, rtol=1e-4, atol=1e-5)
        for name, change in again.point("3").adapter.factors.items():
            expected = adapters[3].scaled(strength / adapters[3].norm()).factors[name].dense()
            torch.testing.assert_close(change.dense(), expected, rtol=1e-3, atol=1e-4)
