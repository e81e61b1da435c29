"""The decoder: embedding, layers with attention residuals, output head; DWDP's hooks are called here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dwdp.errors import DwdpError, ModelReleasedError, ModelUnusableError
from dwdp.kernels.batch import PackedBatch
from dwdp.kernels.select import use_triton
from dwdp.model.config import ModelConfig
from dwdp.model.kda import KimiDeltaAttention
from dwdp.model.mla import LatentAttention
from dwdp.model.moe import GatedMLP, LatentMoE, RoutedExperts
from dwdp.model.norms import RMSNorm, normal_init, residual_mix
from dwdp.model.state import ModelState


def _dense_manager() -> Any:
    """The dense DWDP manager of this rank context, or None; imported late, the planner builds no runtime."""
    from dwdp.runtime.manager import current_dense_manager

    return current_dense_manager()


class DecoderLayer(nn.Module):
    """One layer: attention weights are read only between h1 and h2, MoE-dense ones between h1 and h3."""

    # Plain tensor attributes (neither parameter nor buffer) that may move with their segment: there are none.
    dense_dwdp_allowed: frozenset[str] = frozenset()
    # Never moved: the routing bias is rewritten by load balancing and read in fp32.
    dense_dwdp_excluded: frozenset[str] = frozenset({"e_score_correction_bias"})

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        dtype: torch.dtype,
        expert_format: str,
        expert_range: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = dict(dtype=dtype, device=device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index, self.eps = index, eps
        self.is_moe = config.is_moe(index)
        self.dense = _dense_manager()
        attention = LatentAttention if config.layer_kind(index) == "mla" else KimiDeltaAttention
        self.self_attn = attention(config, **where)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(
                config, index, expert_format=expert_format, expert_range=expert_range, **where
            )
        else:
            self.mlp = GatedMLP(config, config.intermediate_size, **where)
        self.input_layernorm = RMSNorm(hidden, eps, **where)
        self.post_attention_layernorm = RMSNorm(hidden, eps, **where)
        block = config.attn_res_block_size
        self.has_residual_mix = block is not None
        self.starts_block = block is not None and index % block == 0
        if self.has_residual_mix:
            self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False, **where)
            self.self_attention_res_norm = RMSNorm(hidden, eps, **where)
            self.mlp_res_proj = nn.Linear(hidden, 1, bias=False, **where)
            self.mlp_res_norm = RMSNorm(hidden, eps, **where)

    def dense_dwdp_roots(self) -> dict[str, list[nn.Module]]:
        """Segment -> modules whose weights dense DWDP may spread; empty for a layer without MoE."""
        if not self.is_moe:
            return {}
        return {"attn": [self.self_attn], "moe": self.block_sparse_moe.dense_roots()}

    def forward(
        self, prefix: Tensor, snapshots: list[Tensor], state: Any = None, batch: PackedBatch | None = None
    ) -> Tensor:
        """prefix: running sum [B, T, hidden], or [1, N, hidden] of a packed batch -> the next. A block's first layer
        appends to `snapshots`."""
        if self.dense is not None:
            self.dense.h1(self.index)
        x = self._mixed(prefix, snapshots, "self_attention")
        attended = self.self_attn(self.input_layernorm(x), state, batch)
        if self.dense is not None:
            self.dense.h2(self.index)
        if self.starts_block:
            # The snapshot is the unmixed sum, and the new block's sum starts at the attention output.
            snapshots.append(prefix)
            prefix = attended
        else:
            prefix = prefix + attended
        x = self.post_attention_layernorm(self._mixed(prefix, snapshots, "mlp"))
        if self.is_moe:
            out = self.block_sparse_moe(x)
        else:
            out = self.mlp(x)
        if self.dense is not None:
            self.dense.h3(self.index)
        return prefix + out

    def _mixed(self, prefix: Tensor, snapshots: list[Tensor], which: str) -> Tensor:
        if not self.has_residual_mix:
            return prefix
        proj, norm = getattr(self, f"{which}_res_proj"), getattr(self, f"{which}_res_norm")
        return residual_mix(prefix, snapshots, proj.weight, norm.weight, self.eps)


class TextModel(nn.Module):
    """Embedding, layers and final norm; names below `model.` as in the release."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: Any, **experts: Any) -> None:
        super().__init__()
        where: dict[str, Any] = dict(dtype=dtype, device=device)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.embed_tokens = nn.Embedding(
            config.vocab_size, hidden, _weight=normal_init(torch.empty(config.vocab_size, hidden, **where))
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, **where, **experts) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps, **where)
        self.has_residual_mix = config.attn_res_block_size is not None
        if self.has_residual_mix:
            self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False, **where)
            self.output_attn_res_norm = RMSNorm(hidden, eps, **where)

    def forward(self, ids: Tensor, state: ModelState | None, batch: PackedBatch | None = None) -> Tensor:
        prefix, snapshots = self.embed_tokens(ids), []
        for layer in self.layers:
            prefix = layer(prefix, snapshots, None if state is None else state.layers[layer.index], batch)
        if self.has_residual_mix:
            proj, norm = self.output_attn_res_proj.weight, self.output_attn_res_norm.weight
            prefix = residual_mix(prefix, snapshots, proj, norm, self.eps)
        return self.norm(prefix)


class KimiK3Model(nn.Module):
    """Kimi-K3 (and Kimi-Linear) text model.

    `named_parameters()` are the release's names without `language_model.`, but for the routed experts: layer
    N has its tables in `model.layers.N.block_sparse_moe.experts` (see `RoutedExperts`). Parameters that the
    release keeps in fp32 (A_log, dt_bias, convolutions, o_norm, routing bias) are fp32 in a bf16 model too.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        expert_format: str = "plain",
        expert_range: tuple[int, int] | None = None,
        device: torch.device | str = "meta",
    ) -> None:
        """expert_range: experts (start, end) whose rows this rank holds until they are rebound; None: all."""
        super().__init__()
        self.config, self.dtype, self.expert_format = config, dtype, expert_format
        self.released = False
        self.unusable: BaseException | None = None
        self.checkpoint_config: dict[str, Any] | None = None  # the config.json that it was loaded with
        self.dense = _dense_manager()
        self.model = TextModel(
            config,
            dtype=dtype,
            device=device,
            expert_format=expert_format,
            expert_range=(0, config.num_experts) if expert_range is None else expert_range,
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch. Raises before anything is changed when DWDP has moved these weights, or had them."""
        from dwdp.runtime.manager import refuse_weight_change

        refuse_weight_change(self)
        if any(experts.dwdp is not None for experts in self.moe_layers()):
            raise DwdpError(
                "expert DWDP shares these experts with other ranks (peers' rows are read-only here): they cannot be "
                "loaded in place; build and load a new model"
            )
        return super().load_state_dict(*args, **kwargs)

    def moe_layers(self) -> list[RoutedExperts]:
        """The routed experts of every MoE layer, in model order."""
        return [layer.block_sparse_moe.experts for layer in self.model.layers if layer.is_moe]

    def new_state(self, batch: int, capacity: int) -> ModelState:
        """Empty state of `batch` sequences with room for `capacity` tokens each, on the model's device."""
        device = self.lm_head.weight.device
        return ModelState.zeros(self.config, batch, capacity, dtype=self.dtype, device=device)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """ids: [B, T], on any device -> fp32 logits [B, T, vocab], or [B, 1, vocab] of the last token with
        `last_only`, on the model's.

        Packed: ids [N], the new tokens of sequence after sequence, with how many each has in `lengths` ->
        [N, vocab], or [B, vocab] of the last token of each. slots: which sequence of the state each one is, 0, 1, ...
        by default; the state's others stay as they are. Results are those of one sequence at a time but for the
        rounding of matrix products, whose order of sums depends on how many rows they have.

        With `state` every sequence goes on from its own length and the state is updated in place; a forward
        that raises leaves it as it was. Without, sequences start empty and the result is differentiable.
        Raises ModelReleasedError once the weights are released, ModelUnusableError on a model marked unusable,
        ValueError when ids and state do not fit, ConfigError when kernels are asked for that cannot run here.
        """
        if self.released:
            raise ModelReleasedError("the weights of this model were released; build and load a new one")
        if self.unusable is not None:
            raise ModelUnusableError(f"this model cannot run: {self.unusable}") from self.unusable
        shape = self._shape(ids, state, lengths, slots)
        weight = self.lm_head.weight
        batch = None
        if lengths is None and not use_triton(weight):
            if state is not None:
                state.begin(*shape)
        else:  # kernels know packed batches only
            counts = [shape[1]] * shape[0] if lengths is None else lengths
            if state is None:
                batch = PackedBatch.of(counts, device=weight.device)
            else:
                batch = state.begin_packed(counts, slots, weight.device)
            ids = ids.reshape(1, -1)
        if self.dense is not None:
            self.dense.h0()
        hidden = self.model(ids.to(weight.device), state, batch)
        if state is not None and batch is not None:
            state.commit_packed(batch)
        elif state is not None:
            state.commit(shape[1])
        if last_only:
            hidden = hidden[:, -1:] if batch is None else hidden[:, batch.cu_seqlens[1:] - 1]
        logits = self.lm_head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits[0] if lengths is not None else logits.view(shape[0], -1, logits.shape[-1])

    def _shape(
        self,
        ids: Tensor,
        state: ModelState | None,
        lengths: Sequence[int] | None,
        slots: Sequence[int] | None,
    ) -> tuple[int, int]:
        """(sequences, tokens of each or of all); raises ValueError where ids, lengths and state do not fit."""
        if lengths is not None:
            if ids.ndim != 1 or ids.numel() != sum(lengths) or ids.numel() == 0:
                raise ValueError(
                    f"ids must be the {sum(lengths)} tokens of lengths {list(lengths)}, not {list(ids.shape)}"
                )
            if slots is not None and state is None:
                raise ValueError("slots are places of a state, and there is none")
            return len(lengths), ids.numel()
        if slots is not None:
            raise ValueError("slots belong to a packed batch, which says its lengths")
        if ids.ndim != 2 or ids.numel() == 0:
            raise ValueError(f"ids must be [batch, tokens] with at least one token, not {list(ids.shape)}")
        if state is not None and state.batch != ids.shape[0]:
            raise ValueError(f"the state holds {state.batch} sequences but the batch has {ids.shape[0]}")
        return ids.shape[0], ids.shape[1]
