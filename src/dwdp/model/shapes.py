"""Shape and bytes of every tensor of a model in bf16, from its configuration alone. Imports no torch.

The names, shapes and dtypes are those of `model/decoder.py`; a test holds the two equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dwdp.model.config import ModelConfig

_ITEMSIZE = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TensorShape:
    """dtype: torch's name without the prefix."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * _ITEMSIZE[self.dtype]


Tensors = dict[str, TensorShape]


def expert_tables(config: ModelConfig, expert_format: str) -> Tensors:
    """Table name -> one expert's row, for the tables that expert DWDP moves. expert_format: plain, mxfp4, nvfp4.

    Raises ValueError for widths that the format cannot pack.
    """
    width, inter = config.expert_width, config.moe_intermediate_size
    if expert_format == "plain":
        return {"w13": TensorShape((2 * inter, width)), "w2": TensorShape((width, inter))}
    group, scale = {"mxfp4": (32, "uint8"), "nvfp4": (16, "float8_e4m3fn")}[expert_format]
    if width % group or inter % group:
        raise ValueError(f"{expert_format} needs widths in multiples of {group}, not {width} and {inter}")
    return {
        "w13": TensorShape((2 * inter, width // 2), "uint8"),
        "w13_scale": TensorShape((2 * inter, width // group), scale),
        "w2": TensorShape((width, inter // 2), "uint8"),
        "w2_scale": TensorShape((width, inter // group), scale),
    }


def small_expert_tensors(config: ModelConfig, expert_format: str) -> Tensors:
    """Name -> one expert's row, for the tensors that every rank holds of all experts."""
    if expert_format != "nvfp4":
        return {}
    return {"w13_scale_2": TensorShape((2,), "float32"), "w2_scale_2": TensorShape((), "float32")}


def layer_tensors(config: ModelConfig, index: int) -> Tensors:
    """Name below `model.layers.N.` -> tensor of one layer, its routed experts left out."""
    hidden = config.hidden_size
    tensors = _below("self_attn", _mla(config) if config.layer_kind(index) == "mla" else _kda(config))
    if config.is_moe(index):
        tensors |= _below("block_sparse_moe", _moe(config))
    else:
        tensors |= _below("mlp", _gated_mlp(hidden, config.intermediate_size))
    tensors |= _weights(input_layernorm=(hidden,), post_attention_layernorm=(hidden,))
    if config.attn_res_block_size is not None:
        tensors |= _weights(self_attention_res_proj=(1, hidden), self_attention_res_norm=(hidden,))
        tensors |= _weights(mlp_res_proj=(1, hidden), mlp_res_norm=(hidden,))
    return tensors


def model_tensors(config: ModelConfig) -> Tensors:
    """Release name (no prefix) -> tensor, for everything but the routed experts, in the order of the model's."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors = {"model.embed_tokens.weight": TensorShape((vocab, hidden))}
    for index in range(config.num_hidden_layers):
        tensors |= _below(f"model.layers.{index}", layer_tensors(config, index))
    tensors["model.norm.weight"] = TensorShape((hidden,))
    if config.attn_res_block_size is not None:
        tensors["model.output_attn_res_proj.weight"] = TensorShape((1, hidden))
        tensors["model.output_attn_res_norm.weight"] = TensorShape((hidden,))
    return tensors | {"lm_head.weight": TensorShape((vocab, hidden))}


def layer_flops_per_token(config: ModelConfig, index: int) -> int:
    """Floating-point operations that a token costs in one layer's matrix products.

    2 x the elements of every matrix of the layer (attention projections, router, latent projections, shared
    experts or dense MLP) + top_k x 2 x the elements of one routed expert's matrices. Left out is what grows
    with the context or is small beside it: attention scores, the delta rule, convolutions, norms.
    """
    matrices = sum(tensor.numel for tensor in layer_tensors(config, index).values() if len(tensor.shape) == 2)
    if config.is_moe(index):
        expert = sum(table.numel for table in expert_tables(config, "plain").values())
        matrices += config.num_experts_per_token * expert
    return 2 * matrices


def state_bytes_per_sequence(config: ModelConfig) -> int:
    """Bytes of a sequence's KDA state, whatever its length: bf16 convolution rows and the fp32 recurrence."""
    linear = config.linear_attn_config
    conv = TensorShape((linear.short_conv_kernel_size - 1, 3 * linear.width))
    recurrent = TensorShape((linear.num_heads, linear.head_dim, linear.head_dim), "float32")
    return _num_layers(config, "kda") * (conv.nbytes + recurrent.nbytes)


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of a token's rows in the bf16 cache of all MLA layers."""
    return _num_layers(config, "mla") * TensorShape((config.mla_cache_width,)).nbytes


def _num_layers(config: ModelConfig, kind: str) -> int:
    return sum(config.layer_kind(index) == kind for index in range(config.num_hidden_layers))


def _below(name: str, tensors: Tensors) -> Tensors:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def _weights(**shapes: tuple[int, ...]) -> Tensors:
    return {f"{name}.weight": TensorShape(shape) for name, shape in shapes.items()}


def _gated_mlp(hidden: int, width: int) -> Tensors:
    return _weights(gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))


def _moe(config: ModelConfig) -> Tensors:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    tensors = _weights(gate=(config.num_experts, hidden))
    tensors["gate.e_score_correction_bias"] = TensorShape((config.num_experts,), "float32")
    if latent is not None:
        tensors |= _weights(routed_expert_down_proj=(latent, hidden), routed_expert_up_proj=(hidden, latent))
    if config.latent_moe_use_norm:
        tensors |= _weights(routed_expert_norm=(latent,))
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        tensors |= _below("shared_experts", _gated_mlp(hidden, width))
    return tensors


def _kda(config: ModelConfig) -> Tensors:
    hidden, linear = config.hidden_size, config.linear_attn_config
    width, head = linear.width, linear.head_dim
    conv = (width, 1, linear.short_conv_kernel_size)
    tensors = {
        name: TensorShape(shape, "float32") for name, shape in (("A_log", (linear.num_heads,)), ("dt_bias", (width,)))
    }
    tensors |= _weights(q_proj=(width, hidden), k_proj=(width, hidden), v_proj=(width, hidden))
    tensors |= {f"{name}_conv1d.weight": TensorShape(conv, "float32") for name in "qkv"}
    tensors |= _weights(f_a_proj=(head, hidden), f_b_proj=(width, head), b_proj=(linear.num_heads, hidden))
    if linear.use_full_rank_gate:
        tensors |= _weights(g_proj=(width, hidden))
    else:
        tensors |= _weights(g_a_proj=(head, hidden), g_b_proj=(width, head))
    tensors["o_norm.weight"] = TensorShape((head,), "float32")
    return tensors | _weights(o_proj=(hidden, width))


def _mla(config: ModelConfig) -> Tensors:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query, rank = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank
    if rank is None:
        tensors = _weights(q_proj=(query, hidden))
    else:
        tensors = _weights(q_a_proj=(rank, hidden), q_a_layernorm=(rank,), q_b_proj=(query, rank))
    tensors |= _weights(
        kv_a_proj_with_mqa=(config.mla_cache_width, hidden),
        kv_a_layernorm=(latent,),
        kv_b_proj=(heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
    )
    if config.mla_use_output_gate:
        tensors |= _weights(g_proj=(heads * config.v_head_dim, hidden))
    return tensors | _weights(o_proj=(hidden, heads * config.v_head_dim))
