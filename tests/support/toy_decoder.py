"""A small decoder that declares dense roots and calls the hooks as the model does.

Its forward needs no numerics: a reader says what it found in a layer's weights, so that a test can check bytes.
"""

from __future__ import annotations

import torch
from torch import nn

from dwdp.runtime.manager import current_dense_manager


class Weights(nn.Module):
    """Parameters of the given shapes, float32 unless said otherwise."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=(dtypes or {}).get(name, torch.float32))
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class ToyLayer(nn.Module):
    """A decoder layer; layer 0 has no MoE and so no roots.

    Attention: q, a plain attribute `rows` over a part of q, a bf16 o, an excluded `scratch`. MoE: gate with an
    excluded routing bias, shared expert.
    """

    dense_dwdp_allowed = frozenset({"rows"})
    dense_dwdp_excluded = frozenset({"scratch", "bias"})

    def __init__(self, index: int, width: int, *, moe: bool) -> None:
        super().__init__()
        self.index, self.moe = index, moe
        self.dense = current_dense_manager()
        odd = width + index % 3  # layers differ in size
        self.attn = Weights({"q": (odd, width), "o": (width, 7)}, {"o": torch.bfloat16})
        self.attn.rows = self.attn.q[1:3]
        self.attn.scratch = torch.zeros(width, width)
        self.norm = Weights({"weight": (width,)})
        if moe:
            self.gate = Weights({"weight": (5, width)})
            self.gate.register_buffer("bias", torch.zeros(width * width))
            self.shared = Weights({"up": (2 * width, odd), "down": (width, 2 * width)})
        else:
            self.mlp = Weights({"up": (width, width)})

    def dense_dwdp_roots(self) -> dict[str, list[nn.Module]]:
        return {"attn": [self.attn], "moe": [self.gate, self.shared]} if self.moe else {}

    def weights(self, segment: str) -> dict[str, torch.Tensor]:
        """The tensors that a segment's kernels read."""
        if segment == "attn":
            return {"q": self.attn.q, "o": self.attn.o, "rows": self.attn.rows}
        return {"gate": self.gate.weight, "up": self.shared.up, "down": self.shared.down}


class ToyModel(nn.Module):
    """num_layers MoE layers behind layer 0. `seed` fills every weight."""

    def __init__(self, num_layers: int = 3, width: int = 24, *, seed: int = 0) -> None:
        super().__init__()
        self.dense = current_dense_manager()
        self.released, self.unusable = False, None
        self.layers = nn.ModuleList(ToyLayer(i, width, moe=i > 0) for i in range(num_layers + 1))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def forward(self, read=None, at=None):
        """read(layer, segment) stands for the kernels; at(hook, index) is called before each hook and read."""
        read, at = read or (lambda *_: None), at or (lambda *_: None)
        if self.dense is not None:
            at("H0", None)
            self.dense.h0()
        for layer in self.layers:
            for name, segment in (("h1", "attn"), ("h2", "moe"), ("h3", None)):
                at(name.upper(), layer.index)
                if layer.dense is not None:
                    getattr(layer.dense, name)(layer.index)
                if segment is not None and layer.moe:
                    at("read", layer.index)
                    read(layer, segment)


def value_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's values as bytes, NaNs included."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def snapshot(model: ToyModel) -> dict[tuple[int, str, str], bytes]:
    """(layer, segment, name) -> bytes of every weight that may move."""
    return {
        (layer.index, segment, name): value_bytes(tensor)
        for layer in model.layers
        if layer.moe
        for segment in ("attn", "moe")
        for name, tensor in layer.weights(segment).items()
    }
