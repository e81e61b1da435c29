"""Tiny models of the Kimi family for tests: configs, random tensors by release name, filling a model.

The tensors are scaled so that nothing saturates: weights by 1 / sqrt(fan in), a routing bias of noise 0.1,
A_log in [0, 1.5] and dt_bias around -1, so that the recurrent state matters and is forgotten slowly.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dwdp.model.config import ModelConfig
from dwdp.model.decoder import KimiK3Model

_TINY_K3: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "attn_res_block_size": 2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
    },
}

_TINY_48B: dict[str, Any] = {
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "routed_scaling_factor": 2.446,
    "attn_res_block_size": None,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "linear_attn_config": {
        "gate_lower_bound": None,
        "use_full_rank_gate": False,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
}

# Changes that give the tiny K3 widths which every kernel takes: those of packed experts are multiples of 128.
WIDER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "routed_expert_hidden_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_attn_config": {"head_dim": 64},
}
TWO_LAYERS: dict[str, Any] = {
    **WIDER,
    "num_hidden_layers": 2,
    "linear_attn_config": {"head_dim": 64, "kda_layers": [1], "full_attn_layers": [2]},
}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in changes.items():
        if isinstance(value, dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


def tiny_config_dict(**changes: Any) -> dict[str, Any]:
    """Text config of the tiny K3 as in config.json; a dict as a change is merged into its section."""
    return _merged(_TINY_K3, changes)


def tiny_48b_config_dict(**changes: Any) -> dict[str, Any]:
    """The Kimi-Linear predecessor: softplus gate, low-rank output gate, no latent, SwiGLU, plain residual."""
    return _merged(_merged(_TINY_K3, _TINY_48B), changes)


def tiny_model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config_dict(**changes))


def release_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Release tensor name (without prefix) -> logical shape, plain experts one by one, A_log unpadded."""
    model = KimiK3Model(config, dtype=torch.float32, device="meta")
    shapes = {}
    for name, parameter in model.named_parameters():
        if ".block_sparse_moe.experts." not in name:
            shapes[name] = tuple(parameter.shape)
    inter, width = config.moe_intermediate_size, config.expert_width
    for layer in config.moe_layer_indices:
        for e in range(config.num_experts):
            for w, shape in (("w1", (inter, width)), ("w2", (width, inter)), ("w3", (inter, width))):
                shapes[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{w}.weight"] = shape
    return shapes


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """fp32 tensors by release name, a function of the seed. A_log is zero-padded to 32, as released."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(release_shapes(config).items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            value = 1.5 * torch.rand(shape, generator=generator)
            value = torch.cat([value, torch.zeros(-value.numel() % 32)])
        elif name.endswith("dt_bias"):
            value = -1.0 + 0.5 * noise
        elif name.endswith("e_score_correction_bias"):
            value = 0.1 * noise
        elif "norm" in name.rsplit(".", 2)[-2]:
            value = 1.0 + 0.1 * noise
        elif "conv1d" in name:
            value = 0.5 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise * shape[-1] ** -0.5
        tensors[name] = value
    return tensors


def fill_model(model: KimiK3Model, tensors: dict[str, Tensor]) -> KimiK3Model:
    """Copy release tensors (plain experts) into a model of any dtype; every tensor must find its place."""
    left = dict(tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".block_sparse_moe.experts." not in name:
                value = left.pop(name)
                parameter.copy_(value[: parameter.shape[0]] if name.endswith("A_log") else value)
        for experts in model.moe_layers():
            inter = experts.w2.shape[-1]
            for row in range(experts.num_rows):
                prefix = f"model.layers.{experts.layer_index}.block_sparse_moe.experts."
                prefix += str(experts.first_expert + row)
                experts.w13[row, :inter] = left.pop(f"{prefix}.w1.weight")
                experts.w13[row, inter:] = left.pop(f"{prefix}.w3.weight")
                experts.w2[row] = left.pop(f"{prefix}.w2.weight")
    assert not left, sorted(left)
    return model


def tiny_model(
    config: ModelConfig, tensors: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> KimiK3Model:
    """A filled model on the CPU that needs no gradient."""
    model = KimiK3Model(config, dtype=dtype, device="cpu").requires_grad_(False)
    return fill_model(model, random_tensors(config) if tensors is None else tensors)


def token_ids(count: int, batch: int = 1, seed: int = 1, vocab: int = 320) -> Tensor:
    """Random ids [batch, count]."""
    return torch.randint(vocab, (batch, count), generator=torch.Generator().manual_seed(seed))


def chunked(model: KimiK3Model, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of `ids` fed in pieces that end at `cuts` (and at the end), with one state."""
    state = model.new_state(ids.shape[0], ids.shape[1])
    edges = [0, *cuts, ids.shape[1]]
    return torch.cat([model(ids[:, a:b], state) for a, b in zip(edges, edges[1:])], 1)
