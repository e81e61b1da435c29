"""Model configs: both spellings are read, and each kind of nonsense is one clear ValueError."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dwdp.model.config import ModelConfig
from tests.support.tiny import tiny_48b_config_dict, tiny_config_dict


def test_release_and_text_only_spellings_are_equal():
    text = tiny_config_dict()
    release = {"model_type": "kimi_k3", "text_config": text, "eos_token_id": [7, 9], "bos_token_id": 3}
    config = ModelConfig.from_dict(release)
    assert config.eos_token_ids == (7, 9) and config.bos_token_id == 3
    plain = ModelConfig.from_dict({**text, "eos_token_id": [7, 9], "bos_token_id": 3})
    assert plain == config
    assert config.moe_layer_indices == (1, 2, 3, 4)
    assert [config.layer_kind(i) for i in range(5)] == ["kda", "kda", "kda", "mla", "mla"]
    assert config.lora_norm_eps == 1e-6 and config.mla_cache_width == 40


def test_predecessor_switches_are_read():
    config = ModelConfig.from_dict(tiny_48b_config_dict(q_lora_rank=None))
    assert config.routed_expert_hidden_size is None and config.expert_width == config.hidden_size
    assert config.attn_res_block_size is None and config.q_lora_rank is None
    assert config.linear_attn_config.gate_lower_bound is None
    assert config.routed_scaling_factor == 2.446


NONSENSE = {
    "vocab_size is missing": ({"vocab_size": None, "kv_lora_rank": None}, "lacks vocab_size, kv_lora_rank"),
    "no layer lists": ({"linear_attn_config": {"kda_layers": None}}, "lacks linear_attn_config.kda_layers"),
    "in both lists": ({"linear_attn_config": {"kda_layers": [1, 2, 3, 4]}}, r"layers \[4\] are in both"),
    "in neither": ({"linear_attn_config": {"kda_layers": [1, 3]}}, r"layers \[2\] are in neither"),
    "counted from 0": (
        {"linear_attn_config": {"kda_layers": [0, 1, 2, 3]}},
        r"layers \[0\] are outside 1\.\.5",
    ),
    "named twice": ({"linear_attn_config": {"kda_layers": [1, 2, 3, 3]}}, "names a layer twice"),
    "top-k": ({"num_experts_per_token": 9}, "num_experts_per_token 9 is more than num_experts 8"),
    "no top-k": ({"num_experts_per_token": None}, "num_experts_per_token is 0 with num_experts 8"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unknown"),
    "no beta": ({"activation_situ_beta": None}, "lacks activation_situ_beta"),
    "model type": ({"model_type": "llama"}, "model_type is 'llama'"),
    "a size beyond any": ({"hidden_size": 10**30}, "hidden_size must be at most 1048576"),
    "layers beyond any": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
    "experts beyond any": ({"num_experts": 10**9}, "num_experts must be at most 100000"),
    "negative size": ({"hidden_size": -64}, "hidden_size must be an integer of at least 1, not -64"),
    "a boolean as size": ({"hidden_size": True}, "hidden_size must be an integer of at least 1, not True"),
    "a text as number": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
    "zero eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps must be above 0"),
    "a positive bound": ({"linear_attn_config": {"gate_lower_bound": 5.0}}, "null or below 0, not 5.0"),
    "rotations": ({"mla_use_nope": False}, "mla_use_nope is False; only True is served"),
    "groups": ({"num_expert_group": 4}, "num_expert_group is 4; only 1 is served"),
    "softmax router": ({"moe_router_activation_func": "softmax"}, "only 'sigmoid' is served"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "next-token layers": ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
    "kv heads": ({"num_key_value_heads": 2}, "num_key_value_heads 2 differs from num_attention_heads 4"),
    "norm without latent": ({"routed_expert_hidden_size": None}, "latent_moe_use_norm is true"),
    "eos": ({"eos_token_id": "end"}, "eos_token_id must be a token id"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused(name):
    changes, message = NONSENSE[name]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(tiny_config_dict(**changes))


def test_shapes_of_the_file_are_refused():
    with pytest.raises(ValueError, match="JSON object, not list"):
        ModelConfig.from_dict([])
    with pytest.raises(ValueError, match="text_config must be a JSON object"):
        ModelConfig.from_dict({"model_type": "kimi_k3", "text_config": 3})
    with pytest.raises(ValueError, match="model_type is 'kimi_vl'"):
        ModelConfig.from_dict({"model_type": "kimi_vl", "text_config": tiny_config_dict()})
    lacking = tiny_config_dict()
    del lacking["linear_attn_config"]
    with pytest.raises(ValueError, match="lacks linear_attn_config"):
        ModelConfig.from_dict(lacking)


def test_several_faults_come_in_one_error():
    with pytest.raises(ValueError, match="hidden_act.*num_experts_per_token 9"):
        ModelConfig.from_dict(tiny_config_dict(hidden_act="gelu", num_experts_per_token=9))


def test_config_needs_no_torch():
    code = f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['torch'] = None; import dwdp.model.config"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
