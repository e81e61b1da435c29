"""What a launch can be asked for: strict pydantic models, refused whole when one key is wrong.

`1.0` passes for an integer here and in the JSON Schema that is generated from these models.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from dwdp.env import nearest
from dwdp.errors import ConfigError


def _integral(value: Any) -> Any:
    """JSON does not tell 1.0 from 1, so a whole float is an integer; the rest is left to strict mode."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


MAX_INTEGER = 2**53 - 1
"""Largest integer of a config: JSON's largest that every reader takes exactly, and messages can carry it."""


MAX_PAGE_GRANULES, MAX_GRANULE_BYTES = 1 << 20, 1 << 30
"""Larger than any that makes sense, and small enough that no address range is asked for that no kernel gives."""


def _whole(low: int, high: int = MAX_INTEGER, **more: Any) -> Any:
    return Annotated[int, Field(ge=low, le=high, **more), BeforeValidator(_integral)]


NonNegative = _whole(0)
Positive = _whole(1)


class Section(BaseModel):
    """A section of the config: strict, without unknown keys, and unchangeable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


# The same rule as `DwdpConfig._both_or_neither`: both fields 0 or absent, or both positive.
_PAIR_SCHEMA = {
    "anyOf": [
        {"properties": {"num_experts_per_worker": {"const": 0}, "num_prefetch_experts": {"const": 0}}},
        {
            "properties": {
                "num_experts_per_worker": {"exclusiveMinimum": 0},
                "num_prefetch_experts": {"exclusiveMinimum": 0},
            },
            "required": ["num_experts_per_worker", "num_prefetch_experts"],
        },
    ]
}


class DwdpConfig(Section):
    """Expert DWDP: how the routed experts are spread over the ranks of a group, and how they move."""

    model_config = ConfigDict(json_schema_extra=_PAIR_SCHEMA)

    dwdp_size: Positive = Field(description="Ranks in a group, N.")
    num_groups: Positive = Field(1, description="Groups; the group of a rank is rank // dwdp_size.")
    num_experts_per_worker: NonNegative = Field(
        0, description="Experts that a rank stores; 0 with num_prefetch_experts 0: balanced."
    )
    num_prefetch_experts: NonNegative = Field(
        0, description="Experts from one rank's start to the next one's; 0 with num_experts_per_worker 0."
    )
    num_prefetch_slots: _whole(2) = Field(2, description="Ring slots for the remote experts of a layer.")
    contention_opt: bool = Field(False, description="Batched copies, slices dealt over the peers.")
    prefetch_gather: bool = Field(False, description="Move experts by an SM gather.")
    gather_kernel: Literal["auto", "tma", "ldst"] = Field("auto", description="Kernel of the gather; auto: tma.")
    sm_reserve: NonNegative | None = Field(None, description="SMs kept out of persistent compute grids.")
    memory: Literal["auto", "cuda", "host"] = Field("auto", description="Memory domain.")
    handle_type: Literal["auto", "fabric", "posix_fd"] = Field("auto", description="CUDA handle type.")
    host_memory_bytes: Positive | None = Field(
        None, description="Size of a host device in bytes; unset: MemAvailable over the ranks on the host."
    )
    host_granule_bytes: _whole(1, MAX_GRANULE_BYTES, multiple_of=4096) = Field(
        65536, description="Granularity of the host domain in bytes, a multiple of 4096."
    )
    page_granules: _whole(1, MAX_PAGE_GRANULES) = Field(8, description="Granules in a ring page.")
    mapping_budget: Positive | None = Field(None, description="Most mappings a rank may hold.")
    allow_shared_device: bool = Field(False, description="For tests: several ranks on one GPU.")
    verify: Literal["full", "sample", "off"] = Field("full", description="Check of expert rows in setup.")
    verify_every: NonNegative = Field(1000, description="Forwards between checks of one layer's rows; 0: never.")

    @model_validator(mode="after")
    def _both_or_neither(self) -> DwdpConfig:
        size, stride = self.num_experts_per_worker, self.num_prefetch_experts
        if (size == 0) != (stride == 0):
            raise ValueError(
                f"num_experts_per_worker {size} and num_prefetch_experts {stride}: give both 0 (balanced) "
                "or both positive"
            )
        return self

    @property
    def transfer(self) -> Literal["per_slice", "batched", "gather"]:
        """How expert copies are submitted, and with them attached dense copies."""
        if self.prefetch_gather:
            return "gather"
        return "batched" if self.contention_opt else "per_slice"

    def group_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """(group, rank within the group) of `rank` in a world of `world_size` ranks.

        Raises ValueError when the world is too small for the groups or the rank is in none of them.
        """
        members = self.num_groups * self.dwdp_size
        shape = f"num_groups {self.num_groups} x dwdp_size {self.dwdp_size}"
        if world_size < members:
            raise ValueError(f"{shape} needs {members} ranks but the world has {world_size}")
        if not 0 <= rank < members:
            raise ValueError(f"rank {rank} belongs to no group: {shape} covers ranks 0 to {members - 1}")
        return divmod(rank, self.dwdp_size)


def _segment_names(value: Any) -> Any:
    """`attn,moe` and lists mean the same; the result is in model order."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError("segments is 'attn' or 'attn,moe', or a list of these names")
    if len(set(names)) != len(names) or not set(names) <= {"attn", "moe"}:
        raise ValueError("segments accepts attn and moe, each once")
    if "attn" not in names:
        raise ValueError("segments without attn is not accepted: attention always moves")
    return ("attn", "moe") if "moe" in names else ("attn",)


Segments = Annotated[
    tuple[str, ...],
    BeforeValidator(_segment_names),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*(attn|attn\s*,\s*moe|moe\s*,\s*attn)\s*$"},
                {
                    "type": "array",
                    "items": {"enum": ["attn", "moe"]},
                    "contains": {"const": "attn"},
                    "uniqueItems": True,
                },
            ]
        }
    ),
]

with warnings.catch_warnings():
    # The field name `copy` hides a method of BaseModel that pydantic has deprecated.
    warnings.filterwarnings("ignore", message='Field name "copy"')

    class DenseConfig(Section):
        """Dense DWDP: the other large weights of the MoE decoder layers."""

        enabled: bool = Field(False, description="Dense DWDP on; the launch decides the mode.")
        copy: Literal["batched", "per_slice", "gather"] = Field(
            "batched", description="Standalone transfer; attached it has no effect."
        )
        required: bool = Field(
            True, description="True: a failed setup raises on every rank. False: replicated weights serve on."
        )
        segments: Segments = Field(("attn", "moe"), description="Which weights move.")
        min_bytes: NonNegative = Field(1 << 20, description="Smaller storages stay replicated.")
        store_chunk_mb: NonNegative = Field(
            0, description="0: one store handle; else whole layers per handle of about this many MiB."
        )
        strict: bool = Field(False, description="Demand fetches, leaks and the like are errors.")
        debug: _whole(0, 2) = Field(
            0, description="1: slots filled with NaN at commit, leaked holders named; 2: also the watchdog."
        )
        load: Literal["whole", "sharded"] = Field("whole", description="How rows are filled.")
        roots: Literal["declared", "discover"] = Field("declared", description="Where segments come from.")
        own_rows: Literal["copy", "map"] = Field("copy", description="How own rows reach the slots.")


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "fp32", "bf16"],
    AfterValidator(lambda name: _DTYPES.get(name, name)),
]

# Keys that users of a serving engine expect, and that are refused by name until they do something.
_LATER_FIELDS = frozenset(
    "max_num_tokens page_size kv_tokens kv_bytes kv_fraction kv_dtype prefix_reuse "
    "state_checkpoint_bytes speculative sleep cuda_graphs torch_compile lora pp_size cp_size host port "
    "admin_port served_model_name max_queue request_timeout_s api_keys transfer admission_wait_ms".split()
)


class ServeConfig(Section):
    """A whole launch. `{}` is one rank with the model's own dtype on whatever device there is."""

    ranks: Positive = Field(1, description="Data-parallel replicas, one process each.")
    replicated: bool = Field(False, description="No DWDP at all: every rank holds every weight.")
    role: Literal["context", "generation", "both"] = Field("context", description="What the server does.")
    tp_size: Positive = Field(1, description="With attention_dp: the number of ranks.")
    attention_dp: bool = Field(False, description="The ranks step together and divide the experts; expert DWDP is off.")
    overlap_scheduler: bool = Field(False, description="Launch a step before the last one's results.")
    dtype: Dtype = Field("auto", description="auto: the checkpoint's on a GPU, float32 on a CPU.")
    keep_fp8: bool = Field(False, description="FP8 projections stay FP8 in memory; else they are loaded as dtype.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    max_seq_len: Positive | None = Field(None, description="Most tokens of a sequence; unset: the model's.")
    max_batch_size: _whole(1, 1 << 12) = Field(
        32, description="Most sequences of a rank that decode together, in a static batch."
    )
    dwdp: DwdpConfig | None = Field(None, description="Expert DWDP; unset: balanced over the ranks.")
    dense_dwdp: DenseConfig | None = Field(None, description="Dense DWDP.")

    @model_validator(mode="before")
    @classmethod
    def _no_later_fields(cls, data: Any) -> Any:
        # Values are left out of the message: some of these keys hold secrets.
        if isinstance(data, dict) and (later := sorted(map(str, _LATER_FIELDS & data.keys()))):
            raise ValueError(f"not supported yet: {', '.join(later)}")
        return data


def validate(model: type[BaseModel], data: Any, *, what: str, as_json: str | None = None) -> Any:
    """`data` as an instance of `model`, or a ConfigError of one line naming `what`, each key and its value.

    as_json: JSON text that is validated instead of `data`, with JSON's types.
    """
    try:
        return model.model_validate(data) if as_json is None else model.model_validate_json(as_json)
    except ValidationError as error:
        raise ConfigError(f"{what}: {one_line(error, model)}") from None


def one_line(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems of a pydantic error on one line, each with the path of its field and the value given.

    model: that was validated, to name the key that an unknown one may have meant.
    """
    problems = []
    for one in error.errors(include_url=False):
        path = ".".join(map(str, one["loc"]))
        text = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            near = nearest(str(one["loc"][-1]), _keys_beside(model, one["loc"]))
            text = f"unknown key, {near} is one" if near else "unknown key"
        if one["type"] == "missing":
            text = "is missing"
        elif path:
            shown = repr(one["input"])
            text = f"{text} (given {shown if len(shown) <= 80 else shown[:77] + '...'})"
        problems.append(f"{path}: {text}" if path else text)
    return "; ".join(line.strip() for line in "; ".join(problems).splitlines())


def _keys_beside(model: type[BaseModel] | None, path: tuple[str | int, ...]) -> list[str]:
    """The keys of the section that `path` lies in."""
    for part in path[:-1]:
        field = None if model is None else model.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return [] if model is None else list(model.model_fields)


def dwdp_section(section: Any, ranks: int, *, what: str = "dwdp") -> DwdpConfig:
    """A `dwdp` section given as a dict, a config or None (all defaults), for `ranks` ranks.

    `dwdp_size` defaults to `ranks`; another value raises ConfigError.
    """
    if section is None:
        section = {}
    if isinstance(section, dict):
        section = {"dwdp_size": ranks} | section
    config = validate(DwdpConfig, section, what=what)
    if config.dwdp_size != ranks:
        raise ConfigError(f"{what}: dwdp_size is {config.dwdp_size} but there are {ranks} ranks (--ranks)")
    return config
