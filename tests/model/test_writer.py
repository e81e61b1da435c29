"""Written checkpoints are release checkpoints: names, shapes, padding, formats; readable by others."""

import json
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dwdp.errors import CheckpointError
from dwdp.model.config import ModelConfig
from dwdp.model.loader import load_model
from dwdp.model.shards import TensorToWrite, write_checkpoint
from dwdp.model.writer import random_checkpoint, save_checkpoint
from tests.support.tiny import release_shapes, tiny_48b_config_dict, tiny_config_dict, tiny_model, token_ids


def _tensors(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_plain_files_hold_exactly_the_release_names_with_a_log_padded(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), prefix="language_model.")
    tensors = _tensors(tmp_path)
    expected = release_shapes(ModelConfig.from_dict(tiny_config_dict()))
    assert set(tensors) == {f"language_model.{name}" for name in expected}
    for name, shape in expected.items():
        tensor = tensors[f"language_model.{name}"]
        assert tuple(tensor.shape) == ((32,) if name.endswith("A_log") else shape), name
        kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
        if name.endswith("A_log"):
            assert (tensor[:4] > 0).all() and (tensor[4:] == 0).all()


@pytest.mark.parametrize("expert_format", ["plain", "mxfp4"])
def test_mlx_lm_takes_the_names_and_computes_the_same_logits(tmp_path, expert_format):
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.kimi_k3 import Model, ModelArgs

    config = tiny_config_dict()
    random_checkpoint(tmp_path, config, expert_format=expert_format, dtype="fp32")
    oracle = Model(ModelArgs.from_dict({"model_type": "kimi_k3", "text_config": config}))
    weights = oracle.sanitize({k: mx.array(v.numpy()) for k, v in _tensors(tmp_path).items()})
    if expert_format == "mxfp4":
        import mlx.nn as nn

        def routed(path, _):
            return "switch_mlp" in path and path.endswith("_proj")

        nn.quantize(oracle, group_size=32, bits=4, mode="mxfp4", class_predicate=routed)
    oracle.load_weights(list(weights.items()), strict=True)
    ids = token_ids(24)
    want = torch.from_numpy(np.array(oracle(mx.array(ids.numpy()))))
    with torch.no_grad():
        got = load_model(tmp_path)(ids)
    assert (got - want).abs().max() < 1e-3 and (got - want).abs().median() < 1e-5


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_checkpoint(tmp_path / name, tiny_config_dict(), seed=seed, expert_format="nvfp4")
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b and a != c


def test_shards_cover_every_tensor_once_and_the_index_says_where(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), shards=4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    held = {file: set(load_file(tmp_path / file)) for file in files}
    assert sum(map(len, held.values())) == len(index["weight_map"])
    assert all(name in held[file] for name, file in index["weight_map"].items())
    sizes = [(tmp_path / file).stat().st_size for file in files]
    assert max(sizes) < 2 * min(sizes)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _tensors(tmp_path).values())


def test_more_shards_than_tensors_are_refused_and_one_each_works(tmp_path):
    tensors = [TensorToWrite(n, torch.float32, (i,), lambda i=i: torch.ones(i)) for i, n in enumerate("abc", 1)]
    with pytest.raises(ValueError, match="3 tensors cannot be cut into 4 shards"):
        write_checkpoint(tmp_path, {}, tensors, shards=4)
    write_checkpoint(tmp_path, {}, tensors, shards=3)
    assert [len(load_file(f)) for f in sorted(tmp_path.glob("*.safetensors"))] == [1, 1, 1]


def test_packed_experts_have_about_the_spread_of_plain_ones(tmp_path):
    spread = {}
    for expert_format in ("plain", "mxfp4", "nvfp4"):
        random_checkpoint(tmp_path / expert_format, tiny_config_dict(), expert_format=expert_format)
        experts = load_model(tmp_path / expert_format).moe_layers()[0]
        spread[expert_format] = torch.stack([experts._weights_of(e)[0] for e in range(8)]).std().item()
    assert spread["plain"] == pytest.approx(32**-0.5, rel=0.05)
    assert all(0.6 < value / spread["plain"] < 1.6 for value in spread.values()), spread


def test_fp8_attention_with_mxfp4_experts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="FP8 attention"):
        random_checkpoint(tmp_path, tiny_config_dict(), expert_format="mxfp4", fp8_attention=True)


def test_other_tools_read_scalars_and_metadata(tmp_path):
    random_checkpoint(tmp_path, tiny_config_dict(), expert_format="nvfp4", tokenizer='{"x": 1}')
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale_2"
        assert file.get_tensor(name).shape == ()
    assert (tmp_path / "tokenizer.json").read_text() == '{"x": 1}'


@pytest.mark.parametrize("config", [tiny_config_dict(), tiny_48b_config_dict()], ids=["k3", "48b"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_saved_model_loads_to_its_bfloat16_values(tmp_path, config, prefix):
    model = tiny_model(ModelConfig.from_dict(config))
    with_stale = {**config, "quantization_config": {"quant_method": "other"}}
    save_checkpoint(tmp_path, model, with_stale, prefix=prefix, shards=2)
    loaded = load_model(tmp_path)
    for name, value in model.named_parameters():
        kept = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias"))
        want = value if kept else value.bfloat16().float()
        assert torch.equal(dict(loaded.named_parameters())[name], want), name


def test_a_model_that_lacks_experts_or_is_packed_is_not_saved(tmp_path):
    random_checkpoint(tmp_path / "plain", tiny_config_dict())
    part = load_model(tmp_path / "plain", expert_range=(0, 4))
    with pytest.raises(ValueError, match="holds 4 of 8 experts"):
        save_checkpoint(tmp_path / "out", part, tiny_config_dict())
    random_checkpoint(tmp_path / "packed", tiny_config_dict(), expert_format="mxfp4")
    with pytest.raises(ValueError, match="plain experts"):
        save_checkpoint(tmp_path / "out", load_model(tmp_path / "packed"), tiny_config_dict())
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "out")


def test_a_checkpoint_of_256_mb_is_written_in_seconds_and_little_memory(tmp_path):
    config = tiny_config_dict(num_experts=64, moe_intermediate_size=1024, routed_expert_hidden_size=512)
    before, started = _resident_bytes(), time.monotonic()
    with _Peak() as peak:
        random_checkpoint(tmp_path, config, expert_format="mxfp4")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 200e6
    assert time.monotonic() - started < 20
    assert peak.nbytes is None or peak.nbytes - before < size / 4


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class _Peak:
    """Peak resident bytes inside the block; None where the kernel does not let us reset the mark."""

    nbytes = None

    def __enter__(self):
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._reset = True
        except OSError:
            self._reset = False
        return self

    def __exit__(self, *exc):
        if self._reset:
            with open("/proc/self/status") as file:
                line = next((x for x in file if x.startswith("VmHWM")), None)
            self.nbytes = None if line is None else int(line.split()[1]) * 1024
