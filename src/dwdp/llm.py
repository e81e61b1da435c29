"""The offline API: `LLM` starts one process a rank and completes prompts with them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dwdp.config.schema import DenseConfig, DwdpConfig
from dwdp.errors import DwdpError, RequestError
from dwdp.executor import messages
from dwdp.executor.frontend import Frontend
from dwdp.executor.prompts import Prompt, plain_ids, prepare, request_output
from dwdp.executor.request import RequestOutput, SamplingParams, check_token_ids, check_whole
from dwdp.executor.settings import Launch, model_folder, resolve

if TYPE_CHECKING:
    import torch

    from dwdp.model.tokenizer import Tokenizer


class LLM:
    """N rank processes that serve one model. A context manager with an idempotent `close()`.

    model: a checkpoint's folder, or `nano-k3`, the model that is shipped. ranks: with more than one, the
    routed experts are spread over them (expert DWDP) unless `replicated`. dwdp, dense_dwdp: config sections
    as a dict or `DwdpConfig`, `DenseConfig`; `dwdp_size` defaults to `ranks`; DWDP_* variables override them.
    tp_size=N, attention_dp=True: N ranks that step together and divide the experts, without expert DWDP.
    device: auto, cpu or cuda. dtype: auto, float32 (fp32) or bfloat16 (bf16). server_fields: further fields
    of `ServeConfig`, for example `max_seq_len`. quiet: no progress bars. trace: keep what the devices do, for
    `trace()`; grows with every forward. Calls from several threads take turns.

    Raises ValueError, one line, for a launch that is refused, before any rank exists where that can be known.
    When a rank dies, the call raises RankDiedError naming `rank K`; everything has been ended by then.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        ranks: int = 1,
        dwdp: Mapping[str, Any] | DwdpConfig | None = None,
        dense_dwdp: Mapping[str, Any] | DenseConfig | None = None,
        replicated: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        quiet: bool = False,
        trace: bool = False,
        **server_fields: Any,
    ) -> None:
        launch = resolve(
            model,
            ranks=None if ranks == 1 else ranks,  # the default leaves the number to tp_size
            dwdp=dwdp,
            dense_dwdp=dense_dwdp,
            replicated=replicated,
            device=device,
            dtype=dtype,
            **server_fields,
        )
        self._start(launch, quiet, trace)

    @classmethod
    def from_launch(cls, launch: Launch, *, quiet: bool = False, trace: bool = False) -> LLM:
        """An LLM for a launch that was checked already."""
        self = cls.__new__(cls)
        self._start(launch, quiet, trace)
        return self

    def _start(self, launch: Launch, quiet: bool, trace: bool) -> None:
        if trace:
            launch = launch.traced()
        self._launch, self._quiet = launch, quiet
        self._lock = threading.RLock()
        self._epoch = 0
        self._bars = None
        self._frontend = Frontend(launch.settings, on_progress=self._on_progress)
        try:
            self.setup()
        except BaseException:
            self._frontend.close(at_once=True)
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """encode(text) -> ids, decode(ids) -> text; None when the model has no tokenizer."""
        return self._launch.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | Mapping[str, Any] | None = None,
        *,
        logits_sha256: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts, texts or lists of token ids; prompt i runs on rank i mod N.

        sampling_params: one for all or one a prompt, taken as they are. A dict has some of their fields; what it leaves
        out, and everything without it, is as the model's generation_config.json says, and then the defaults.
        logits_sha256: also hash each prompt's logits, SHA-256 over the [P + K - 1, vocab] little-endian
        float32 values of all computed positions in order. Raises RequestError for a prompt that is refused;
        nothing has been computed then.
        """
        texts, items = prepare(self._launch, prompts, sampling_params)
        ranks = self._launch.ranks
        with self._lock:
            call = self._frontend.next_call()
            answers = self._frontend.call(
                self._with_company(
                    call,
                    {
                        rank: messages.Generate(call, items[rank::ranks], logits_sha256)
                        for rank in range(min(ranks, len(items)))
                    },
                )
            )
        results = {result.index: result for answer, _ in answers.values() for result in answer.results}
        return [
            request_output(self.tokenizer, text, item, results[item.index], item.index % ranks)
            for text, item in zip(texts, items)
        ]

    def logits(
        self, token_ids: Sequence[int], *, rank: int = 0, chunk_size: int | None = None, decode: int = 0
    ) -> torch.Tensor:
        """Float32 [tokens, vocab] of every position of `token_ids`, computed by `rank`.

        chunk_size: tokens of a prefill chunk, the state carried on (default: the whole prompt at once). The
        last `decode` tokens go one by one through the decode path. Raises RequestError naming the argument.
        """
        import torch

        config, limit = self._launch.model_config, self._launch.settings.max_seq_len
        ids = plain_ids(token_ids, "token_ids must be a list of token ids")
        check_token_ids(ids, vocab_size=config.vocab_size, what="token_ids")
        if len(ids) > limit:
            raise RequestError(f"token_ids of {len(ids)} tokens are over max_seq_len {limit}")
        rank = check_whole(f"rank (of {self._launch.ranks} ranks)", rank, 0, self._launch.ranks - 1)
        if chunk_size is not None:
            chunk_size = min(check_whole("chunk_size", chunk_size, 1), len(ids))
        decode = check_whole(f"decode (of {len(ids)} tokens)", decode, 0, len(ids))
        with self._lock:
            call = self._frontend.next_call()
            command = messages.Logits(call, ids, chunk_size, decode)
            answer, frames = self._frontend.call(self._with_company(call, {rank: command}))[rank]
        return torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(answer.shape)

    def report(self) -> list[dict[str, Any]]:
        """By rank: {rank, pid, kernels, ledger, memory, counters}; the ledger is in bytes and static after setup,
        memory is what the rank holds now (bytes: `domain_bytes`, `torch_bytes`, `total_bytes`), kernels the form
        that is chosen, torch or triton; what has no kernel for its widths computes in torch all the same."""
        with self._lock:
            answers = self._to_all(messages.Report)
        return [answers[rank][0].report for rank in range(self._launch.ranks)]

    def trace(self) -> list[dict[str, Any]]:
        """By rank: {rank, ops}, what its streams have done since `setup`; waits for them. Only with `trace=True`.

        ops, in the order in which they were enqueued: {stream, kind, slot, layer, event} as `dwdp simulate --json`
        writes them, `t0` and `t1` (seconds of the host's monotonic clock), and `nbytes` of a copy. A `read` is where
        a read window opens or closes. `dwdp.tools.races.find_races` judges a document, `dwdp.tools.trace` draws it.
        """
        if not self._frontend.settings.trace:
            raise DwdpError("this LLM keeps no trace: make it with trace=True")
        with self._lock:
            answers = self._to_all(messages.Trace)
        return [{"rank": rank, "ops": msgspec.json.decode(answers[rank][1][0])} for rank in range(self._launch.ranks)]

    def release(self) -> None:
        """Gives DWDP back and drops the models; the rank processes stay. Until `setup` requests are
        refused."""
        with self._lock:
            self._to_all(messages.Release)

    def setup(self) -> None:
        """Builds, loads and sets up in the rank processes, again after a `release`."""
        from dwdp.executor.progress import ProgressBars

        with self._lock, ProgressBars(quiet=self._quiet) as self._bars:
            self._to_all(messages.Setup, self._frontend.settings, self._epoch)
            self._epoch += 1

    def update_weights(self, model_path: str | os.PathLike) -> None:
        """Overwrites the weights in the running ranks with those of another checkpoint folder.

        Its config.json must be the loaded one, quantization_config included; the tokenizer stays. Waits for calls of
        other threads to finish; a later `setup` loads these weights. Raises CheckpointError (a ValueError), one line
        naming the rank, for a checkpoint that does not fit, and DwdpError where dense DWDP has moved the weights; then
        nothing has changed on any rank. After an error later on no rank computes with mixed weights: forwards raise
        ModelUnusableError until `release` and `setup`.
        """
        from dwdp.executor.progress import ProgressBars

        path = str(model_folder(model_path, asked_by="update_weights").resolve())
        with self._lock, ProgressBars(quiet=self._quiet) as self._bars:
            votes = self._frontend.settings.has_group or self._launch.ranks == 1
            if not votes:
                self._to_all(messages.UpdateWeights, path, True)
            try:
                self._to_all(messages.UpdateWeights, path)
            except BaseException as error:
                # Some ranks may have the new weights: without a vote, or where nobody has waited for the answers.
                if not votes or not isinstance(error, Exception):
                    self._distrust(error)
                raise
            self._frontend.settings = msgspec.structs.replace(self._frontend.settings, weights=path)

    def _distrust(self, error: BaseException) -> None:
        """No rank computes until `release` and `setup`, which load the weights from before the failed update."""
        reason = f"a weight update that not every rank has done: {error or type(error).__name__}"
        try:
            self._to_all(messages.MarkUnusable, reason)
        except DwdpError:
            pass  # a rank died, so all have been ended

    def close(self) -> None:
        """Ends every rank process; afterwards nothing of this LLM is left."""
        self._close(at_once=False)

    def _close(self, *, at_once: bool) -> None:
        self._frontend.stop()  # a call of another thread ends first: they share sockets
        with self._lock:
            self._frontend.close(at_once=at_once)

    def _with_company(self, call: int, commands: dict[int, Any]) -> dict[int, Any]:
        """On an attention-DP instance the ranks without work too: the others compute with their experts."""
        if commands and self._launch.settings.attention_dp:
            return {rank: commands.get(rank, messages.Generate(call, [])) for rank in range(self._launch.ranks)}
        return commands

    def _to_all(self, command: type, *fields: Any) -> dict[int, tuple[Any, list[bytes]]]:
        call = self._frontend.next_call()
        return self._frontend.call({rank: command(call, *fields) for rank in range(self._launch.ranks)})

    def _on_progress(self, rank: int, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            self._bars.update(rank, stage, done, total)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # on the way out of an error or an interrupt nobody waits for work that goes on
        self._close(at_once=kind is not None)
