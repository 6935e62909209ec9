"""How vLLM keeps the weights of a compressed folder: its quantization method and its load format, both "netweight".

The loader decodes one tensor after another on the host, where vLLM cuts it for its process; each layer is encoded on
its device as soon as it is whole. Linear layers, merged ones too, embeddings and heads are compressed, with the same
bits; experts and norms stay dense. With `"prefer": "speed"`, the default here, bf16 weights that are multiplied take
the fixed-length form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from netweight import open_store
from netweight.autoload import HINT, METHOD
from netweight.codec import Precision
from netweight.errors import UsageError
from netweight.methods.compress.runtime.functional import decode, gather_rows, linear_fixed
from netweight.methods.compress.runtime.model import check_prefer
from netweight.methods.compress.runtime.storage import CompressedStorage


@register_quantization_config(METHOD)
class NetweightConfig(QuantizationConfig):
    """What a folder's `quantization_config` says."""

    def __init__(self, prefer: str) -> None:
        super().__init__()
        check_prefer(prefer, Precision())
        self.prefer = prefer

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NetweightConfig:
        return cls(config.get("prefer", "speed"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        named = str(hf_quant_cfg.get("quant_method")).lower()  # as vLLM writes it
        return METHOD if named in (METHOD, HINT.lower()) else None

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        load_format = get_current_vllm_config().load_config.load_format
        if load_format != METHOD:
            raise UsageError(
                f"vLLM is to load a compressed folder with load format {load_format!r}, which cannot decode it.",
                cure=f"Pass --load-format {METHOD}, or load_format={METHOD!r} to LLM.",
            )
        if isinstance(layer, LinearBase):
            return CompressedLinear(self.prefer)
        if isinstance(layer, VocabParallelEmbedding):
            return CompressedEmbedding(self.prefer)
        return None


@register_model_loader(METHOD)
class NetweightLoader(DefaultModelLoader):
    """Gives vLLM the tensors of a compressed folder, decoded and checked one after another."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        places = (source.model_or_path, source.subfolder, source.revision)
        folder, *_ = self._prepare_weights(*places, False, source.allow_patterns_overrides)
        with closing(open_store(folder)) as store:
            for name in store.names():
                yield source.prefix + name, store.get(name, threads=torch.get_num_threads())


class CompressedLinear(LinearMethodBase):
    """Linear layers, of which a process has a part where vLLM runs tensor parallel."""

    uses_meta_device = True  # vLLM then makes a layer's weight when all of it has arrived, and has it processed at once

    def __init__(self, prefer: str) -> None:
        self.prefer = prefer

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        empty = torch.empty(shape, dtype=params_dtype, device="meta")
        loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter(
            "weight", ModelWeightParameter(data=empty, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        _compress(layer, fixed=self.prefer == "speed")

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _product(layer, x, bias)


class CompressedEmbedding(UnquantizedEmbeddingMethod):
    """Embeddings, of which only the rows asked for are decoded, and heads, tied or not."""

    supports_pre_processed_weights = False

    def __init__(self, prefer: str) -> None:
        self.prefer = prefer

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        layer.netweight_source, embed_tokens.netweight_multiplies = [embed_tokens], True  # a list: no submodule
        return super().tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        source = getattr(layer, "netweight_source", [layer])[0]
        multiplies = isinstance(source, ParallelLMHead) or getattr(source, "netweight_multiplies", False)
        _compress(source, fixed=self.prefer == "speed" and multiplies)
        layer.weight, layer.netweight = source.weight, source.netweight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _product(layer, x, bias)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        stored = layer.netweight
        if stored is None:
            return F.embedding(input_, layer.weight)
        rows: torch.Tensor = gather_rows(layer.weight, *stored.form, input_)
        return rows


def _compress(layer: nn.Module, *, fixed: bool) -> None:
    """Put the payload in the weight's place, and its description beside it; None if it would not get smaller."""
    if hasattr(layer, "netweight"):
        return
    weight = layer.weight.data
    with torch.inference_mode(False), torch.no_grad():
        stored = CompressedStorage.of(weight, fixed=fixed)
    layer.netweight = stored if stored.payload.nbytes < weight.nbytes else None
    if layer.netweight is not None:
        stored.payload = nn.Parameter(stored.payload, requires_grad=False)
        layer.weight = stored.payload


def _product(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    stored = layer.netweight
    if stored is None:
        return F.linear(x, layer.weight, bias)
    if stored.fixed and x.dtype == stored.dtype:
        product: torch.Tensor = linear_fixed(x, layer.weight, list(stored.shape), bias)
        return product
    weight = decode(layer.weight, *stored.form)
    return F.linear(x, weight.to(x.dtype), bias)
