"""`make clients`: starts a platform, runs every client against it over HTTPS, prints a table. Exit 1 if one fails."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.platform import Platform, running

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".bench" / "clients"
INSTALL_S, RUN_S = 900, 240


@dataclass(frozen=True)
class Client:
    """A script, and the exact packages that it needs."""

    name: str
    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai (Python)", "openai_client.py", ("openai==3.57.0",)),
    Client("openai (Node)", "node_openai.mjs", ("openai@6.49.0",)),
    Client("Vercel AI SDK", "node_vercel.mjs", ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")),
    Client("langchain-openai", "langchain_client.py", ("langchain-openai==1.7.4",)),
    Client("litellm", "litellm_client.py", ("litellm==1.110.2",)),
    Client("openai-agents", "agents_client.py", ("openai-agents==0.24.0",)),
    Client("pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("instructor", "instructor_client.py", ("instructor==1.17.0",)),
    Client("llm", "llm_client.py", ("llm==0.36",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients ARGS=…")
    parser.add_argument("names", nargs="*", help="only these scripts, by a part of their names")
    names = parser.parse_args().names
    chosen = [client for client in CLIENTS if not names or any(name in client.script for name in names)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="ingle-clients-") as folder, running(Path(folder)) as platform:
        environment = prepare(platform)
        for client in chosen:
            print(f"{client.name} …", file=sys.stderr)
            what, good = attempt(client, environment)
            rows.append((client.name, version(client), what, good))
    print("\n| client | version | what was run | |\n|---|---|---|---|")
    for name, found, what, good in rows:
        print(f"| {name} | {found} | {what} | {'ok' if good else 'FAILED'} |")
    return 0 if all(row[3] for row in rows) else 1


def prepare(platform: Platform) -> dict[str, str]:
    """Two endpoints and a key; what a tenant's shell would hold."""
    for name, model in (("chat", "smollm2-135m-instruct"), ("embed", "all-minilm-l6-v2")):
        platform.ingle("model", "pull", model)
        platform.ingle("endpoint", "create", name, "--region", "local-eu", "--model", model, "--wait")
    exports = platform.ingle("key", "create", "-o", "env")
    tenant = dict(line.removeprefix("export ").split("=", 1) for line in exports.splitlines() if "=" in line)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, **tenant, "NODE_EXTRA_CA_CERTS": tenant["SSL_CERT_FILE"], "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def attempt(client: Client, environment: dict[str, str]) -> tuple[str, bool]:
    folder = ENVIRONMENTS / Path(client.script).stem
    try:
        install(client, folder)
        program = ["node", client.script] if client.is_node else [str(folder / "bin" / "python"), client.script]
        if client.is_node:
            shutil.copy(HERE / client.script, folder / client.script)
        with tempfile.TemporaryDirectory() as home:
            done = subprocess.run(
                program, cwd=folder if client.is_node else HERE, capture_output=True, text=True, timeout=RUN_S,
                env={**environment, "HOME": home, "LLM_USER_PATH": f"{home}/llm"},
            )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:200], False
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:160], False
    return done.stdout.strip().splitlines()[-1], True


def install(client: Client, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if client.is_node:
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages]
    else:
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *client.packages]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=INSTALL_S)


def version(client: Client) -> str:
    """As it is pinned."""
    separator = "@" if client.is_node else "=="
    return ", ".join(package.rpartition(separator)[2] for package in client.packages[:2])


if __name__ == "__main__":
    sys.exit(main())
