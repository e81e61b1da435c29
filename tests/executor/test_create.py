"""What was built is taken back in reverse, the first error stays, and nobody else's manager is touched."""

import logging
import threading

import pytest
import torch

from dwdp.errors import DwdpError, GroupError
from dwdp.executor.create import Stages, build_rank
from dwdp.executor.messages import RankSettings, WorkItem
from dwdp.executor.request import SamplingParams
from dwdp.group.threads import run_rank_threads
from dwdp.runtime.setup_experts import outside_bytes
from tests.executor.checkpoints import write_tiny
from tests.support.tiny import tiny_model, tiny_model_config


def test_stages_are_taken_back_in_reverse_and_a_failing_undo_stops_none_of_the_others(caplog):
    order, stages = [], Stages()

    def fail() -> None:
        order.append("b")
        raise OSError("broken undo")

    stages.done("a", lambda: order.append("a"))
    stages.done("b", fail)
    stages.done("c", lambda: order.append("c"))
    with caplog.at_level(logging.ERROR, "dwdp"):
        stages.undo_all()
    assert order == ["c", "b", "a"]
    assert "stage b" in caplog.text and "broken undo" in caplog.text
    stages.undo_all()
    assert order == ["c", "b", "a"]


def test_replicated_bytes_count_each_storage_once_and_plain_attributes_too():
    model = tiny_model(tiny_model_config())
    before = outside_bytes(model)
    assert before == sum(p.untyped_storage().nbytes() for p in model.parameters())
    norm = model.model.norm
    norm.alias = norm.weight.detach()[:3]
    assert outside_bytes(model) == before
    norm.scratch = torch.zeros(10)
    assert outside_bytes(model) == before + 40


def test_replicated_bytes_leave_the_domains_memory_out():
    class Domain:
        def holds(self, tensor) -> bool:
            return tensor is model.lm_head.weight

    model = tiny_model(tiny_model_config())
    assert outside_bytes(model, Domain()) == outside_bytes(model) - model.lm_head.weight.nbytes


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_machine_with_an_nvidia_device_never_falls_back_to_the_cpu_silently(device, tmp_path):
    from dwdp.errors import ConfigError
    from dwdp.executor.devices import choose_device

    with pytest.raises(ConfigError) as caught:
        choose_device(device, nvidia_paths=(str(tmp_path),))
    assert str(tmp_path) in str(caught.value) and "--device cpu" in str(caught.value)
    assert "pip install 'dwdp[gpu]'" in str(caught.value)


def test_the_cpu_is_used_when_asked_for_or_when_there_is_nothing_else(tmp_path):
    from dwdp.errors import ConfigError
    from dwdp.executor.devices import choose_device

    assert choose_device("cpu", nvidia_paths=(str(tmp_path),)) == ("cpu", "asked for")
    assert choose_device("auto", nvidia_paths=(str(tmp_path / "none"),))[0] == "cpu"
    with pytest.raises(ConfigError, match="device cuda"):
        choose_device("cuda", nvidia_paths=())
    with pytest.raises(ConfigError, match="tpu"):
        choose_device("tpu")


def thread_settings(folder, ranks: int, *, dense: bool = True) -> RankSettings:
    dwdp = {"dwdp_size": ranks, "host_granule_bytes": 4096, "page_granules": 1}
    return RankSettings(
        model=str(folder),
        ranks=ranks,
        dtype="float32",
        device="cpu",
        max_seq_len=64,
        dwdp=dwdp,
        dense_dwdp={"enabled": True, "min_bytes": 0} if dense else None,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny(tmp_path_factory.mktemp("tiny"))


ITEMS = [WorkItem(i, prompt, SamplingParams(max_tokens=4)) for i, prompt in enumerate(([3, 1, 4], [1, 5]))]


def test_ranks_in_threads_with_slow_copies_compute_the_same_bits_as_one_whole_rank(tiny):
    def one_rank(group):
        settings = thread_settings(tiny, 3)
        with build_rank(settings, group, rank=group.rank, copy_bytes_per_second=3e6, trace=True) as executor:
            results = executor.generate(ITEMS, logits_sha256=True)
            assert any(op["kind"] == "copy" for op in executor.device.trace)
            return results, executor.report()["counters"]

    whole = build_rank(RankSettings(model=str(tiny), ranks=1, dtype="fp32", device="cpu", max_seq_len=64))
    expected = whole.generate(ITEMS, logits_sha256=True)
    for results, counters in run_rank_threads(3, one_rank):
        assert results == expected
        assert counters["demand_fetches"] == counters["fences"] == counters["restarts"] == 0
        # the throttle makes copies slower than the layers, so waiting for them must have shown
        assert counters["exposed_wait_seconds"] > 0


def test_one_rank_serves_its_prompts_while_the_others_have_none_and_run_no_forward(tiny):
    """Prompts of unlike lengths and unlike outputs on rank 0 alone; no rank is in a collective meanwhile."""
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [8], [2, 7, 1, 8], [2]]
    items = [WorkItem(i, p, SamplingParams(max_tokens=1 + 2 * i, ignore_eos=True)) for i, p in enumerate(prompts)]
    whole = build_rank(RankSettings(model=str(tiny), ranks=1, dtype="fp32", device="cpu", max_seq_len=64))
    expected, done = whole.generate(items, logits_sha256=True), threading.Event()

    def one_rank(group):
        with build_rank(thread_settings(tiny, 3), group, rank=group.rank) as executor:
            if group.rank > 0:
                assert done.wait(20)
            else:
                collectives = group._number
                assert executor.generate(items, logits_sha256=True) == expected
                assert group._number == collectives
                done.set()
            return executor.report()["counters"]["forwards"]

    forwards = run_rank_threads(3, one_rank)
    assert forwards[0] > 0 and forwards[1:] == [0, 0]


def test_a_model_without_dense_roots_is_refused_before_its_weights_are_read(tiny, monkeypatch):
    from dwdp.model import loader
    from dwdp.model.decoder import DecoderLayer

    monkeypatch.setattr(DecoderLayer, "dense_dwdp_roots", lambda self: {})
    monkeypatch.setattr(loader, "_fill", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(DwdpError, match="dense roots"):
        run_rank_threads(2, lambda group: build_rank(thread_settings(tiny, 2), group, rank=group.rank))


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["load", "setup"])
def test_a_rank_that_fails_raises_its_own_error_ends_its_peers_and_leaves_nothing(tiny, monkeypatch, step, error):
    from dwdp.model import loader
    from dwdp.runtime.manager import DwdpManager, current_dense_manager

    domains, registered, seen = [], [], {}
    load_model, setup, enter = loader.load_model, DwdpManager.setup, DwdpManager.__enter__

    def failing(original, which):
        def call(self_or_path, *args, **options):
            if which == step and threading.current_thread().name.endswith("-1"):
                raise error
            return original(self_or_path, *args, **options)

        return call

    def entered(manager):
        domains.append(manager.domain)
        result = enter(manager)
        registered.append(current_dense_manager())
        return result

    monkeypatch.setattr(loader, "load_model", failing(load_model, "load"))
    monkeypatch.setattr(DwdpManager, "setup", failing(setup, "setup"))
    monkeypatch.setattr(DwdpManager, "__enter__", entered)

    def one_rank(group):
        try:
            build_rank(thread_settings(tiny, 2), group, rank=group.rank)
        except BaseException as raised:
            seen[group.rank] = raised
        assert current_dense_manager() is None

    run_rank_threads(2, one_rank, timeout=20)
    assert seen[1] is error
    assert isinstance(seen[0], GroupError) and "rank 1" in str(seen[0])
    assert domains and all(not any(domain.live().values()) for domain in domains)
    assert None not in registered


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_a_manager_is_exited_once_with_no_error_and_what_its_exit_raises_hides_nothing(
    tiny, monkeypatch, caplog, error
):
    from dwdp.model import loader
    from dwdp.runtime.manager import DwdpManager, current_dense_manager

    exits, leave, both_joined = [], DwdpManager.__exit__, threading.Barrier(2)

    def exiting(manager, *given):
        exits.append((manager.group.rank, given))
        leave(manager, *given)
        raise RuntimeError("the exit went wrong as well")

    def failing(*args, **options):
        both_joined.wait(10)
        raise error

    monkeypatch.setattr(loader, "load_model", failing)
    monkeypatch.setattr(DwdpManager, "__exit__", exiting)

    def one_rank(group):
        with pytest.raises(type(error)) as raised:
            build_rank(thread_settings(tiny, 2), group, rank=group.rank)
        assert raised.value is error and current_dense_manager() is None

    run_rank_threads(2, one_rank, timeout=20)
    assert sorted(exits) == [(rank, (None, None, None)) for rank in range(2)]
    assert caplog.text.count("RuntimeError: the exit went wrong as well") == 2


def test_a_manager_that_was_registered_before_is_left_alone(tiny):
    from dwdp.config.schema import DenseConfig
    from dwdp.runtime.manager import DenseDwdpManager, current_dense_manager

    def one_rank(group):
        first = DenseDwdpManager(DenseConfig(enabled=True))
        first.register()
        with pytest.raises(DwdpError, match="registered already"):
            build_rank(thread_settings(tiny, 2), group, rank=group.rank)
        return current_dense_manager() is first

    assert run_rank_threads(2, one_rank, timeout=20) == [True, True]


def test_ranks_that_were_given_different_configs_are_named_with_what_differs(tiny):
    def one_rank(group):
        settings = thread_settings(tiny, 2)
        if group.rank == 1:
            settings.dwdp["num_prefetch_slots"] = 3
        with pytest.raises(GroupError) as caught:
            build_rank(settings, group, rank=group.rank)
        return str(caught.value)

    for text in run_rank_threads(2, one_rank, timeout=20):
        assert "rank 0" in text and "rank 1" in text and "dwdp_config" in text


@pytest.mark.parametrize("dense", [True, False])
def test_weights_that_are_shared_cannot_be_loaded_in_place_also_after_the_release(tiny, dense):
    def one_rank(group):
        with build_rank(thread_settings(tiny, 2, dense=dense), group, rank=group.rank) as executor:
            model, before = executor.model, executor.logits([1, 2, 3])
            with pytest.raises(DwdpError, match="build and load a new"):
                model.load_state_dict({name: torch.zeros_like(p) for name, p in model.named_parameters()})
            assert torch.equal(executor.logits([1, 2, 3]), before)
        with pytest.raises(DwdpError, match="build and load a new"):
            model.load_state_dict({})

    run_rank_threads(2, one_rank)
