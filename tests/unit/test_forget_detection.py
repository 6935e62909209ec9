"""Value layers, statistics, similarity and detection: independent oracles, published formats, refusals."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted_diffusion import Planted
from torch import nn

from netweight.data.prompts import read_prompts
from netweight.errors import CorruptBlob, NameNotFound, OutputExists, Unsupported, UsageError
from netweight.methods.forget.detect import (
    MemorizationScore,
    Threshold,
    calibrate,
    detect,
    detect_resumably,
    first_step,
    noise_difference,
    roc,
)
from netweight.methods.forget.layers import Statistics, measure_statistics, text_activations, text_values, value_layers
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.structural_similarity import similarity_matrix, structural_similarity, windows_for
from netweight.nn.hooks import capture
from netweight.nn.text_to_image import Batches

PROMPTS = [f"prompt {number}" for number in range(7)]


def pair(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(*shape, generator=generator)
    return first, (first + 0.3 * torch.rand(*shape, generator=generator)) / 1.3


# ---- layers ----


@pytest.fixture(scope="module")
def pipelines():
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    import small_pipelines

    return small_pipelines


def test_layers_of_stable_diffusion_1_4_by_its_configuration():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280),
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, layers_per_block=2,
        )  # fmt: skip
    layers = value_layers(unet)
    assert [layer.width for layer in layers.values()] == [320, 320, 640, 640, 1280, 1280, 1280]
    assert sum(layer.width for layer in layers.values()) == 5760
    assert list(layers)[-1].startswith("mid_block.")
    assert len(value_layers(unet, scope="all")) == 16


def test_layers_are_down_then_middle_then_up():
    layers = value_layers(Planted().denoiser, scope="all")
    assert [name.split(".")[0] for name in layers] == ["down_blocks", "down_blocks", "mid_block", "up_blocks"]
    assert list(value_layers(Planted().denoiser)) == list(layers)[:3]


def test_layers_that_are_not_at_work_are_refused(pipelines):
    unet = pipelines.stable_diffusion().unet
    unet.fuse_qkv_projections()
    with pytest.raises(Unsupported, match="unfuse_qkv_projections"):
        value_layers(unet)
    unet.unfuse_qkv_projections()
    assert len(value_layers(unet)) == 3
    with pytest.raises(Unsupported, match="Sequential has no cross-attention"):
        value_layers(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="scope"):
        value_layers(unet, scope="up")
    upwards = nn.ModuleDict({"up_blocks": Planted().denoiser.up_blocks})
    assert len(value_layers(upwards, scope="all")) == 1
    with pytest.raises(Unsupported, match=r'on the way up only.*scope="all"'):
        value_layers(upwards)


@pytest.mark.parametrize("kind", ["stable_diffusion", "pixart"])
def test_values_from_text_alone_are_those_of_the_running_network(kind, pipelines):
    from netweight.hf.load_pipeline import text_to_image

    model = text_to_image(getattr(pipelines, kind)())
    layers = value_layers(model.denoiser, scope="all")
    text = model.embed(["a red square", "the large blue circle"])
    with torch.no_grad(), capture(model.denoiser, list(layers)) as seen:
        model.predict(model.initial_noise([0, 1]), torch.tensor(500), text)
        alone = text_values(model.denoiser, layers, text)
    assert all(torch.allclose(alone[name], seen[name], atol=1e-6) for name in layers)


# ---- statistics ----


@given(st.integers(2, 9), st.integers(1, 5))
def test_statistics_are_numpys_whatever_the_batches(count, batch):
    model = Planted()
    prompts = [f"text {number}" for number in range(count)]
    found = measure_statistics(model, prompts, batch=batch)
    for name, mean in found.means.items():
        weight = model.denoiser.get_parameter(f"{name}.weight").detach().numpy().astype(np.float64)
        active = np.abs(model.embed(prompts).states.numpy() @ weight.T).mean(1)
        assert np.allclose(mean, active.mean(0), rtol=1e-6)
        assert np.allclose(found.deviations[name], active.std(0, ddof=1), rtol=1e-5, atol=1e-9)


def test_masked_tokens_do_not_count():
    model = Planted()
    layers = value_layers(model.denoiser)
    text = model.embed(PROMPTS[:2])
    text = type(text)(text.states, torch.tensor([[True, True, False], [True, False, False]]))
    found = text_activations(model, layers, text)
    for name, layer in layers.items():
        values = layer.module(text.states).detach().abs().double()
        assert torch.allclose(found[name][0], values[0, :2].mean(0))
        assert torch.allclose(found[name][1], values[1, 0])


def test_statistics_at_rest(tmp_path):
    model = Planted()
    found = measure_statistics(model, PROMPTS)
    found.write(tmp_path / "found.safetensors")
    again = Statistics.read(tmp_path / "found.safetensors")
    assert (again.prompts, again.model, list(again.means)) == (7, model.digest(), list(found.means))
    assert all(torch.equal(again.means[name], found.means[name]) for name in found.means)
    assert all(torch.equal(again.deviations[name], found.deviations[name]) for name in found.means)
    with pytest.raises(OutputExists):
        found.write(tmp_path / "found.safetensors")
    (tmp_path / "found.safetensors").write_bytes(b"nothing")
    with pytest.raises(CorruptBlob, match="contains no statistics"):
        Statistics.read(tmp_path / "found.safetensors")


def test_published_statistics_are_read_and_written_without_pickles(tmp_path):
    model = Planted()
    layers = value_layers(model.denoiser)
    found = measure_statistics(model, PROMPTS)
    found.write_published(tmp_path / "published.pt")
    means, deviations = torch.load(tmp_path / "published.pt", weights_only=True)
    assert isinstance(means, list)
    assert len(deviations) == 3
    again = Statistics.read_published(tmp_path / "published.pt", layers)
    assert again.prompts == 50_000
    assert all(torch.allclose(again.means[name], found.means[name]) for name in layers)
    with pytest.raises(UsageError, match="layers of"):
        Statistics.read_published(tmp_path / "published.pt", value_layers(model.denoiser, scope="all"))
    torch.save(Planted, tmp_path / "code.pt")
    with pytest.raises(Unsupported, match="no pair"):
        Statistics.read_published(tmp_path / "code.pt", layers)


def test_statistics_of_another_model_are_refused():
    found = measure_statistics(Planted(0), PROMPTS)
    other = Planted(1)
    with pytest.raises(UsageError, match="another model"):
        found.check(value_layers(other.denoiser), other.digest())
    with pytest.raises(UsageError, match="do not fit"):
        found.check(value_layers(other.denoiser, scope="all"), Planted(0).digest())
    with pytest.raises(UsageError, match="at least 2"):
        measure_statistics(other, PROMPTS[:1])


# ---- structural similarity ----


def test_similarity_with_three_scales_is_that_of_torchmetrics():
    metrics = pytest.importorskip("torchmetrics.functional.image", reason="torchmetrics is not installed")
    first, second = pair(3, 4, 64, 64)
    theirs = [
        metrics.multiscale_structural_similarity_index_measure(
            a[None], b[None], kernel_size=11, betas=(0.33, 0.33, 0.33), data_range=1.0
        )
        for a, b in zip(first, second, strict=True)
    ]
    assert torch.allclose(structural_similarity(first, second), torch.stack(theirs), atol=1e-5)


@pytest.mark.parametrize("side", [8, 13])
def test_similarity_with_one_scale_is_that_of_torchmetrics(side):
    metrics = pytest.importorskip("torchmetrics.functional.image", reason="torchmetrics is not installed")
    first, second = pair(3, 2, side, side)
    theirs = metrics.structural_similarity_index_measure(first, second, sigma=0.9, data_range=1.0, reduction="none")
    assert torch.allclose(structural_similarity(first, second), theirs, atol=1e-5)


def test_similarity_of_plain_images_follows_the_formula():
    light, dark = torch.full((1, 1, 8, 8), 0.9), torch.full((1, 1, 8, 8), 0.3)
    expected = (2 * 0.9 * 0.3 + 1e-4) / (0.9**2 + 0.3**2 + 1e-4)  # nothing but brightness differs
    assert structural_similarity(light, dark).item() == pytest.approx(expected, abs=1e-4)
    assert structural_similarity(light, light).item() == pytest.approx(1, abs=1e-5)


@given(st.integers(3, 128), st.integers(3, 128))
def test_windows_fit_every_size(height, width):
    windows = windows_for(height, width)
    smallest = min(height, width) // 2 ** (len(windows.weights) - 1)
    assert windows.kernel % 2 == 1
    assert 3 <= windows.kernel <= smallest
    if min(height, width) >= 44:
        assert windows == windows_for(64, 64)
    with pytest.raises(UsageError, match="3 pixels"):
        windows_for(2, width)


def test_differences_are_scaled_channel_by_channel_and_compared_symmetrically():
    latents, noise = pair(4, 3, 16, 16, seed=3)
    noise[0, 0] = latents[0, 0] + 2  # nothing to scale
    found = noise_difference(noise, latents)
    raw = (noise - latents).numpy()
    low, high = raw.min((2, 3), keepdims=True), raw.max((2, 3), keepdims=True)
    expected = np.where(high - low > 1e-5, (raw - low) / np.maximum(high - low, 1e-9), 0)
    assert np.allclose(found.numpy()[1:], expected[1:], atol=1e-5)
    assert found.isfinite().all()
    table = similarity_matrix(found)
    assert torch.equal(table, table.T)
    assert torch.allclose(table[1, 2], structural_similarity(found[1:2], found[2:3])[0])
    assert torch.equal(table.diagonal(), torch.ones(4))


# ---- detection ----


def test_scores_are_those_of_a_plain_loop():
    model = Planted()
    config = DetectionConfig(seeds=(3, 1, 4), rows=5)
    noise, timestep = first_step(model, config)
    for score in detect(model, PROMPTS, config):
        text, empty = model.embed([score.prompt]), model.embed([""])
        said = [model.predict(part[None], timestep, text).noise.detach() for part in noise]
        plain = [model.predict(part[None], timestep, empty).noise.detach() for part in noise]
        differences = [noise_difference(a, b[None]) for a, b in zip(said, noise, strict=True)]
        for place, value in enumerate(score.seeds):
            others = [
                structural_similarity(differences[place], other) for at, other in enumerate(differences) if at != place
            ]
            assert value == pytest.approx(float(max(others)), abs=1e-5)
        norms = [np.linalg.norm((a - b).numpy()) for a, b in zip(said, plain, strict=True)]
        assert score.wen == pytest.approx(float(np.mean(norms)), rel=1e-4)


def test_the_timing_of_the_code_is_one_timestep_later():
    model = Planted()
    paper, code = DetectionConfig(timing="paper", steps=5), DetectionConfig(timing="code", steps=5)
    assert [int(first_step(model, config)[1]) for config in (paper, code)] == model.timesteps(5)[:2].tolist()
    assert torch.equal(first_step(model, paper)[0], first_step(model, code)[0])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_curve_is_scikit_learns(memorized, ordinary):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    found = roc([float(value) for value in memorized], [float(value) for value in ordinary])
    truth = [1] * len(memorized) + [0] * len(ordinary)
    assert found.auc == pytest.approx(metrics.roc_auc_score(truth, memorized + ordinary))
    alarms, hits, thresholds = metrics.roc_curve(truth, memorized + ordinary, drop_intermediate=False)
    assert np.allclose(found.false_alarms, alarms)
    assert np.allclose(found.hits, hits)
    assert np.array_equal(found.thresholds, thresholds)


def test_thresholds_say_what_lies_below_them():
    scores = [MemorizationScore(str(number), (number / 10, number / 5), 1.0) for number in range(10)]
    seeds = np.array([score.seeds for score in scores])
    mean = calibrate(scores, model="abc")
    assert mean.value == pytest.approx(seeds.mean() + seeds.std(ddof=1))
    assert mean.seeds_below == pytest.approx((seeds <= mean.value).mean())
    assert mean.prompts_below == pytest.approx((seeds.mean(1) <= mean.value).mean())
    assert mean.broken == pytest.approx(seeds.mean())
    assert (
        calibrate(scores, rule="quantile", quantile=0.1).broken
        == calibrate(scores, rule="quantile", quantile=0.1).value
    )
    assert calibrate(scores, rule="quantile", quantile=0.8).value == pytest.approx(np.quantile(seeds.mean(1), 0.8))
    assert Threshold.from_json(mean.to_json()) == mean
    with pytest.raises(UsageError, match="at least 2"):
        calibrate(scores[:1])
    with pytest.raises(CorruptBlob):
        Threshold.from_json({"something": 1})


def test_detection_resumes_where_it_stopped(tmp_path):
    model = Planted()
    config = DetectionConfig(seeds=(0, 1), rows=4)
    whole = detect(model, PROMPTS, config)
    detect_resumably(model, PROMPTS[:3], config, folder=tmp_path)
    before = model.denoiser.rows
    found = detect_resumably(model, PROMPTS, config, folder=tmp_path)
    assert model.denoiser.rows - before == 5 * 2 + 3 * 2  # four prompts are left, one of them in a batch that began
    assert [score.prompt for score in found] == PROMPTS
    for score, other in zip(found, whole, strict=True):
        assert score.seeds == pytest.approx(other.seeds, abs=1e-6)


def test_a_run_that_was_killed_within_a_batch_scores_the_rest_to_the_same_bits(pipelines, tmp_path):
    from netweight.hf.load_pipeline import text_to_image

    model = text_to_image(pipelines.stable_diffusion())
    config, prompts = DetectionConfig(seeds=(0, 1, 2), steps=4, rows=9), ["a red circle", "a photo", *PROMPTS[:3]]
    whole = detect_resumably(model, prompts, config, folder=tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    lines = (tmp_path / "whole" / "scores.jsonl").read_text().splitlines(keepends=True)
    for count in (1, 2, 4):
        (tmp_path / "killed" / "scores.jsonl").write_text("".join(lines[:count]))
        assert detect_resumably(model, prompts, config, folder=tmp_path / "killed") == whole


def test_a_batch_that_does_not_fit_is_halved_and_nothing_is_lost():
    sizes = []

    def function(rows):
        sizes.append(rows.stop - rows.start)
        if rows.stop - rows.start > 3:
            raise torch.OutOfMemoryError("full")
        return torch.arange(rows.start, rows.stop)

    batches = Batches(16)
    assert torch.equal(batches.run(function, 10), torch.arange(10))
    assert batches.rows <= 3
    assert sizes[-1] <= 3
    with pytest.raises(torch.OutOfMemoryError):
        Batches(1).run(lambda rows: (_ for _ in ()).throw(torch.OutOfMemoryError("full")), 1)
    with pytest.raises(RuntimeError, match="something else"):
        Batches(4).run(lambda rows: (_ for _ in ()).throw(RuntimeError("something else")), 4)


def test_settings_that_cannot_be_are_refused():
    for wrong in ({"seeds": (1,)}, {"seeds": (1, 1)}, {"steps": 1}, {"timing": "late"}, {"rows": 0}):
        with pytest.raises(UsageError):
            DetectionConfig(**wrong)
    for wrong in ({"theta": 0.5}, {"prompts": 0}, {"fidelity": "exact"}):
        with pytest.raises(UsageError):
            LocalizationConfig(**wrong)
    assert len(LocalizationConfig().thetas) == 17
    with pytest.raises(UsageError, match="no prompt"):
        detect(Planted(), [])


# ---- prompts ----


def test_prompts_come_from_every_kind_of_file(tmp_path):
    files = {
        "a.txt": "first, one\n\nsecond\nfirst, one\n",
        "a.csv": 'id,prompt\n1,"first, one"\n2,second\n',
        "b.csv": "Caption;URL\nfirst, one;x\nsecond;y\n",
        "a.jsonl": '{"prompt": "first, one"}\n{"prompt": "second", "more": 1}\n',
        "a.json": '[{"prompt": "first, one"}, {"prompt": "second"}]',
        "a.tsv": "id\tprompt \n1\tfirst, one\n2\tsecond\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert read_prompts(tmp_path / name, column="Caption, prompt") == ["first, one", "second"]
        assert read_prompts(tmp_path / name, column="Caption" if name == "b.csv" else "prompt") == [
            "first, one",
            "second",
        ]


def test_files_without_prompts_are_refused_with_the_reason(tmp_path):
    cases = {
        "a.csv": ("id,title\n1,one\n", NameNotFound, r"no column 'prompt'.*title"),
        "a.txt": ("\n \n", UsageError, "contains no prompt"),
        "a.jsonl": ('{"prompt": ""}\n', UsageError, "line 1: prompt is empty"),
        "b.jsonl": ("[1]\n", UsageError, "not a list of JSON objects"),
        "a.dat": ("x", UsageError, "a format that is not supported"),
    }
    for name, (text, kind, reason) in cases.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(kind, match=reason):
            read_prompts(tmp_path / name)
    with pytest.raises(UsageError, match="There is no file"):
        read_prompts(tmp_path / "none.txt")


def test_captions_are_split_at_ends_of_lines_alone(tmp_path):
    # Captions of the web contain separators at which Python's splitlines would cut them in two.
    odd = "a\u2028line\x85separator\x0b and a \x1c file"
    (tmp_path / "a.txt").write_bytes(f"{odd}\r\nsecond\rthird\n\u200b\n".encode())
    assert read_prompts(tmp_path / "a.txt") == [odd, "second", "third"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": odd}, ensure_ascii=False) + "\n")
    (tmp_path / "a.csv").write_text('id,prompt\n1,"said ""so"", twice\non two lines \U0001f600 "\n')
    assert read_prompts(tmp_path / "a.jsonl") == [odd]
    assert read_prompts(tmp_path / "a.csv") == ['said "so", twice\non two lines \U0001f600']


def test_anchors_keep_their_places(tmp_path):
    (tmp_path / "a.TXT").write_text("one\ntwo\none\n")
    assert read_prompts(tmp_path / "a.TXT", distinct=False) == ["one", "two", "one"]
