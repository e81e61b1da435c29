"""Another checkpoint's weights into a running model: a control action of the whole group.

    checkpoint    every rank has finished its step, drained its copies and checked the whole checkpoint; a vote
    drained       a barrier; from here on weights change
    rows          replicated tensors and own rows are written in place; checksums and small tensors are exchanged
    verification  edges are filled again, plans run once and are checked; the final vote

[Note: all or nothing] Nobody writes before the barrier is through, and nobody comes to it unless the vote before it
was good. So an update that fails at the vote, by a bad checkpoint or because a rank is lost there, has changed nothing
on any rank. One that fails later may have: then every rank marks its model unusable, also one that cannot know how far
its peers came, and no forward ever reads a mixture.

[Note: who reads what is written] Peers' copies read own rows, so copies are drained on every rank before any rank
writes, and every prefetched layer is dropped. A peer reads a row again behind the vote `rows`, and this rank writes it
again only in another update, which begins with a vote.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from dwdp.errors import CheckpointError, DwdpError, VerificationError
from dwdp.group.ranks import compare_reports, join_problems
from dwdp.runtime.dense_manager import refuse_weight_change
from dwdp.runtime.experts import ExpertRuntime
from dwdp.weights.small import PER_EXPERT, assemble, disagreements, pack
from dwdp.weights.verify import overlap_problems, tensor_checksum

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """A checked checkpoint. digest: the same on every rank that writes the same tensors."""

    digest: str

    def write(self) -> None:
        """Overwrites the model's replicated tensors and the rows of experts that this rank stores."""


OpenSource = Callable[[], AbstractContextManager[WeightSource]]


def update_weights(
    model, open_source: OpenSource, *, group=None, device=None, experts: ExpertRuntime | None = None, verify="full"
) -> None:
    """Overwrites the weights of a model in place; every rank of the group calls it, between two forwards.

    open_source: checks a checkpoint and raises where it does not fit, with nothing changed. group: None for a rank
    that shares nothing. experts: the runtime of expert DWDP where it is on. verify: of the copied rows, as in setup.

    Raises on every rank when any fails: there its own error, elsewhere one that names the rank. The weights are then
    as they were, or `model.unusable` is the error; see [Note: all or nothing].
    """
    if group is not None and group.dead:
        raise DwdpError(f"no weight update without ranks {sorted(group.dead)}, which are dead; start the group anew")
    shared = experts is not None and experts.num_layers > 0
    with ExitStack() as stack:
        update = _Update(model, group, device, experts if shared else None, verify)
        try:
            update.check(lambda: stack.enter_context(open_source()))
            update.write()
        except BaseException as error:
            if update.began:
                model.unusable = error
                # It stays with the model; what it was raised in has tensors over memory that a release gives back.
                traceback.clear_frames(error.__traceback__)
            if group is not None and not isinstance(error, Exception):
                # This rank will not come to the next collective.
                group.abort(f"the weight update was interrupted: {error!r}")
            raise
    logger.info("the weights were updated in place")


class _Update:
    """One update on one rank."""

    def __init__(self, model, group, device, experts: ExpertRuntime | None, verify: str) -> None:
        self.model, self.group, self.device, self.experts, self.verify = model, group, device, experts, verify
        self.error: Exception | None = None  # this rank's first failure, to be told at the next vote
        self.began = False  # some rank may have written
        self.source: WeightSource | None = None

    def check(self, open_source: Callable[[], WeightSource]) -> None:
        """Nothing is changed here, on any rank."""
        self.source = self._attempt(lambda: self._open(open_source))
        digests = self._vote("weight update: checkpoint", self.source and self.source.digest)
        problems = compare_reports([{"the checkpoint's tensors (digest)": digest} for digest in digests])
        if problems:
            raise CheckpointError(
                f"weight update: the ranks were given different checkpoints: {join_problems(problems)}"
            )

    def write(self) -> None:
        """Every rank has a checkpoint that fits."""
        self.began = True
        if self.group is not None:
            self.group.barrier("weight update: drained")
        if self.experts is not None:
            self._attempt(self.experts.invalidate_prefetch)
        announced = self._attempt(self._write)
        sent = self._vote("weight update: rows", announced)
        problems = self._judge(sent)
        if problems:
            raise VerificationError(f"weight update: the ranks disagree: {join_problems(problems)}")
        if self.experts is not None:
            self._attempt(lambda: self._refresh(sent))
        self._vote("weight update: verification")

    # The local steps.

    def _open(self, open_source: Callable[[], WeightSource]) -> WeightSource:
        refuse_weight_change(self.model)
        error = self.device.drain() if self.device is not None else None
        if error is not None:
            raise DwdpError(f"no weight update behind a copy that failed: {error}") from error
        return open_source()

    def _write(self) -> dict[str, Any]:
        """Returns what the peers must know of the new weights."""
        self.source.write()
        of_experts = {id(p) for layer in self.model.moe_layers() for p in layer.parameters()}
        checksum = 0
        for parameter in self.model.parameters():
            if id(parameter) not in of_experts:
                checksum = tensor_checksum(parameter, checksum)
        announced = {"replicated": checksum, "rows": [], "small": []}
        if self.experts is not None:
            announced["rows"] = self.experts.transport.sum_own_rows()
            announced["small"] = [pack(tensor) for tensor in self._own_small()]
        return announced

    def _judge(self, sent: list[dict[str, Any]]) -> list[str]:
        """The same verdict on every rank, from the same messages."""
        checksums = [{"the replicated tensors (checksum)": message["replicated"]} for message in sent]
        problems = compare_reports(checksums)
        if self.experts is not None:
            transport = self.experts.transport
            specs = [table.spec for table in transport.tables]
            problems += overlap_problems(specs, [message["rows"] for message in sent], transport.partition)
            problems += disagreements(self.experts.small, [message["small"] for message in sent], transport.partition)
        return problems

    def _refresh(self, sent: list[dict[str, Any]]) -> None:
        """What this rank keeps of its peers' experts: small tensors, edge bytes, checksums."""
        experts, transport = self.experts, self.experts.transport
        whole = [full if spec.kind == PER_EXPERT else None for spec, full in zip(experts.small, self._small())]
        assemble(experts.small, [message["small"] for message in sent], transport.partition, whole)
        experts.mover.copy(transport.edges())
        experts.checker.renew({rank: message["rows"] for rank, message in enumerate(sent)})
        if self.verify == "off":
            return
        for pos, plan in enumerate(experts.plans):
            experts.mover.run(plan)
            experts.checker.check(pos, self.verify)

    def _small(self):
        """Every declared small tensor, with all experts."""
        layers = self.model.moe_layers()
        return [layers[spec.pos].small_tensors()[spec.name] for spec in self.experts.small]

    def _own_small(self):
        """The same with this rank's experts only, as a model has them before set-up."""
        start, end = self.experts.transport.own_range
        return [
            full[start:end] if spec.kind == PER_EXPERT else full
            for spec, full in zip(self.experts.small, self._small())
        ]

    def _attempt(self, step: Callable[[], Any]) -> Any:
        """Runs a local step unless this rank has failed; its failure waits for the next vote."""
        if self.error is None:
            try:
                return step()
            except Exception as error:
                self.error = error
        return None

    def _vote(self, phase: str, payload: Any = None) -> list[Any]:
        if self.group is not None:
            return self.group.vote_with(phase, self.error, payload)
        if self.error is not None:
            raise self.error
        return [payload]
