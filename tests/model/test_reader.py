"""Reads end well or with one line, whatever goes wrong, and nothing of them is left: no thread, no file, no memory.

Mutation-checked once, each caught by a test below: buffers given back without an event; `close` without waiting for the
threads; the rest of a short read dropped; the first tensor of a read named in place of the one that is cut off.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from dwdp.errors import CheckpointError
from dwdp.model import read_plan, reader
from dwdp.model.checkpoint import Checkpoint
from dwdp.model.landing import Landing
from dwdp.model.reader import read_landings
from dwdp.model.shards import TensorToWrite, write_checkpoint
from dwdp.model.staging import BUFFER_NBYTES, BUFFERS, HostCopies

MIB = 1 << 20


def values(i: int, numel: int) -> torch.Tensor:
    return torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(i)).bfloat16()


def write(folder, sizes, shards=1):
    tensors = [
        TensorToWrite(f"t{i:03d}", torch.bfloat16, (numel,), lambda i=i, numel=numel: values(i, numel))
        for i, numel in enumerate(sizes)
    ]
    write_checkpoint(folder, {"model_type": "x"}, tensors, shards=shards)
    return folder


def landings_of(folder, dtype=torch.bfloat16, landed=lambda i, room: None):
    """(landings of all tensors in full, where each goes)."""
    with Checkpoint(folder) as checkpoint:
        entries = list(checkpoint.entries.values())
    rooms = [torch.empty(entry.nbytes // 2, dtype=dtype) for entry in entries]
    landings = [
        Landing(entry, 0, entry.nbytes // 2, lambda i=i: rooms[i], lambda room, i=i: landed(i, room))
        for i, entry in enumerate(entries)
    ]
    return landings, rooms


def left() -> tuple[int, list[str]]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("dwdp-read")]
    return len(os.listdir("/proc/self/fd")), threads


@pytest.fixture
def nothing_left():
    before = left()
    yield
    assert left() == before


@pytest.fixture
def small_reads(monkeypatch):
    monkeypatch.setattr(read_plan, "MAX_READ_NBYTES", 4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_arrive_whole_in_large_reads_in_file_order(tmp_path, nothing_left, dtype):
    folder = write(tmp_path, [13 * MIB, 5, MIB, 3, 17 * MIB + 1, 0], shards=2)
    landings, rooms = landings_of(folder, dtype)
    log, order = [], []
    landings = [
        Landing(x.entry, x.start, x.end, x.room, lambda room, i=i: order.append(i)) for i, x in enumerate(landings)
    ]
    result = read_landings(folder, landings, read_log=lambda *read: log.append(read))
    for i, room in enumerate(rooms):
        assert torch.equal(room, values(i, room.numel()).to(dtype))
    assert log == sorted(log) and len(log) == result.reads
    assert all(8 * MIB <= nbytes <= 20 * MIB for _, _, nbytes in log), log
    assert sum(nbytes for _, _, nbytes in log) == result.nbytes <= 1.05 * result.needed
    assert sorted(order) == list(range(6)) and [i for i in order if i != 5] == [0, 1, 2, 3, 4]
    assert result.staged == (0 if dtype == torch.bfloat16 else BUFFERS * BUFFER_NBYTES) < 128 * MIB


def test_parts_of_tensors_are_read_and_nothing_else(tmp_path, small_reads, nothing_left):
    folder = write(tmp_path, [1000, 5000, 2000])
    landings, rooms = landings_of(folder)
    ranges = [(0, 7), (1001, 4999), (0, 0)]
    rooms = [torch.full((end - start,), 7.0) for start, end in ranges]
    parts = [
        Landing(x.entry, start, end, lambda i=i: rooms[i], x.landed)
        for i, (x, (start, end)) in enumerate(zip(landings, ranges))
    ]
    result = read_landings(folder, parts)
    for i, (start, end) in enumerate(ranges):
        assert torch.equal(rooms[i], values(i, (1000, 5000, 2000)[i])[start:end].float())
    assert result.nbytes == result.needed == 2 * (7 + 3998)


def test_short_reads_go_on_where_they_ended(tmp_path, monkeypatch, nothing_left):
    """A file system may return less than was asked for: in the middle of an element, a buffer, or between two."""
    folder = write(tmp_path, [100, 300, 1, 2000])
    landings, rooms = landings_of(folder, torch.float32)
    landings = landings[:1] + landings[2:]  # a gap too
    monkeypatch.setattr(read_plan, "OVER_READ", 1)
    preadv, asked = os.preadv, []

    def short(descriptor, views, offset):
        asked.append(len(views))
        return preadv(descriptor, [views[0][:77]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert read_landings(folder, landings).reads == 1
    assert len(asked) > 50 and max(asked) == 4
    assert all(torch.equal(rooms[i], values(i, rooms[i].numel()).float()) for i in (0, 2, 3))


def refusal(folder, landings, **options):
    with pytest.raises(CheckpointError) as refused:
        read_landings(folder, landings, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_file_that_is_cut_while_it_is_read_is_named_with_the_tensor_at_the_cut(tmp_path, small_reads, nothing_left):
    """The cut is in the middle of a read of several tensors, behind all reads that are under way when it is made."""
    folder = write(tmp_path, [40_000, *[100] * 60, 5000])
    landings, _ = landings_of(folder)
    plan = read_plan.plan_reads([read_plan.Need(x.entry.file, *x.file_range, 2) for x in landings])
    read = plan.reads[-4]
    assert len(plan.reads) > 20 and len(read.pieces) > 10
    entry = landings[read.pieces[5].need].entry
    cut = entry.offset + 101
    done = []
    text = refusal(
        folder, landings, progress=lambda *_: done.append(1) or os.truncate(folder / "model.safetensors", cut)
    )
    end = entry.offset + entry.nbytes
    assert text == f"{folder}/model.safetensors is truncated: tensor {entry.name} ends at byte {end}, the file at {cut}"
    assert len(done) == len(plan.reads) - 4


@pytest.mark.parametrize("how", ["gone", "folder"])
def test_a_file_that_cannot_be_opened_any_more_is_named(tmp_path, nothing_left, how):
    folder = write(tmp_path, [100, 100, 100], shards=2)
    landings, _ = landings_of(folder)
    file = folder / "model-00002-of-00002.safetensors"
    file.unlink()
    if how == "folder":
        file.mkdir()
    reason = "cannot be opened: No such file or directory" if how == "gone" else "is not a regular file"
    assert refusal(folder, landings) == f"{file} {reason}"


def test_an_error_in_one_thread_stops_all_of_them(tmp_path, monkeypatch, small_reads, nothing_left):
    folder = write(tmp_path, [1000] * 200)
    landings, _ = landings_of(folder)
    bad = landings[60].entry
    preadv, begun = os.preadv, []

    def failing(descriptor, views, offset):
        begun.append(offset)
        if offset <= bad.offset < offset + sum(map(len, views)):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", failing)
    text = refusal(folder, landings)
    assert text.startswith(f"{folder}/model.safetensors: tensor t0") and text.endswith(
        "cannot be read: Input/output error"
    )
    behind = [offset for offset in begun if offset > bad.offset]
    assert len(behind) <= reader.IN_FLIGHT and max(begun) < landings[100].entry.offset


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk gone"), MemoryError()])
@pytest.mark.parametrize("where", ["room", "landed", "progress", "copy"])
def test_whatever_is_raised_while_reads_are_under_way_waits_for_them(
    tmp_path, monkeypatch, small_reads, nothing_left, error, where
):
    """The memory that they read into is gone afterwards, so none may still be writing."""
    folder = write(tmp_path, [3000] * 40)
    preadv, running = os.preadv, set()

    def slow(descriptor, views, offset):
        running.add(offset)
        time.sleep(0.02)
        count = preadv(descriptor, views, offset)
        running.discard(offset)
        return count

    class Copies(HostCopies):
        def copy(self, room, staged):
            fail("copy")
            super().copy(room, staged)

    calls = []

    def fail(at):
        calls.append(at)
        if at == where and calls.count(at) == 9:
            raise error

    monkeypatch.setattr(os, "preadv", slow)
    landings, rooms = landings_of(folder, torch.float32)
    landings = [
        Landing(x.entry, x.start, x.end, lambda i=i: fail("room") or rooms[i], lambda room: fail("landed"))
        for i, x in enumerate(landings)
    ]
    with pytest.raises(type(error)) as caught:
        read_landings(folder, landings, copies=Copies(), progress=lambda *_: fail("progress"))
    assert caught.value is error and not running


def test_a_second_interrupt_waits_for_the_reads_too(tmp_path, monkeypatch, small_reads, nothing_left):
    folder = write(tmp_path, [3000] * 10)
    landings, _ = landings_of(folder)
    shutdown, preadv, calls, running = reader.ThreadPoolExecutor.shutdown, os.preadv, [], set()

    def slow(descriptor, views, offset):
        running.add(offset)
        time.sleep(0.05)
        running.discard(offset)
        return preadv(descriptor, views, offset)

    def interrupted(pool, **options):
        calls.append(1)
        if len(calls) < 3:
            raise KeyboardInterrupt("again")
        shutdown(pool, **options)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(reader.ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_landings(folder, landings, progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt("first")))
    assert len(calls) == 3 and not running


# ---- a GPU ----


class FakeEvent:
    """Its copies happen when somebody waits for it, as late as they may on a device."""

    def __init__(self, copies) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        while self._copies:
            room, staged = self._copies.pop(0)
            room.copy_(staged)


class FakeDevice(HostCopies):
    """Tensors on the CPU that stand for a GPU's memory: no file is read there, and copies run late."""

    def __init__(self) -> None:
        self.begun, self.marks = [], 0

    def readable_into(self, room, dtype):
        return False

    def copy(self, room, staged):
        self.begun.append((room, staged))

    def mark(self):
        self.marks += 1
        copies, self.begun = self.begun, []
        return FakeEvent(copies)


def test_a_buffer_is_read_into_again_only_behind_its_last_copy(tmp_path, small_reads, nothing_left):
    folder = write(tmp_path, [1000, 3000, 50_000, 7, 20_000])
    landings, rooms = landings_of(folder, torch.float32)
    device = FakeDevice()
    result = read_landings(folder, landings, copies=device)
    assert device.marks == result.reads > 3 * BUFFERS and device.begun == []
    for i, room in enumerate(rooms):
        assert torch.equal(room, values(i, room.numel()).float()), i


def test_weights_for_a_gpu_pass_through_pinned_buffers(monkeypatch):
    from dwdp.model.staging import CudaCopies, Staging, copies_to

    asked, empty = [], torch.empty

    def without_a_driver(*args, pin_memory, **options):
        asked.append(pin_memory)
        return empty(*args, **options)

    copies = copies_to("cuda:0")
    assert type(copies) is CudaCopies and type(copies_to("cpu")) is HostCopies
    assert not copies.readable_into(torch.empty(3, device="meta"), torch.float32)
    assert copies.readable_into(torch.empty(3), torch.float32)
    monkeypatch.setattr(torch, "empty", without_a_driver)
    for one in (copies, HostCopies()):
        staging = Staging(one)
        assert staging.nbytes == 0
        assert staging.take().memory.numel() == BUFFER_NBYTES and staging.nbytes == BUFFERS * BUFFER_NBYTES
    assert asked == [True, False]
