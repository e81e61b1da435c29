"""The models refuse what they must, and their JSON Schema agrees with them."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig, dwdp_section, one_line, validate
from dwdp.errors import ConfigError


def accepted(model, data):
    """Whether the model accepts `data` as JSON; the schema and the Python form must say the same."""
    schema = jsonschema.Draft202012Validator(model.model_json_schema()).is_valid(data)
    verdicts = {schema}
    for parse, value in ((model.model_validate, data), (model.model_validate_json, json.dumps(data))):
        try:
            parse(value)
            verdicts.add(True)
        except ValidationError:
            verdicts.add(False)
    assert len(verdicts) == 1, (model, data)
    return verdicts.pop()


PAIRS = [
    ({}, True),
    ({"num_experts_per_worker": 0, "num_prefetch_experts": 0}, True),
    ({"num_experts_per_worker": 1, "num_prefetch_experts": 1}, True),
    ({"num_experts_per_worker": 2, "num_prefetch_experts": 1}, True),
    ({"num_experts_per_worker": 2.0, "num_prefetch_experts": 1.0}, True),
    ({"num_experts_per_worker": 0}, True),
    ({"num_prefetch_experts": 0}, True),
    ({"num_experts_per_worker": 1}, False),
    ({"num_prefetch_experts": 1}, False),
    ({"num_experts_per_worker": 1, "num_prefetch_experts": 0}, False),
    ({"num_experts_per_worker": 0, "num_prefetch_experts": 1}, False),
    ({"num_experts_per_worker": -1, "num_prefetch_experts": -1}, False),
    ({"num_experts_per_worker": -1, "num_prefetch_experts": 1}, False),
    ({"num_experts_per_worker": 1.5, "num_prefetch_experts": 1}, False),
]


@pytest.mark.parametrize("pair,right", PAIRS)
def test_size_and_stride_are_both_zero_or_both_positive(pair, right):
    assert accepted(DwdpConfig, {"dwdp_size": 4, **pair}) is right
    assert accepted(ServeConfig, {"dwdp": {"dwdp_size": 4, **pair}}) is right


def test_the_refusal_of_half_a_pair_names_both_fields_and_numbers():
    with pytest.raises(ValueError, match="num_experts_per_worker 3 and num_prefetch_experts 0"):
        DwdpConfig(dwdp_size=2, num_experts_per_worker=3)


BAD = [
    (DwdpConfig, {}),
    (DwdpConfig, {"dwdp_size": 0}),
    (DwdpConfig, {"dwdp_size": -1}),
    (DwdpConfig, {"dwdp_size": "4"}),
    (DwdpConfig, {"dwdp_size": True}),
    (DwdpConfig, {"dwdp_size": 4.5}),
    (DwdpConfig, {"dwdp_size": None}),
    (DwdpConfig, {"dwdp_size": 4, "num_groups": 0}),
    (DwdpConfig, {"dwdp_size": 4, "num_prefetch_slots": 1}),
    (DwdpConfig, {"dwdp_size": 4, "num_prefetch_slots": 0}),
    (DwdpConfig, {"dwdp_size": 4, "num_prefetch_slots": -2}),
    (DwdpConfig, {"dwdp_size": 4, "moe_tp_size": 2}),
    (DwdpConfig, {"dwdp_size": 4, "contention_opt": 1}),
    (DwdpConfig, {"dwdp_size": 4, "contention_opt": "true"}),
    (DwdpConfig, {"dwdp_size": 4, "gather_kernel": "fast"}),
    (DwdpConfig, {"dwdp_size": 4, "memory": "disk"}),
    (DwdpConfig, {"dwdp_size": 4, "handle_type": "ipc"}),
    (DwdpConfig, {"dwdp_size": 4, "host_granule_bytes": 1000}),
    (DwdpConfig, {"dwdp_size": 4, "host_granule_bytes": 0}),
    (DwdpConfig, {"dwdp_size": 4, "page_granules": 0}),
    (DwdpConfig, {"dwdp_size": 4, "mapping_budget": 0}),
    (DwdpConfig, {"dwdp_size": 4, "verify": "no"}),
    (DwdpConfig, {"dwdp_size": 4, "verify_every": -1}),
    (DwdpConfig, {"dwdp_size": 4, "experts": 3}),
    (DenseConfig, {"enabled": "yes"}),
    (DenseConfig, {"enabled": 1}),
    (DenseConfig, {"copy": "fast"}),
    (DenseConfig, {"segments": "moe"}),
    (DenseConfig, {"segments": ["moe"]}),
    (DenseConfig, {"segments": []}),
    (DenseConfig, {"segments": ["attn", "attn"]}),
    (DenseConfig, {"segments": ["attn", "mlp"]}),
    (DenseConfig, {"segments": 3}),
    (DenseConfig, {"min_bytes": -1}),
    (DenseConfig, {"store_chunk_mb": -1}),
    (DenseConfig, {"debug": 3}),
    (DenseConfig, {"load": "lazy"}),
    (DenseConfig, {"own_rows": "move"}),
    (DenseConfig, {"roots": "guess"}),
    (DenseConfig, {"dwdp_size": 4}),
    (ServeConfig, {"ranks": 0}),
    (ServeConfig, {"ranks": "2"}),
    (ServeConfig, {"replicated": 0}),
    (ServeConfig, {"role": "decode"}),
    (ServeConfig, {"tp_size": 0}),
    (ServeConfig, {"dtype": "int8"}),
    (ServeConfig, {"device": "tpu"}),
    (ServeConfig, {"max_seq_len": 0}),
    (ServeConfig, {"dwdp": {"dwdp_size": 2, "slots": 2}}),
    (ServeConfig, {"dense_dwdp": {"enable": True}}),
    (ServeConfig, {"port": 8000}),
    (ServeConfig, {"moe_ep_size": 2}),
    (ServeConfig, {"locality_domains": True}),
    (ServeConfig, {"expert_load_balancer": {}}),
    (ServeConfig, {"unknown": None}),
]


@pytest.mark.parametrize("model,data", BAD)
def test_a_wrong_field_is_refused_by_model_and_schema(model, data):
    assert accepted(model, data) is False


GOOD = [
    (DwdpConfig, {"dwdp_size": 1}),
    (DwdpConfig, {"dwdp_size": 4.0, "num_prefetch_slots": 3.0, "mapping_budget": None}),
    (DwdpConfig, {"dwdp_size": 4, "host_granule_bytes": 4096, "verify": "off", "verify_every": 0}),
    (DenseConfig, {}),
    (DenseConfig, {"segments": "attn,moe"}),
    (DenseConfig, {"segments": "moe, attn"}),
    (DenseConfig, {"segments": ["moe", "attn"], "min_bytes": 0, "debug": 2.0}),
    (ServeConfig, {}),
    (ServeConfig, {"dwdp": None, "dense_dwdp": {"enabled": True}, "max_seq_len": 16}),
]


@pytest.mark.parametrize("model,data", GOOD)
def test_a_right_section_is_accepted_by_model_and_schema(model, data):
    assert accepted(model, data) is True


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.sampled_from([1.0, 2.0, 1.5, -1.0, 4096.0, 65536])
) | st.sampled_from(["auto", "host", "full", "attn", "attn,moe", "2", ""])


@pytest.mark.parametrize("model", [DwdpConfig, DenseConfig, ServeConfig])
@settings(max_examples=150)
@given(data=st.data())
def test_model_and_schema_agree_on_random_sections(model, data):
    keys = st.sampled_from([*model.model_fields, "else"])
    section = data.draw(st.dictionaries(keys, VALUES, max_size=3))
    if model is DwdpConfig:
        section.setdefault("dwdp_size", 2)
    accepted(model, section)


def test_defaults_are_the_documented_ones():
    assert DwdpConfig(dwdp_size=4).model_dump() == {
        "dwdp_size": 4,
        "num_groups": 1,
        "num_experts_per_worker": 0,
        "num_prefetch_experts": 0,
        "num_prefetch_slots": 2,
        "contention_opt": False,
        "prefetch_gather": False,
        "gather_kernel": "auto",
        "sm_reserve": None,
        "memory": "auto",
        "handle_type": "auto",
        "host_memory_bytes": None,
        "host_granule_bytes": 65536,
        "page_granules": 8,
        "mapping_budget": None,
        "allow_shared_device": False,
        "verify": "full",
        "verify_every": 1000,
    }
    assert DenseConfig().model_dump() == {
        "enabled": False,
        "copy": "batched",
        "required": True,
        "segments": ("attn", "moe"),
        "min_bytes": 1 << 20,
        "store_chunk_mb": 0,
        "strict": False,
        "debug": 0,
        "load": "whole",
        "roots": "declared",
        "own_rows": "copy",
    }


def test_segments_are_in_model_order_however_they_are_given():
    for given_as in ("attn,moe", "moe,attn", ["moe", "attn"], ("attn", "moe")):
        assert DenseConfig(segments=given_as).segments == ("attn", "moe")
    assert DenseConfig(segments="attn").segments == ("attn",)


def test_short_dtype_names_mean_the_long_ones():
    assert ServeConfig(dtype="bf16").dtype == "bfloat16"
    assert ServeConfig(dtype="fp32").dtype == "float32"


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        DwdpConfig(dwdp_size=2).dwdp_size = 3


@pytest.mark.parametrize("key", ["kv_tokens", "speculative", "sleep", "cuda_graphs", "host", "api_keys"])
def test_a_key_of_a_missing_feature_says_not_supported_yet_without_its_value(key):
    with pytest.raises(ConfigError) as refused:
        validate(ServeConfig, {key: "s3cret"}, what="file.yaml")
    assert str(refused.value) == f"file.yaml: not supported yet: {key}"


def test_a_refusal_is_one_line_with_every_path_and_value():
    with pytest.raises(ConfigError) as refused:
        validate(
            ServeConfig,
            {"ranks": "a\nb", "dwdp": {"dwdp_size": 0, "nope": 1}, "dense_dwdp": {"debug": 7}},
            what="the config",
        )
    text = str(refused.value)
    assert "\n" not in text and text.startswith("the config: ")
    for part in (
        "ranks: ",
        r"'a\nb'",
        "dwdp.dwdp_size: ",
        "given 0",
        "dwdp.nope: unknown key (given 1)",
        "dense_dwdp.debug: ",
        "given 7",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "document, part",
    [
        ({"rank": 2}, "rank: unknown key, ranks is one (given 2)"),
        ({"dwdp": {"dwdp_size": 2, "slots": 3}}, "dwdp.slots: unknown key, num_prefetch_slots is one (given 3)"),
        ({"dense_dwdp": {"enable": True}}, "dense_dwdp.enable: unknown key, enabled is one (given True)"),
        ({"dense_dwdp": {"min_byte": 1}}, "dense_dwdp.min_byte: unknown key, min_bytes is one (given 1)"),
        ({"xyzzy": 1}, "xyzzy: unknown key (given 1)"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_of_its_section(document, part):
    with pytest.raises(ConfigError) as refused:
        validate(ServeConfig, document, what="the config")
    assert str(refused.value) == f"the config: {part}"


@pytest.mark.parametrize("field", ["page_granules", "host_granule_bytes"])
def test_sizes_that_no_address_range_has_are_bad_input(field):
    value = 4096 * 10**12
    with pytest.raises(ConfigError, match=f"dwdp.{field}.*given {value}"):
        validate(ServeConfig, {"dwdp": {"dwdp_size": 2, field: value}}, what="the config")


def test_one_line_names_a_missing_field_and_shortens_long_values():
    with pytest.raises(ValidationError) as missing:
        DwdpConfig.model_validate({})
    assert one_line(missing.value) == "dwdp_size: is missing"
    with pytest.raises(ValidationError) as long:
        DwdpConfig.model_validate({"dwdp_size": "9" * 500})
    assert len(one_line(long.value)) < 200


def test_dwdp_size_defaults_to_the_ranks_and_must_equal_them():
    assert dwdp_section(None, 3).dwdp_size == 3
    assert dwdp_section({"num_prefetch_slots": 3}, 2) == DwdpConfig(dwdp_size=2, num_prefetch_slots=3)
    assert dwdp_section(DwdpConfig(dwdp_size=2), 2).dwdp_size == 2
    with pytest.raises(ConfigError, match="dwdp_size is 4 but there are 2 ranks"):
        dwdp_section({"dwdp_size": 4}, 2)
    with pytest.raises(ConfigError, match="dwdp.slots|slots: unknown key"):
        dwdp_section({"slots": 4}, 2)


def test_three_wrong_group_shapes_are_three_errors_with_the_numbers():
    with pytest.raises(ValueError, match="num_groups"):
        DwdpConfig(dwdp_size=2, num_groups=0)
    with pytest.raises(ValueError, match="rank 4 belongs to no group: num_groups 2 x dwdp_size 2"):
        DwdpConfig(dwdp_size=2, num_groups=2).group_of(4, 8)
    with pytest.raises(ValueError, match="num_groups 4 x dwdp_size 2 needs 8 ranks but the world has 2"):
        DwdpConfig(dwdp_size=2, num_groups=4).group_of(0, 2)
    assert [DwdpConfig(dwdp_size=2, num_groups=2).group_of(r, 4) for r in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
