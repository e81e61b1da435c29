"""The `dwdp` command: every refusal is one line on stderr and exit code 2. No torch at module level."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from dwdp.errors import ConfigError, MemoryBudgetError, PrefetchRingMemoryError, RequestError
from dwdp.group.parent import leave_nothing

# typer's own copy of click is private; its usage errors are the parent of the public BadParameter
UsageError = typer.BadParameter.__base__

EXIT_FAILED = 1
EXIT_REFUSED = 2
_GENERATION = "as the model's generation_config.json"

app = typer.Typer(
    name="dwdp",
    help="Distributed Weight Data Parallelism: ranks that share one model's weights.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"dwdp {version('dwdp')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="The version, and nothing else.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or nano-k3, the model that is shipped.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 file of prompts, one a line; empty lines are skipped.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Most tokens of a completion; default {_GENERATION}, else 16.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Rank processes; prompt i runs on rank i mod N.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON file, as a server's; default: the model folder's dwdp.yaml, if any."),
    ] = None,
    replicated: Annotated[
        bool, typer.Option("--replicated", help="Every rank holds all weights; DWDP is off.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 (fp32) or bfloat16 (bf16).")] = None,
    temperature: Annotated[
        float | None, typer.Option(help=f"0 takes the best token; default {_GENERATION}, else 0.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help=f"Sample from the k most likely tokens, 0: all; default {_GENERATION}, else 0.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Sample from tokens with this probability; default {_GENERATION}, else 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled completion repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a completion.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Folder for the timeline of each rank's streams: rankK.json, rankK.chrome.json."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No logs and no progress bars.")] = False,
) -> None:
    """Complete prompts with N ranks, or as one of N independent processes (DWDP_RANK and its pair)."""
    _configure_logging(quiet)
    from dwdp.executor.request import SamplingParams

    asked = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    params = {name: value for name, value in asked.items() if value is not None}
    params |= {"stop": tuple(stop or ()), "ignore_eos": ignore_eos}
    SamplingParams(**params)  # refuses what is wrong, whatever the model's own defaults are
    prompts = _prompts(prompt, prompt_file)
    given = {"ranks": ranks, "device": device, "dtype": dtype, "replicated": replicated or None}

    from dwdp.executor.settings import launch_fields

    fields = launch_fields(model, config, {name: value for name, value in given.items() if value is not None})
    document = _run(fields, prompts, params, hashed=as_json, quiet=quiet, trace=trace)
    if as_json:
        # in one write: the processes of a launcher share their stdout
        sys.stdout.write(json.dumps(document) + "\n")
        return
    for output in document["outputs"]:
        print(output["text"] if len(prompts) == 1 else f"[{output['index']}] {output['text']}")


def _run(fields: dict, prompts: list[str], params, *, hashed: bool, quiet: bool, trace: Path | None) -> dict:
    """The document of `--json`, from ranks that are started here or from this process's own rank. trace: folder of
    the timelines."""
    from dwdp import env
    from dwdp.config.files import asked_ranks
    from dwdp.executor.prompts import prepare
    from dwdp.executor.settings import resolve

    _keep_torch_off_stderr()
    ranks = asked_ranks(fields.get("ranks"), fields.get("tp_size", 1), fields.get("attention_dp", False))
    place = env.discover_rank(ranks)
    try:
        launch = resolve(**fields)
        if trace is not None:
            launch = launch.traced()
            _make_folder(trace)
        prepare(launch, prompts, params)  # what is refused here needs no rank
    except Exception as error:
        if place is not None and not fields.get("replicated"):
            from dwdp.executor.independent import tell_refusal

            tell_refusal(place, f"{type(error).__name__}: {error}")
        raise
    if place is not None:
        from dwdp.executor.independent import run_rank

        outputs, reports, traces = run_rank(launch, place, prompts, params, logits_sha256=hashed)
    else:
        from dwdp.llm import LLM

        with LLM.from_launch(launch, quiet=quiet, trace=trace is not None) as llm:
            outputs = list(enumerate(llm.generate(prompts, params, logits_sha256=hashed)))
            reports, traces = llm.report(), llm.trace() if trace is not None else []
    if trace is not None:
        from dwdp.tools.trace import write_traces

        write_traces(trace, traces)
    return document(launch, outputs, reports)


def _make_folder(path: Path) -> None:
    """For what is written at the end: a folder that cannot be made is refused at the start."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be a folder: {error.strerror}") from None


def document(launch, outputs: list[tuple[int, object]], reports: list[dict]) -> dict:
    """outputs: (index among all prompts, RequestOutput) of the prompts that ran here."""
    partition = launch.partition
    return {
        "outputs": [
            {
                "index": index,
                "text": output.outputs[0].text,
                "token_ids": output.outputs[0].token_ids,
                "logits_sha256": output.outputs[0].logits_sha256,
            }
            for index, output in outputs
        ],
        "ranks": reports,
        "partition": partition and {"kind": partition.kind, "ranges": [list(bounds) for bounds in partition.ranges]},
    }


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=2, help="Rank processes of the run with DWDP.")] = 2,
    quiet: Annotated[bool, typer.Option("--quiet", help="No logs and no progress bars.")] = False,
) -> None:
    """Complete three prompts with nano-k3, with DWDP and with replicated weights, and compare the logits."""
    _configure_logging(quiet)
    from dwdp.tools.demo import run_demo

    if not run_demo(ranks=ranks, quiet=quiet):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def plan(
    path: Annotated[str | None, typer.Argument(help="The same as --model.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="kimi-k3, nano-k3 or a folder with a config.json.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share the experts, one GPU each; default for a folder: 1.")
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option("--format", help="Of the routed experts: nvfp4, mxfp4 or bf16; default: as config.json says."),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=0, help="Experts that a rank stores; 0 with --stride 0 (default): balanced.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=0, help="Experts from one rank's first to the next one's.")] = None,
    slots: Annotated[int | None, typer.Option(min=2, help="Ring slots of a layer's remote experts; default 2.")] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Plan dense DWDP too.")] = False,
    segments: Annotated[
        str | None, typer.Option(help="Dense weights that move: attn,moe (default) or attn; with --dense.")
    ] = None,
    min_bytes: Annotated[
        int | None, typer.Option(min=0, help="Smaller storages stay whole, default 1 MiB; with --dense.")
    ] = None,
    store_chunk_mb: Annotated[
        int | None, typer.Option(min=0, help="MiB of a handle of rows, default 0: one handle; with --dense.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON file, as a server's; default: the model folder's dwdp.yaml, if any."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, b200, gb200 or gb300.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="Another GPU: memory that CUDA may allocate, GiB.")] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="Another GPU: rate from its peers, 1e9 bytes a second, one direction.")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Another GPU: dense bf16 TFLOP/s of its datasheet.")] = None,
    kv_fraction: Annotated[
        float | None, typer.Option(help="Share of the memory left that the KV cache takes; default 0.9.")
    ] = None,
    reads: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Print what rank R reads of the folder's files.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """What N ranks hold and move of a model; with a GPU also whether it fits and from which step on it pays."""
    from dwdp.tools.hardware import choose_gpu
    from dwdp.tools.plan import run_plan
    from dwdp.tools.plan_model import KNOWN_MODELS

    if (model is None) == (path is None):
        given = "no model" if model is None else f"two models, {path} and --model {model}"
        raise ConfigError(f"{given}: dwdp plan takes one, as its argument or as --model")
    model = path if model is None else model
    if ranks is None and model in KNOWN_MODELS:
        raise ConfigError(f"--ranks is missing: into how many ranks are the experts of {model} to be divided?")

    run_plan(
        model,
        1 if ranks is None else ranks,
        format_name,
        choose_gpu(gpu, gpu_memory, link_gbps, tflops),
        config_file=config,
        experts={"num_experts_per_worker": size, "num_prefetch_experts": stride, "num_prefetch_slots": slots},
        dense=dense,
        dense_options={"segments": segments, "min_bytes": min_bytes, "store_chunk_mb": store_chunk_mb},
        kv_fraction=kv_fraction,
        reads_of=reads,
        as_json=as_json,
    )


@app.command()
def simulate(
    layers: Annotated[int | None, typer.Option(min=1, max=4096, help="Layers that DWDP manages.")] = None,
    slots: Annotated[int, typer.Option(min=2, max=4096, help="Expert prefetch slots.")] = 2,
    mode: Annotated[str, typer.Option(help="attached, standalone or experts.")] = "attached",
    segments: Annotated[str, typer.Option(help="Dense weights that move: attn,moe or attn.")] = "attn,moe",
    aux: Annotated[int, typer.Option(min=0, max=64, help="Auxiliary streams that read MoE-dense weights.")] = 1,
    forwards: Annotated[int | None, typer.Option(min=1, max=4096, help="Forwards; 3 without a script.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="File of events, one a line, such as abort after-bind 3; see docs/simulate.md.")
    ] = None,
    mutate: Annotated[str | None, typer.Option(help="A fault to put in; it should be found.")] = None,
    list_mutations: Annotated[bool, typer.Option("--list-mutations", help="List the faults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Enqueue forwards without running them, and check the trace for races and for the order of the copies."""
    _configure_logging(quiet=True)
    _keep_torch_off_stderr()
    from dwdp.tools.simulate import command

    if not command(
        layers=layers, slots=slots, mode=mode, segments=segments, aux=aux, forwards=forwards, script=script,
        mutate=mutate, list_mutations=list_mutations, as_json=as_json,
    ):  # fmt: skip
        raise typer.Exit(EXIT_FAILED)


@app.command()
def doctor(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Rank processes to probe on this host.")],
    memory: Annotated[str | None, typer.Option(help="auto (default: GPUs where there are some), cuda or host.")] = None,
    handle_type: Annotated[str | None, typer.Option(help="Of GPU memory: auto (default), fabric or posix_fd.")] = None,
    allow_shared_device: Annotated[
        bool, typer.Option("--allow-shared-device", help="Several ranks may be on one GPU.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file whose dwdp section is probed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Probe whether N ranks of this machine can share memory, and how fast; names what is wrong and its cure."""
    _configure_logging(quiet=True)
    _keep_torch_off_stderr()
    from dwdp.tools.doctor import run_doctor

    if not run_doctor(
        ranks, as_json=as_json, config_file=config, memory=memory, handle_type=handle_type,
        allow_shared_device=allow_shared_device,
    ):  # fmt: skip
        raise typer.Exit(EXIT_FAILED)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(given or ())
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--prompt-file {file} cannot be read: {error}") from None
        prompts += [line for line in text.splitlines() if line]
        if not prompts:
            raise RequestError(f"--prompt-file {file} holds no prompt")
    if not prompts:
        raise RequestError("no prompt: give --prompt TEXT or --prompt-file FILE")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} is empty: at least one token is needed (--prompt '')")
    return prompts


def _keep_torch_off_stderr() -> None:
    """Warnings of torch and Python would stand beside our one line; to be called before torch is loaded."""
    from dwdp import env

    env.set_default("TORCH_CPP_LOG_LEVEL", "FATAL")
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(logging.NullHandler())


def _configure_logging(quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root = logging.getLogger("dwdp")
    # Replaced, not added to: main may run more than once in a process, with another stderr each time.
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.CRITICAL + 1 if quiet else logging.INFO)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; what goes wrong is one line on stderr."""
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError" or not arguments:  # its message is the whole help text
            return _say("a command is needed; dwdp --help lists them", EXIT_REFUSED)
        return _say(error.format_message() + _given_value(error, arguments), EXIT_REFUSED)
    except (ValueError, PrefetchRingMemoryError, MemoryBudgetError) as error:
        return _say(str(error) or type(error).__name__, EXIT_REFUSED)
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:
        logging.getLogger(__name__).debug("the command failed", exc_info=True)
        return _say(str(error) or type(error).__name__, EXIT_FAILED)


def _given_value(error: UsageError, arguments: list[str]) -> str:
    """The value of the option that a usage error is about, which its own message leaves out."""
    options = getattr(getattr(error, "param", None), "opts", ())
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in options and (equals or at + 1 < len(arguments)):
            return f" (got {value if equals else arguments[at + 1]!r})"
    return ""


def _say(text: object, code: int) -> int:
    from dwdp.executor.messages import one_line

    print(f"dwdp: {one_line(text)}", file=sys.stderr, flush=True)
    return code


# [Note: a signal ends the command at once]
# Not by an exception: raised between any two instructions it can be swallowed, by an import, a callback or a
# finaliser, or leave half a clean-up behind, and a second signal would interrupt what the first one began. Peers of
# an independent rank notice its death.

SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # which a progress bar hides


def _end_at_once(signum: int, frame: object) -> None:
    leave_nothing()
    word = b"terminated" if signum == signal.SIGTERM else b"interrupted"
    try:
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"dwdp: " + word + b"\n")
    finally:
        os._exit(128 + signum)


def _open_missing_streams() -> None:
    """Standard streams that the command was started without (`2>&-`) become the null device.

    Else the next file or socket would take their numbers, and Python prints to stdout what has no stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def main() -> None:
    """Entry point of the `dwdp` command."""
    _open_missing_streams()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)  # [Note: a signal ends the command at once]
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
