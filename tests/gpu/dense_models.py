"""Models for the measurements of dense DWDP: Kimi-K3's decoder layers at full width, with experts that take no room.

The weights are random. They are made on the GPU, the same on every rank, or lie in a checkpoint that was written fast.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from dwdp.config.schema import DenseConfig
from dwdp.errors import DwdpError
from dwdp.model import loader, writer
from dwdp.model.config import ModelConfig
from dwdp.model.decoder import DecoderLayer, KimiK3Model
from dwdp.model.headers import read_config
from dwdp.tools.plan_dense import DensePlan, DenseSizes
from dwdp.tools.plan_model import KNOWN_MODELS
from tests.support.tiny import tiny_config_dict

EXPERT_WIDTH = 8
SHARED_WIDTH = 6144
TINY_EXPERTS = 6


def config_dict(layers: int, *, fake: bool, router: bool = True) -> dict:
    """`layers` layers with experts, in K3's order of attentions and at its widths, the shared expert's too.

    The routed experts have a width of 8 and the vocabulary 256 entries. router: of 896 experts, else of 8, which keeps
    a checkpoint's list of tensors short.
    """
    document = json.loads(KNOWN_MODELS["kimi-k3"].read_text())["text_config"]
    linear = document["linear_attn_config"]
    full = [i for i in linear["full_attn_layers"] if i <= layers]
    attentions = {"full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in full]}
    if fake:
        changes = {"num_experts": TINY_EXPERTS, "first_k_dense_replace": 0, "num_hidden_layers": layers}
        return tiny_config_dict(**changes, linear_attn_config=attentions)
    for key in ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id"):
        document.pop(key, None)
    return document | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "vocab_size": 256,
        "num_experts": 896 if router else 8,
        "num_experts_per_token": 16 if router else 4,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_shared_experts": SHARED_WIDTH // EXPERT_WIDTH,
        "linear_attn_config": linear | attentions,
    }


def plan_of(config: dict, dense: dict, granularity: int) -> DensePlan:
    """What `dwdp plan --dense` computes for two ranks."""
    settings = DenseConfig(**{"enabled": True, **dense})
    return DenseSizes.of(ModelConfig.from_dict(config), settings, factor_nbytes=0).on(2, granularity)


def expert_bytes(config: dict) -> int:
    """Of one rank of two: the tables of its experts in bf16."""
    model = ModelConfig.from_dict(config)
    row = 3 * model.expert_width * model.moe_intermediate_size * 2
    return -(-model.num_experts // 2) * row * len(model.moe_layer_indices)


@contextlib.contextmanager
def config_folder(config: dict) -> Iterator[Path]:
    """A folder with nothing but the config.json, for weights that are made where they are needed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def made_on_device(path, *, expert_range=None, device="cpu", built=None, **_) -> KimiK3Model:
    """As `load_model`, with random bf16 weights in place of a checkpoint's: by parameter the same on every rank, whole
    or in the parts that a rank keeps."""
    model = KimiK3Model(
        ModelConfig.from_dict(read_config(path)), dtype=torch.bfloat16, expert_range=expert_range, device="meta"
    )
    parts = (built(model) if built is not None else None) or {}
    model.requires_grad_(False)
    loader._materialise(model, device, parts)
    generator = torch.Generator(device)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator.manual_seed(number)
        part = parts.get(name)
        values = parameter.detach() if part is None else torch.empty_like(parameter, device=device).detach()
        values.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        if part is not None and part.start < part.end:
            part.take(values.view(-1)[part.start : part.end])
    return model.eval()


@contextlib.contextmanager
def weights_made_on_device(then: Callable[[KimiK3Model], None] = lambda model: None) -> Iterator[None]:
    """Ranks that are built inside make their weights instead of reading them. then: called with every loaded model."""

    def load(*args, **options):
        model = made_on_device(*args, **options)
        then(model)
        return model

    with mock.patch.object(loader, "load_model", load):
        yield


class _Slices(writer._Draw):
    """Values from one block of noise, at another place for each name: writing is then bound by memory."""

    block: torch.Tensor

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        start = zlib.crc32(name.encode()) % (len(self.block) - count)
        return self.block[start : start + count].view(shape)


class Checkpoint(threading.Thread):
    """Writes a checkpoint into the host's memory while other things run; `folder` appears when it is whole."""

    def __init__(self, config: dict) -> None:
        super().__init__(daemon=True)
        place = Path("/dev/shm")
        plan = plan_of(config, {}, 1)
        enough = place.is_dir() and shutil.disk_usage(place).free > 1.2 * (plan.moved_bytes + plan.replicated_bytes)
        self.root = Path(tempfile.mkdtemp(prefix="dwdp-bench-", dir=place if enough else None))
        self.folder, self.failed, self._config = self.root / "model", self.root / "failed", config

    def run(self) -> None:
        try:
            largest = max(
                p.numel() for p in KimiK3Model(ModelConfig.from_dict(self._config), device="meta").parameters()
            )
            noise = torch.empty(2 * largest + 4097).normal_(std=0.02, generator=torch.Generator().manual_seed(1))
            with mock.patch.object(writer, "_Draw", type("Slices", (_Slices,), {"block": noise})):
                writer.random_checkpoint(self.root / "part", self._config, prefix="")
            os.rename(self.root / "part", self.folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.failed.write_text(f"{type(error).__name__}: {error}")

    def remove(self) -> None:
        if self.ident is not None:  # it was started
            self.join(60)
        shutil.rmtree(self.root, ignore_errors=True)


def wait_for(folder: Path, seconds: float) -> None:
    """Returns when the checkpoint is there."""
    until = time.monotonic() + seconds
    while not folder.exists():
        failed = folder.parent / "failed"
        if failed.exists() or time.monotonic() > until:
            raise DwdpError(f"no checkpoint: {failed.read_text() if failed.exists() else 'it is not written in time'}")
        time.sleep(0.05)


class Matmuls:
    """The products of a layer with `tokens` tokens and its own weights; nothing between them."""

    def __init__(self, model: KimiK3Model, tokens: int) -> None:
        weights = [p for layer in model.model.layers for part in self._parts(layer) for p in part]
        self._inputs = {
            width: torch.empty(tokens, width, dtype=torch.bfloat16, device=weights[0].device).normal_()
            for width in {w.shape[1] for w in weights}
        }
        self._tokens = tokens

    @staticmethod
    def _parts(layer: DecoderLayer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        roots = layer.dense_dwdp_roots()
        return tuple(
            [p for module in roots[s] for p in module.parameters() if p.ndim == 2 and p.dtype == torch.bfloat16]
            for s in ("attn", "moe")
        )

    def attention(self, layer: DecoderLayer) -> None:
        self._multiply(self._parts(layer)[0])

    def moe(self, layer: DecoderLayer) -> None:
        self._multiply(self._parts(layer)[1])

    def flops(self, layer: DecoderLayer) -> int:
        return 2 * self._tokens * sum(p.numel() for part in self._parts(layer) for p in part)

    def _multiply(self, weights: list[torch.Tensor]) -> None:
        for weight in weights:
            F.linear(self._inputs[weight.shape[1]], weight)
