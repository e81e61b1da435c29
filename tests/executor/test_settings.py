"""A launch is refused before any rank exists, in one line with the names and numbers; what may start is
complete."""

import functools
import os

import pytest

from dwdp.config.gate import GateError
from dwdp.errors import CheckpointError, ConfigError, MemoryDomainError
from dwdp.executor import devices
from dwdp.executor.settings import launch_fields, resolve
from tests.executor.checkpoints import write_tiny
from tests.memory.fake_driver import CUresult, FakeDriver, FakeMachine, zero_live


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def start(model, **fields):
    return resolve(model, device="cpu", environ={}, **fields)


def test_several_ranks_turn_expert_dwdp_on_and_replicated_turns_all_of_it_off(tiny):
    spread = start(tiny, ranks=2)
    assert spread.settings.dwdp["dwdp_size"] == 2 and spread.partition.ranges == ((0, 4), (4, 8))
    whole = start(tiny, ranks=2, replicated=True, dwdp={"num_prefetch_slots": 3}, dense_dwdp={"enabled": True})
    assert (whole.settings.dwdp, whole.settings.dense_dwdp, whole.partition) == (None, None, None)
    assert start(tiny).settings.dwdp is None
    assert start(tiny, dwdp={}).partition.ranges == ((0, 8),)


def test_dense_dwdp_is_on_by_its_section_or_by_its_variable_and_the_log_says_which_won(tiny, caplog):
    assert start(tiny, ranks=2).settings.dense_dwdp is None
    assert start(tiny, ranks=2, dense_dwdp={"enabled": True}).mode == "attached"
    with caplog.at_level("INFO", "dwdp"):
        launch = resolve(tiny, device="cpu", ranks=2, environ={"DWDP_DENSE": "yes"})
    assert launch.settings.dense_dwdp["enabled"] is True
    assert any("DWDP_DENSE" in line and "overrides" in line for line in caplog.messages)


GATHER = "transfer gather (prefetch_gather, kernel {}, as its twin on the host{})"


@pytest.mark.parametrize(
    "dwdp, environ, shown",
    [
        ({}, {}, "transfer per_slice (the default)"),
        ({"contention_opt": True}, {}, "transfer batched (contention_opt)"),
        ({"prefetch_gather": True}, {}, GATHER.format("auto", "")),
        ({"prefetch_gather": True, "gather_kernel": "ldst"}, {}, GATHER.format("ldst", "")),
        (
            {"prefetch_gather": True, "contention_opt": True},
            {"DWDP_GATHER_KERNEL": "tma"},
            GATHER.format("tma", "; contention_opt has no effect beside it"),
        ),
        ({"prefetch_gather": True, "contention_opt": True}, {"DWDP_PREFETCH_GATHER": "0"}, "transfer batched"),
        ({}, {"TRTLLM_DWDP_PREFETCH_GATHER": "1"}, GATHER.format("auto", "")),
    ],
)
def test_the_log_names_the_transfer_of_a_launch_and_what_chose_it(tiny, caplog, dwdp, environ, shown):
    with caplog.at_level("INFO", "dwdp"):
        resolve(tiny, device="cpu", ranks=2, dwdp=dwdp, environ=environ)
    (line,) = [line for line in caplog.messages if line.startswith("domain host")]
    assert shown in line
    for name in environ:
        assert sum(f"{name}=" in line and "overrides dwdp." in line for line in caplog.messages) == 1


def test_standalone_the_dense_copy_is_the_transfer_and_its_kernel_is_the_variables(tiny, caplog):
    def launch(copy, environ):
        caplog.clear()
        dense = {"enabled": True, "copy": copy}
        return resolve(tiny, device="cpu", tp_size=2, attention_dp=True, dense_dwdp=dense, environ=environ).settings

    with caplog.at_level("INFO", "dwdp"):
        assert launch("gather", {"DWDP_GATHER_KERNEL": "ldst"}).dense_gather_kernel == "ldst"
        assert "transfer gather (dense_dwdp.copy)" in caplog.text and "no effect" not in caplog.text
        assert launch("batched", {"DWDP_DENSE_COPY": "per_slice"}).dense_dwdp["copy"] == "per_slice"
        launch("batched", {"DWDP_GATHER_KERNEL": "ldst"})
        assert "DWDP_GATHER_KERNEL=ldst has no effect" in caplog.text
    with pytest.raises(ConfigError, match="TRTLLM_CUTEDSL_SM_RESERVE=8 needs a GPU"):
        launch("gather", {"TRTLLM_CUTEDSL_SM_RESERVE": "8"})


def test_a_kernel_without_the_gather_warns_and_sms_to_reserve_are_refused(tiny, caplog):
    with caplog.at_level("WARNING", "dwdp"):
        resolve(tiny, device="cpu", ranks=2, environ={"DWDP_GATHER_KERNEL": "ldst"})
    assert sum("DWDP_GATHER_KERNEL" in line and "the gather is off" in line for line in caplog.messages) == 1
    with pytest.raises(ConfigError, match="DWDP_SM_RESERVE.*needs a GPU"):
        resolve(tiny, device="cpu", ranks=2, environ={"DWDP_SM_RESERVE": "8"})


def test_max_seq_len_is_the_models_and_at_most_4096_on_the_host_unless_set(tmp_path):
    long = write_tiny(tmp_path / "long", max_position_embeddings=9000)
    assert start(long).settings.max_seq_len == 4096
    assert start(long, max_seq_len=9000).settings.max_seq_len == 9000
    with pytest.raises(ConfigError, match="max_seq_len 9001.*9000"):
        start(long, max_seq_len=9001)
    short = write_tiny(tmp_path / "short", max_position_embeddings=100)
    assert start(short).settings.max_seq_len == 100


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"ranks": 0}, ConfigError, ["ranks", "0"]),
        ({"ranks": 9}, ValueError, ["8", "9"]),
        ({"ranks": 2, "dwdp": {"dwdp_size": 3}}, ConfigError, ["dwdp_size", "3", "2"]),
        (
            {"ranks": 2, "dwdp": {"num_experts_per_worker": 4}},
            ConfigError,
            ["num_prefetch_experts", "0", "4"],
        ),
        ({"ranks": 2, "dwdp": {"num_groups": 2}}, ValueError, ["num_groups", "2", "4 ranks"]),
        ({"ranks": 2, "dwdp": {"slots": 4}}, ConfigError, ["dwdp", "slots"]),
        ({"ranks": 2, "dense_dwdp": {"enabled": "yes"}}, ConfigError, ["dense_dwdp", "enabled", "yes"]),
        ({"frobnicate": 1}, ConfigError, ["frobnicate"]),
        ({"kv_tokens": 5}, ConfigError, ["kv_tokens"]),
        ({"dtype": "int8"}, ConfigError, ["dtype", "int8"]),
        ({"dense_dwdp": {"enabled": True}}, GateError, ["attention_dp"]),
        ({"dwdp": {}, "dense_dwdp": {"enabled": True}}, GateError, ["dwdp_size", "1"]),
        ({"ranks": 2, "overlap_scheduler": True}, ConfigError, ["overlap_scheduler"]),
        ({"overlap_scheduler": True}, ConfigError, ["overlap_scheduler", "not supported"]),
        ({"ranks": 2, "tp_size": 2}, ConfigError, ["tp_size 2", "attention_dp"]),
        ({"ranks": 3, "tp_size": 2, "attention_dp": True}, ConfigError, ["tp_size 2", "3"]),
        ({"ranks": 1, "tp_size": 2, "attention_dp": True}, ConfigError, ["tp_size 2", "ranks, 1"]),
        ({"tp_size": 9, "attention_dp": True}, ValueError, ["8", "9"]),
        ({"attention_dp": True}, ConfigError, ["attention_dp", "tp_size"]),
        ({"tp_size": 2, "attention_dp": True, "overlap_scheduler": True}, ConfigError, ["overlap", "not supported"]),
        ({"tp_size": 2, "attention_dp": True, "dwdp": {}}, ConfigError, ["tp_size 2", "dwdp"]),
        (
            {"ranks": 2, "role": "generation", "dense_dwdp": {"enabled": True}},
            GateError,
            ["role", "generation"],
        ),
    ],
)
def test_a_launch_that_cannot_be_served_is_refused_with_names_and_values(tiny, fields, error, words):
    with pytest.raises(error) as caught:
        start(tiny, **fields)
    text = str(caught.value)
    assert all(word in text for word in words) and "\n" not in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", ["--model", "empty"]),
        ("x" * 5000, ["--model", "xxx", "too long"]),
        ("a\0b", ["--model", "null byte"]),
        (None, ["model", "None"]),
        (b"/tmp", ["model", "b'/tmp'"]),
    ],
)
def test_a_model_that_can_be_no_path_is_refused_by_its_value(model, words):
    with pytest.raises(CheckpointError) as caught:
        resolve(model)
    assert all(word in str(caught.value) for word in words)


def test_a_model_whose_name_is_no_utf8_is_refused(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    with pytest.raises(CheckpointError, match="surrogates not allowed"):
        resolve(os.fsdecode(folder))


@pytest.mark.parametrize("section", [5, "on", [1]])
def test_a_section_that_is_no_mapping_is_refused_by_name(tiny, section):
    for name in ("dwdp", "dense_dwdp"):
        with pytest.raises(ConfigError, match=name):
            resolve(tiny, ranks=2, **{name: section})


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="no such model.*nowhere"):
        start(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no safetensors file"):
        start(bare)
    (bare / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        start(bare)


def test_a_models_own_config_applies_to_several_ranks_only_and_a_given_file_replaces_it(tmp_path):
    folder = write_tiny(tmp_path / "model")
    (folder / "dwdp.yaml").write_text("dense_dwdp:\n  enabled: true\n")
    other = tmp_path / "other.yaml"
    other.write_text("ranks: 2\ndwdp:\n  num_prefetch_slots: 3\n")

    def launch(file, **given):
        return start(**launch_fields(str(folder), file, given))

    assert launch(None, ranks=2).mode == "attached"
    assert launch(None, ranks=1).mode == "off"
    assert launch(None, ranks=2, replicated=True).mode == "off"
    given = launch(other)
    assert (given.mode, given.settings.ranks, given.settings.dwdp["num_prefetch_slots"]) == ("off", 2, 3)
    with pytest.raises(ConfigError, match="dwdp_size"):
        other.write_text("dwdp:\n  dwdp_size: 3\n")
        launch(other, ranks=2)


@pytest.mark.parametrize("text", ["max_seq_len: 100\n", "tp_size: 2\nattention_dp: true\n", "ranks: 1\n", "{}\n"])
def test_a_config_without_sections_goes_with_replicated_weights(tiny, tmp_path, text):
    """Fails when a section that the file lacks is looked into."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    launch = start(**launch_fields(str(tiny), file, {"replicated": True}))
    assert (launch.mode, launch.settings.dwdp, launch.settings.attention_dp) == ("off", None, False)


STANDALONE = {"tp_size": 2, "attention_dp": True, "dense_dwdp": {"enabled": True}}


def broken(source, arch, options):
    raise MemoryDomainError("NVRTC cannot be loaded")


def starts_on_a_gpu(model, monkeypatch, *, compiler=lambda *arguments: b"cubin", driver=None, **fields):
    """`resolve` where the ranks compute on GPUs with such a driver, and what the gate learnt of them."""
    fake = FakeDriver(FakeMachine(), **(driver or {}))
    probed = functools.partial(devices.capabilities, driver=fake, compiler=compiler)
    monkeypatch.setattr(devices, "choose_device", lambda device: ("cuda", "asked for"))
    monkeypatch.setattr(devices, "capabilities", probed)
    launch = resolve(model, environ=fields.pop("environ", {}), **fields)
    assert fake.live() == zero_live() and not [name for name, *_ in fake.calls if "Ctx" in name]
    return launch


@pytest.mark.parametrize(
    "driver, compiler, fields, message",
    [
        (
            {"version": 12080}, None, {"ranks": 2, "dwdp": {"contention_opt": True}},
            r"dwdp.contention_opt needs batched copies, .* CUDA 13.0 .* the driver is of CUDA 12.8.*: switch it off",
        ),
        (
            {"version": 12080}, None, STANDALONE,
            r"dense_dwdp.copy\) batched needs .* the driver is of CUDA 12.8.*: set per_slice",
        ),
        (
            {}, broken, {"ranks": 2, "dwdp": {"prefetch_gather": True}},
            r"DWDP_PREFETCH_GATHER\) needs the gather kernel, .*\(NVRTC cannot be loaded\): switch it off",
        ),
        (
            {"capability": (8, 0)}, None, {"ranks": 2, "dwdp": {"prefetch_gather": True, "gather_kernel": "tma"}},
            r"needs the gather kernel, .*tma needs compute capability 9.0, device 0 has 8.0; take ldst",
        ),
        (
            {}, broken, {**STANDALONE, "environ": {"DWDP_DENSE_COPY": "Gather"}},
            r"DWDP_DENSE_COPY=gather needs the gather kernel, .*\(NVRTC cannot be loaded\): set batched",
        ),
        (
            {"attributes": {"HANDLE_TYPE_FABRIC_SUPPORTED": 0}}, None, {"ranks": 2, "dwdp": {"handle_type": "fabric"}},
            r"dwdp.handle_type: fabric is not available .*HANDLE_TYPE_FABRIC_SUPPORTED is 0\): auto takes what works",
        ),
        (
            {"attributes": {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}}, None, {"ranks": 2},
            r"expert DWDP needs exportable memory: .*\(the device has no virtual memory management\)",
        ),
        (
            {"fail": {"cuDeviceGetAttribute": lambda attribute, _: CUresult(int(attribute in (103, 128)))}}, None,
            STANDALONE, r"dense DWDP needs exportable memory: .*FABRIC_SUPPORTED is 0, and .*DESCRIPTOR_SUPPORTED is 0",
        ),
    ],
    ids=["batched", "standalone batched", "gather", "kernel", "standalone gather", "fabric", "memory", "old driver"],
)  # fmt: skip
def test_what_is_demanded_and_a_gpu_cannot_do_is_one_error_at_the_gate(
    tiny, monkeypatch, driver, compiler, fields, message
):
    """With its reason, before any rank exists and without a context on the GPU; without the demand it may start."""
    compiler = {} if compiler is None else {"compiler": compiler}
    with pytest.raises(GateError, match=message) as refused:
        starts_on_a_gpu(tiny, monkeypatch, driver=driver, **compiler, **fields)
    assert "\n" not in str(refused.value)
    starts_on_a_gpu(tiny, monkeypatch, **fields)


def test_a_gpu_that_lacks_what_nobody_asks_for_starts(tiny, monkeypatch):
    lacking = {"version": 12080, "attributes": {"HANDLE_TYPE_FABRIC_SUPPORTED": 0}}
    launch = starts_on_a_gpu(tiny, monkeypatch, compiler=broken, driver=lacking, ranks=2, dense_dwdp={"enabled": True})
    assert launch.mode == "attached" and launch.settings.dwdp["handle_type"] == "auto"
