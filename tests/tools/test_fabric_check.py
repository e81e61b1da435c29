"""`examples/fabric_check.sh` and the module behind it, in real processes on fake drivers, as on one host and on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dwdp.config.schema import DwdpConfig
from dwdp.env import child_environment
from dwdp.group.threads import run_rank_threads
from dwdp.tools import fabric_check
from dwdp.tools.doctor_memory import CudaMemory
from tests.memory.fake_driver import GRANULE, CUresult, FakeCudaDomain, FakeDriver, FakeMachine, zero_live
from tests.support.groups import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "fabric_check.sh"

FAKE = """
import os, sys
sys.path.insert(0, ROOT)
from dwdp.group import comm, ranks
from dwdp.tools import doctor_memory, fabric_check
from tests.memory.fake_driver import CUresult, FakeCudaDomain, FakeDriver, FakeMachine

rank = int(os.environ.get("DWDP_RANK", "0"))
options, hosts = {}, os.environ.get("FAKE_HOSTS")
if hosts:
    ranks.BOOT_ID_FILE = "/nowhere"
    ranks.socket.gethostname = lambda: hosts.split(",")[rank]
PLANT

class OnFake(doctor_memory.CudaMemory):
    def open_domain(self):
        driver = FakeDriver(FakeMachine(), **options)
        return FakeCudaDomain(rank, rank, handle_type=self.config.handle_type, driver=driver)

sys.exit(fabric_check.main(sys.argv[3:], memory=OnFake, command=[COMMAND, "-m", "dwdp.tools.fabric_check"]))
"""


def reads_refused(address, size, access, count):
    return CUresult.CUDA_ERROR_NOT_SUPPORTED if access[0].flags == 1 else None


@pytest.fixture
def check(tmp_path):
    """check(plant, *arguments, **variables) -> the finished script, whose Python has fake GPUs."""

    def run(plant="options = {'imex': True}", *arguments, **variables):
        python, ssh = tmp_path / "python", tmp_path / "ssh"
        fake = FAKE.replace("ROOT", repr(str(ROOT))).replace("PLANT", plant).replace("COMMAND", repr(str(python)))
        (tmp_path / "fake.py").write_text(fake)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/fake.py "$@"\n')
        ssh.write_text('#!/bin/sh\nexec bash -c "$2"\n')
        for file in (python, ssh):
            file.chmod(0o755)
        env = child_environment(PYTHON=str(python), SSH=str(ssh), ADDRESS="127.0.0.1", **variables)
        return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=90)

    return run


def row(shown: str, step: str) -> str:
    return next(line for line in shown.splitlines() if line.strip().startswith(step))


def test_two_processes_of_one_host_go_through_every_step(check):
    result = check()
    assert (result.returncode, result.stderr) == (0, "")
    for step in ("create", "export", "import"):
        assert row(result.stdout, step).count("works") == 2
    assert row(result.stdout, "map").count("read-only") == 2
    assert row(result.stdout, "read every byte").count(" right") == 2
    assert row(result.stdout, "copy to this rank").count("GB/s") == 2
    last = result.stdout.splitlines()[-1]
    assert last.startswith("FABRIC works between two processes on host ") and last.endswith(".")


def test_one_process_on_another_host_given_by_name(check):
    """The group's token goes through the standard input of ssh, the ranks meet at ADDRESS and PORT."""
    result = check("options = {'imex': True}", "node-b", PORT=str(free_port()), FAKE_HOSTS="node-a,node-b")
    assert (result.returncode, result.stderr) == (0, "")
    last = "FABRIC works between two processes on host node-a (rank 0), host node-b (rank 1)."
    assert result.stdout.splitlines()[-1] == last and row(result.stdout, "copy to this rank").count("GB/s") == 2


NO_IMPORT = {"fail": {"cuMemImportFromShareableHandle": CUresult.CUDA_ERROR_NOT_SUPPORTED}}


@pytest.mark.parametrize(
    "machine, on_rank_1, told",
    [
        ({}, {"imex": False}, "rank 1: create: cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED (800)"),
        ({}, NO_IMPORT, "rank 1: import: cuMemImportFromShareableHandle failed with CUDA_ERROR_NOT_SUPPORTED (801)"),
        ({"drop_writes": True}, {}, "rank 0: read every byte: byte 0 of 65,536 is not what rank 1 wrote; rank 1: "),
    ],
    ids=["no channel", "no import", "wrong bytes"],
)
def test_the_step_that_fails_is_named_with_its_rank_and_the_cure(capsys, machine, on_rank_1, told):
    reports = in_threads(machine, {"imex": True, **on_rank_1})
    fabric_check.print_table(reports, "host a")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FABRIC does not work between two processes on host a: " + told), last
    assert "imex-channels" in last


def test_a_map_that_cannot_be_read_only_is_told_and_no_failure():
    reports = in_threads({}, {"imex": True, "fail": {"cuMemSetAccess": reads_refused}})
    assert [failed for _, failed in reports] == [None, None]
    assert [dict(rows)["map"] for rows, _ in reports] == ["read-only", "works, but read-only is not granted"]


def in_threads(machine, on_rank_1):
    """The reports of a check whose ranks are threads; both come to the same end and nothing stays behind."""
    shared = FakeMachine(**machine)
    config = DwdpConfig(dwdp_size=2, handle_type="fabric")

    def rank(group):
        class OnFake(CudaMemory):
            def open_domain(self):
                return FakeCudaDomain(group.rank, group.rank, handle_type="fabric", driver=driver)

        driver = FakeDriver(shared, **(on_rank_1 if group.rank else {"imex": True}))
        with OnFake(group.rank, config) as memory:
            group.join({})
            reports = fabric_check.FabricCheck(group, memory, GRANULE).run()
        return reports, driver.live()

    (reports, live), (same, other_live) = run_rank_threads(2, rank, timeout=30)
    assert reports == same and live == other_live == zero_live() and shared.used == 0
    assert [[name for name, _ in rows[-6:]] for rows, _ in reports] == [list(fabric_check.STEPS)] * 2
    return reports


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    """Also with a second host, where nothing is started then."""
    for arguments in ([], ["node-b"]):
        env = child_environment(PYTHON=sys.executable, SSH="/bin/false", CUDA_VISIBLE_DEVICES="")
        result = subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=90)
        assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("fabric_check: FABRIC handles are of GPU memory, but ")


def test_the_script_is_bash_and_its_usage_is_refused_in_one_line():
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0 and os.access(SCRIPT, os.X_OK)
    for arguments, variables, word in ((["a", "b"], {}, "usage: "), ([], {"PYTHON": "/nope/python"}, "/nope/python")):
        result = subprocess.run(
            [SCRIPT, *arguments], env=child_environment(**variables), capture_output=True, text=True, timeout=20
        )
        assert result.returncode == 2 and word in result.stderr and len(result.stderr.splitlines()) == 1
