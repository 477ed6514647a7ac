"""Engine settings by scenario. What an endpoint's own arguments say goes before what its preset says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Preset(StrEnum):
    """CHAT: people wait for each token. THROUGHPUT: as many tokens an hour as there can be. EDGE: little memory."""

    CHAT = "chat"
    THROUGHPUT = "throughput"
    EDGE = "edge"


SETTINGS: Mapping[Preset, tuple[str, ...]] = {
    # Short steps: a long prompt may not hold up the tokens of those who read along.
    Preset.CHAT: ("--max-num-seqs=64", "--max-batched-tokens=512", "--max-waiting=512"),
    # Large batches and a long queue: each weight that is read serves as many sequences as fit.
    Preset.THROUGHPUT: ("--max-num-seqs=256", "--max-batched-tokens=4096", "--max-waiting=8192"),
    Preset.EDGE: (
        "--max-num-seqs=8", "--max-batched-tokens=256", "--kv-cache-tokens=16384", "--max-waiting=64",
    ),
}  # fmt: skip


def resolve(preset: str | None, engine_args: Iterable[str]) -> tuple[str, ...]:
    """What the engine is started with: the preset's settings that `engine_args` don't give, then those."""
    own = tuple(engine_args)
    if preset is None:
        return own
    given = {argument.partition("=")[0] for argument in own if argument.startswith("--")}
    kept = (setting for setting in SETTINGS[Preset(preset)] if setting.partition("=")[0] not in given)
    return (*kept, *own)


def setting(engine_args: Iterable[str], flag: str) -> str | None:
    """What `flag`, such as `--precision`, is set to, by `--flag=value` or `--flag value`; the last one counts."""
    found = None
    arguments = list(engine_args)
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != flag:
            continue
        if equals:
            found = value
        elif place + 1 < len(arguments):
            found = arguments[place + 1]
    return found


def number(engine_args: Iterable[str], flag: str) -> int | None:
    """The same as a number above 0; None where it isn't one: the engine says what is wrong with it."""
    text = setting(engine_args, flag)
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def changed(before: str | None, engine_args: Iterable[str], after: str | None) -> tuple[str, ...]:
    """`engine_args`, which `before` was resolved into, under another preset: what `before` had set goes."""
    theirs = SETTINGS[Preset(before)] if before is not None else ()
    return resolve(after, (argument for argument in engine_args if argument not in theirs))
