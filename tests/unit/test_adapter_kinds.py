"""Adapters of hubs as they come, and kinds other than LoRA: what they become, beside peft's own layers."""

import copy
import os

import peft
import pytest
import torch
from hub_folder import SD, base_weights, build
from safetensors.torch import save_file

from netweight import AdapterBank, open_store, read_adapter
from netweight.errors import NameNotFound, NetweightError, Unsupported, UsageError
from netweight.methods.space.converting import convert_file
from netweight.methods.space.settings import ConvertSettings
from netweight.nn.lora import LowRank
from netweight.store.lora_formats.base_names import base_key
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.parts import take_rows
from netweight.store.lora_formats.reading import load_converted, plan_adapter


def dense(change):
    return change.scale * (change.up.double() @ change.down.double())


def error_of(found, expected):
    """Norm of the difference of two adapters over that of the second."""
    lost = sum(float((dense(found.factors[name]) - whole).square().sum()) for name, whole in expected.items())
    return (lost / sum(float(whole.square().sum()) for whole in expected.values())) ** 0.5


def in_names_of_diffusers(changes, plan):
    """Changes of modules in the authors' names, split as the architecture's table says."""
    renamed = {}
    for name, whole in changes.items():
        match = plan.naming and plan.naming.match(name.removeprefix("diffusion_model."), names="authors")
        if not name.startswith("diffusion_model.") or match is None:
            renamed[name.replace("diffusion_model.", "transformer.", 1) if plan.naming else name] = whole
            continue
        for piece in match.pieces(*whole.shape, plan.naming.component):
            renamed[piece.module] = take_rows(whole, piece.rows)
    return renamed


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    place = tmp_path_factory.mktemp("hub")
    path, weights = base_weights(place / "base")
    return place / "loras", path, build(place / "loras", weights)


def path_of(folder, name):
    return (
        folder / name
        if (folder / name).is_dir() or name.lower().endswith((".pt", ".safetensors"))
        else folder / f"{name}.safetensors"
    )


def test_every_adapter_of_a_hub_is_read_or_converted_with_its_error_or_refused_by_name(hub):
    folder, base, cases = hub
    legitimate = [case for case in cases if case.change is not None]
    assert len(cases) > 125
    assert len(legitimate) > 75
    for case in legitimate:
        plan = plan_adapter(path_of(folder, case.name), conversion=Conversion(3, base))
        found = load_converted(plan)
        change = in_names_of_diffusers(case.change, plan)
        assert set(found.adapter.factors) == set(change), case.name
        assert error_of(found.adapter, change) == pytest.approx(found.relative_error, abs=2e-6), case.name
        if plan.base is not None:
            assert base_key(plan.base) == base_key(case.base), case.name


def test_the_whole_folder_makes_a_bank_of_the_usual_base_and_names_the_rest(hub, tmp_path):
    folder, base, cases = hub
    bank = AdapterBank.ingest(folder, tmp_path / "bank", convert=3, weights=base, skip_bad=True)
    assert base_key(bank.base) == base_key(SD)
    expected = {c.name for c in cases if c.change is not None and base_key(c.base) == base_key(SD)}
    assert expected <= set(bank.names)
    assert "relative error" in bank.provenance["loha"]["converted"]
    assert "relative error" not in str(bank.provenance.get("kohya sd15"))
    for case in cases:
        if case.change is None:
            assert case.refused in bank.skipped[case.name], case.name
            assert case.name.split(".")[0] in bank.skipped[case.name]
        elif case.name not in expected:
            assert "was trained on" in bank.skipped[case.name], case.name
    assert set(bank.names) | set(bank.skipped) == {case.name for case in cases}


def test_names_that_are_no_text_are_refused_and_do_not_stop_the_rest(hub, tmp_path):
    (tmp_path / "loras").mkdir()
    whole = (hub[0] / "kohya sd15.safetensors").read_bytes()
    for name in (b"good.safetensors", b"\xff.safetensors", b"new\nline.safetensors"):
        (tmp_path / "loras" / os.fsdecode(name)).write_bytes(whole if name[:1] == b"g" else whole[:-1] + b"\0")
        whole = whole[:-2] + b"\1\1"
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank", skip_bad=True)
    assert bank.names == ["good", "new\nline"]
    [(name, reason)] = bank.skipped.items()
    assert "\\xff" in name
    assert "not a text" in reason


def test_a_magnitude_is_never_left_out(hub):
    with pytest.raises(UsageError, match="--weights"):
        plan_adapter(path_of(hub[0], "dora of a named adapter"), conversion=Conversion(2))


def test_without_being_asked_other_kinds_are_refused_with_the_cure(hub):
    folder, _, _ = hub
    for name in ("loha", "lokr", "full difference", "peft loha", "dora by rows"):
        with pytest.raises(Unsupported, match="space convert"):
            read_adapter(path_of(folder, name))
    with pytest.raises(UsageError, match="--weights"):
        plan_adapter(path_of(folder, "dora by rows"), conversion=Conversion(2))
    other = folder.parent / "nothing.safetensors"
    save_file({"elsewhere.weight": torch.ones(2, 2)}, other)
    with pytest.raises(NameNotFound, match="contains no weight of unet"):
        load_converted(plan_adapter(path_of(folder, "dora by rows"), conversion=Conversion(2, other)))


class Model(torch.nn.Module):
    """A linear layer and a convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 18, bias=False), torch.nn.Conv2d(6, 8, 3, bias=False)

    def forward(self, x):
        return self.second(x.mean() + torch.zeros(1, 6, 4, 4)) + self.first(x).mean()


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=2, alpha=3, target_modules=["first", "second"], init_weights=False),
        peft.LoHaConfig(r=3, alpha=3, target_modules=["second"], use_effective_conv2d=True, init_weights=False),
        peft.LoKrConfig(r=2, alpha=3, target_modules=["first", "second"], init_weights=False),
        peft.LoKrConfig(r=2, alpha=3, target_modules=["first", "second"], init_weights=False, decompose_both=True),
        peft.LoKrConfig(r=2, alpha=3, target_modules=["second"], use_effective_conv2d=True, init_weights=False),
        peft.LoKrConfig(r=99, alpha=7, target_modules=["first"], init_weights=False),
        peft.LoraConfig(r=2, lora_alpha=5, target_modules=["first", "second"], use_dora=True, init_lora_weights=False),
    ],
    ids=["LoHa", "LoHa of kernels", "LoKr", "LoKr of products", "LoKr of kernels", "LoKr whole", "DoRA"],
)
def test_what_peft_merges_is_what_is_converted(tmp_path, config):
    torch.manual_seed(0)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(before, tmp_path / "base.safetensors")
    adapted = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "magnitude" in name:
                value *= 1.3
    adapted.save_pretrained(tmp_path / "adapter")
    after = adapted.merge_and_unload().state_dict()
    expected = {
        n: (after[f"{n}.weight"].double() - before[f"{n}.weight"].double()).flatten(1) for n in config.target_modules
    }
    for rank in (2, 99):
        plan = plan_adapter(tmp_path / "adapter", conversion=Conversion(rank, tmp_path / "base.safetensors"))
        found = load_converted(plan)
        assert error_of(found.adapter, expected) == pytest.approx(found.relative_error, abs=3e-5)
        best = sum(float(torch.linalg.svdvals(whole)[rank:].square().sum()) for whole in expected.values())
        whole = sum(float(each.square().sum()) for each in expected.values())
        assert found.relative_error == pytest.approx((best / whole) ** 0.5, abs=3e-5)
        assert found.relative_error < 1e-6 or rank == 2


def test_a_converted_file_states_the_whole_error_and_reads_as_a_lora(hub, tmp_path):
    folder, _, cases = hub
    [expected] = [case.change for case in cases if case.name == "loha"]
    for options in ({"rank": 2}, {"energy": 0.9}, {"rank": 3, "energy": 0.8, "layout": "kohya"}):
        target = tmp_path / f"{len(str(options))}.safetensors"
        written = convert_file(folder / "loha.safetensors", target, ConvertSettings(**options), overwrite=False)
        found = read_adapter(target)
        assert error_of(found, expected) == pytest.approx(written.relative_error, abs=2e-6)
        if "energy" in options:
            assert written.relative_error**2 <= 1 - options["energy"] + 1e-9 or written.ranks[1] == options.get("rank")
    mixed = convert_file(
        folder / "kohya sd15.safetensors", tmp_path / "small", ConvertSettings(rank=1), overwrite=False
    )
    assert mixed.ranks == (1, 1)
    assert open_store(tmp_path / "small").files[0].metadata["format"] == "pt"


def test_energy_keeps_the_lowest_rank_that_is_enough():
    draw = torch.Generator().manual_seed(0)
    change = LowRank.of(torch.randn(9, 7, generator=draw, dtype=torch.float64))
    values = torch.linalg.svdvals(change.dense()).square()
    for energy in (0.1, 0.5, 0.9, 0.999, 1.0):
        kept, lost = change.truncated(7, energy)
        assert lost <= (1 - energy) * float(values.sum()) + 1e-12
        assert kept.rank == 1 or float(values[kept.rank - 1 :].sum()) > (1 - energy) * float(values.sum()) - 1e-12
        assert lost == pytest.approx(float(values[kept.rank :].sum()), abs=1e-12)


def test_damaged_structures_are_named(tmp_path):
    head = "lora_unet_mid_block_attentions_0_proj_in"
    cases = {
        "lacks a factor": {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4)},
        "do not fit": {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (5, 2), "hada_w2_b": (2, 4)},
        r"of another shape \(lokr_w2_a": {"lokr_w1": (2, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (3, 4)},
    }
    for message, shapes in cases.items():
        save_file({f"{head}.{role}": torch.ones(shape) for role, shape in shapes.items()}, tmp_path / "a.safetensors")
        with pytest.raises(NetweightError, match=message):
            plan_adapter(tmp_path / "a.safetensors", conversion=Conversion(2))


def test_files_that_repeat_a_header_are_checked_each(tmp_path):
    """Entries of tensors are parsed once; metadata, sizes and repeated names are looked at in every file."""
    tensors = {"a.weight": torch.arange(3.0), "b.weight": torch.ones(2, 2)}
    for number in range(2):
        save_file(tensors, tmp_path / f"{number}.safetensors", {"name": f'ü \\ " {{}} {number}'})
    for number in range(2):
        with open_store(tmp_path / f"{number}.safetensors") as store:
            assert store.files[0].metadata == {"name": f'ü \\ " {{}} {number}'}
            assert all(torch.equal(store.get(name), value) for name, value in tensors.items())
    whole = (tmp_path / "0.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    entries = whole[8 : 8 + size][whole[8 : 8 + size].index(b'"a.weight"') :]
    for metadata in (
        b'{"name":1}',
        b'{"name":{}}',
        b'{"a":"1","a":"2"}',
        b"[]",
        b'{"name":"\\ud800"}',
        b'{"name":"\xff"}',
    ):
        head = b'{"__metadata__":' + metadata + b"," + entries
        (tmp_path / "bad.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + size :])
        with pytest.raises(NetweightError, match="header is damaged"):
            open_store(tmp_path / "bad.safetensors")
    for head in (
        b'{"__metadata__":{},"__metadata__":{"x":"y"},' + entries,
        b'{"__metadata__":{},' + entries.rstrip()[:-1] + b',"__metadata__":{}}',
        b'{"__metadata__":{},}',
    ):
        (tmp_path / "bad.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + size :])
        with pytest.raises(NetweightError):
            open_store(tmp_path / "bad.safetensors")
    (tmp_path / "short.safetensors").write_bytes(whole[:-4])
    with pytest.raises(NetweightError, match="describes"):
        open_store(tmp_path / "short.safetensors")
