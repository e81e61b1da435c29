"""Files are YAML 1.2 or JSON and nothing else, and file, options and environment meet in a known order."""

import json

import pytest

from dwdp.config.files import load_config_file, read_config_file, requested_dense_copy, resolve
from dwdp.config.schema import DenseConfig, DwdpConfig, ServeConfig
from dwdp.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="serve.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def refusal(path, load=load_config_file):
    with pytest.raises(ConfigError) as refused:
        load(path)
    text = str(refused.value)
    assert "\n" not in text and str(path) in text
    return text


def test_yaml_and_json_files_mean_the_same(write):
    data = {"ranks": 2, "dtype": "float32", "dwdp": {"dwdp_size": 2}, "dense_dwdp": {"segments": ["attn"]}}
    yaml = "ranks: 2\ndtype: float32\ndwdp:\n  dwdp_size: 2\ndense_dwdp:\n  segments: [attn]\n"
    from_yaml, from_json = load_config_file(write(yaml)), load_config_file(write(json.dumps(data), "a.json"))
    assert from_yaml == from_json == ServeConfig.model_validate(data)


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "ON", "y", "n", "1", "0", "'true'"])
def test_only_true_and_false_are_booleans_in_a_file(write, word):
    text = refusal(write(f"dense_dwdp:\n  enabled: {word}\n"))
    assert "dense_dwdp.enabled: " in text and word.strip("'") in text


@pytest.mark.parametrize("word,value", [("true", True), ("false", False)])
def test_true_and_false_are_read(write, word, value):
    assert load_config_file(write(f"dense_dwdp: {{enabled: {word}}}")).dense_dwdp.enabled is value


def test_an_older_yaml_version_cannot_bring_its_booleans_back(write):
    assert "YAML 1.1" in refusal(write("%YAML 1.1\n---\ndense_dwdp:\n  enabled: yes\n"))
    assert load_config_file(write("%YAML 1.2\n---\nranks: 3\n")).ranks == 3


def test_whole_floats_pass_for_integers_and_old_octals_are_decimal(write):
    assert load_config_file(write("ranks: 2.0")).ranks == 2
    assert load_config_file(write("max_seq_len: 1e3")).max_seq_len == 1000
    assert load_config_file(write("max_seq_len: 010")).max_seq_len == 10
    assert load_config_file(write('{"ranks": 2.0}', "a.json")).ranks == 2


@pytest.mark.parametrize(
    "text,name,key",
    [
        ("ranks: 2\nranks: 2\n", "a.yaml", "ranks"),
        ("dwdp:\n  dwdp_size: 1\n  dwdp_size: 1\n", "a.yaml", "dwdp_size"),
        ('{"ranks": 2, "ranks": 3}', "a.json", "ranks"),
        ('{"dwdp": {"dwdp_size": 1, "dwdp_size": 1}}', "a.json", "dwdp_size"),
        ('{"ranks": 2, "ranks": 3}', "a.yaml", "ranks"),
    ],
)
def test_duplicate_keys_are_refused_at_every_level(write, text, name, key):
    assert f"duplicate key '{key}'" in refusal(write(text, name))


@pytest.mark.parametrize(
    "text,path",
    [
        ("colour: red", "colour"),
        ("dwdp: {dwdp_size: 1, colour: red}", "dwdp.colour"),
        ("dense_dwdp: {colour: red}", "dense_dwdp.colour"),
    ],
)
def test_unknown_keys_are_refused_at_every_level_with_path_and_value(write, text, path):
    assert refusal(write(text)).endswith(f"{path}: unknown key (given 'red')")


@pytest.mark.parametrize(
    "text,name,part",
    [
        ("[1, 2]", "a.yaml", "must be a mapping"),
        ("just text", "a.yaml", "must be a mapping"),
        ("null", "a.json", "must be a mapping"),
        ("", "a.json", "is not JSON"),
        ('{"ranks": 2', "a.json", "is not JSON"),
        ("ranks: [1", "a.yaml", "is not YAML"),
        ("ranks: 1\n---\nranks: 2\n", "a.yaml", "is not YAML"),
        ("a: *nothing", "a.yaml", "is not YAML"),
        ("ranks: !!python/object:os.system x", "a.yaml", "is not YAML"),
        ("ranks: 2001-01-01", "a.yaml", "ranks is "),
        ("max_seq_len: .nan", "a.yaml", "max_seq_len is nan"),
        ('{"max_seq_len": NaN}', "a.json", "max_seq_len is nan"),
        ('{"max_seq_len": 1e999}', "a.json", "max_seq_len is inf"),
        ("1: 2", "a.yaml", "key 1 at the top level"),
        ("dwdp: &a\n  x: *a\n", "a.yaml", "contains itself"),
        (b"\xff\xfe\x00", "a.yaml", "UTF-8"),
        (b"a: \x00", "a.yaml", "is not YAML"),
        ("[" * 20000, "a.json", "nested too deeply"),
    ],
)
def test_what_is_no_mapping_of_json_values_is_refused_in_one_line(write, text, name, part):
    assert part in refusal(write(text, name))


def test_a_file_that_is_not_there_is_named(tmp_path):
    refusal(tmp_path / "missing.yaml", read_config_file)
    refusal(tmp_path, read_config_file)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_the_default_launch(write, text):
    assert load_config_file(write(text)) == ServeConfig()


def test_options_are_laid_over_the_file_and_dwdp_size_follows_the_ranks(write):
    path = write("ranks: 2\ndwdp: {num_prefetch_slots: 3}\n")
    assert load_config_file(path).dwdp == DwdpConfig(dwdp_size=2, num_prefetch_slots=3)
    config = load_config_file(path, {"ranks": 4, "dtype": None})
    assert (config.ranks, config.dwdp.dwdp_size, config.dtype) == (4, 4, "auto")


def test_expert_dwdp_is_on_with_several_ranks_and_off_when_replicated():
    def sections(environ=None, **fields):
        config, _ = resolve(ServeConfig(**fields), environ or {})
        return config.dwdp, config.dense_dwdp

    dense = DenseConfig(enabled=True)
    assert sections(ranks=3) == (DwdpConfig(dwdp_size=3), DenseConfig())
    assert sections(ranks=1) == (None, DenseConfig())
    assert sections(ranks=1, dwdp=DwdpConfig(dwdp_size=1))[0] == DwdpConfig(dwdp_size=1)
    assert sections(ranks=2, tp_size=2, attention_dp=True, dense_dwdp=dense) == (None, dense)
    for fields in ({}, {"dwdp": DwdpConfig(dwdp_size=3)}):
        got = sections({"DWDP_DENSE": "1"}, ranks=3, replicated=True, dense_dwdp=dense, **fields)
        assert got[0] is None and got[1].enabled is False


def test_a_launch_whose_sizes_do_not_fit_is_refused_with_the_numbers():
    for fields, text in (
        ({"ranks": 2, "dwdp": DwdpConfig(dwdp_size=4)}, "dwdp_size is 4 but there are 2 ranks"),
        ({"ranks": 2, "replicated": True, "dwdp": DwdpConfig(dwdp_size=4)}, "dwdp_size is 4"),
        ({"ranks": 2, "tp_size": 2}, "tp_size 2 needs attention_dp"),
        ({"ranks": 4, "tp_size": 2, "attention_dp": True}, "tp_size 2 must be 1 or the number of ranks, 4"),
    ):
        with pytest.raises(ConfigError, match=text):
            resolve(ServeConfig(**fields), {})


def test_a_variable_overrides_its_field_and_the_line_says_which_won():
    environ = {
        "DWDP_DENSE": "on",
        "TRTLLM_DWDP_DENSE_SEGMENTS": "attn",
        "DWDP_DENSE_MIN_BYTES": "77",
        "DWDP_PREFETCH_GATHER": "1",
        "DWDP_SM_RESERVE": "8",
    }
    asked = ServeConfig(ranks=2, dense_dwdp=DenseConfig(enabled=False, required=False, debug=1))
    config, lines = resolve(asked, environ)
    assert config.dense_dwdp == DenseConfig(enabled=True, required=False, debug=1, segments=("attn",), min_bytes=77)
    assert config.dwdp == DwdpConfig(dwdp_size=2, prefetch_gather=True, sm_reserve=8)
    assert len(lines) == len(environ)
    for name in environ:
        assert any(name in line and "overrides" in line for line in lines), name
    line = next(line for line in lines if "DWDP_DENSE=on" in line)
    assert line == "DWDP_DENSE=on overrides dense_dwdp.enabled: True is used, not the config's False"
    assert asked.dense_dwdp.enabled is False and asked.dwdp is None


def test_without_variables_there_is_no_line_and_an_off_value_turns_the_option_off():
    assert resolve(ServeConfig(ranks=2), {})[1] == []
    config, lines = resolve(ServeConfig(ranks=2, dense_dwdp=DenseConfig(enabled=True)), {"DWDP_DENSE": "0"})
    assert config.dense_dwdp.enabled is False and "overrides" in lines[0]


def test_an_expert_switch_without_expert_dwdp_says_that_it_has_no_effect():
    _, lines = resolve(ServeConfig(ranks=1), {"DWDP_GATHER_KERNEL": "tma"})
    assert lines == ["DWDP_GATHER_KERNEL=tma has no effect: expert DWDP is off"]


def test_the_copy_switch_is_parsed_standalone_only():
    standalone = ServeConfig(ranks=2, tp_size=2, attention_dp=True)
    with pytest.raises(ConfigError, match="DWDP_DENSE_COPY='fast'.*batched, per_slice or gather"):
        resolve(standalone, {"DWDP_DENSE_COPY": "fast"})
    assert resolve(standalone, {"DWDP_DENSE_COPY": "per_slice"})[0].dense_dwdp.copy == "per_slice"
    config, lines = resolve(ServeConfig(ranks=2), {"DWDP_DENSE_COPY": "fast"})
    assert config.dense_dwdp.copy == "batched" and lines == []


def test_what_asks_for_a_copy_mode_reaches_the_gate_unread():
    assert requested_dense_copy(DenseConfig(), {}) is None
    assert requested_dense_copy(DenseConfig(copy="batched"), {}) == "batched"
    assert requested_dense_copy(DenseConfig(copy="gather"), {"TRTLLM_DWDP_DENSE_COPY": "x"}) == "x"


def test_a_bad_variable_is_refused_at_start_even_where_nothing_uses_it():
    for name in ("DWDP_SKIP_KV_CACHE_ESTIMATION", "DWDP_RENDEZVOUS_TIMEOUT_S", "DWDP_DENSE_STRICT"):
        with pytest.raises(ConfigError, match=name):
            resolve(ServeConfig(), {name: "maybe"})


def test_tp_size_names_the_ranks_of_an_attention_dp_instance_and_turns_expert_dwdp_off():
    config, _ = resolve(ServeConfig(tp_size=3, attention_dp=True), {})
    assert (config.ranks, config.dwdp) == (3, None)
    config, _ = resolve(ServeConfig(ranks=3, tp_size=3, attention_dp=True), {})
    assert (config.ranks, config.dwdp) == (3, None)


def test_a_number_of_ranks_that_was_given_is_never_replaced_by_tp_size(tmp_path):
    """Fails when 1, the default, passes for a number that nobody gave."""
    words = r"tp_size 2 must be 1 or the number of ranks, 1 \(ranks, --ranks\)"
    with pytest.raises(ConfigError, match=words):
        resolve(ServeConfig(ranks=1, tp_size=2, attention_dp=True), {})
    file = tmp_path / "dwdp.yaml"
    file.write_text("{tp_size: 2, attention_dp: true}")
    assert resolve(load_config_file(file), {})[0].ranks == 2
    with pytest.raises(ConfigError, match=words):
        resolve(load_config_file(file, {"ranks": 1}), {})


def test_replicated_wins_over_attention_dp_and_says_so():
    config, lines = resolve(ServeConfig(tp_size=3, attention_dp=True, replicated=True), {})
    assert (config.ranks, config.tp_size, config.attention_dp, config.dwdp) == (3, 1, False, None)
    assert any("attention_dp and tp_size 3 do not apply" in line for line in lines)
