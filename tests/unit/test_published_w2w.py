"""weights2weights' published files, on fabricated ones of the same structure: read without executing anything."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from adapters_under_test import same

from netweight import AdapterBank, WeightSpace, read_adapter
from netweight.core.progress import Progress
from netweight.errors import CorruptBlob, UnsafeInput, UsageError
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.labels import read_labels
from netweight.methods.space.space import read_published
from netweight.nn.lora import Adapter, LowRank
from netweight.store.bank import published as published_w2w
from netweight.store.bank.published import (
    import_published,
    published_tensor,
    read_dimensions,
    stable_diffusion_dimensions,
)

MODULES = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (4, 4),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v": (4, 3),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_v": (5, 5),
}
DIMENSIONS = {
    f"base_model.model.{module}.lora_{side}.weight": (1, columns) if side == "A" else (rows, 1)
    for module, (rows, columns) in MODULES.items()
    for side in "AB"
}
WIDTH = sum(map(math.prod, DIMENSIONS.values()))


def published(folder, *, rows=50, dimensions=None, legacy=False):
    """A matrix with its companions, laid out over folders as they were published."""
    data, tables = folder / "weights_datasets" / "identities", folder / "files"
    data.mkdir(parents=True)
    tables.mkdir()
    matrix = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.save(matrix, data / "all_weights.pt", _use_new_zipfile_serialization=not legacy)
    entries = {name: (torch.Size([math.prod(shape)]), torch.Size(shape)) for name, shape in DIMENSIONS.items()}
    torch.save(entries if dimensions is None else dimensions, tables / "weight_dimensions.pt")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 27, "base_model_name_or_path": "realistic-vision-v51"}
    (tables / "adapter_config.json").write_text(json.dumps(settings))
    return data / "all_weights.pt", matrix


def adapter_of(row):
    """The adapter that a row means, read entry by entry."""
    parts, start = {}, 0
    for name, shape in DIMENSIONS.items():
        parts[name] = row[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    head = "base_model.model."
    return Adapter({
        f"unet.{module}": LowRank(parts[f"{head}{module}.lora_A.weight"], parts[f"{head}{module}.lora_B.weight"], 27.0)
        for module in MODULES
    })  # fmt: skip


@pytest.mark.parametrize("compress", [False, True])
def test_the_matrix_becomes_a_bank(tmp_path, monkeypatch, compress):
    path, matrix = published(tmp_path)
    monkeypatch.setattr(published_w2w, "_BLOCK_BYTES", 7 * WIDTH * 4)
    bank = AdapterBank.ingest(path.parent if compress else path, tmp_path / "bank", compress=compress)
    assert len(bank) == 50
    assert bank.names[:2] == ["model-000000", "model-000001"]
    assert bank.base == "realistic-vision-v51"
    assert bank.shapes == {f"unet.{module}": shape for module, shape in MODULES.items()}
    for row in (0, 6, 7, 49):
        assert same(bank.adapter(row), adapter_of(matrix[row]))


def test_the_entry_for_a_module_may_be_its_shape_alone(tmp_path):
    path, matrix = published(tmp_path, dimensions={name: list(shape) for name, shape in DIMENSIONS.items()})
    import_published(path, tmp_path / "bank", names=[f"p{row}" for row in range(50)])
    assert same(AdapterBank.open(tmp_path / "bank").adapter("p3"), adapter_of(matrix[3]))


def test_an_adapter_written_by_peft_is_the_row_that_the_order_says(tmp_path):
    """The order is that of the sorted names of peft's file, A before B."""
    from safetensors.torch import save_file

    path, matrix = published(tmp_path)
    row = matrix[5]
    pieces = row.split([math.prod(shape) for shape in DIMENSIONS.values()])
    folder = tmp_path / "unet"
    folder.mkdir()
    tensors = {name: piece.reshape(DIMENSIONS[name]).clone() for name, piece in zip(DIMENSIONS, pieces, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes((tmp_path / "files" / "adapter_config.json").read_bytes())
    import_published(path, tmp_path / "bank")
    assert same(read_adapter(folder), AdapterBank.open(tmp_path / "bank").adapter(5))


def test_stable_diffusions_order():
    order = stable_diffusion_dimensions()
    assert sum(map(math.prod, order.values())) == 99_648
    assert len(order) == 128
    assert list(order) == sorted(order)
    assert next(iter(order)).endswith("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight")
    assert order["base_model.model.up_blocks.3.attentions.2.transformer_blocks.0.attn2.to_v.lora_A.weight"] == (1, 768)
    assert order["base_model.model.mid_block.attentions.0.transformer_blocks.0.attn2.to_v.lora_B.weight"] == (1280, 1)


def test_a_killed_import_goes_on(tmp_path, monkeypatch):
    path, matrix = published(tmp_path)
    monkeypatch.setattr(published_w2w, "_BLOCK_BYTES", 7 * WIDTH * 4)
    added = published_w2w.BankWriter.add_rows
    calls = []

    def failing(self, names, *arguments, **options):
        calls.append(list(names))
        if len(calls) == 4:
            raise KeyboardInterrupt
        added(self, names, *arguments, **options)

    monkeypatch.setattr(published_w2w.BankWriter, "add_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        import_published(path, tmp_path / "bank")
    assert not (tmp_path / "bank").exists()
    import_published(path, tmp_path / "bank", progress=Progress("off"))
    assert [names[0] for names in calls[4:]] == [
        "model-000021",
        "model-000028",
        "model-000035",
        "model-000042",
        "model-000049",
    ]
    bank = AdapterBank.open(tmp_path / "bank")
    assert all(same(bank.adapter(row), adapter_of(matrix[row])) for row in (0, 20, 21, 49))


def test_rows_with_nan_are_named_and_left_out_if_asked(tmp_path):
    path, matrix = published(tmp_path)
    matrix[[3, 30], 2] = torch.tensor([float("nan"), float("inf")])
    torch.save(matrix, path)
    with pytest.raises(UsageError, match=r"row 3 \(model-000003\) contains NaN"):
        AdapterBank.ingest(path, tmp_path / "bank")
    bank = AdapterBank.ingest(path, tmp_path / "bank", skip_bad=True)
    assert len(bank) == 48
    assert sorted(bank.skipped) == ["model-000003", "model-000030"]


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["all_weights.pt", "weight_dimensions.pt"])
def test_nothing_is_executed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path, _ = published(tmp_path)
    torch.save({"a": Harmful()}, path if name == path.name else tmp_path / "files" / name)
    with pytest.raises(UnsafeInput, match=f"{name} contains objects"):
        AdapterBank.ingest(path, tmp_path / "bank")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "bank").exists()


def test_dimensions_that_are_objects_can_be_replaced_by_the_known_order(tmp_path):
    path, _ = published(tmp_path)
    torch.save(torch.randn(3, 99_648), path)
    with (tmp_path / "files" / "weight_dimensions.pt").open("wb") as file:
        pickle.dump({"a": Harmful}, file)
    with pytest.raises((UnsafeInput, CorruptBlob)):
        AdapterBank.ingest(path, tmp_path / "bank")
    import_published(path, tmp_path / "bank", dimensions=stable_diffusion_dimensions())
    assert len(AdapterBank.open(tmp_path / "bank").modules) == 64


def test_components_and_statistics_open_as_tensors(tmp_path):
    mean = torch.randn(7)
    torch.save(mean, tmp_path / "mean.pt")
    found = published_tensor(tmp_path / "mean.pt")
    assert torch.equal(found, mean)
    assert str(tmp_path / "mean.pt") in Path("/proc/self/maps").read_text()  # mapped, not read
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(UsageError, match="contains a list, not a tensor"):
        published_tensor(tmp_path / "list.pt")
    with pytest.raises(UsageError, match="no file"):
        published_tensor(tmp_path / "V.pt")


def fault(tmp_path, kind):
    path, matrix = published(tmp_path, legacy=kind == "legacy")
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-300])
    if kind == "width":
        torch.save(matrix[:, :-1].clone(), path)
    if kind == "vector":
        torch.save(matrix[0].clone(), path)
    if kind == "no dimensions":
        (tmp_path / "files" / "weight_dimensions.pt").unlink()
    if kind == "no settings":
        (tmp_path / "files" / "adapter_config.json").unlink()
    if kind == "odd dimensions":
        torch.save({"a": "b"}, tmp_path / "files" / "weight_dimensions.pt")
    if kind == "other rank":
        text = (tmp_path / "files" / "adapter_config.json").read_text()
        (tmp_path / "files" / "adapter_config.json").write_text(text.replace('"r": 1', '"r": 2'))
    return path


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("legacy", CorruptBlob, "cannot be read"),
        ("truncated", CorruptBlob, "cannot be read"),
        ("width", UsageError, f"rows of {WIDTH - 1} entries, but the shapes describe {WIDTH}"),
        ("vector", UsageError, "not a matrix of adapters"),
        ("no dimensions", UsageError, "no weight_dimensions.pt .*--stable-diffusion"),
        ("no settings", UsageError, "no adapter_config.json"),
        ("odd dimensions", UsageError, "the shape of a is 'b'"),
        ("other rank", CorruptBlob, "has rank 1, but 2 according to its settings"),
    ],
)
def test_faults_are_named(tmp_path, kind, error, message):
    path = fault(tmp_path, kind)
    with pytest.raises(error, match=message):
        AdapterBank.ingest(path, tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_names_that_do_not_fit(tmp_path):
    path, _ = published(tmp_path)
    with pytest.raises(UsageError, match="50 rows, and there are 1 names"):
        import_published(path, tmp_path / "bank", names=["a"])
    with pytest.raises(UsageError, match="contains no published matrix"):
        import_published(tmp_path, tmp_path / "bank")
    assert read_dimensions(tmp_path / "files" / "weight_dimensions.pt") == DIMENSIONS


def test_another_matrix_is_not_taken_for_the_rest_of_the_first(tmp_path):
    path, matrix = published(tmp_path)
    import_published(path, tmp_path / "bank")
    import_published(path, tmp_path / "bank")  # nothing is left to do
    assert len(AdapterBank.open(tmp_path / "bank")) == 50
    torch.save(matrix[:20].clone(), path)
    with pytest.raises(UsageError, match="'model-000000' that is not of"):
        import_published(path, tmp_path / "bank")
    import_published(path, tmp_path / "bank", names=[f"dog-{row}" for row in range(20)])
    assert len(AdapterBank.open(tmp_path / "bank")) == 70


def published_files(folder, *, components=12):
    """The authors' arithmetic on a fabricated matrix: what `V.pt`, `mean.pt`, `std.pt` and the scores then are."""
    _, matrix = published(folder)
    mean, std = matrix.mean(0), matrix.std(0)
    vectors = torch.linalg.svd((matrix - mean) / std, full_matrices=False).Vh.T.contiguous()
    tensors = {"V": vectors, "mean": mean, "std": std, "proj_12pc": ((matrix - mean) / std) @ vectors[:, :components]}
    for name, value in tensors.items():
        torch.save(value, folder / "files" / f"{name}.pt")
    return folder / "files", matrix, tensors


def published_space(files, **how):
    return read_published(files, **how)


def test_the_published_space_opens_and_its_points_are_the_authors_rows(tmp_path):
    files, matrix, tensors = published_files(tmp_path)
    published_space(files).save(tmp_path / "space")
    space = WeightSpace.open(tmp_path / "space")
    assert space.components == 12
    assert space.names[3] == "model-000003"
    scores = space.scores[3]
    row = (tensors["V"][:, :12] @ scores) * tensors["std"] + tensors["mean"]
    expected = adapter_of(row)
    for name, change in space.point("model-000003").adapter.factors.items():
        torch.testing.assert_close(change.dense(), expected.factors[name].dense(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(space.project(adapter_of(matrix[3])), scores, rtol=1e-4, atol=1e-4)
    sampled = space.sample(seed=1)
    assert sampled.adapter.modules == expected.modules
    written = sampled.export(tmp_path / "sampled", layout="peft")
    assert read_adapter(written.path).modules == expected.modules
    (tmp_path / "labels.csv").write_text("name,old\n" + "".join(f"model-{n:06d},{n % 2}\n" for n in range(50)))
    direction = fit_direction(space.scores, read_labels(tmp_path / "labels.csv", space.names), "old")
    moved = edit(space.scores[:1], [Move(direction, 2.0)])
    assert not torch.equal(moved, space.scores[:1])
    point = space.scores[5].clone().requires_grad_()
    sum(change.square().sum() for change in space.changes(point).values()).backward()
    assert point.grad.abs().sum() > 0
    few = published_space(files, components=4)
    assert torch.equal(few.scores, space.scores[:, :4])


def test_what_is_wrong_with_a_published_space_is_said(tmp_path):
    files, _, tensors = published_files(tmp_path)
    with pytest.raises(UsageError, match="scores of 12 components, not of 13"):
        published_space(files, components=13)
    for name, value, error, words in (
        ("mean", tensors["mean"][:-1].clone(), UsageError, "not of one space"),
        ("V", tensors["V"] * 1.1, CorruptBlob, "not orthonormal"),
        ("std", tensors["std"] * float("nan"), CorruptBlob, r"std\.pt contains NaN"),
    ):
        torch.save(value, files / f"{name}.pt")
        with pytest.raises(error, match=words):
            published_space(files)
        torch.save(tensors[name], files / f"{name}.pt")
    torch.save({"a": Harmful()}, files / "V.pt")
    with pytest.raises(UnsafeInput, match=r"V\.pt contains objects"):
        published_space(files)
    (files / "proj_12pc.pt").unlink()
    with pytest.raises(UsageError, match="contains 0 files proj_"):
        published_space(files)
