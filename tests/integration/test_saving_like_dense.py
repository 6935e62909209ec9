"""Libraries save a compressed model as they save its dense twin: peft, Trainer, accelerate, safetensors and others."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import netweight

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Deprecations that the libraries tell each other.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2)  # fmt: skip


@pytest.fixture(scope="module", params=["untied", "tied"])
def folders(request, tmp_path_factory):
    """One model, dense and compressed."""
    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=request.param == "tied")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(root / "dense")
    netweight.compress_folder(root / "dense", root / "net")
    return root


def opened(folders, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / kind)
    model.config.name_or_path = model.name_or_path = "base"  # what adapters record must not differ by folder
    return model


def trained(model, steps=2):
    """Train what is trainable, with AdamW."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    ids = torch.randint(0, 64, (2, 8))
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def files_of(folder):
    """All files but cards, by path; tensors of safetensors files by name, so that order does not matter."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("README.md", "training_args.bin", "trainer_state.json"):
            name = path.relative_to(folder).as_posix()
            found[name] = load_file(path) if path.suffix == ".safetensors" else path.read_bytes()
    return found


def assert_alike(left, right):
    assert left.keys() == right.keys()
    for name in left:
        if isinstance(left[name], dict):
            assert left[name].keys() == right[name].keys(), name
            for key in left[name]:
                assert left[name][key].dtype == right[name][key].dtype
                assert torch.equal(left[name][key], right[name][key]), (name, key)
        elif name.endswith(".json"):
            assert left[name] == right[name], name


ADAPTERS = {
    "modules_to_save": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "embedding to save": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "head targeted": dict(target_modules=["q_proj", "lm_head"]),
    "embedding targeted": dict(target_modules=["q_proj", "embed_tokens"]),
    "token indices": dict(target_modules=["q_proj"], trainable_token_indices=[3]),
    "DoRA with head": dict(target_modules=["v_proj", "lm_head"], use_dora=True),
    "bias": dict(target_modules=["q_proj"], bias="all"),
    "norms": dict(target_modules=["q_proj"], modules_to_save=["norm"]),
}


# Resizing replaces embedding and head, so that adapters of these are resized too.
RESIZED = ("modules_to_save", "head targeted", "embedding targeted")


@pytest.mark.parametrize(
    ("adapter", "resize"), [*((each, None) for each in ADAPTERS), *((each, 70) for each in RESIZED)]
)
def test_peft_saves_the_same_files(folders, tmp_path, adapter, resize):
    saved = {}
    for kind in ("dense", "net"):
        model = opened(folders, kind)
        torch.manual_seed(3)
        if resize:
            model.resize_token_embeddings(resize)
        model = trained(peft.get_peft_model(model, peft.LoraConfig(r=4, **ADAPTERS[adapter])))
        model.save_pretrained(tmp_path / kind)
        saved[kind] = files_of(tmp_path / kind)
        assert "adapter_model.safetensors" in saved[kind]
    assert_alike(saved["dense"], saved["net"])


@pytest.mark.parametrize("adapter", ["modules_to_save", "head targeted"])
def test_what_was_saved_of_one_opens_on_the_other(folders, tmp_path, adapter):
    model = trained(peft.get_peft_model(opened(folders, "net"), peft.LoraConfig(r=4, **ADAPTERS[adapter])))
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        for kind in ("dense", "net"):
            again = peft.PeftModel.from_pretrained(opened(folders, kind), tmp_path / "adapter").eval()
            assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize("adapter", ["modules_to_save", "head targeted"])
def test_trainer_checkpoints_and_resumes_alike(folders, tmp_path, adapter):
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (8, 8), generator=torch.manual_seed(5))]
    saved = {}
    for kind in ("dense", "net"):
        folder = tmp_path / kind

        def trainer(steps, kind=kind, folder=folder):
            torch.manual_seed(3)
            model = peft.get_peft_model(opened(folders, kind), peft.LoraConfig(r=4, **ADAPTERS[adapter]))
            arguments = transformers.TrainingArguments(
                folder, max_steps=steps, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, seed=0
            )
            return transformers.Trainer(model, arguments, train_dataset=data)

        trainer(2).train()
        trainer(4).train(resume_from_checkpoint=True)
        saved[kind] = {step: load_file(folder / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 4)}
    for step in (2, 4):
        assert_alike({"weights": saved["dense"][step]}, {"weights": saved["net"][step]})


def test_merging_and_saving_gives_the_dense_models_weights(folders, tmp_path):
    merged = {}
    for kind in ("dense", "net"):
        torch.manual_seed(3)
        model = peft.get_peft_model(opened(folders, kind), peft.LoraConfig(r=4, **ADAPTERS["head targeted"]))
        model = trained(model).merge_and_unload()
        model.save_pretrained(tmp_path / kind)
        merged[kind] = netweight.dense_state_dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind))
    assert_alike({"weights": merged["dense"]}, {"weights": merged["net"]})


def test_resized_models_save_and_open_again(folders, tmp_path):
    logits = {}
    for kind in ("dense", "net"):
        model = opened(folders, kind)
        torch.manual_seed(3)
        model.resize_token_embeddings(80)
        model.save_pretrained(tmp_path / kind)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        with torch.no_grad():
            logits[kind] = again(torch.arange(64, 80)[None]).logits
    assert torch.equal(logits["dense"], logits["net"])


def test_a_state_dict_that_is_given_is_saved(folders, tmp_path):
    for kind in ("dense", "net"):
        model = opened(folders, kind)
        state = {name: value * 2 for name, value in model.state_dict().items()}
        model.save_pretrained(tmp_path / kind, state_dict=state)
    pair = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind) for kind in ("dense", "net")]
    assert_alike(*({"weights": netweight.dense_state_dict(model)} for model in pair))


def test_safetensors_writes_what_it_writes_of_the_dense_model(folders, tmp_path):
    for kind in ("dense", "net"):
        save_model(opened(folders, kind), tmp_path / f"{kind}.safetensors")
    assert (tmp_path / "dense.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()
    head = {kind: {"head": opened(folders, kind).lm_head.weight[:7]} for kind in ("dense", "net")}
    for kind, tensors in head.items():
        save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / f"{kind}.safetensors")
    assert (tmp_path / "dense.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_tied_weights_are_refused_by_safetensors_as_those_of_dense_models_are(folders, tmp_path):
    messages = []
    for kind in ("dense", "net"):
        try:
            save_file(dict(opened(folders, kind).state_dict()), tmp_path / f"{kind}.safetensors")
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]


def test_accelerate_saves_and_restores(folders, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    ids = torch.arange(8)[None]
    for kind in ("dense", "net"):
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(opened(folders, kind))
        accelerator.save_model(model, tmp_path / f"{kind}-model")
        accelerator.save_state(tmp_path / f"{kind}-state")
        with torch.no_grad():
            before = model(ids).logits
            for parameter in model.parameters():
                parameter.mul_(2)
            accelerator.load_state(tmp_path / f"{kind}-state")
            assert torch.equal(model(ids).logits, before)
    assert_alike(files_of(tmp_path / "dense-model"), files_of(tmp_path / "net-model"))


def test_torch_save_brings_a_peft_model_back(folders, tmp_path):
    model = peft.get_peft_model(opened(folders, "net"), peft.LoraConfig(r=4, **ADAPTERS["modules_to_save"]))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.manual_seed(9)
    other = peft.get_peft_model(opened(folders, "net"), peft.LoraConfig(r=4, **ADAPTERS["modules_to_save"]))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with torch.no_grad():
        assert torch.equal(model(torch.arange(8)[None]).logits, other(torch.arange(8)[None]).logits)


def test_the_hubs_mixin_saves_the_same_file(folders, tmp_path):
    from huggingface_hub import PyTorchModelHubMixin

    class Net(torch.nn.Module, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

    torch.manual_seed(0)
    model = Net()
    model.save_pretrained(tmp_path / "dense")
    netweight.compress_(model)
    model.save_pretrained(tmp_path / "net")
    assert_alike(files_of(tmp_path / "dense"), files_of(tmp_path / "net"))
    shutil.rmtree(tmp_path / "net")
