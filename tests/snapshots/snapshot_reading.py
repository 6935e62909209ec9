"""How each format on disk is read: a folder with the files of `formats/` and `inputs/` in, JSON values out.

Everything goes through commands and the names that `import netweight` offers.
"""

import hashlib
import json
import shutil

import torch
import xxhash
from snapshot_cases import HERE, arguments, call, inside, normal, prepare

import netweight

READERS = {}


def lay_out(folder):
    """Write the input of all cases, and over it the files that an earlier version wrote."""
    prepare(folder)
    shutil.copytree(HERE / "formats", folder, dirs_exist_ok=True)
    for name in ("text_encoder", "tokenizer", "scheduler", "vae"):  # what an edit leaves as it is
        shutil.copytree(folder / "pipeline" / name, folder / "edited" / name)
    _move(folder / "finetune" / "attacks.jsonl", folder)


def _move(ledger, folder):
    """Give a ledger whose keys hold absolute paths, written as @, those of a folder."""
    records = [json.loads(line.replace('"@/', f'"{folder}/')) for line in ledger.read_text().splitlines()]
    for record in records:
        config = json.dumps(record["config"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        record["digest"] = f"xxh3-128:{xxhash.xxh3_128_hexdigest(config.encode())}"
    ledger.write_text("".join(json.dumps(record) + "\n" for record in records))


def reader(function):
    """Keep a reader under its name."""
    READERS[function.__name__] = function
    return function


def run(folder, words, code=0):
    """What a command writes with `--json`."""
    done = call(folder, [*words.split(), "--json"])
    assert done["exit"] == code, (words, done)
    return done["json"]


def sha256(path):
    """The digest of a file, or of each file of a folder."""
    if path.is_dir():
        return {str(each.relative_to(path)): sha256(each) for each in sorted(path.rglob("*")) if each.is_file()}
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(tensors):
    """A few numbers that tell tensors apart, by name."""
    described = {}
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().double().flatten()
        weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64)
        described[name] = [*tensor.shape, float(values.norm()), float(values @ weights)]
    return described


def of_adapter(adapter):
    """The dense changes of an adapter."""
    return sums({name: change.dense() for name, change in adapter.factors.items()})


def repeated(folder, case, ledger, code=0):
    """Run a case again where its ledger knows all answers: what it writes, after checking that nothing was added."""
    file = folder / ledger
    before = file.read_bytes()
    done = call(folder, arguments(case))
    assert done["exit"] == code, done
    assert file.read_bytes() == before, f"{ledger} was not remembered"
    return done["json"]


@reader
def compressed_file(folder):
    run(folder, "decompress one.net.safetensors back.safetensors")
    assert (folder / "back.safetensors").read_bytes() == (folder / "one.safetensors").read_bytes()
    with netweight.open_store(folder / "one.net.safetensors") as store:
        return {"file": sha256(folder / "back.safetensors"), "tensors": sums({n: store.get(n) for n in store.names()})}


@reader
def rounded_file(folder):
    run(folder, "decompress rounded.net.safetensors back.safetensors")
    return sha256(folder / "back.safetensors")


@reader
def compressed_folder(folder):
    found = run(folder, "verify folder-net --against folder")
    run(folder, "decompress folder-net back")
    originals = {path.name: sha256(path) for path in (folder / "folder").iterdir()}
    assert sha256(folder / "back") == originals
    return {"passed": found["passed"], "files": originals}


@reader
def rounded_folder(folder):
    run(folder, "decompress folder-rounded back")
    return sha256(folder / "back")


@reader
def checkpoint_of_a_dense_model(folder):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    extra = netweight.load_checkpoint(folder / "dense.safetensors", model, optimizer)
    moments = {f"{i}.{k}": v for i, part in optimizer.state_dict()["state"].items() for k, v in part.items()}
    return {"model": sums(model.state_dict()), "optimizer": sums(moments), "extra": extra}


@reader
def checkpoint_of_a_compressed_model(folder):
    model, optimizer = compressed_network()
    extra = netweight.load_checkpoint(folder / "compressed.safetensors", model, optimizer)
    optimizer.close()
    netweight.decompress_(model)
    return {"model": sums(model.state_dict()), "extra": extra}


@reader
def bank_of_adapters(folder):
    return _bank(folder, "bank")


@reader
def compressed_bank(folder):
    return _bank(folder, "bank-net")


@reader
def bank_of_published_adapters(folder):
    return _bank(folder, "published-bank")


@reader
def published_matrix(folder):
    run(folder, "space ingest published ingested")
    return _bank(folder, "ingested")


def _bank(folder, name):
    info = run(folder, f"space info {name} --verify")
    bank = netweight.AdapterBank.open(folder / name)
    return {"info": info, "adapters": {each: of_adapter(bank.adapter(each)) for each in bank.names[::5]}}


@reader
def space(folder):
    info = run(folder, "space info space")
    opened = netweight.WeightSpace.open(folder / "space", netweight.AdapterBank.open(folder / "bank"))
    kept = {"scores": opened.scores, "deviations": opened.deviations}
    return {"info": info, "kept": sums(kept), "first": sums(opened.changes(opened.scores[0]))}


@reader
def standalone_space(folder):
    opened = netweight.WeightSpace.open(folder / "space-alone")
    return {"scores": sums({"scores": opened.scores}), "first": sums(opened.changes(opened.scores[0]))}


@reader
def direction_and_points(folder):
    edited = run(folder, "space edit space --bank bank person-04 --move beard.json 2.5 --out again.json")
    found = {"edited": edited, "same": json.loads((folder / "again.json").read_text())}
    for points in ("edited", "gaussian", "inverted"):
        found[points] = run(folder, f"space neighbors space --bank bank {points}.json --count 2")
    return found


@reader
def adapters_in_three_layouts(folder):
    return {
        layout: of_adapter(netweight.read_adapter(folder / f"exported-{layout}"))
        for layout in ("diffusers", "kohya", "peft")
    }


@reader
def ledger_of_an_inversion(folder):
    before = (folder / "inverted.jsonl").read_bytes()
    done = call(folder, [*arguments("space invert"), "--overwrite"])
    assert (folder / "inverted.jsonl").read_bytes() == before
    return done["json"]


@reader
def record_of_an_immunization(folder):
    """Its card tells what the record says."""
    shutil.copy(folder / "llama" / "config.json", folder / "defended")
    run(folder, "report finetune --card defended")
    lines = (folder / "defended" / "README.md").read_text().splitlines()
    return [line for line in lines if line.startswith("|")]


@reader
def ledger_of_attacks(folder):
    return repeated(folder, "attack finetune", "finetune/attacks.jsonl")


@reader
def statistics_and_ledger_of_neurons(folder):
    return repeated(folder, "forget localize", "localized/neurons.jsonl", code=1)


@reader
def neurons(folder):
    found = {}
    for form in ("json", "csv"):
        run(folder, f"forget apply pipeline edited-{form} --neurons localized/neurons.{form}")
        found[form] = sha256(folder / f"edited-{form}" / "unet" / "diffusion_pytorch_model.safetensors")
    return found


@reader
def record_of_an_edit(folder):
    found = run(folder, "forget undo edited restored")
    weights = "unet/diffusion_pytorch_model.safetensors"
    with (
        netweight.open_store(folder / "restored" / weights) as one,
        netweight.open_store(folder / "pipeline" / weights) as other,
    ):
        assert one.names() == other.names()
        assert all(torch.equal(one.get(name), other.get(name)) for name in one.names())
    return found


@reader
def threshold_and_ledger_of_scores(folder):
    before = (folder / "calibrated" / "scores.jsonl").read_bytes()
    found = run(
        folder,
        "forget detect pipeline --prompts ordinary.txt --threshold calibrated/threshold.json --seeds 3 --steps 5 "
        "--out calibrated",
    )
    assert (folder / "calibrated" / "scores.jsonl").read_bytes() == before
    return found


@reader
def ledger_of_searches(folder):
    return repeated(folder, "attack embedding", "embedding/searches.jsonl")


@reader
def reports(folder):
    return {
        name: run(folder, f"report {name}") | {"written": (folder / name / "report.html").stat().st_size > 5000}
        for name in ("compress-run", "finetune", "inversion", "federation")
    }


@reader
def run_of_a_federation(folder):
    again = call(folder, arguments("federate run"))["json"]
    audited = call(folder, arguments("federate audit"))["json"]
    longer = call(folder, [*arguments("federate run"), "--rounds", "2"])["json"]
    return {"again": again, "audited": audited, "longer": longer}


@reader
def run_of_a_recipe(folder):
    plan = run(folder, "run compress.yaml --plan")
    again = run(folder, "run compress.yaml")
    assert [step["remembered"] for step in again["steps"]] == [True]
    return {"plan": plan, "again": again}


@reader
def result_of_a_table(folder):
    found = run(folder, "reproduce neuzip-fig5 --out tables")
    assert found["reused"] is True
    return found


def network(wide=16):
    """A small network with a fixed start."""
    model = torch.nn.Sequential(torch.nn.Linear(24, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 8, bias=False))
    with torch.no_grad():
        for place, value in enumerate(model.parameters()):
            value.copy_(0.1 * normal(50 + place, *value.shape))
    return model


def compressed_network():
    """The same in bfloat16, compressed, with the optimizer that updates it layer by layer."""
    model = network(wide=96).bfloat16()
    netweight.compress_(model)
    return model, netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.01)


def write_checkpoints(folder):
    """Train both networks for three steps and save them."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(normal(60 + step, 4, 24)).square().mean().backward()
        optimizer.step()
    netweight.save_checkpoint(folder / "dense.safetensors", model, optimizer, extra={"step": 3})
    model, optimizer = compressed_network()
    for step in range(3):
        model(normal(60 + step, 4, 24).bfloat16()).square().mean().backward()
    netweight.save_checkpoint(folder / "compressed.safetensors", model, optimizer, extra={"step": 3, "name": "small"})


def read(name, folder):
    """Read one format in a folder laid out for it."""
    with inside(folder):
        return json.loads(json.dumps(READERS[name](folder), default=str))
