"""Model configuration of the Kimi family (Kimi-K3 and the Kimi-Linear predecessor), as read from config.json.

Imports no torch: the planner and the launch gate use it where torch may be absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dwdp.errors import ConfigError

_MODEL_TYPES = ("kimi_k3", "kimi_linear")
_ACTIVATIONS = ("situ", "silu")
_LORA_NORM_EPS = 1e-6
# Far above any model. Whatever a config.json says, building its shapes takes moments and no size overflows 64 bits.
_MOST_WIDTH = 1 << 20
_MOST_HEADS = 1 << 16
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 100_000


@dataclass(frozen=True)
class LinearAttentionConfig:
    """KDA part of the configuration; the two layer lists are 1-based, as in the release."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    use_full_rank_gate: bool
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]

    @property
    def width(self) -> int:
        """Channels of one of q, k, v: heads x head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """Frozen text configuration; field names are the release's. Build it with `from_dict`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    activation_situ_beta: float | None
    activation_situ_linear_beta: float | None
    rms_norm_eps: float
    lora_norm_eps: float
    max_position_embeddings: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    moe_renormalize: bool
    routed_scaling_factor: float
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    attn_res_block_size: int | None
    linear_attn_config: LinearAttentionConfig
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization_config: dict[str, Any] | None = field(default=None, compare=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Read a config.json: the release's top level with `text_config`, or a text config alone.

        Raises ConfigError (a ValueError) that names every missing field, or every field with a value that
        cannot be served.
        """
        return _Reader(data).read()

    def layer_kind(self, index: int) -> str:
        """ "mla" or "kda" for the 0-based layer `index`."""
        return "mla" if index + 1 in self.linear_attn_config.full_attn_layers else "kda"

    def is_moe(self, index: int) -> bool:
        """Whether the 0-based layer `index` has routed experts (else a dense MLP)."""
        return self.num_experts > 0 and index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    @property
    def moe_layer_indices(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert: the latent width, or the hidden size without one."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def mla_cache_width(self) -> int:
        """Numbers cached per token and MLA layer: the latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class _Reader:
    """Collects what is wrong with a config, so that one error lists all of it."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"the model config must be a JSON object, not {type(data).__name__}")
        self.top = data
        text = data.get("text_config", data)
        if not isinstance(text, dict):
            raise ConfigError(f"text_config must be a JSON object, not {type(text).__name__}")
        self.text: dict[str, Any] = text
        self.missing: list[str] = []
        self.problems: list[str] = []

    def read(self) -> ModelConfig:
        for where, source in (("", self.top), ("text_config.", self.text)):
            kind = source.get("model_type")
            if kind not in _MODEL_TYPES:
                raise ConfigError(f"{where}model_type is {kind!r}; this program serves {' and '.join(_MODEL_TYPES)}")
        linear = self.text.get("linear_attn_config")
        if not isinstance(linear, dict):
            raise ConfigError("the model config lacks linear_attn_config (a JSON object)")
        self._refuse_unsupported()
        act = self.text.get("hidden_act")
        if act is None:
            self.missing.append("hidden_act")
        elif act not in _ACTIVATIONS:
            self.problems.append(f"hidden_act {act!r} is unknown (known: {', '.join(_ACTIVATIONS)})")
        num_experts = self._int("num_experts", default=0, least=0, most=_MOST_EXPERTS)
        values = dict(
            vocab_size=self._int("vocab_size"),
            hidden_size=self._int("hidden_size"),
            num_hidden_layers=self._int("num_hidden_layers", most=_MOST_LAYERS),
            num_attention_heads=self._int("num_attention_heads", most=_MOST_HEADS),
            intermediate_size=self._int("intermediate_size"),
            hidden_act=act,
            activation_situ_beta=self._float("activation_situ_beta", required=act == "situ", above=0.0),
            activation_situ_linear_beta=self._float("activation_situ_linear_beta", above=0.0),
            rms_norm_eps=self._float("rms_norm_eps", required=True, above=0.0),
            lora_norm_eps=self._float("lora_norm_eps", above=0.0) or _LORA_NORM_EPS,
            max_position_embeddings=self._int("max_position_embeddings", default=1 << 20, most=1 << 40),
            q_lora_rank=self._int("q_lora_rank", default=None),
            kv_lora_rank=self._int("kv_lora_rank"),
            qk_nope_head_dim=self._int("qk_nope_head_dim"),
            qk_rope_head_dim=self._int("qk_rope_head_dim"),
            v_head_dim=self._int("v_head_dim"),
            mla_use_output_gate=self._bool("mla_use_output_gate", False),
            first_k_dense_replace=self._int("first_k_dense_replace", default=0, least=0),
            moe_layer_freq=self._int("moe_layer_freq", default=1),
            num_experts=num_experts,
            num_experts_per_token=self._int("num_experts_per_token", default=0, least=0),
            num_shared_experts=self._int("num_shared_experts", default=0, least=0, most=_MOST_HEADS),
            moe_intermediate_size=self._int("moe_intermediate_size", default=0, least=0),
            moe_renormalize=self._bool("moe_renormalize", True),
            routed_scaling_factor=self._float("routed_scaling_factor", above=0.0) or 1.0,
            routed_expert_hidden_size=self._int("routed_expert_hidden_size", default=None),
            latent_moe_use_norm=self._bool("latent_moe_use_norm", False),
            attn_res_block_size=self._int("attn_res_block_size", default=None),
            linear_attn_config=self._linear(linear),
            bos_token_id=self._token("bos_token_id"),
            eos_token_ids=self._eos(),
            pad_token_id=self._token("pad_token_id"),
            quantization_config=self.text.get("quantization_config") or self.top.get("quantization_config"),
        )
        if self.missing:
            raise ConfigError("the model config lacks " + ", ".join(self.missing))
        self._experts(values)
        if not self.problems:
            self._layers(values["num_hidden_layers"], values["linear_attn_config"])
        if self.problems:
            raise ConfigError("the model config cannot be served: " + "; ".join(self.problems))
        return ModelConfig(**values)

    # -- single fields ------------------------------------------------------------------------------------

    _REQUIRED = object()

    def _int(
        self,
        name: str,
        default: Any = _REQUIRED,
        least: int = 1,
        most: int = _MOST_WIDTH,
        source: dict | None = None,
    ) -> Any:
        value = (self.text if source is None else source).get(name)
        label = name if source is None else f"linear_attn_config.{name}"
        if value is None:
            if default is not self._REQUIRED:
                return default
            self.missing.append(label)
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.problems.append(f"{label} must be an integer of at least {least}, not {value!r}")
        elif value > most:
            self.problems.append(f"{label} must be at most {most}, not {value!r}")
        else:
            return value
        return None

    def _float(self, name: str, required: bool = False, above: float | None = None) -> float | None:
        value = self.text.get(name)
        if value is None:
            if required:
                self.missing.append(name)
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.problems.append(f"{name} must be a number, not {value!r}")
            return None
        if above is not None and value <= above:
            self.problems.append(f"{name} must be above {above:g}, not {value!r}")
        return float(value)

    def _bool(self, name: str, default: bool, source: dict | None = None) -> bool:
        value = (self.text if source is None else source).get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, not {value!r}")
        return value

    def _token(self, name: str) -> int | None:
        value = self.top.get(name, self.text.get(name))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            self.problems.append(f"{name} must be a token id, not {value!r}")
        return value

    def _eos(self) -> tuple[int, ...]:
        value = self.top.get("eos_token_id", self.text.get("eos_token_id"))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            self.problems.append(f"eos_token_id must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    # -- rules that span fields -----------------------------------------------------------------------------

    def _linear(self, linear: dict[str, Any]) -> LinearAttentionConfig:
        bound = linear.get("gate_lower_bound")
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound >= 0):
            self.problems.append(f"linear_attn_config.gate_lower_bound must be null or below 0, not {bound!r}")
            bound = None
        lists = []
        for name in ("kda_layers", "full_attn_layers"):
            value = linear.get(name)
            if value is None:
                self.missing.append(f"linear_attn_config.{name}")
                value = []
            elif not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
                self.problems.append(f"linear_attn_config.{name} must be a list of layer numbers, not {value!r}")
                value = []
            lists.append(tuple(value))
        return LinearAttentionConfig(
            num_heads=self._int("num_heads", most=_MOST_HEADS, source=linear),
            head_dim=self._int("head_dim", source=linear),
            short_conv_kernel_size=self._int("short_conv_kernel_size", default=4, least=2, source=linear),
            gate_lower_bound=None if bound is None else float(bound),
            use_full_rank_gate=self._bool("use_full_rank_gate", False, source=linear),
            kda_layers=lists[0],
            full_attn_layers=lists[1],
        )

    def _layers(self, num_layers: int, linear: LinearAttentionConfig) -> None:
        kda, full = linear.kda_layers, linear.full_attn_layers
        everything = set(range(1, num_layers + 1))
        for what, layers in (
            ("are in both kda_layers and full_attn_layers", set(kda) & set(full)),
            ("are in neither kda_layers nor full_attn_layers", everything - set(kda) - set(full)),
            (f"are outside 1..{num_layers} (the lists count from 1)", (set(kda) | set(full)) - everything),
        ):
            if layers:
                self.problems.append(f"layers {sorted(layers)} {what}")
        for name, layers in (("kda_layers", kda), ("full_attn_layers", full)):
            if len(set(layers)) != len(layers):
                self.problems.append(f"linear_attn_config.{name} names a layer twice")

    def _experts(self, values: dict[str, Any]) -> None:
        num_experts, top_k = values["num_experts"], values["num_experts_per_token"]
        if not num_experts:
            return
        if not top_k:
            self.problems.append(f"num_experts_per_token is {top_k!r} with num_experts {num_experts}")
        elif top_k > num_experts:
            self.problems.append(f"num_experts_per_token {top_k} is more than num_experts {num_experts}")
        if not values["moe_intermediate_size"]:
            self.problems.append(f"moe_intermediate_size is missing with num_experts {num_experts}")
        if values["latent_moe_use_norm"] and values["routed_expert_hidden_size"] is None:
            self.problems.append("latent_moe_use_norm is true but routed_expert_hidden_size is missing")

    def _refuse_unsupported(self) -> None:
        only = {
            "mla_use_nope": (True, False),
            "moe_router_activation_func": ("sigmoid", "sigmoid"),
            "topk_method": ("noaux_tc", "noaux_tc"),
            "num_expert_group": (1, 1),
            "topk_group": (1, 1),
            "tie_word_embeddings": (False, False),
            "num_nextn_predict_layers": (0, 0),
        }
        for name, (served, absent) in only.items():
            value = self.text.get(name)
            if (absent if value is None else value) != served:
                self.problems.append(f"{name} is {value!r}; only {served!r} is served")
        heads, kv_heads = (self.text.get(n) for n in ("num_attention_heads", "num_key_value_heads"))
        if kv_heads is not None and kv_heads != heads:
            self.problems.append(f"num_key_value_heads {kv_heads!r} differs from num_attention_heads {heads!r}")
