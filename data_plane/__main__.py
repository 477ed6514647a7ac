"""`python -m data_plane serve MODEL`, `… stage` and `… model pull|list|inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from data_plane.config import EngineConfig, ServeConfig
from data_plane.errors import InvalidArgument, StartError


def main(arguments: list[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        return code
    except StartError as error:
        print(json.dumps({"event": "failed", "code": error.code, "message": str(error)}), flush=True)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("data_plane", "kernels"):
            raise
        print(f"error: {error.name} is not installed; the engine needs: pip install 'ingle[engine]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ingle engine", description="Run a language model, or look at one.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_stage(commands)
    model = commands.add_parser("model", prog="ingle model", help="fetch and inspect models")
    verbs = model.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    pull = verbs.add_parser("pull", help="fetch a model of the catalogue into the cache")
    pull.add_argument("name")
    pull.set_defaults(run=_pull)
    listing = verbs.add_parser("list", help="the catalogue, and what of it is in the cache")
    listing.add_argument("-o", "--output", choices=("table", "json"), default="table")
    listing.set_defaults(run=_list)
    inspect = verbs.add_parser("inspect", help="what a model is, from its files alone")
    inspect.add_argument("name")
    inspect.add_argument("-o", "--output", choices=("table", "json"), default="table")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        prog="ingle engine serve",
        help="serve one model over HTTP",
        usage="ingle engine serve MODEL [options]",
    )
    serve.add_argument("model", help="a .gguf file, a folder with safetensors, or a name of the catalogue")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    serve.add_argument("--name", default="", help="the model's name in requests (default: MODEL)")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    serve.add_argument("--precision", choices=("auto", "packed", "float32", "bfloat16", "float16"), default="auto")
    for flag, help in (
        ("max-model-len", "context length in tokens (default: the model's)"),
        ("kv-cache-tokens", "tokens the KV cache holds (default: from the memory there is)"),
        ("max-batched-tokens", "tokens a step runs at most (default: from the device)"),
        ("threads", "CPU threads of the engine (default: from the machine)"),
        ("stages-elsewhere", "of the stages, those that come from other hosts by `ingle engine stage`"),
    ):
        serve.add_argument(f"--{flag}", type=int, default=0, help=help)
    serve.add_argument("--max-num-seqs", type=int, default=256, help="sequences a step runs at most")
    serve.add_argument(
        "--stages", type=int, default=1, help="parts that the layers are in, each on a GPU of its own (default: 1)"
    )
    serve.add_argument("--stage-listen", default="", metavar="HOST:PORT", help="where they come to")
    serve.add_argument("--max-waiting", type=int, default=2048, help="requests that may wait")
    serve.add_argument("--block-size", type=int, default=16, help="tokens a KV block holds")
    serve.add_argument("--no-prefix-cache", action="store_true")
    serve.add_argument("--max-body", type=int, default=8 << 20, help="bytes of a request body at most")
    serve.add_argument("--liveness", type=float, default=10.0, help="seconds without a step until /health fails")
    serve.add_argument("--drain", type=float, default=30.0, help="seconds that SIGTERM waits for open requests")
    serve.add_argument(
        "--rung",
        choices=("hot", "asleep", "ember"),
        default="hot",
        help="how warm it is at first; POST /wake makes it hot",
    )
    serve.add_argument(
        "--metrics-names", choices=("ingle", "vllm"), default="ingle", help="vllm: metrics under vLLM's names too"
    )
    serve.add_argument(
        "--tls-pair", default="", help="PEM file, certificate chain then key: HTTPS for known callers only"
    )
    serve.add_argument("--tls-authority", default="", help="PEM file, what callers' certificates are checked against")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    engine = EngineConfig(
        model=options.model,
        device=options.device,
        precision=options.precision,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_tokens=options.kv_cache_tokens,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_batched_tokens,
        max_waiting=options.max_waiting,
        prefix_cache=not options.no_prefix_cache,
        threads=options.threads,
        rung=options.rung,
        stages=options.stages,
        stages_elsewhere=options.stages_elsewhere,
        stage_listen=options.stage_listen,
        stage_pair=options.tls_pair,
    )
    config = ServeConfig(
        engine=engine,
        host=options.host,
        port=options.port,
        name=options.name or options.model,
        max_body_bytes=options.max_body,
        liveness_s=options.liveness,
        drain_s=options.drain,
        metrics_names=options.metrics_names,
        tls_pair=options.tls_pair,
        tls_authority=options.tls_authority,
    ).validate()
    from data_plane.api.server import serve

    return serve(config)


def _add_stage(commands: Any) -> None:
    stage = commands.add_parser(
        "stage",
        prog="ingle engine stage",
        help="run a part of a model for an engine on another host",
        usage="ingle engine stage --connect HOST:PORT [options]",
    )
    stage.add_argument("--connect", required=True, metavar="HOST:PORT", help="that engine's --stage-listen")
    stage.add_argument("--tls-authority", default="", help="PEM file, what its certificate is checked against: TLS")
    stage.add_argument("--tls-name", default="", help="the name in its certificate (default: HOST)")
    stage.set_defaults(run=_stage)


def _stage(options: argparse.Namespace) -> int:
    from data_plane.engine.stage import join

    host = options.connect.rpartition(":")[0]
    return join(options.connect, options.tls_name or host, options.tls_authority)


def _pull(options: argparse.Namespace) -> int:
    from data_plane.loading.sources import pull

    print(pull(options.name))
    return 0


def _list(options: argparse.Namespace) -> int:
    from data_plane.loading.sources import CATALOGUE, cached_path

    rows = [
        {"name": model.name, "cached": cached_path(model).exists(), "license": model.license,
         "description": model.description}
        for model in CATALOGUE.values()
    ]  # fmt: skip
    if options.output == "json":
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(
                f"{row['name']}  {'cached' if row['cached'] else 'not cached'}  {row['license']}  {row['description']}"
            )
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from data_plane.loading.formats import open_checkpoint
    from data_plane.loading.sources import resolve

    path = resolve(options.name)
    spec = open_checkpoint(path).spec
    row = {"path": str(path), **asdict(spec), "kv_bytes_per_token_16bit": spec.kv_bytes_per_token(2)}
    if options.output == "json":
        print(json.dumps(row, indent=2))
    else:
        for key, value in row.items():
            print(f"{key:26} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
