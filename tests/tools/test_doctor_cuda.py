"""`dwdp doctor` on GPUs: real rank processes, each with a fake driver, pass real handles; faults are named."""

from __future__ import annotations

import subprocess

import pytest

from dwdp.config.schema import dwdp_section
from dwdp.tools import doctor
from dwdp.tools.cli import run
from dwdp.tools.doctor_text import print_document
from tests.tools.doctor_runs import SMALL, check_wrong_byte, examine, faulty, whats

GPU_NODE = "there is no IMEX channel device below /dev/nvidia-caps-imex-channels"


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """probed(ranks, plant, **fields of the dwdp section) -> the document."""

    def probe(ranks, plant="seams = {'memory': on_fake_gpus()}", seams=(), **fields):
        config = dwdp_section(fields, ranks)
        return examine(
            tmp_path, monkeypatch, ranks, memory="cuda", config=config, probe=faulty(plant), **dict(seams)
        )  # fmt: skip

    return probe


def rows(document, key, name):
    return {one[name]: one for one in document[key]}


def shape(value):
    """Its keys at every level; of a list those of its first element, of a scalar nothing."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def test_gpus_of_their_own_have_every_pair_right_and_fabric_is_refused_for_a_missing_channel(
    probed, tmp_path, monkeypatch
):
    document = probed(3)
    assert document["problems"] == [] and document["copy_bytes"] == SMALL
    assert [(pair["source"], pair["target"]) for pair in document["pairs"]] == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1),
    ]  # fmt: skip
    for pair in document["pairs"]:
        assert pair["bytes_ok"] is pair["read_only"] is pair["peer_access"] is True and pair["gb_per_s"] > 0
    assert {row["target"]: row["sources"] for row in document["many_to_one"]} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert all(row["gb_per_s"] > 0 for row in document["many_to_one"])
    types = rows(document, "handle_types", "type")
    assert types["memfd"]["tried"] is False and "--memory host" in types["memfd"]["why"]
    assert types["POSIX_FD"]["works"] is True and document["handle_type"] == "posix_fd"
    fabric = types["FABRIC"]
    assert (fabric["tried"], fabric["works"]) == (True, False)
    assert "cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED (800)" in fabric["why"]
    assert "the attribute of the device says that FABRIC is supported, but " + GPU_NODE in fabric["why"]
    assert "the nvidia-imex service" in fabric["why"]
    assert any("FABRIC" in note and "not needed on one host" in note for note in document["notes"])
    passing = document["descriptor_passing"]
    assert passing["used"] == "scm_rights" and passing["pidfd_getfd"]["works"] is True
    assert [one["transfer"] for one in document["transfers"]] == ["per_slice", "batched", "gather"]
    assert all(one["works"] is True for one in document["transfers"])
    assert document["transfer"]["used"] == "per_slice"
    assert document["limits"]["mapping_budget"] == doctor.CUDA_MAPPINGS
    devices = document["devices"]
    assert len({one["uuid"] for one in devices}) == 3 and [one["visible_as"] for one in devices] == [0, 1, 2]
    assert all(one["page_bytes"] == 8 * one["granularity"] > 0 for one in devices)

    host = examine(tmp_path, monkeypatch, 2)
    assert shape(host) == shape(document) | {"problems": None}


def test_fabric_is_taken_where_it_works_and_needs_no_descriptors(probed):
    document = probed(2, "seams = {'memory': on_fake_gpus(imex=True), 'take': refused}")
    assert document["problems"] == [] and document["handle_type"] == "fabric"
    types = rows(document, "handle_types", "type")
    assert types["FABRIC"]["works"] is True and types["POSIX_FD"]["works"] is True
    assert types["POSIX_FD"]["why"].endswith("FABRIC is taken")
    assert all(pair["bytes_ok"] for pair in document["pairs"])
    assert document["descriptor_passing"]["used"] is None
    assert "FABRIC handles are bytes" in document["descriptor_passing"]["scm_rights"]["why"]


def test_fabric_that_was_asked_for_and_is_refused_is_a_problem_with_its_cure(probed):
    document = probed(2, handle_type="fabric")
    (problem,) = document["problems"]
    assert problem["what"].startswith("ranks 0, 1: FABRIC handles were asked for and do not work")
    assert "nvidia-imex" in problem["cure"] and "/dev/nvidia-caps-imex-channels" in problem["cure"]
    types = rows(document, "handle_types", "type")
    assert types["FABRIC"]["works"] is False and types["POSIX_FD"]["tried"] is False
    assert all(pair["bytes_ok"] is None for pair in document["pairs"])


def test_two_ranks_on_one_gpu_are_refused_unless_allowed(probed):
    plant = "seams = {'memory': on_fake_gpus(gpu=5)}"
    document = probed(2, plant)
    (problem,) = document["problems"]
    assert "ranks 0, 1 are on one device, GPU-" in problem["what"] and "--allow-shared-device" in problem["cure"]
    document = probed(2, plant, allow_shared_device=True)
    assert document["problems"] == [] and all(pair["peer_access"] is True for pair in document["pairs"])
    assert any("ranks 0, 1 share GPU-" in note and "not of a link" in note for note in document["notes"])


def test_devices_are_told_by_uuid_where_every_rank_sees_another_one(probed):
    """All call theirs GPU 0. Fails when ordinals are compared; whether peers reach each other nobody can ask."""
    plant = "seams = {'memory': on_fake_gpus(gpu=[int(os.environ['CUDA_VISIBLE_DEVICES'])])}"
    each = [{"CUDA_VISIBLE_DEVICES": name} for name in ("3", "6")]
    document = probed(2, plant, {"env_per_rank": each})
    assert document["problems"] == [] and [one["visible_as"] for one in document["devices"]] == [0, 0]
    assert all(pair["bytes_ok"] is True and pair["peer_access"] is None for pair in document["pairs"])


def test_a_wrong_byte_in_a_copy_is_found_in_its_pair_only(probed):
    plant = "seams = copying_with(wrong_byte, on_fake_gpus()) | {'take': refused}"
    document = probed(2, plant)
    check_wrong_byte(document)
    assert any("pidfd_getfd is refused and not needed" in note for note in document["notes"])
    assert rows(document, "handle_types", "type")["POSIX_FD"]["works"] is False


def test_memory_that_reads_back_wrong_is_told_with_every_call_succeeding(probed):
    document = probed(2, "seams = {'memory': on_fake_gpus(machine={'drop_writes': True})}")
    assert all("read back wrong" in what for what in whats(document)) and document["problems"]
    assert "IOMMU" in document["problems"][0]["cure"]


def test_both_ways_to_pass_descriptors_failing_is_named_with_both_causes(probed):
    document = probed(2, "no_rights(); seams = {'memory': on_fake_gpus(), 'take': refused}")
    assert document["problems"]
    for problem in document["problems"]:
        assert "SCM_RIGHTS is not allowed here" in problem["what"] and "pidfd_getfd(pid" in problem["what"]
        assert "CAP_SYS_PTRACE" in problem["cure"]


def test_a_rank_that_dies_is_the_one_that_is_named(probed):
    document = probed(2, "seams = copying_with(killed, on_fake_gpus())")
    (problem,) = document["problems"]
    assert problem["what"].startswith("rank 1 (pid ") and "died (killed by SIGKILL)" in problem["what"]


def test_a_rank_that_stops_is_named_within_the_bound(probed):
    document = probed(2, "seams = copying_with(stopped, on_fake_gpus())", {"step_seconds": 3.0})
    (problem,) = document["problems"]
    assert problem["what"].startswith("rank 1 (pid ") and "its process is stopped" in problem["what"]


def test_a_driver_too_old_for_batches_is_a_note_and_a_problem_where_they_are_asked_for(probed, capsys):
    """The text of the document is looked at too."""
    document = probed(2, "seams = {'memory': on_fake_gpus(version=12080, capability=(8, 0))}", gather_kernel="tma")
    assert document["problems"] == []
    transfers = rows(document, "transfers", "transfer")
    assert transfers["batched"]["works"] is False and "the driver is of CUDA 12.8" in transfers["batched"]["why"]
    assert transfers["gather"]["works"] is False and "compute capability 9.0" in transfers["gather"]["why"]
    assert sum("copies do not work here and are not asked for" in note for note in document["notes"]) == 2
    asked = doctor.transfer(2, dwdp_section({"contention_opt": True}, 2), transfers)
    assert asked["used"] is None and "CUDA 13.0" in asked["why"]
    assert asked["why"].startswith("dwdp.contention_opt asks for batched copies: every rank: ")
    print_document(document)
    shown = capsys.readouterr().out
    assert "memory domain: cuda (asked for)" in shown and "Peers are mapped read-only." in shown
    assert (
        f"Fake GPU {document['devices'][1]['uuid']}, GPU 1 here" in shown
        and "Note: batched copies do not work here" in shown
    )
    assert shown.splitlines()[-1] == "Verdict: all is well."


def test_maps_that_cannot_be_read_only_and_a_compiler_that_fails_are_noted(probed):
    plant = """
from dwdp.errors import DwdpError
def broken(*arguments): raise DwdpError("NVRTC cannot be loaded")
def refuse_reads(address, size, access, count): return 801 if access[0].flags == 1 else 0
from tests.memory.fake_driver import CUresult
fail = {"cuMemSetAccess": lambda *arguments: CUresult(refuse_reads(*arguments))}
seams = {"memory": on_fake_gpus(fail=fail, compiler=broken)}
"""
    document = probed(2, plant, prefetch_gather=True)
    assert all(pair["read_only"] is False and pair["bytes_ok"] for pair in document["pairs"])
    assert any("mapped writable" in note and "NOT_SUPPORTED" in note for note in document["notes"])
    (problem,) = document["problems"]
    assert problem["what"] == "dwdp.prefetch_gather asks for gather copies: every rank: NVRTC cannot be loaded"


def test_a_full_gpu_is_told_as_one(probed):
    plant = """
class Full(on_fake_gpus()):
    def open_domain(self):
        domain = super().open_domain()
        domain.driver.api.machine.gpu("host0", rank).used = 1 << 30
        return domain
seams = {"memory": Full}
"""
    document = probed(2, plant)
    assert "out of memory before anything was moved" in document["problems"][0]["what"]
    assert "nvidia-smi" in document["problems"][0]["cure"]


# what is asked


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("how", ["option", "memory: cuda", "device: cuda"])
def test_gpus_that_are_not_there_are_one_line(capsys, monkeypatch, tmp_path, how):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(doctor, "NVIDIA_PATHS", ())
    file = tmp_path / "dwdp.yaml"
    file.write_text({"memory: cuda": "dwdp: {memory: cuda}", "device: cuda": "device: cuda"}.get(how, ""))
    arguments = ["--memory", "cuda"] if how == "option" else ["--config", str(file)]
    assert run(["doctor", "--ranks", "2", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert "is built without CUDA" in captured.err and "--memory host" in captured.err


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "gpu"], ["memory", "'gpu'"]),
        (["--handle-type", "fd"], ["handle_type", "'fd'"]),
        (["--memory", "host", "--handle-type", "fabric"], ["handle_type fabric", "host memory is probed"]),
        (["--config", "/nope.yaml"], ["/nope.yaml"]),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, arguments, words):
    assert run(["doctor", "--ranks", "2", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert all(word in captured.err for word in words)


def test_a_machine_with_a_gpu_is_probed_on_it_and_never_silently_on_the_host(tmp_path, monkeypatch):
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ValueError, match=r"has an NVIDIA device .* but torch .* is built without CUDA"):
        doctor.choose_memory(dwdp_section(None, 2), nvidia_paths=(str(device),))
    assert doctor.choose_memory(dwdp_section({"memory": "host"}, 2), nvidia_paths=(str(device),))[0] == "host"
    monkeypatch.setattr(doctor, "lacking_for_cuda", lambda paths: [])
    assert doctor.choose_memory(dwdp_section(None, 2), nvidia_paths=(str(device),)) == (
        "cuda", f"this machine has an NVIDIA device ({device})",
    )  # fmt: skip


def test_the_section_of_a_file_the_options_and_the_environment_make_one_config(tmp_path):
    file = tmp_path / "dwdp.yaml"
    file.write_text("dwdp: {contention_opt: true, handle_type: posix_fd, page_granules: 2}")
    given = {"handle_type": "fabric", "memory": None}
    config, device, said = doctor.read_settings(4, file, given, {"DWDP_PREFETCH_GATHER": "1"})
    assert (config.dwdp_size, config.handle_type, config.page_granules) == (4, "fabric", 2)
    assert config.transfer == "gather" and len(said) == 1 and "DWDP_PREFETCH_GATHER" in said[0]


def test_copies_fill_a_link_and_stay_within_what_the_host_can_check():
    assert doctor.copy_bytes(2, 0, "cuda") == 256 << 20
    assert doctor.copy_bytes(64, 0, "cuda") == 64 << 20
