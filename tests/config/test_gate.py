"""The gate accepts both modes and refuses a launch that breaks any one requirement, naming it."""

import logging
from dataclasses import replace

import pytest

from dwdp.config.gate import GateError, LaunchSettings, check_launch, check_supported
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig
from dwdp.errors import ConfigError

ATTACHED = LaunchSettings(dense=True, dwdp_size=4)
STANDALONE = LaunchSettings(dense=True, attention_dp=True, tp_size=4)
BOTH = (ATTACHED, STANDALONE)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="dwdp")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_mode_follows_from_the_launch_without_a_warning(warnings):
    assert check_launch(ATTACHED) == "attached"
    assert check_launch(STANDALONE) == "standalone"
    assert check_launch(replace(STANDALONE, dwdp_size=0)) == "standalone"
    assert check_launch(replace(STANDALONE, overlap_scheduler=True)) == "standalone"
    assert check_launch(replace(STANDALONE, group="mpi")) == "standalone"
    assert warnings() == []


def test_with_dense_dwdp_off_nothing_is_judged():
    assert check_launch(LaunchSettings()) == "off"
    assert check_launch(replace(ATTACHED, dense=False, cuda_graphs=True, tp_size=2, dense_copy="x")) == "off"


@pytest.mark.parametrize("settings", BOTH, ids=["attached", "standalone"])
@pytest.mark.parametrize(
    "field,value",
    [
        ("cuda_graphs", True),
        ("torch_compile", True),
        ("prefill_graphs", True),
        ("sleep", True),
        ("lora", True),
        ("speculative", {"num_draft_tokens": 2}),
        ("locality_domains", True),
        ("pp_size", 2),
        ("cp_size", 2),
        ("exportable_memory", False),
        ("role", "decode"),
    ],
)
def test_a_requirement_of_both_modes_is_named(settings, field, value):
    with pytest.raises(GateError, match=field) as refused:
        check_launch(replace(settings, **{field: value}))
    assert isinstance(refused.value, ValueError) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings,part",
    [
        (replace(ATTACHED, dwdp_size=1), "dwdp_size > 1: dwdp_size is 1"),
        (replace(ATTACHED, dwdp_size=-1), "dwdp_size > 1: dwdp_size is -1"),
        (replace(ATTACHED, tp_size=2, attention_dp=True), "neither mode"),
        (replace(ATTACHED, overlap_scheduler=True), "overlap_scheduler"),
        (replace(ATTACHED, role="generation"), "role"),
        (replace(ATTACHED, role="both"), "role"),
        (replace(STANDALONE, attention_dp=False), "attention_dp"),
        (replace(STANDALONE, tp_size=1), "tp_size > 1"),
        (replace(STANDALONE, group="ray"), "'ray'"),
        (replace(STANDALONE, group=None), "group"),
        (replace(STANDALONE, dense_copy="fast"), "DWDP_DENSE_COPY.*batched, per_slice, gather.*'fast'"),
        (replace(STANDALONE, dense_copy=""), "DWDP_DENSE_COPY"),
        (replace(STANDALONE, dense_copy="gather"), "gather kernel"),
        (LaunchSettings(dense=True), "attached .* standalone"),
    ],
)
def test_a_requirement_of_one_mode_is_named(settings, part):
    with pytest.raises(GateError, match=part):
        check_launch(settings)


def test_a_launch_that_is_neither_mode_hears_of_both():
    with pytest.raises(GateError, match="attached .* standalone"):
        check_launch(replace(ATTACHED, tp_size=4, attention_dp=True))


def test_the_first_requirement_is_the_one_that_is_named():
    with pytest.raises(GateError, match="cuda_graphs") as refused:
        check_launch(replace(ATTACHED, cuda_graphs=True, sleep=True, tp_size=2))
    assert "sleep" not in str(refused.value) and "tp_size" not in str(refused.value)


@pytest.mark.parametrize("text", ["gather", "fast", "", "batched"])
def test_attached_any_copy_value_gives_one_warning(warnings, text):
    assert check_launch(replace(ATTACHED, dense_copy=text)) == "attached"
    (line,) = warnings()
    assert "DWDP_DENSE_COPY" in line and "ignored" in line


@pytest.mark.parametrize("text", [None, "batched", "per_slice", "PER_SLICE"])
def test_standalone_known_copy_values_pass_silently(warnings, text):
    assert check_launch(replace(STANDALONE, dense_copy=text)) == "standalone"
    assert warnings() == []


def test_standalone_gather_names_the_validated_settings_in_one_warning(warnings):
    assert check_launch(replace(STANDALONE, dense_copy="gather", gather_available=True)) == "standalone"
    (line,) = warnings()
    for name in ("DWDP_DENSE_COPY=gather", "DWDP_GATHER_KERNEL=tma", "DWDP_DISABLE_COOP_ROUTING=1"):
        assert name in line


@pytest.mark.parametrize("role", ["generation", "both"])
def test_standalone_roles_that_decode_pass_with_one_warning_naming_the_bytes(warnings, role):
    assert check_launch(replace(STANDALONE, role=role, gathered_bytes_per_step=123456)) == "standalone"
    (line,) = warnings()
    assert role in line and "123456 bytes" in line


@pytest.mark.parametrize(
    "field, value, device, part",
    [
        ("memory", "cuda", "cpu", "dwdp.memory: cuda needs a GPU"),
        ("handle_type", "fabric", "cpu", "dwdp.handle_type: fabric is of GPU memory"),
        ("memory", "host", "cuda", "dwdp.memory: host needs device: cpu"),
    ],
)
def test_memory_of_another_kind_than_the_device_is_refused_by_name(field, value, device, part):
    config = ServeConfig(ranks=2, dwdp=DwdpConfig(dwdp_size=2, **{field: value}))
    with pytest.raises(ConfigError, match=part):
        check_supported(config, "off", device)
    check_supported(config, "off", "cuda" if device == "cpu" else "cpu")


def test_a_reserve_of_sms_is_refused_where_there_are_none():
    for count in (0, 8):
        config = ServeConfig(ranks=2, dwdp=DwdpConfig(dwdp_size=2, sm_reserve=count))
        with pytest.raises(ConfigError, match=rf"dwdp.sm_reserve: {count} \(DWDP_SM_RESERVE\) needs a GPU"):
            check_supported(config, "off")


def test_every_transfer_passes_and_a_kernel_without_the_gather_is_one_warning(warnings):
    for fields in (
        {"contention_opt": True},
        {"prefetch_gather": True},
        {"prefetch_gather": True, "contention_opt": True},
        {"prefetch_gather": True, "gather_kernel": "ldst"},
    ):
        check_supported(ServeConfig(ranks=2, dwdp=DwdpConfig(dwdp_size=2, **fields)), "attached")
    assert warnings() == []
    dwdp = DwdpConfig(dwdp_size=2, gather_kernel="ldst", contention_opt=True)
    check_supported(ServeConfig(ranks=2, dwdp=dwdp), "off")
    (line,) = warnings()
    assert "dwdp.gather_kernel: ldst (DWDP_GATHER_KERNEL) has no effect" in line and "prefetch_gather" in line


@pytest.mark.parametrize("dense", [True, False])
def test_a_transfer_that_the_device_cannot_do_is_refused_by_the_name_that_asks_for_it(dense):
    attached = replace(ATTACHED, dense=dense)
    for transfer, missing, name in (
        ("gather", "gather_available", r"dwdp.prefetch_gather \(DWDP_PREFETCH_GATHER\)"),
        ("batched", "batched_available", "dwdp.contention_opt"),
    ):
        able = replace(attached, expert_transfer=transfer, gather_available=True, batched_available=True)
        assert check_launch(able) == ("attached" if dense else "off")
        with pytest.raises(GateError, match=f"{name} needs .*not have"):
            check_launch(replace(able, **{missing: False}))
        check_launch(replace(able, **{missing: False}, expert_transfer="per_slice"))


def test_standalone_without_batched_copies_is_told_to_ask_for_another_transfer():
    for copy in (None, "batched"):
        with pytest.raises(GateError, match="DWDP_DENSE_COPY.*batched.*set per_slice"):
            check_launch(replace(STANDALONE, dense_copy=copy, batched_available=False))
    assert check_launch(replace(STANDALONE, dense_copy="per_slice", batched_available=False)) == "standalone"


def test_what_is_served_passes_also_with_the_default_copy_attached():
    dwdp = DwdpConfig(dwdp_size=2, memory="host", num_prefetch_slots=4)
    check_supported(ServeConfig(ranks=2, dwdp=dwdp, dense_dwdp=DenseConfig(enabled=True)), "attached")
    check_supported(ServeConfig(ranks=2, dwdp=dwdp, dense_dwdp=DenseConfig(load="sharded")), "off")
    for copy in ("batched", "per_slice", "gather"):
        check_supported(ServeConfig(ranks=2, dense_dwdp=DenseConfig(copy=copy)), "standalone")
    check_supported(ServeConfig(overlap_scheduler=True), "off")


def test_expert_dwdp_goes_neither_with_the_overlap_scheduler_nor_with_tensor_parallel_ranks():
    dwdp = DwdpConfig(dwdp_size=2)
    with pytest.raises(ConfigError, match="overlap_scheduler"):
        check_supported(ServeConfig(ranks=2, dwdp=dwdp, overlap_scheduler=True), "off")
    with pytest.raises(ConfigError, match="tp_size 2"):
        check_supported(ServeConfig(ranks=2, dwdp=dwdp, tp_size=2, attention_dp=True), "off")


@pytest.mark.parametrize("mode", ["attached", "standalone"])
def test_loading_into_rows_needs_required_because_there_is_nothing_to_go_back_to(mode):
    def check(**fields):
        check_supported(ServeConfig(ranks=2, dense_dwdp=DenseConfig(enabled=True, load="sharded", **fields)), mode)

    check()
    with pytest.raises(GateError, match="load: sharded .* needs required .DWDP_DENSE_REQUIRED. on"):
        check(required=False)
