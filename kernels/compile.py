"""Compile every Triton kernel ahead of time, for every target, without a GPU: `python -m kernels.compile`.

Each operation is called on meta tensors in the shapes of real models while its launches are recorded, and each
distinct launch is compiled as it would be at run time. The table tells what each one takes of its target.
Exit: 0 when every kernel compiles and fits, 1 when one does not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.errors import CompileError
from kernels.triton import OPS
from kernels.triton.launch import Launch, recording

SCALARS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for, and the shared memory in bytes that one program may have there."""

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_89": Target("cuda", 89, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that kernels are specialized for."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    window: int = 0


MODELS = (
    Model("smollm2-135m", 9, 3, 64, 576, 1536),
    Model("llama-3-8b", 32, 8, 128, 4096, 14336),
    Model("qwen2-7b", 28, 4, 128, 3584, 18944),
    Model("phi-3-mini", 32, 32, 96, 3072, 8192, window=2047),
    Model("h2o-danube3", 32, 8, 80, 2560, 6912, window=4096),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = {"decode-few": (4, 1), "decode-many": (256, 1), "verify": (4, 5), "prefill": (4, 512)}


@dataclass(frozen=True)
class Report:
    """One kernel on one target; figures are None where the tools at hand cannot tell, and all None after an error."""

    kernel: str
    case: str
    target: str
    shared_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    size_bytes: int | None = None
    error: str | None = None


def cases(models: Sequence[Model] = MODELS, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[tuple[str, Launch]]:
    """Each distinct launch that the models' steps make, with a name for where it came from."""
    seen = set()
    for model in models:
        for dtype in dtypes:
            for step, (sequences, query_len) in STEPS.items():
                with recording() as launches:
                    _step(model, dtype, sequences, query_len)
                for launch in launches:
                    source = _source(launch)
                    key = (source.hash(), launch.num_warps, launch.num_stages)
                    if key not in seen:
                        seen.add(key)
                        yield f"{model.name}/{SCALARS[dtype]}/{step}", launch


def _step(model: Model, dtype: torch.dtype, sequences: int, query_len: int) -> None:
    """Every operation once, as a layer of the model calls it."""
    tokens, block_size, head_dim = sequences * query_len, 16, model.head_dim

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden, norm = meta(tokens, model.hidden), meta(model.hidden)
    fused = meta(tokens, model.heads + 2 * model.kv_heads, head_dim)
    q, k, v = fused.split_with_sizes([model.heads, model.kv_heads, model.kv_heads], dim=1)
    caches = meta(2, 64, model.kv_heads, block_size, head_dim)
    k_cache, v_cache = caches[0], caches[1]
    tables = meta(sequences, 4096 // block_size, dtype=torch.int32)
    bounds, lengths = meta(sequences + 1, dtype=torch.int32), meta(sequences, dtype=torch.int32)
    positions = meta(tokens, dtype=torch.int64)
    OPS.rms_norm(hidden, norm, 1e-5)
    OPS.rms_norm(q, meta(head_dim), 1e-5)
    OPS.add_rms_norm(hidden, hidden, norm, 1e-5)
    OPS.apply_rope(q, k, meta(4096, head_dim, dtype=torch.float32), positions)
    OPS.silu_mul(meta(tokens, 2 * model.intermediate))
    OPS.cache_write(k, v, k_cache, v_cache, positions)
    attention = (q, k_cache, v_cache, tables, bounds, lengths)
    OPS.paged_attention(*attention, scale=0.1, max_query_len=query_len, window=model.window)


def _source(launch: Launch) -> Any:
    """The launch as Triton's just-in-time compiler would see it: types, constants, and what it assumes of values."""
    if not isinstance(launch.kernel, triton.JITFunction):
        raise CompileError("kernels are interpreted, not compiled, while TRITON_INTERPRET is set: unset it")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    assumptions: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=False)):
        specialized = not parameter.do_not_specialize
        fixed = value is None or (isinstance(value, int) and value == 1 and specialized)
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if fixed:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = _type_name(value)
            if aligned and specialized:
                assumptions[(index,)] = [["tt.divisibility", 16]]
    signature.update(dict.fromkeys(launch.constants, "constexpr"))
    return ASTSource(launch.kernel, signature, constants | launch.constants, assumptions)


def _type_name(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return "*" + SCALARS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def compile_launch(launch: Launch, case: str, target_name: str) -> Report:
    """Compile one launch for one target. Whatever is wrong with it ends in the report's `error`."""
    target = TARGETS[target_name]
    kernel = launch.kernel.__name__
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    try:
        compiled = triton.compile(_source(launch), target=gpu, options=options)
    except Exception as error:  # whatever the compiler raises is the finding
        return Report(kernel, case, target_name, error=f"{type(error).__name__}: {error}")
    shared = compiled.metadata.shared
    if target.backend == "cuda":
        binary = compiled.asm["cubin"]
        registers, spilled = _cuda_resources(binary)
    else:
        binary = compiled.asm["hsaco"]
        registers, spilled = _hip_resources(compiled.asm["amdgcn"])
    over = shared > target.shared_memory
    error_text = f"needs {shared} bytes of shared memory, the target has {target.shared_memory}" if over else None
    return Report(kernel, case, target_name, shared, registers, spilled, len(binary), error_text)


def _cuda_resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, bytes of stack, where spills go) a thread, by the cuobjdump that Triton carries; Nones without it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    registers, stack = (re.search(rf"\b{name}:(\d+)", result.stdout) for name in ("REG", "STACK"))
    return (int(registers[1]) if registers else None), (int(stack[1]) if stack else None)


def _hip_resources(assembly: str) -> tuple[int | None, int | None]:
    """(vector registers a thread, bytes spilled a thread) from the metadata at the end of the assembly."""
    registers, spilled = (re.search(rf"\.{name}:\s*(\d+)", assembly) for name in ("vgpr_count", "vgpr_spill_count"))
    return (int(registers[1]) if registers else None), (4 * int(spilled[1]) if spilled else None)


def table(reports: Sequence[Report]) -> str:
    """The reports as aligned text, a line each, errors in full below their line."""
    rows: list[tuple[str, ...]] = [("kernel", "case", "target", "shared", "registers", "spilled", "size")]
    for report in reports:
        figures = (report.shared_bytes, report.registers, report.spilled_bytes, report.size_bytes)
        shown = ("-" if figure is None else str(figure) for figure in figures)
        rows.append((report.kernel, report.case, report.target, *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, finding in zip(rows, (None, *reports), strict=True):
        cells = (
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells))
        if finding is not None and finding.error:
            lines.append(f"  FAILED {finding.error}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.compile", description="Compile every kernel, without a GPU."
    )
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: every one")
    parser.add_argument("--model", nargs="+", choices=[model.name for model in MODELS], help="default: every one")
    parser.add_argument("--dtype", nargs="+", choices=[SCALARS[dtype] for dtype in DTYPES], help="default: every one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there too")
    options = parser.parse_args(arguments)
    models = [model for model in MODELS if options.model is None or model.name in options.model]
    dtypes = [dtype for dtype in DTYPES if options.dtype is None or SCALARS[dtype] in options.dtype]
    try:
        launches = list(cases(models, dtypes))
    except CompileError as error:
        print(f"kernels.compile: {error}", file=sys.stderr)
        return 1
    reports = [compile_launch(launch, case, target) for target in options.target for case, launch in launches]
    print(table(reports))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    failed = sum(report.error is not None for report in reports)
    print(f"{len(reports)} compiled for {', '.join(options.target)}, {failed} failed, triton {triton.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
