"""Odd inputs of a label by name, each with a function that writes it. Not a test itself."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

W = {"model.layers.0.mlp.weight": torch.arange(4096.0).reshape(64, 64), "model.norm.weight": torch.ones(64)}


def write(folder, name, content):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    else:
        file.write_text(json.dumps(content), encoding="utf-8")
    return file


def weights(folder, name="model.safetensors", tensors=W, metadata=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, metadata)
    return folder / name


def lora(folder, name="lora.safetensors", prefix="lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"):
    tensors = {
        f"{prefix}.lora_down.weight": torch.ones(4, 16),
        f"{prefix}.lora_up.weight": torch.ones(16, 4),
        f"{prefix}.alpha": torch.tensor(2.0),
    }
    return weights(folder, name, tensors)


def header(entries, data=b""):
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


class Runs:
    def __reduce__(self):
        return (print, ("this must not run",))


def language(folder, **values):
    return write(folder, "config.json", {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, **values})


def in_the_hubs_cache(folder):
    """Files as the hub's client stores them: links in a folder whose name is a digest."""
    blobs, snapshot = (folder / "models--owner--name" / each for each in ("blobs", f"snapshots/{'a' * 40}"))
    snapshot.mkdir(parents=True)
    weights(blobs, "1")
    write(blobs, "2", {"architectures": ["LlamaForCausalLM"]})
    (snapshot / "model.safetensors").symlink_to(blobs / "1")
    (snapshot / "config.json").symlink_to(blobs / "2")
    return snapshot


def linked_to_itself(folder):
    lora(folder / "x", "a.safetensors")
    lora(folder / "x", "b.safetensors")
    (folder / "x" / "up").symlink_to(folder)
    return folder


def saved(folder, name, value):
    torch.save(value, folder / name)
    return folder / name


def dangling(folder):
    (language(folder).parent / "model.safetensors").symlink_to(folder / "gone")
    return folder


def fifo(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def torchscript(folder):
    torch.jit.script(torch.nn.Linear(3, 3)).save(str(folder / "script.pt"))
    return folder / "script.pt"


class Starts:
    def __reduce__(self):
        return (os.system, ("echo this must not run",))


# name → how it is made; each returns the path that is labelled, and what the label's kind begins with
LABELLED = {
    "plain file": lambda d: (weights(d), "weights"),
    "file without suffix": lambda d: (weights(d, "model"), "weights"),
    "folder of one file": lambda d: (weights(d).parent, "weights"),
    "folder without config, two shards": lambda d: (
        weights(d, "a.safetensors") and weights(d, "b.safetensors", {"x": torch.ones(3)}).parent, "weights"),
    "model with config": lambda d: (
        write(d, "config.json", {"architectures": ["BertModel"]}) and weights(d).parent, "model: BertModel"),
    "language model": lambda d: (
        write(d, "config.json", {"architectures": ["LlamaForCausalLM"], "vocab_size": 10}) and weights(d).parent,
        "language model: LlamaForCausalLM"),
    "config without architectures": lambda d: (
        write(d, "config.json", {"model_type": "llama"}) and weights(d).parent, "model"),
    "multimodal": lambda d: (
        write(d, "config.json", {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"vocab_size": 5}})
        and weights(d).parent, "language model"),
    "null architectures": lambda d: (
        write(d, "config.json", {"architectures": None}) and weights(d).parent, "model"),
    "checkpoint": lambda d: (torch.save(W, d / "model.pt") or d / "model.pt", "weights"),
    "old checkpoint": lambda d: (
        torch.save(W, d / "old.bin", _use_new_zipfile_serialization=False) or d / "old.bin", "weights"),
    "nested checkpoint": lambda d: (
        torch.save({"optimizer": [{"state": W}], "epoch": 1}, d / "c.ckpt") or d / "c.ckpt", "weights"),
    "folder of a checkpoint": lambda d: (
        torch.save(W, d / "pytorch_model.bin") or write(d, "config.json", {"model_type": "gpt2"}).parent, "model"),
    "safetensors beside its pickle": lambda d: (
        torch.save(W, d / "pytorch_model.bin") or (write(d, "config.json", {"model_type": "x"}) and weights(d).parent),
        "model"),
    "two variants": lambda d: (
        weights(d, "model.fp16.safetensors", {"a": torch.ones(64, dtype=torch.half)})
        and write(d, "config.json", {"model_type": "x"}) and weights(d).parent, "model"),
    "only a variant": lambda d: (
        write(d, "config.json", {"model_type": "x"}) and weights(d, "model.fp16.safetensors").parent, "model"),
    "pipeline": lambda d: (
        weights(d / "unet", "diffusion_pytorch_model.safetensors")
        and write(d, "model_index.json", {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "U"],
                                          "vae": ["diffusers", "V"], "safety_checker": [None, None]}).parent,
        "pipeline: StableDiffusionPipeline"),
    "kohya file": lambda d: (lora(d), "adapter (LoRA)"),
    "folder of one LoRA": lambda d: (lora(d).parent, "adapter (LoRA)"),
    "folder of two LoRAs": lambda d: (lora(d, "a.safetensors") and lora(d, "b.safetensors").parent, "folder of adap"),
    "LoRAs in subfolders": lambda d: (
        lora(d / "x", "a.safetensors") and lora(d / "y", "b.safetensors").parent.parent, "folder of adapters"),
    "folder of peft": lambda d: (
        write(d, "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"],
                                         "base_model_name_or_path": "some/base"})
        and weights(d, "adapter_model.safetensors", {
            "base_model.model.q.lora_A.weight": torch.ones(2, 8), "base_model.model.q.lora_B.weight": torch.ones(8, 2)
        }).parent, "adapter (LoRA)"),
    "a LoRA that no reader knows": lambda d: (
        weights(d, "odd.safetensors", {"who.knows.lora_X": torch.ones(2), "who.lora_Y": torch.ones(2)}), "adapter"),
    "federation": lambda d: (write(d, "federation.json", {"method": "hyperfl", "clients": 3}).parent, "federation run"),
    "no elements": lambda d: (weights(d, tensors={"a": torch.ones(0, 4), "b": torch.ones(3)}), "weights"),
    "scalar": lambda d: (weights(d, tensors={"a": torch.tensor(1.0)}), "weights"),
    "only NaN": lambda d: (weights(d, tensors={"a": torch.full((4, 4), float("nan"))}), "weights"),
    "fp8": lambda d: (weights(d, tensors={"a": torch.ones(64, 64).to(torch.float8_e4m3fn)}), "weights"),
    "int8 codes": lambda d: (weights(d, tensors={"a": torch.ones(64, 64, dtype=torch.int8)}), "weights"),
    "truth values": lambda d: (weights(d, tensors={"a": torch.ones(64, 64, dtype=torch.bool)}), "weights"),
    "complex": lambda d: (weights(d, tensors={"a": torch.ones(8, dtype=torch.complex64)}), "weights"),
    "names in Chinese": lambda d: (weights(d / "模型", "权重.safetensors", {"层.0.权重": torch.ones(4, 4)}), "weights"),
    "name with markup": lambda d: (
        weights(d / "<b>&amp;'\"", "model.safetensors", {"<script>": torch.ones(4, 4)}).parent, "weights"),
    "card without end": lambda d: (
        write(d, "README.md", "---\nlicense: mit\n") and write(d, "config.json", {"a": 1}) and weights(d).parent,
        "model"),
    "card with broken YAML": lambda d: (
        write(d, "README.md", "---\nlicense: [\n---\n") and write(d, "config.json", {"a": 1}) and weights(d).parent,
        "model"),
    "card in Latin-1": lambda d: (
        write(d, "README.md", b"---\nlicense: mit\n---\n\xe9") and write(d, "config.json", {"a": 1})
        and weights(d).parent, "model"),
    "tokenizer without vocabulary": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"]}) and write(d, "tokenizer.json", {"model": {}})
        and weights(d).parent, "language model"),
    "damaged tokenizer": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"]}) and write(d, "tokenizer.json", "{")
        and weights(d).parent, "language model"),
    "tokenizer as a list": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"], "vocab_size": 9})
        and write(d, "tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"id": 8}]})
        and weights(d).parent, "language model"),
    "remote code": lambda d: (
        write(d, "config.json", {"auto_map": {"AutoModel": "modeling.X"}}) and write(d, "modeling.py", "import os")
        and weights(d).parent, "model"),
    "template that escapes": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"]})
        and write(d, "tokenizer_config.json", {"chat_template": "{{ x.__class__.__mro__ }}"}) and weights(d).parent,
        "language model"),
    "several templates": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"]})
        and write(d, "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "system tools"}]})
        and weights(d).parent, "language model"),
    "several ends": lambda d: (
        write(d, "config.json", {"architectures": ["XForCausalLM"]})
        and write(d, "generation_config.json", {"eos_token_id": [1, 2]}) and weights(d).parent, "language model"),
    "optimizer beside the model": lambda d: (
        torch.save({"state": {0: torch.ones(4)}}, d / "optimizer.pt")
        or (write(d, "config.json", {"model_type": "x"}) and weights(d).parent), "model"),
    "snapshot of the hub": lambda d: (in_the_hubs_cache(d), "language model"),
    "LoRAs with a link to their folder": lambda d: (linked_to_itself(d), "folder of adapters"),
    "upper-case suffix": lambda d: (weights(d, "MODEL.SAFETENSORS"), "weights"),
    "config with a byte order mark": lambda d: (
        write(d, "config.json", b'\xef\xbb\xbf{"architectures": ["BertModel"]}') and weights(d).parent, "model: Bert"),
    "NaN in the config": lambda d: (
        write(d, "config.json", '{"a": NaN, "architectures": ["BertModel"]}') and weights(d).parent, "model"),
    "architectures as a text": lambda d: (language(d, architectures="LlamaForCausalLM") and weights(d).parent, "lang"),
    "architectures as numbers": lambda d: (language(d, architectures=[3]) and weights(d).parent, "model"),
    "odd values in the config": lambda d: (
        language(d, vocab_size="many", eos_token_id="x", text_config=[1], quantization_config="gptq")
        and weights(d).parent, "language model"),
    "adapter beside a model": lambda d: (
        language(d) and write(d, "adapter_config.json", {"peft_type": "LORA"}) and weights(d).parent, "adapter (LoRA)"),
    "learned prompt of peft": lambda d: (
        write(d, "adapter_config.json", {"peft_type": "PROMPT_TUNING"})
        and weights(d, "adapter_model.safetensors", {"prompt_embeddings": torch.ones(8, 16)}).parent,
        "adapter: PROMPT_TUNING"),
    "model and its author's own layout": lambda d: (
        language(d) and weights(d, "consolidated.safetensors")
        and weights(d, "model-00001-of-00001.safetensors").parent, "language model"),
    "checkpoint of a trainer": lambda d: (
        language(d) and saved(d, "optimizer.pt", {"s": 1}) and saved(d, "training_args.bin", {"a": 1})
        and weights(d).parent, "language model"),
    "vocabulary named .bin": lambda d: (
        language(d) and write(d, "tok512.bin", bytes(range(64))) and weights(d).parent, "language model"),
    "arrays beside a model": lambda d: (
        language(d) and (np.savez(d / "v.npz", a=np.ones(3)) or weights(d).parent), "language model"),
    "weights that share memory": lambda d: (saved(d, "s.pt", {"a": W["model.norm.weight"]} | W), "weights"),
    "parameters": lambda d: (saved(d, "p.pt", {"p": torch.nn.Parameter(torch.ones(3))}), "weights"),
    "one tensor alone": lambda d: (saved(d, "t.pt", torch.ones(9)), "weights"),
    "name of 5,000 letters": lambda d: (weights(d, tensors={"a" * 5000: torch.ones(3, 3)}), "weights"),
    "control characters in a name": lambda d: (
        weights(d, "a\nb.safetensors", {"c\nd\x1b[31m": torch.ones(64, 64)}), "weights"),
    "odd parts of a pipeline": lambda d: (
        weights(d / "unet", "diffusion_pytorch_model.safetensors")
        and write(d, "model_index.json", {"_class_name": 5, "unet": "x", "vae": ["a"], "n": {"q": 1}}).parent,
        "pipeline"),
    "embedding of a textual inversion": lambda d: (weights(d, tensors={"emb_params": torch.ones(4, 768)}), "weights"),
    "LoHa": lambda d: (
        weights(d, tensors={f"lora_unet_x.hada_w{i}_{c}": torch.ones(4, 4) for i in (1, 2) for c in "ab"}), "adapter"),
    "odd card": lambda d: (
        language(d) and write(d, "README.md", "---\nlicense: [mit, x]\nbase_model: {a: 1}\n---\n")
        and weights(d).parent, "language model"),
    "odd tokenizer": lambda d: (
        language(d) and write(d, "tokenizer.json", {"model": {"vocab": {"a": "x"}}, "added_tokens": "y"})
        and write(d, "tokenizer_config.json", {"chat_template": 5, "added_tokens_decoder": [1]}) and weights(d).parent,
        "language model"),
    "four-bit floats": lambda d: (
        write(d, "f4.safetensors", header({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"1234")),
        "weights"),
}  # fmt: skip

# name → how it is made; each returns the path, and a word that the refusal must hold
REFUSED = {
    "no such path": lambda d: (d / "nothing", "no file or folder"),
    "empty folder": lambda d: ((d / "e").mkdir() or d / "e", "empty"),
    "config alone": lambda d: (write(d, "config.json", {"architectures": ["X"]}).parent, "no weights"),
    "text": lambda d: (write(d, "notes.txt", "hello"), "notes.txt"),
    "empty file": lambda d: (write(d, "model.safetensors", b""), "model.safetensors"),
    "short file": lambda d: (write(d, "model.safetensors", b"\x08\0\0\0\0\0\0\0{"), "model.safetensors"),
    "cut file": lambda d: (
        write(d, "model.safetensors", header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, b"1")),
        "model.safetensors"),
    "header that is too long": lambda d: (write(d, "model.safetensors", struct.pack("<Q", 1 << 40)), "model.safet"),
    "GGUF": lambda d: (write(d, "model.gguf", b"GGUF" + bytes(64)), "GGUF"),
    "folder of GGUF": lambda d: (write(d, "model.gguf", b"GGUF" + bytes(64)).parent, "GGUF"),
    "ONNX": lambda d: (write(d, "model.onnx", bytes(64)), "ONNX"),
    "HDF5": lambda d: (write(d, "model.h5", b"\x89HDF\r\n\x1a\n" + bytes(64)), "HDF5"),
    "Keras folder": lambda d: (write(d, "tf_model.h5", b"\x89HDF").parent, "tf_model.h5"),
    "Flax": lambda d: (write(d, "flax_model.msgpack", bytes(8)), "Flax"),
    "numpy": lambda d: (np.save(d / "x.npy", np.ones(3)) or d / "x.npy", "numpy"),
    "numpy archive": lambda d: (np.savez(d / "x.npz", a=np.ones(3)) or d / "x.npz", "numpy"),
    "zip": lambda d: (zipfile.ZipFile(d / "x.zip", "w").writestr("a", "b") or d / "x.zip", "x.zip"),
    "pickle that runs code": lambda d: (write(d, "evil.bin", pickle.dumps(Runs())), "evil.bin"),
    "pickle that starts a program": lambda d: (saved(d, "evil.pt", {"x": Starts()}), "it refers to posix.system"),
    "checkpoint that runs code": lambda d: (torch.save(Runs(), d / "evil.pt") or d / "evil.pt", "evil.pt"),
    "checkpoint without tensors": lambda d: (torch.save({"epoch": 3}, d / "c.pt") or d / "c.pt", "no tensors"),
    "index file": lambda d: (write(d, "model.safetensors.index.json", {"weight_map": {}}), "index"),
    "damaged config": lambda d: (write(d, "config.json", "{") and weights(d).parent, "config.json"),
    "config that is a list": lambda d: (write(d, "config.json", []) and weights(d).parent, "config.json"),
    "shard that the index names and the folder lacks": lambda d: (
        write(d, "model.safetensors.index.json", {"weight_map": {
            "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
        and weights(d, "model-00001-of-00002.safetensors").parent, "model-00002-of-00002.safetensors"),
    "shard that only the names of others show": lambda d: (
        weights(d, "model-00001-of-00003.safetensors") and weights(d, "model-00003-of-00003.safetensors").parent,
        "model-00002-of-00003.safetensors"),
    "index alone": lambda d: (
        write(d, "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00001.safetensors"}}).parent,
        "model-00001-of-00001.safetensors"),
    "checkpoint that is none": lambda d: (
        write(d, "pytorch_model.bin", b"not a pickle").parent, "pytorch_model.bin"),
    "folder of models": lambda d: (
        write(d / "one", "config.json", {"a": 1}) and weights(d / "one").parent.parent, "one"),
    "device": lambda d: (Path("/dev/null"), "neither a file nor a folder"),
    "named pipe": lambda d: (fifo(d), "neither a file nor a folder"),
    "link to nothing": lambda d: (dangling(d), "model.safetensors is a link"),
    "sparse tensor": lambda d: (saved(d, "s.pt", {"a": torch.eye(64).to_sparse(), "b": torch.ones(3)}), "a is sparse"),
    "quantized tensor": lambda d: (
        saved(d, "q.pt", {"a": torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8)}), "a is quantized"),
    "tensor without data": lambda d: (saved(d, "m.pt", {"a": torch.ones(3, device="meta")}), "m.pt: the tensor a"),
    "whole module": lambda d: (saved(d, "m.pt", torch.nn.Linear(3, 3)), "torch.nn.modules.linear.Linear"),
    "TorchScript": lambda d: (torchscript(d), "TorchScript"),
    "cut checkpoint": lambda d: (write(d, "cut.pt", saved(d, "t.pt", W).read_bytes()[:900]), "cut.pt"),
    "header without tensors": lambda d: (write(d, "e.safetensors", header({"__metadata__": {"a": "b"}})), "no tensors"),
    "Git LFS pointer": lambda d: (
        language(d) and write(d, "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid x\n").parent,
        "Git LFS"),
    "page of an error as weights": lambda d: (write(d, "model.safetensors", "<!doctype html>Not found"), "model.safe"),
    "archive of torch as safetensors": lambda d: (saved(d, "a.safetensors", W), "a.safetensors is a pickle"),
    "pipeline without weights": lambda d: (write(d, "model_index.json", {"_class_name": "X"}).parent, "model_index"),
    "adapter without weights": lambda d: (
        write(d, "adapter_config.json", {"peft_type": "LORA"}).parent, "adapter_config.json"),
    "index that leads outside": lambda d: (
        language(d) and write(d, "model.safetensors.index.json", {"weight_map": {"a": "../evil.safetensors"}})
        and weights(d).parent, "../evil.safetensors"),
    "shape of 2^80 numbers": lambda d: (
        write(d, "h.safetensors",
              header({"a": {"dtype": "F32", "shape": [1 << 40] * 2, "data_offsets": [0, 4]}}, b"1234")),
        "h.safetensors"),
    "unknown type": lambda d: (
        write(d, "h.safetensors", header({"a": {"dtype": "F3", "shape": [4], "data_offsets": [0, 4]}}, b"1234")), "F3"),
    "federation with a damaged report": lambda d: (
        write(d, "federation.json", {}) and write(d, "report.json", "{").parent, "report.json"),
    "federation without a plan": lambda d: (write(d, "federation.json", []).parent, "federation.json"),
}  # fmt: skip
