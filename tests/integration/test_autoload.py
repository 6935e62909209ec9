"""Programs that import only transformers, diffusers or sentence-transformers open compressed folders."""

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import warm
from hub_stand_in import hub

import netweight

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="outside a source tree")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Compressed folders, and pyproject.toml's entry points as they are installed."""
    place = tmp_path_factory.mktemp("autoload")
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = place / "installed" / "entry-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")
    (entry,) = entry_points["torch.backends"].items()
    (installed / "entry_points.txt").write_text("[torch.backends]\n{} = {}\n".format(*entry))
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    transformers.BertModel(transformers.BertConfig(vocab_size=64, **shape)).bfloat16().save_pretrained(place / "bert")
    netweight.compress_folder(place / "bert", place / "bert-net")
    return place


# What programs find imported that are `run` warm: torch first, with the entry points installed, as whoever imports it.
IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sklearn.metrics",
    "transformers:AutoModel,BertModel,PreTrainedModel,PreTrainedTokenizerFast,Trainer", "transformers.modeling_utils",
)  # fmt: skip
FEW = ("torch", "transformers:AutoModel,BertModel")  # for a place of its own in the environment


def run(place, program, *, cold=False, **environment):
    """Run a program in a process of its own, with the entry points installed; what it printed, and its errors."""
    paths = [str(place / "installed"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    switches = {"NETWEIGHT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    quiet = {
        "TRANSFORMERS_VERBOSITY",
        "DIFFUSERS_VERBOSITY",
        "_NETWEIGHT_QUIET",
    }  # set where a command ran in this process before
    inherited = {name: value for name, value in os.environ.items() if name not in switches | quiet}
    inherited |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"} | environment
    libraries = () if cold else FEW if environment else IMPORTED
    answer = warm.run("-c", program, env=inherited, cwd=place, libraries=libraries)
    return answer.stdout.splitlines(), answer.stderr


LOADED = "import sys; print(sorted(name for name in sys.modules if name.startswith('netweight')))"
TRANSFORMERS = """
from transformers import AutoModel
model = AutoModel.from_pretrained("bert-net")
print(type(model.encoder.layer[0].output.dense.weight).__name__)
"""


def test_a_program_that_imports_only_transformers(place):
    for cold in (True, False):
        printed, errors = run(place, TRANSFORMERS, cold=cold)
        assert printed == ["CompressedTensor"], errors


def test_a_part_of_transformers_may_be_what_imports_torch(place):
    program = "from transformers import PreTrainedModel, Trainer" + TRANSFORMERS
    printed, errors = run(place, program + "print(PreTrainedModel.save_pretrained.__wrapped__.__name__)", cold=True)
    assert printed == ["CompressedTensor", "save_pretrained"], errors


def test_without_compressed_models_nothing_else_is_imported(place):
    printed, errors = run(
        place, f"from transformers import AutoModel, Trainer\nAutoModel.from_pretrained('bert')\n{LOADED}"
    )
    assert printed == [str(["netweight", "netweight.autoload"])]
    assert "netweight" not in errors.replace(sys.prefix, "")  # libraries name where they are installed
    printed, errors = run(
        place, f"import torch, netweight\nnetweight._autoload()\n{LOADED}", cold=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert printed == ["['netweight']"], errors


@pytest.mark.parametrize(
    "switch", ["NETWEIGHT_AUTOLOAD", pytest.param("TORCH_DEVICE_BACKEND_AUTOLOAD", marks=pytest.mark.study)]
)
def test_it_can_be_switched_off_and_done_by_hand(place, switch):
    printed, errors = run(place, TRANSFORMERS, **{switch: "0"})
    assert not printed
    assert "netweight decompress FOLDER NEW_FOLDER" in errors
    printed, errors = run(place, f"import netweight.plugins.transformers\n{TRANSFORMERS}", **{switch: "0"})
    assert printed == ["CompressedTensor"], errors


def test_models_go_to_the_hub_and_come_by_their_id(place, tmp_path):
    with hub() as (address, repositories):
        environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none", "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HOME"] = str(tmp_path / "first")
        push = """
from transformers import AutoModel
model = AutoModel.from_pretrained("bert-net")
model.push_to_hub("me/one")
model.save_pretrained("kept", push_to_hub=True, repo_id="me/other")
"""
        _, errors = run(place, push, **environment)
        assert repositories.keys() == {"me/one", "me/other"}, errors
        for files in repositories.values():
            assert {"model.net.safetensors", "config.json", "netweight.json"} <= files.keys()
            assert "model.safetensors" not in files
        load = TRANSFORMERS.replace('"bert-net"', '"me/one", cache_dir=FOLDER')  # with nothing in it
        printed, errors = run(place, load.replace("FOLDER", repr(str(tmp_path / "second"))), **environment)
        assert printed == ["CompressedTensor"], errors
        config = json.loads(repositories["me/one"]["config.json"])
        del config["dtype"]  # as in models of old
        repositories["me/one"]["config.json"] = json.dumps(config).encode()
        load = load.replace("FOLDER", repr(str(tmp_path / "third"))) + "print(model.dtype)"
        printed, errors = run(place, load, **environment)
        assert printed == ["CompressedTensor", "torch.bfloat16"], errors


def test_sentence_transformers_and_pipelines(place):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    program = """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, pipeline
words = {"[UNK]": 0, "[PAD]": 1, "a": 2}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")), unk_token="[UNK]", pad_token="[PAD]"
)
for folder in ("bert", "bert-net"):
    tokenizer.save_pretrained(folder)
import numpy
from sentence_transformers import SentenceTransformer
ours, theirs = (pipeline("feature-extraction", model=folder)("a a") for folder in ("bert-net", "bert"))
print(ours == theirs)
ours, theirs = (SentenceTransformer(folder).encode(["a a", "a"]) for folder in ("bert-net", "bert"))
print(numpy.array_equal(ours, theirs))
import sys
print("netweight.plugins.transformers" in sys.modules)
"""
    printed, errors = run(place, program)
    assert printed[-3:] == ["True"] * 3, errors


def test_diffusers(place):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    unet = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, block_out_channels=(32,), **blocks)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(place / "ddpm")
    netweight.compress_folder(place / "ddpm", place / "ddpm-net")
    program = """
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained("ddpm-net")
pipeline.save_pretrained("ddpm-saved")
for folder in ("ddpm-net", "ddpm-saved"):
    print(type(DiffusionPipeline.from_pretrained(folder).unet.conv_in.weight).__name__)
"""
    printed, errors = run(place, program)
    assert printed == ["CompressedTensor"] * 2, errors


def test_models_compressed_in_memory_are_saved_compressed(place):
    program = """
import netweight
from transformers import AutoModel
model = AutoModel.from_pretrained("bert")
netweight.compress_(model)
model.save_pretrained("by-hand")
print(netweight.verify("by-hand", against="bert")[0].passed)
print(type(AutoModel.from_pretrained("by-hand").pooler.dense.weight).__name__)
"""
    printed, errors = run(place, program)
    assert printed == ["True", "CompressedTensor"], errors
