"""The catalogue of accelerators: what each holds, how fast it is, what it is listed for, and where that was read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from control_plane.config import describe_validation
from control_plane.domain import Rung
from control_plane.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
GIGA = 1e9
TERA = 1e12


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Efficiency(_Entry):
    """What share of its published rates an accelerator gives, and what a step takes beside them."""

    prefill: Share
    """Of the matrix rate."""
    bandwidth: Share
    step_overhead_s: Annotated[float, Field(ge=0, le=1)]
    sequence_overhead_s: Annotated[float, Field(ge=0, le=1)]
    """For each sequence of a step: sampling, detokenizing, sending."""
    stage_s: Annotated[float, Field(ge=0, le=1)]
    """What a step takes more for each accelerator after the first: its layers go over them in stages."""
    overlaps: bool
    """Whether matrix work hides behind memory traffic, or adds to it."""
    measured: bool
    note: str


class StartTimes(_Entry):
    """What the time until a replica serves is made of."""

    place_s: Annotated[float, Field(ge=0, le=3600)]
    import_s: Annotated[float, Field(ge=0, le=3600)]
    load_gb_s: Positive
    wake_s: Annotated[float, Field(ge=0, le=3600)]
    wake_gb_s: Positive
    cold_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    """From nothing, where that was measured."""

    def seconds(self, rung: Rung, weights: float) -> float:
        """From `rung` to serving, for `weights` bytes."""
        gigabytes = weights / GIGA
        if rung is Rung.HOT:
            return 0.0
        if rung is Rung.ASLEEP:
            return self.wake_s + gigabytes / self.wake_gb_s
        load = self.wake_s + gigabytes / self.load_gb_s
        if rung is Rung.EMBER:
            return load
        return self.place_s + self.import_s + load if self.cold_s is None else self.cold_s


class Accelerator(_Entry):
    """One accelerator. Matrix rates are dense; `price_per_hour` is None where no public price was found."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_gb: Positive
    bandwidth_gb_s: Positive
    bf16_tflops: Positive
    eight_bit_tflops: Positive
    source: Annotated[str, Field(min_length=1)]
    price_per_hour: Positive | None = None
    price_source: str | None = None
    price_note: str = ""
    regions: tuple[str, ...] = ()
    regions_source: str | None = None

    @model_validator(mode="after")
    def _sourced(self) -> Accelerator:
        if (self.price_per_hour is None) != (self.price_source is None):
            raise ValueError("price_per_hour and price_source: both or neither")
        if bool(self.regions) != (self.regions_source is not None):
            raise ValueError("regions and regions_source: both or neither")
        return self


class Catalogue(_Entry):
    counts: tuple[Annotated[int, Field(ge=1, le=64)], ...]
    efficiency: dict[Literal["gpu", "cpu"], Efficiency]
    starts: dict[Literal["gpu", "cpu"], StartTimes]
    accelerator: tuple[Accelerator, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> Catalogue:
        names = [_key(name) for one in self.accelerator for name in (one.name, *one.aliases)]
        if len(set(names)) != len(names):
            raise ValueError("an accelerator's name is given twice")
        missing = {one.kind for one in self.accelerator} - (set(self.efficiency) & set(self.starts))
        if missing:
            raise ValueError(f"no efficiency or starts for {', '.join(sorted(missing))}")
        return self

    def find(self, name: str) -> Accelerator | None:
        """By name or alias; case, spaces and hyphens don't matter."""
        return next((one for one in self.accelerator if _key(name) in map(_key, (one.name, *one.aliases))), None)

    def sizes(self) -> Iterator[tuple[Accelerator, int]]:
        """Every accelerator with every count of it that a replica may have; a CPU is always one."""
        for one in self.accelerator:
            for count in self.counts if one.kind == "gpu" else (1,):
                yield one, count


def _key(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def parse(text: str) -> Catalogue:
    """Raises ConfigError naming the field."""
    try:
        return Catalogue.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the accelerator catalogue can't be read: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"the accelerator catalogue: {describe_validation(error)}") from None


@cache
def catalogue() -> Catalogue:
    """The one that ingle carries."""
    return parse(files("control_plane.planning").joinpath("accelerators.toml").read_text("utf-8"))


def label(accelerator: Accelerator, count: int) -> str:
    """`H100`, or `H100x4`."""
    return accelerator.name if count == 1 else f"{accelerator.name}x{count}"
