"""Rank processes under the launcher: independent deaths, no orphan, clean streams."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dwdp import env
from dwdp.errors import DwdpError
from dwdp.group.launch import RankLauncher

# A rank that watches its parent as `dwdp.executor.rank` does, then sleeps; argv: --parent-socket PATH --rank
# R
CHILD = """
import os, sys, time
from dwdp.group.parent import watch_parent
watch_parent(sys.argv[sys.argv.index("--parent-socket") + 1])
number = sys.argv[sys.argv.index("--rank") + 1]
# one write: the ranks share a stderr, and pieces of their lines would mix
os.write(1, f"rank {number} {os.environ.get('RANK')} {os.environ['MINE']}\\n".encode())
time.sleep(60)
"""


def launcher(n, code=CHILD, **kwargs):
    return RankLauncher(n, [{"MINE": f"${r}"} for r in range(n)], args_per_rank=[["-c", code]] * n, **kwargs)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the bound"
        time.sleep(0.01)


def test_a_killed_rank_is_reported_the_others_live_on_and_close_leaves_none(capfd):
    ended = []
    before = len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    with launcher(3, on_exit=ended.append) as ranks:
        ranks.start()
        assert time.monotonic() - start < 2
        pids = ranks.pids()
        assert sorted(pids) == [0, 1, 2] and all(map(alive, pids.values())) and ranks.poll() == {}
        wait_for(lambda: os.path.exists(f"/proc/{pids[1]}"), 1)
        os.kill(pids[1], signal.SIGKILL)
        wait_for(ranks.poll, 1)
        assert str(ranks.poll()[1]) == "killed by SIGKILL" and ranks.poll()[1].pid == pids[1]
        time.sleep(0.3)
        assert sorted(ranks.poll()) == [1] and alive(pids[0]) and alive(pids[2])
    assert not any(map(alive, pids.values())) and sorted(ranks.poll()) == [0, 1, 2]
    assert sorted(e.rank for e in ended) == [0, 1, 2]
    ranks.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(t.name.startswith("dwdp-agent") for t in threading.enumerate())
    out, err = capfd.readouterr()
    assert out == "" and "elastic" not in err and "signal handlers" not in err


def test_a_rank_gets_its_number_and_environment_and_its_stdout_goes_to_stderr(capfd):
    seen = []
    with launcher(2) as ranks:
        ranks.start()

        def printed():
            out, err = capfd.readouterr()
            assert out == ""
            seen.append(err)
            return "".join(seen).count("\n") >= 2

        wait_for(printed, 10)
    # not elastic's RANK, which would say 0 to both
    assert sorted("".join(seen).splitlines()) == ["rank 0 None $0", "rank 1 None $1"]


def test_exit_codes_are_told_and_a_rank_that_ends_by_itself_stops_nobody():
    code = "import sys; rank = int(sys.argv[-1]); import time; time.sleep(60 * (rank == 2)); sys.exit(3 * rank)"
    with launcher(3, code) as ranks:
        ranks.start()
        wait_for(lambda: len(ranks.poll()) == 2, 5)
        assert {rank: str(end) for rank, end in ranks.poll().items()} == {0: "exit code 0", 1: "exit code 3"}
        assert alive(ranks.pids()[2])


def test_a_rank_that_ignores_sigterm_or_is_stopped_is_killed_after_the_bound():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ranks = launcher(2, code)
    ranks.start()
    time.sleep(0.3)
    os.kill(ranks.pids()[1], signal.SIGSTOP)
    start = time.monotonic()
    ranks.close(kill_after_seconds=0.5)
    assert 0.4 < time.monotonic() - start < 3
    assert [str(ranks.poll()[rank]) for rank in (0, 1)] == ["killed by SIGKILL"] * 2
    assert not any(map(alive, ranks.pids().values()))


def test_what_a_rank_started_ends_with_it():
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    ranks = launcher(1, code)
    ranks.start()
    children = f"/proc/{ranks.pids()[0]}/task/{ranks.pids()[0]}/children"
    wait_for(lambda: open(children).read().strip(), 5)
    grandchild = int(open(children).read())
    os.kill(ranks.pids()[0], signal.SIGKILL)
    wait_for(lambda: not alive(grandchild), 2)
    ranks.close()


def test_a_rank_that_cannot_start_is_named_and_the_others_are_ended():
    ranks = launcher(2)
    ranks._env_per_rank = [{"MINE": "x"}, {"MINE": "a\0b"}]
    with pytest.raises(DwdpError, match="rank 1 could not be started: ValueError: embedded null byte"):
        ranks.start()
    assert not any(map(alive, ranks.pids().values()))
    with pytest.raises(ValueError, match="3 ranks, 2 environments"):
        RankLauncher(3, [{}, {}])


PARENT = f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_launch
ranks = test_launch.launcher(3)
ranks.start()
print(*ranks.pids().values(), flush=True)
time.sleep(60)
"""


def test_ranks_end_when_the_launching_process_is_killed(tmp_path):
    environment = env.child_environment(TMPDIR=str(tmp_path))  # nobody is left to remove the sockets' folder
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        parent.kill()
        wait_for(lambda: not any(map(alive, pids)), 5)
    finally:
        parent.kill()
        parent.communicate()


STREAMS = """
import os, sys
from dwdp.group.launch import RankLauncher
for number in map(int, sys.argv[1].split(",")):
    os.close(number)
child = "import os, sys; os.write(1, b'x'); os.write(2, b'y'); os.read(0, 1)"
with RankLauncher(1, [{}], args_per_rank=[["-c", child]]) as ranks:
    ranks.start()
    while not ranks.poll():
        pass
    code = ranks.poll()[0].exit_code
os._exit(code)
"""


@pytest.mark.parametrize("closed", ["0", "2", "0,2", "0,1,2"])
def test_a_rank_has_all_three_streams_though_its_launcher_has_not(closed):
    command = [sys.executable, "-c", STREAMS, closed]
    assert subprocess.run(command, env=env.child_environment(), timeout=60).returncode == 0


def test_kill_ends_every_rank_also_a_frozen_one():
    with launcher(2) as ranks:
        ranks.start()
        os.kill(ranks.pids()[1], signal.SIGSTOP)
        ranks.kill()
        wait_for(lambda: len(ranks.poll()) == 2, 5)
        assert {str(ended) for ended in ranks.poll().values()} == {"killed by SIGKILL"}
