"""An inventory names what is wrong: each of some, and the number of very many that are wrong for one reason."""

import copy

from dwdp.model import inventory
from dwdp.model.config import ModelConfig
from dwdp.model.folder import expectations
from dwdp.model.formats import read_formats
from dwdp.model.safetensors_file import TensorEntry
from tests.support.sparse_k3 import quantization, text_tensors
from tests.support.tiny import tiny_config_dict

CONFIG = ModelConfig.from_dict(tiny_config_dict())


def problems(tmp_path, expert_format: str, declared: str, ignore=()) -> list[str]:
    entries = {
        name: TensorEntry(name, dtype, shape, "a.safetensors", 0, 0)
        for name, dtype, shape in text_tensors(CONFIG, expert_format)
    }
    data = {"quantization_config": copy.deepcopy(quantization(CONFIG, declared))}
    data["quantization_config"].setdefault("ignore", []).extend(ignore)
    found = inventory.Inventory(entries, read_formats(tmp_path, data))
    for expected in expectations(CONFIG, expert_format):
        found.take(expected)
    return found.problems()


def test_what_fits_has_no_problems(tmp_path):
    assert problems(tmp_path, "mxfp4", "mxfp4") == problems(tmp_path, "nvfp4", "nvfp4") == []


def test_one_wrong_entry_names_tensor_and_list(tmp_path):
    (problem,) = problems(tmp_path, "mxfp4", "mxfp4", ["re:.*layers.2.*experts.3.w1"])
    assert problem.startswith("tensor model.layers.2.block_sparse_moe.experts.3.w1.weight_packed: ")
    assert "ignore entry 're:.*layers.2.*experts.3.w1' makes it plain" in problem


def test_very_many_alike_are_counted(tmp_path, monkeypatch):
    """Of 4 layers x 8 experts x 3 matrices; each reason has its own count."""
    every = problems(tmp_path, "mxfp4", "mxfp4", ["re:.*experts.*w[12]", "w3"])
    assert len(every) == 96
    monkeypatch.setattr(inventory, "_MOST_ALIKE", 50)
    counted = problems(tmp_path, "mxfp4", "mxfp4", ["re:.*experts.*w[12]", "w3"])
    assert len(counted) == 32 + 3 + 1
    assert counted[-1].startswith(
        "tensors: 61 more of this kind (they are mxfp4, config.json quantization_config ignore"
    )
    assert set(counted[:-1]) < set(every)
