"""Every variable is read by its documented spellings, and a value that cannot be read is never a default."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import dwdp.env
from dwdp import env
from dwdp.errors import ConfigError

BOOLEANS = [
    "DWDP_DENSE",
    "DWDP_DENSE_STRICT",
    "DWDP_PREFETCH_GATHER",
    "DWDP_DISABLE_COOP_ROUTING",
    "DWDP_SKIP_KV_CACHE_ESTIMATION",
    "DWDP_EXECUTOR_SHUTDOWN_DROP_INFLIGHT",
    "DWDP_DENSE_REQUIRED",
]
ALIASES = {
    "DWDP_DENSE": "TRTLLM_DWDP_DENSE",
    "DWDP_DENSE_COPY": "TRTLLM_DWDP_DENSE_COPY",
    "DWDP_DENSE_REQUIRED": "TRTLLM_DWDP_DENSE_REQUIRED",
    "DWDP_DENSE_SEGMENTS": "TRTLLM_DWDP_DENSE_SEGMENTS",
    "DWDP_DENSE_MIN_BYTES": "TRTLLM_DWDP_DENSE_MIN_BYTES",
    "DWDP_DENSE_STORE_CHUNK_MB": "TRTLLM_DWDP_DENSE_STORE_CHUNK_MB",
    "DWDP_DENSE_STRICT": "TRTLLM_DWDP_DENSE_STRICT",
    "DWDP_DENSE_DEBUG": "TRTLLM_DWDP_DENSE_DEBUG",
    "DWDP_PREFETCH_GATHER": "TRTLLM_DWDP_PREFETCH_GATHER",
    "DWDP_GATHER_KERNEL": "TRTLLM_DWDP_GATHER_KERNEL",
    "DWDP_SM_RESERVE": "TRTLLM_CUTEDSL_SM_RESERVE",
    "DWDP_DISABLE_COOP_ROUTING": "TLLM_ROUTING_DISABLE_COOP_LAUNCH",
    "DWDP_RENDEZVOUS_TIMEOUT_S": "TRTLLM_DWDP_RENDEZVOUS_TIMEOUT_S",
    "DWDP_SKIP_KV_CACHE_ESTIMATION": "TRTLLM_SKIP_KV_CACHE_ESTIMATION",
    "DWDP_EXECUTOR_SHUTDOWN_DROP_INFLIGHT": "TRTLLM_EXECUTOR_SHUTDOWN_DROP_INFLIGHT",
    "DWDP_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S": "TRTLLM_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S",
}
SAMPLES = {  # two texts that mean different values
    "DWDP_DENSE_COPY": ("gather", "batched"),
    "DWDP_DENSE_SEGMENTS": ("attn", "attn,moe"),
    "DWDP_DENSE_DEBUG": ("1", "2"),
    "DWDP_GATHER_KERNEL": ("tma", "ldst"),
}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="dwdp")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", BOOLEANS)
def test_every_boolean_reads_every_spelling_in_any_case(name):
    for words, value in ((["1", "true", "on", "yes"], True), (["0", "false", "off", "no"], False)):
        for word in words:
            for text in (word, word.upper(), word.capitalize(), f" {word} "):
                assert env.value(name, {name: text}) is value, text
    assert env.value(name, {}) is None


@pytest.mark.parametrize("name", [name for name in BOOLEANS if name != "DWDP_DENSE_REQUIRED"])
@pytest.mark.parametrize("text", ["", " ", "2", "maybe", "t", "y", "enabled", "01", "-1", "１"])
def test_a_boolean_that_cannot_be_read_names_the_variable_and_what_it_accepts(name, text):
    for variable in (name, ALIASES[name]):
        with pytest.raises(ConfigError, match="0/1, true/false, on/off or yes/no") as refused:
            env.value(name, {variable: text})
        assert str(refused.value).startswith(variable)


@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_required_alone_stays_on_with_a_warning(warnings, text):
    assert env.value("DWDP_DENSE_REQUIRED", {"TRTLLM_DWDP_DENSE_REQUIRED": text}) is True
    (line,) = warnings()
    assert "TRTLLM_DWDP_DENSE_REQUIRED" in line and "stays on" in line


@pytest.mark.parametrize(
    "name,good,bad",
    [
        ("DWDP_DENSE_COPY", {"per_slice": "per_slice", "GATHER": "gather"}, ["fast", "", "batched,gather"]),
        (
            "DWDP_DENSE_SEGMENTS",
            {"attn": ("attn",), "attn,moe": ("attn", "moe"), "moe, attn": ("attn", "moe")},
            ["moe", "", ",", "attn,", "attn,attn", "attn,mlp"],
        ),
        ("DWDP_DENSE_MIN_BYTES", {"0": 0, "1048576": 1 << 20}, ["-1", "1.5", "1MiB", "1_0", "+1", ""]),
        ("DWDP_DENSE_STORE_CHUNK_MB", {"0": 0, "512": 512}, ["-1", "x"]),
        ("DWDP_DENSE_DEBUG", {"0": 0, "1": 1, "2": 2}, ["3", "-1", "true"]),
        ("DWDP_GATHER_KERNEL", {"auto": "auto", "tma": "tma", "LDST": "ldst"}, ["cute", ""]),
        ("DWDP_SM_RESERVE", {"0": 0, "16": 16}, ["-1", "all"]),
        ("DWDP_RANK", {"0": 0, "11": 11}, ["-1", "one", "", "1.0"]),
        ("DWDP_MASTER_PORT", {"1": 1, "65535": 65535}, ["0", "65536", "http", ""]),
        ("DWDP_MASTER_ADDR", {"node0": "node0"}, ["", " "]),
        ("DWDP_SOCKET_DIR", {"/tmp/x": "/tmp/x"}, [""]),
        ("DWDP_RENDEZVOUS_TIMEOUT_S", {"5": 5.0, "0.5": 0.5}, ["0", "-1", "nan", "inf", "ten", "", "1e999"]),
        (
            "DWDP_SERVE_GRACEFUL_SHUTDOWN_TIMEOUT_S",
            {"30": 30.0, "2.5": 2.5, ".5": 0.5},
            ["", "0", "0.0", "-1", "nan", "inf", "soon", "1_0", "0x10"],
        ),
    ],
)
def test_typed_switches_read_their_values_and_refuse_others_by_name(name, good, bad):
    for text, value in good.items():
        got = env.value(name, {name: text})
        assert got == value and type(got) is type(value)
    for text in bad:
        with pytest.raises(ConfigError, match=f"^{name}=.* it accepts "):
            env.value(name, {name: text})


@pytest.mark.parametrize("name", ALIASES)
def test_the_original_name_is_an_alias_and_a_difference_names_both(name):
    one, other = SAMPLES.get(name, ("1", "0") if name in BOOLEANS else ("7", "8"))
    alias = ALIASES[name]
    value = env.value(name, {name: one})
    assert env.value(name, {alias: one}) == value
    assert env.value(name, {name: one, alias: one}) == value
    for names in ((name, alias), (alias, name)):
        with pytest.raises(ConfigError) as refused:
            env.value(name, {names[0]: one, names[1]: other})
        assert f"{name}=" in str(refused.value) and f"{alias}=" in str(refused.value)


def test_two_spellings_of_one_value_do_not_differ():
    assert env.value("DWDP_DENSE", {"DWDP_DENSE": "1", "TRTLLM_DWDP_DENSE": "Yes"}) is True


def test_check_environment_reads_everything_but_what_the_launch_decides(warnings):
    env.check_environment({})
    env.check_environment({"DWDP_DENSE_COPY": "fast", "DWDP_DENSE_REQUIRED": "maybe"})
    assert warnings() == []
    for name in set(env.SWITCHES) - {"DWDP_DENSE_COPY", "DWDP_DENSE_REQUIRED"}:
        with pytest.raises(ConfigError, match=f"^{name}="):
            env.check_environment({name: " "})


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.delenv("TRTLLM_DWDP_RENDEZVOUS_TIMEOUT_S", raising=False)
    monkeypatch.delenv("DWDP_RENDEZVOUS_TIMEOUT_S", raising=False)
    assert env.rendezvous_timeout_seconds() == 1800.0
    monkeypatch.setenv("DWDP_RENDEZVOUS_TIMEOUT_S", "2.5")
    assert env.rendezvous_timeout_seconds() == 2.5
    assert env.socket_dir({}) is None and env.socket_dir({"DWDP_SOCKET_DIR": "/run/x"}) == "/run/x"


def test_the_token_is_a_text_or_a_file_and_no_message_shows_it(tmp_path):
    assert env.group_token({}) is None
    assert env.group_token({"DWDP_GROUP_TOKEN": "s3cret"}) == "s3cret"
    path = tmp_path / "token"
    path.write_text("from-s3cret\n")
    path.chmod(0o600)
    assert env.group_token({"DWDP_GROUP_TOKEN": str(path)}) == "from-s3cret"
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"DWDP_GROUP_TOKEN: .*{path} has mode {mode:04o}.*chmod 600") as refused:
            env.group_token({"DWDP_GROUP_TOKEN": str(path)})
        assert "from-s3cret" not in str(refused.value)
    path.chmod(0o600)
    path.write_text("\n")
    for environ in (
        {"DWDP_GROUP_TOKEN": str(path)},
        {"DWDP_GROUP_TOKEN": str(tmp_path / "s3cret")},
        {"DWDP_GROUP_TOKEN": " "},
        {"DWDP_GROUP_TOKEN": "s3cret", "TRTLLM_DWDP_GROUP_TOKEN": "s3cret2"},
    ):
        with pytest.raises(ConfigError, match="DWDP_GROUP_TOKEN") as refused:
            env.group_token(environ)
        assert "s3cret" not in str(refused.value)


OWN = {"DWDP_RANK": "1", "DWDP_MASTER_ADDR": "a", "DWDP_MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    "environ,source",
    [
        (OWN, "DWDP_RANK"),
        (TORCHRUN, "torchrun"),
        (MPI | ADDRESS, "MPI"),
        (MPICH | ADDRESS, "MPI"),
        (SLURM | ADDRESS, "Slurm"),
        (SLURM | {"DWDP_MASTER_ADDR": "a", "DWDP_MASTER_PORT": "1234"}, "Slurm"),
        (OWN | TORCHRUN | MPI | SLURM, "DWDP_RANK"),
        (TORCHRUN | MPI | SLURM, "torchrun"),
        (MPI | SLURM | ADDRESS, "MPI"),
    ],
)
def test_the_first_complete_set_gives_rank_and_address(environ, source, caplog, warnings):
    caplog.set_level(logging.INFO, logger="dwdp")
    place = env.discover_rank(2, environ)
    assert (place.source, place.rank, place.size) == (source, 1, 2)
    assert (place.master_addr, place.master_port) == ("a", 1234)
    assert any(source in r.getMessage() and r.levelno == logging.INFO for r in caplog.records)
    assert warnings() == []


@pytest.mark.parametrize("environ", [{}, SLURM, ADDRESS, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_without_a_complete_set_there_is_no_place(environ):
    assert env.discover_rank(2, environ) is None


@pytest.mark.parametrize("environ", [MPI, MPICH, MPI | SLURM, MPI | {"MASTER_ADDR": "a"}])
def test_mpi_needs_no_store_unless_a_variable_of_ours_begins_another_set(environ, warnings):
    place = env.discover_rank(2, environ)
    assert (place.source, place.rank, place.size, place.has_store) == ("MPI", 1, 2, False)
    assert str(place) == "MPI: rank 1 of 2 without a store"
    assert env.discover_rank(2, environ | OWN).source == "DWDP_RANK"
    assert env.discover_rank(2, TORCHRUN | environ).source == "torchrun" and warnings() == []
    for name in OWN:
        with pytest.raises(ConfigError, match="go together"):
            env.discover_rank(2, environ | {name: OWN[name]})


def test_a_set_of_one_process_forms_no_group():
    environ = {"RANK": "0", "WORLD_SIZE": "1", **ADDRESS, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert env.discover_rank(4, environ) is None


@pytest.mark.parametrize(
    "change", [{"RANK": "0"}, {"MASTER_PORT": "99"}, {"MASTER_ADDR": "b"}], ids=["rank", "port", "address"]
)
def test_a_second_set_that_disagrees_is_one_warning_naming_both(warnings, change):
    assert env.discover_rank(2, OWN | TORCHRUN | change).source == "DWDP_RANK"
    (line,) = warnings()
    assert "DWDP_RANK" in line and "torchrun" in line


def test_a_second_set_that_cannot_be_read_is_a_warning_and_a_first_one_an_error(warnings):
    assert env.discover_rank(2, OWN | TORCHRUN | {"RANK": "x"}).rank == 1
    assert "RANK='x'" in warnings()[0]
    with pytest.raises(ConfigError, match="RANK='x'"):
        env.discover_rank(2, TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize("missing", OWN)
def test_half_of_our_own_set_is_an_error_naming_what_is_missing(missing):
    with pytest.raises(ConfigError, match=f"^{missing} not set"):
        env.discover_rank(2, {name: text for name, text in OWN.items() if name != missing})


def test_sizes_and_ranks_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="torchrun runs 2 processes but the launch has 4 ranks"):
        env.discover_rank(4, TORCHRUN)
    with pytest.raises(ConfigError, match="rank 1 is not below the number of ranks, 1"):
        env.discover_rank(1, OWN)
    with pytest.raises(ConfigError, match="rank 2 is not below"):
        env.discover_rank(None, TORCHRUN | {"RANK": "2"})
    assert env.discover_rank(None, OWN).size is None


def test_a_store_that_torchrun_serves_is_reported():
    assert env.discover_rank(2, TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store_exists is True
    assert env.discover_rank(2, TORCHRUN).store_exists is False


def test_a_child_gets_this_environment_with_changes_and_finds_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("DWDP_TEST_KEEP", "kept")
    monkeypatch.setenv("DWDP_TEST_DROP", "dropped")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    child = env.child_environment(OMP_NUM_THREADS="3", DWDP_TEST_DROP=None)
    assert child["DWDP_TEST_KEEP"] == "kept" and child["OMP_NUM_THREADS"] == "3"
    assert "DWDP_TEST_DROP" not in child
    code = "import dwdp.env; print(dwdp.env.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=child, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert Path(run.stdout.strip()).resolve() == Path(dwdp.env.__file__).resolve(), run.stderr


def test_a_variable_that_changes_nothing_is_named():
    environ = {"DWDP_DENZE": "1", "TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1", "DWDP_DENSE": "1", "HOME": "/"}
    lines = env.ineffective(environ)
    assert len(lines) == 2
    assert lines[0].startswith("TRTLLM_SKIP_KV_CACHE_ESTIMATION has no effect")
    assert "DWDP_DENZE" in lines[1] and "DWDP_DENSE is" in lines[1]


@pytest.mark.parametrize(
    "name, near",
    [
        ("DWDP_DENSE_ENABLE", "DWDP_DENSE"),
        ("DWDP_DENSE_ENABLED", "DWDP_DENSE"),
        ("DWDP_DENSE_ON", "DWDP_DENSE"),
        ("DWDP_DENZE", "DWDP_DENSE"),
        ("DWDP_DENSE_SEGMENT", "DWDP_DENSE_SEGMENTS"),
        ("DWDP_DENSE_STORE_CHUNK", "DWDP_DENSE_STORE_CHUNK_MB"),
        ("DWDP_DENSE_COPIES", "DWDP_DENSE_COPY"),
        ("DWDP_MASTER_ADDRESS", "DWDP_MASTER_ADDR"),
        ("DWDP_RESERVE", "DWDP_SM_RESERVE"),
        ("DWDP_XYZZY_QUUX", None),
    ],
)
def test_an_unknown_name_is_answered_with_the_one_that_it_may_have_meant(name, near):
    """Fails when the spelling of the whole name decides: DWDP_DENSE_DEBUG is spelled most like DWDP_DENSE_ENABLE."""
    assert env.nearest(name, env.SWITCHES) == near


def test_a_switch_for_what_runs_beside_a_gather_has_no_effect_without_one():
    environ = {"TLLM_ROUTING_DISABLE_COOP_LAUNCH": "1"}
    assert env.ineffective(environ) == [
        "TLLM_ROUTING_DISABLE_COOP_LAUNCH has no effect: no gather takes SMs of a GPU here"
    ]
    assert env.ineffective(environ, gather=True) == []


def environment_reads(source):
    """Lines that reach the process environment, in any of the ways of the standard library."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if names & {alias.name for alias in node.names}:
                yield node.lineno


def test_nothing_else_reads_the_environment():
    root = Path(dwdp.env.__file__).parent
    own = root / "env.py"
    assert list(environment_reads(own.read_text()))
    found = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if path != own and (lines := list(environment_reads(path.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DWDP_RENDEZVOUS_TIMEOUT_S", "1e300"),
        ("DWDP_DENSE_MIN_BYTES", str(2**53)),
        ("DWDP_SOCKET_DIR", "/tmp/\udcff"),
    ],
)
def test_a_value_that_no_later_step_could_take_is_refused_at_start(name, text):
    with pytest.raises(ConfigError, match=name):
        env.check_environment({name: text})


def test_a_token_file_that_does_not_exist_is_refused_at_start():
    with pytest.raises(ConfigError, match="DWDP_GROUP_TOKEN names a file that does not exist"):
        env.check_environment({"DWDP_GROUP_TOKEN": "/nowhere/token"})
