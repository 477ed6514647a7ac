"""From an EngineConfig to a model on a device with a KV cache of a size that fits."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from data_plane import log
from data_plane.config import EngineConfig
from data_plane.engine.grammar import Grammars
from data_plane.engine.runner import Runner
from data_plane.engine.scheduler import SchedulerLimits
from data_plane.engine.stages import Stages
from data_plane.errors import InvalidArgument, NotEnoughMemory
from data_plane.loading.checkpoint import Checkpoint
from data_plane.loading.formats import open_checkpoint
from data_plane.loading.sources import resolve
from data_plane.models.packed import PackedLlamaModel, decoder_shape
from data_plane.models.registry import Model, build, check_family
from data_plane.models.spec import ModelSpec

# above this a group of activations has 15 bits instead of 8 (infra/decisions/0001)
_LOUDNESS = 1.0
_CPU_KV_TOKENS = 65_536
_CPU_MEMORY_SHARE = 0.25
_GPU_MEMORY_SHARE = 0.9


@dataclass
class Loaded:
    """What the step loop runs on. `phases`: seconds by name."""

    runner: Runner
    grammars: Grammars
    limits: SchedulerLimits
    spec: ModelSpec
    device: str
    precision: str
    kernels: str
    max_model_len: int
    num_blocks: int
    phases: dict[str, float] = field(default_factory=dict)


def load(config: EngineConfig, stages: Stages | None = None) -> Loaded:
    """Load the model, or its first stage and have `stages` load theirs. Raises a StartError that says what to do."""
    started = time.monotonic()
    device = device_of(config)
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    check_family(checkpoint)
    spec = checkpoint.spec
    max_model_len = _context(config, spec)
    precision = _precision(config, spec, device)
    opened = time.monotonic()
    budget = config.max_batched_tokens or (512 if device == "cpu" else 8192)
    model: Model
    try:
        if precision == "packed":
            model, kernels = _packed(config, checkpoint, path, max_model_len, budget), "c"
        else:
            model, kernels = _torch_model(config, checkpoint, precision, device, max_model_len, stages)
        room = room_for(device, model.own_kv_token_bytes, config.stages - config.stages_elsewhere)
        if stages is not None:
            room = min(room, stages.room())
        num_blocks = _num_blocks(config, room, device, max_model_len)
        max_model_len = min(max_model_len, num_blocks * config.block_size)
        grammars = Grammars(path, spec.vocab_size, spec.eos_token_ids)
        runner = Runner(
            model,
            grammars,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_len=max_model_len,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise NotEnoughMemory(
            f"{config.model} does not fit on {device}: lower --kv-cache-tokens or --max-model-len, or change device"
        ) from error
    limits = SchedulerLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=budget,
        prefill_chunk=min(budget, 128 if device == "cpu" else 2048),
        prefix_cache=config.prefix_cache,
    )
    phases = {"open": opened - started, "load": time.monotonic() - opened}
    return Loaded(runner, grammars, limits, spec, device, precision, kernels, max_model_len, num_blocks, phases)


def is_out_of_memory(error: Exception) -> bool:
    """Python's or torch's, without loading torch to ask."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def device_of(config: EngineConfig) -> str:
    """cuda (NVIDIA or AMD) or cpu. Without device files torch is not asked: its import is slow."""
    if config.device == "cpu":
        return "cpu"
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or config.device == "cuda":
        import torch

        if torch.cuda.is_available():
            return "cuda"
    if config.device == "cuda":
        raise InvalidArgument("--device cuda, but torch sees no GPU here; use --device cpu or install its driver")
    return "cpu"


def _torch_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    precision: str,
    device: str,
    max_model_len: int,
    stages: Stages | None,
) -> tuple[Model, str]:
    import torch

    here = config.stages - config.stages_elsewhere
    if device == "cpu":
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    elif here > torch.cuda.device_count():
        raise InvalidArgument(f"{here} stages here need a GPU each, and torch sees {torch.cuda.device_count()}")
    own = stages.open(checkpoint.spec, precision, device, max_model_len) if stages is not None else None
    return build(checkpoint, precision, torch.device(device), max_model_len, own, stages)


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len > spec.max_model_len:
        raise InvalidArgument(
            f"--max-model-len {config.max_model_len} exceeds the {spec.max_model_len} tokens the model was made for"
        )
    return config.max_model_len or spec.max_model_len


def _precision(config: EngineConfig, spec: ModelSpec, device: str) -> str:
    """packed where it can run, which is a CPU with a C compiler; else the fastest float type of the device."""
    if config.precision not in ("auto", "packed"):
        return config.precision
    reason = _why_not_packed(config, spec, device)
    if reason is None:
        return "packed"
    if config.precision == "packed":
        raise InvalidArgument(f"--precision {config.precision} cannot run here: {reason}")
    if device == "cpu":
        log.event("packed_unavailable", level="warning", reason=reason)
    return "bfloat16" if device == "cuda" or _cpu_has_bfloat16() else "float32"


def _why_not_packed(config: EngineConfig, spec: ModelSpec, device: str) -> str | None:
    if device != "cpu":
        return f"it is for CPUs, and the device is {device}"
    if config.stages > 1:
        return "it runs a model whole, not in stages"
    from kernels.cpu import CompilerMissing, library

    try:
        library()
    except CompilerMissing as error:
        return str(error)
    return decoder_shape(spec, block_size=config.block_size, most_tokens=1, threads=1).why_not()


def _packed(config: EngineConfig, checkpoint: Checkpoint, path: Path, max_model_len: int, budget: int) -> Model:
    threads = config.threads or len(os.sched_getaffinity(0))
    shape = decoder_shape(
        checkpoint.spec,
        block_size=config.block_size,
        most_tokens=max(budget, config.max_num_seqs),
        threads=threads,
        loudness=_LOUDNESS,
    )
    return PackedLlamaModel(checkpoint, path, shape, max_model_len)


def _cpu_has_bfloat16() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def room_for(device: str, token_bytes: int, sharing: int) -> int:
    """Tokens of `token_bytes` that there is memory for beside what is loaded. `sharing` stages share a CPU's."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - _GPU_MEMORY_SHARE) * total) // token_bytes
    return int(_available_memory() * _CPU_MEMORY_SHARE / sharing) // token_bytes


def _num_blocks(config: EngineConfig, room: int, device: str, max_model_len: int) -> int:
    if device == "cuda":
        tokens = config.kv_cache_tokens or room
    else:
        tokens = config.kv_cache_tokens or min(max(_CPU_KV_TOKENS, max_model_len), room)
    if config.kv_cache_tokens and tokens > max(room, 1) and device == "cuda":
        raise NotEnoughMemory(f"--kv-cache-tokens {tokens} does not fit: there is room for {room} on {device}")
    blocks = tokens // config.block_size
    if blocks < 2:
        raise NotEnoughMemory(f"no room for a KV cache on {device}: {max(room, 0)} tokens fit beside the weights")
    return blocks


def _available_memory() -> int:
    """Bytes that can be had without swapping, within the control group's limit."""
    available = 1 << 62
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            limit = file.read().strip()
            available = min(available, int(limit)) if limit.isdigit() else available
    except OSError:
        pass
    return available
