"""Messages arrive as they were sent, errors as the class a caller would catch, and every text as one line."""

import msgspec
import pytest

from dwdp import errors
from dwdp.config.gate import GateError
from dwdp.executor import messages
from dwdp.executor.frontend import rebuild_error
from dwdp.executor.rank import failure, is_echo
from dwdp.executor.request import Logprob, SamplingParams

SETTINGS = messages.RankSettings(
    model="/m", ranks=2, dtype="auto", device="cpu", max_seq_len=8, dwdp={"dwdp_size": 2}, socket_dir="/s"
)
PARAMS = SamplingParams(max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, seed=1, stop="x", logprobs=2)


@pytest.mark.parametrize(
    "command",
    [
        messages.Setup(1, SETTINGS, 3),
        messages.Generate(2, [messages.WorkItem(0, [1, 2], PARAMS)], True),
        messages.Logits(3, [5], 2, 1),
        messages.Report(4),
        messages.UpdateWeights(7, "/new", True),
        messages.Release(5),
        messages.Shutdown(6),
    ],
)
def test_a_command_arrives_as_it_was_sent(command):
    assert messages.decode_command(messages.encode(command)) == command


@pytest.mark.parametrize(
    "command",
    [
        messages.Logits(1, [2**70]),
        messages.Logits(1, [1.5]),
        messages.Logits(1, [1], "2"),
        messages.Setup(1, msgspec.structs.replace(SETTINGS, model="/\udcff"), 0),
        messages.Setup(1, msgspec.structs.replace(SETTINGS, dwdp={"page_granules": 2**70}), 0),
    ],
)
def test_what_a_rank_would_not_take_is_refused_before_it_is_sent(command):
    with pytest.raises(errors.RequestError, match=type(command).__name__.lower()):
        messages.encode_command(command)
    good = messages.Logits(1, [5], 2, 1)
    assert messages.encode_command(good) == messages.encode(good)


@pytest.mark.parametrize(
    "event",
    [
        messages.Hello(7),
        messages.Progress("load", 1, 2),
        messages.Log(20, "dwdp", "text"),
        messages.Done(1),
        messages.Generated(1, [messages.WorkResult(0, [9], "stop", 9, [{9: Logprob(-0.5, 1)}], "ab")]),
        messages.LogitsReady(1, [2, 3]),
        messages.Reported(1, {"rank": 0}),
        messages.Failed(1, "RequestError", "no", False, ["no"], True),
    ],
)
def test_an_event_arrives_as_it_was_sent_and_is_no_command(event):
    data = messages.encode(event)
    assert messages.decode_event(data) == event
    with pytest.raises(msgspec.DecodeError):
        messages.decode_command(data)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("why"),
        errors.CheckpointError("why"),
        errors.RequestError("why"),
        errors.PrefetchRingMemoryError([5, 6], 7, ["fewer slots"]),
        errors.RankDiedError(1, "rank 1 died"),
        GateError("why"),
        ValueError("why"),
    ],
)
def test_an_error_of_a_rank_is_raised_as_itself_at_the_caller(error):
    sent = messages.decode_event(messages.encode(failure(1, error, True)))
    rebuilt = rebuild_error(sent)
    assert type(rebuilt) is type(error) and str(rebuilt) == str(error)
    assert vars(rebuilt) == vars(error)


def test_an_error_of_an_unknown_class_is_still_one_of_ours_and_one_line():
    rebuilt = rebuild_error(failure(1, KeyError("first\nsecond"), True))
    assert type(rebuilt) is errors.DwdpError and "\n" not in str(rebuilt)


def test_an_error_about_another_ranks_failure_is_told_from_a_cause():
    assert is_echo(errors.GroupError("rank 1 failed")) and is_echo(RuntimeError("rank 1 failed"))
    assert not is_echo(errors.CheckpointError("bad")) and not is_echo(errors.MemoryBudgetError("full"))


def test_newlines_become_semicolons():
    assert messages.one_line("first\n  second\n\nthird\n") == "first; second; third"
