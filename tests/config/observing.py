"""One observable of a field or switch, what it looks at and what it expects."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from dwdp import SamplingParams, env
from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.errors import ConfigError, DwdpError, GroupError
from dwdp.executor.create import build_rank, join_info
from dwdp.executor.messages import WorkItem
from dwdp.executor.prompts import prepare
from dwdp.group.backends import StoreGroup
from dwdp.group.threads import run_rank_threads
from dwdp.kernels.select import kernels_for
from dwdp.runtime.manager import DwdpManager
from tests.config.observed import ATTACHED, UNSET, Asked
from tests.memory.fake_driver import FakeCudaDomain, FakeDriver, FakeMachine
from tests.support.dense_ranks import dense_ranks
from tests.support.foreign_decoders import HubModel, build

Seen = Any


@dataclass(frozen=True)
class Observable:
    """name: a field's path or a switch. what: is observed. base, changed: two values (UNSET: not given), as config
    values or as texts of a switch. see: what shows it, of an `Asked`, of the value itself where `asks` is off.
    expect: of the two observations, what must hold. others: the rest of the launch; environ: of its switches."""

    name: str
    what: str
    base: Any
    changed: Any
    see: Callable[[Any], Seen]
    expect: Callable[[Seen, Seen], bool]
    others: dict[str, Any] = field(default_factory=lambda: ATTACHED)
    environ: dict[str, str] = field(default_factory=dict)
    fault: str | None = None
    asks: bool = True

    @property
    def is_switch(self) -> bool:
        return self.name in env.SWITCHES

    def asked(self, value: Any, variable: str | None = None) -> Asked:
        """The launch with `value`; variable: a switch's alias that says it in the place of its name."""
        fields, environ = {**self.others}, {**self.environ}
        if self.is_switch:
            if value is not UNSET:
                environ[variable or self.name] = value
            return Asked(fields, environ, self.fault)
        section, _, name = self.name.rpartition(".")
        within = fields
        if section:
            within = fields[section] = {**fields.get(section, {})}
        within.pop(name, None)
        if value is not UNSET:
            within[name] = value
        return Asked(fields, environ, self.fault)

    def observe(self, value: Any, variable: str | None = None) -> Seen:
        """What is seen with `value`."""
        if self.asks:
            return self.see(self.asked(value, variable))
        if self.is_switch:
            return self.see({variable or self.name: value})
        return self.see(value)


# ---- what is looked at ----


def refusal(asked: Asked) -> str | None:
    return asked.refusal


def ledger(key: str) -> Callable[[Asked], int]:
    return lambda asked: asked.first.ledger[key]


def kept(names: str) -> Callable[[Asked], list[str]]:
    """Which of the letters A, D, E name slots that copies go into."""
    return lambda asked: sorted({slot for slot, _ in asked.first.copies if slot[0] in names})


def handles(what: str) -> Callable[[Asked], list[tuple[str, int]]]:
    return lambda asked: [handle for handle in asked.first.handles if what in handle[0]]


def ranges(asked: Asked) -> list[list[int]] | None:
    partition = asked.launch.partition
    return None if partition is None else [list(bounds) for bounds in partition.ranges]


def failure(asked: Asked) -> str | None:
    return asked.run.error


def saying(words: str) -> Callable[[Asked], list[str]]:
    """Lines before a rank is built that contain `words`."""
    return lambda asked: [line for line in asked.lines if words in line]


# ---- what must hold ----


def refused_with(*words: str) -> Callable[[str | None, str | None], bool]:
    return lambda base, changed: base is None and changed is not None and all(word in changed for word in words)


def becomes(base: Seen, changed: Seen) -> Callable[[Seen, Seen], bool]:
    return lambda *found: found == (base, changed)


def appears(*words: str) -> Callable[[list[str], list[str]], bool]:
    """No line before, one line with all words afterwards."""
    return lambda base, changed: not base and len(changed) == 1 and all(word in changed[0] for word in words)


# ---- what no launch alone shows ----


def on_one_gpu(asked: Asked) -> str | None:
    """Two ranks join with one device's uuid."""
    config = DwdpConfig(**asked.launch.settings.dwdp)
    info = join_info(asked.launch.settings, config, {}, device_uuid="GPU-1")
    return _group_error(lambda group: group.join(info))


def _group_error(body: Callable[[StoreGroup], Any], **options: Any) -> str | None:
    try:
        run_rank_threads(2, body, timeout=10, **options)
    except GroupError as error:
        return str(error)
    return None


def of_a_foreign_decoder(roots: str) -> dict[str, Any] | str:
    """A decoder that declares nothing: the report of dense DWDP's set-up, or why it fails."""
    config = DenseConfig(enabled=True, min_bytes=1, roots=roots)

    def body(rank):
        rank.manager.check_model(rank.model)
        return rank.setup()

    try:
        return dense_ranks(2, body, settings=lambda rank: config, build=lambda: build(HubModel))[0]
    except DwdpError as error:
        return str(error)


def longest(asked: Asked) -> str | None:
    """Why a prompt of 30 tokens with one more is refused."""
    try:
        prepare(asked.launch, [[1] * 30], SamplingParams(max_tokens=1))
    except ValueError as error:
        return str(error)
    return None


def forwards_of_three_prompts(asked: Asked) -> int:
    """Of one rank that completes them."""
    items = [WorkItem(i, [5 + i], SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(3)]
    with build_rank(asked.launch.settings) as rank:
        rank.generate(items)
        return rank.loop.forwards


PLACE = {"DWDP_RANK": "1", "DWDP_MASTER_ADDR": "a", "DWDP_MASTER_PORT": "1234"}


def place(environ: dict[str, str]) -> tuple[int, str | None, int | None]:
    """This process's place among independent ones, when the rest of the set is `PLACE`."""
    others = {name: text for name, text in PLACE.items() if name not in {_switch(given) for given in environ}}
    found = env.discover_rank(None, others | environ)
    return found.rank, found.master_addr, found.master_port


def _switch(variable: str) -> str:
    return next(one.name for one in env.SWITCHES.values() if variable in (one.name, one.alias))


def sockets_lie_in(environ: dict[str, str]) -> bool:
    """Whether the sockets of two ranks that meet lie in the folder that the value names within a temporary one."""
    ((variable, name),) = environ.items()
    with tempfile.TemporaryDirectory(prefix="dwdp-") as folder:
        os.mkdir(os.path.join(folder, "a"), mode=0o700)
        os.mkdir(os.path.join(folder, "b"), mode=0o700)
        with mock.patch.dict(os.environ, {variable: os.path.join(folder, name)}):

            def body(group):
                group.announce()
                found = len(os.listdir(os.path.join(folder, "a")))
                group.join({})  # takes the sockets out of the folder again
                return found > 0

            return all(run_rank_threads(2, body, timeout=10))


def with_a_rank_whose_token_is_one(environ: dict[str, str]) -> str | None:
    """Rank 0 has the environment's token, rank 1 the token `one`."""
    store = dist.HashStore()
    with mock.patch.dict(os.environ, environ):
        mine = StoreGroup(store, 0, 2, timeout_seconds=10)
    other = StoreGroup(store, 1, 2, timeout_seconds=10, token="one")

    def body(group):
        group.join({})

    with mine, other:
        groups = {0: mine, 1: other}
        return _group_error(lambda group: body(groups[group.rank]))


def alone_in_a_group_of_two(environ: dict[str, str]) -> str:
    """Why a rank whose peer never comes gives up."""
    with mock.patch.dict(os.environ, environ), StoreGroup(dist.HashStore(), 0, 2) as group:
        try:
            group.join({})
        except GroupError as error:
            return str(error)
    return "nothing"


def form_on_the_host(environ: dict[str, str]) -> str:
    """Which form a model on the host runs as, or the refusal."""
    try:
        return kernels_for("cpu", environ)
    except ConfigError as error:
        return str(error)


def beside_a_gather(environ: dict[str, str]) -> tuple[str | None, bool]:
    """What a decoder's own kernels find in the environment while a gather takes SMs, and what the status says."""
    config = DwdpConfig(dwdp_size=2, prefetch_gather=True)
    with mock.patch.dict(os.environ, environ), FakeCudaDomain(0, 0, driver=FakeDriver(FakeMachine())) as domain:
        group = SimpleNamespace(dead=())
        with DwdpManager(config, None, group=group, domain=domain, device=None, num_experts=4) as manager:
            return os.environ.get("TLLM_ROUTING_DISABLE_COOP_LAUNCH"), manager.status()["cooperative_launches"]
