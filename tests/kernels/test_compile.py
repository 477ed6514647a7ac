"""Ahead-of-time compilation, in a process of its own: here Triton may be interpreting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    "rms_norm_kernel",
    "rope_kernel",
    "silu_mul_kernel",
    "cache_write_kernel",
    "attention_kernel",
    "merge_kernel",
}
TARGETS = {"sm_80", "sm_89", "sm_90", "gfx942"}


def compile_kernels(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(cache, "-m", "kernels.compile", *arguments, **environment)


def run_python(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"TRITON_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_every_kernel_compiles_for_every_target_and_fits(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    models = ["--model", "smollm2-135m", "h2o-danube3", "--dtype", "bf16"]
    result = compile_kernels(tmp_path / "cache", *models, "--json", str(report))
    assert result.returncode == 0, result.stdout + result.stderr
    reports = json.loads(report.read_text())
    assert {(entry["kernel"], entry["target"]) for entry in reports} == {(k, t) for k in KERNELS for t in TARGETS}
    for entry in reports:
        assert entry["error"] is None
        assert entry["registers"] > 0, entry
        assert entry["size_bytes"] > 0, entry
    tables = [line for line in result.stdout.splitlines() if line.startswith("attention_kernel")]
    assert len(tables) == sum(entry["kernel"] == "attention_kernel" for entry in reports)


def test_a_kernel_that_does_not_fit_its_target_is_a_failure(tmp_path: Path) -> None:
    code = (
        "import dataclasses, sys\n"
        "from kernels import compile\n"
        "compile.TARGETS['sm_80'] = dataclasses.replace(compile.TARGETS['sm_80'], shared_memory=1024)\n"
        "sys.exit(compile.main(['--target', 'sm_80', '--model', 'smollm2-135m', '--dtype', 'fp16']))\n"
    )
    result = run_python(tmp_path, "-c", code)
    assert result.returncode == 1
    assert "of shared memory, the target has 1024" in result.stdout


def test_interpreting_is_not_compiling(tmp_path: Path) -> None:
    result = compile_kernels(tmp_path, "--model", "smollm2-135m", TRITON_INTERPRET="1")
    assert result.returncode == 1
    assert "TRITON_INTERPRET" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_target_is_a_usage_error(tmp_path: Path) -> None:
    result = compile_kernels(tmp_path, "--target", "sm_20")
    assert result.returncode == 2
    assert "sm_20" in result.stderr
