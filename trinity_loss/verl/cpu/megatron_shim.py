"""What Megatron-core needs on a machine without CUDA, for the whole process it is applied in.

Replaced: device arguments that say cuda, three functions of ``torch.cuda``, and the transformer layer, whose
Transformer Engine parts become Megatron's local ones with torch's attention. Everything that has to do with
the loss stays stock: verl's engine, the schedules, DDP, the reduction of gradients, the optimizer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            # Megatron's optimizers compare the names of CUDA tensor types.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def redirect() -> None:
    """Redirect CUDA to the CPU; once, before any engine is made."""
    from verl.utils.device import get_torch_device

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    # verl seeds Megatron's CUDA generators where it counts a device; there are none to seed.
    get_torch_device().device_count = lambda: 0
    CudaMeansCpu().__enter__()


def register_bridge() -> None:
    """Make mbridge build Qwen2 from Megatron's local layers with torch's attention, without Transformer Engine."""
    from mbridge.core import register_model
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import MegatronModule

    class TorchAttention(MegatronModule):
        """Causal attention by torch, for padded [s, b, h, d] and packed [t, h, d] inputs."""

        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            """From [b, h, s, d] each to [b, h, s, d]; keys and values may have fewer heads."""
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
            )

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            qkv = query, key, value
            if packed_seq_params is None:
                # Padding stands on the right, where causal attention does not look.
                return self.attend(*(x.permute(1, 2, 0, 3) for x in qkv)).permute(2, 0, 1, 3).flatten(2)
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
            sequences = [
                self.attend(*(x[start:end].transpose(0, 1).unsqueeze(0) for x in qkv)).squeeze(0).transpose(0, 1)
                for start, end in pairwise(ends)
            ]
            return torch.cat(sequences).flatten(1)

    @register_model("qwen2")
    class LocalQwen2Bridge(Qwen2Bridge):
        """mbridge's Qwen2 with local layers, whose norms are modules of their own."""

        _MLP_MAPPING = {  # noqa: RUF012
            **Qwen2Bridge._MLP_MAPPING,
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        }

        def _weight_name_mapping_other(self, name: str) -> list[str]:
            layer, _, parameter = name.removeprefix("decoder.layers.").partition(".")
            if parameter != "input_layernorm.weight":
                raise NotImplementedError(f"no name in the Hugging Face model is known for {name}")
            return [f"model.layers.{layer}.input_layernorm.weight"]

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = TorchAttention
            return spec
