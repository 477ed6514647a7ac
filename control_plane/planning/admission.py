"""Refuses what can't run: a known model on a known accelerator that can't hold it. What isn't known isn't refused."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.errors import InvalidInput, Unprocessable
from control_plane.planning.accelerators import GIGA, catalogue
from control_plane.planning.fit import Machine, fit, machines, nearest, precision_for
from control_plane.planning.presets import number, setting
from control_plane.planning.shapes import known_shape

_PAGE = 256
"""Tokens that must fit beside the weights where no context length is asked for: the engine cuts its own."""


def require_fit(model: str, gpu: str | None, gpus: int, engine_args: Sequence[str]) -> None:
    """`engine_args` are the resolved ones. Raises Unprocessable naming the field, and what would do."""
    shape = known_shape(model)
    accelerator = None if gpu is None else catalogue().find(gpu)
    if shape is None or accelerator is None:
        return
    machine = Machine(accelerator, max(1, gpus), catalogue().efficiency[accelerator.kind])
    asked = number(engine_args, "--max-model-len")
    context = min(_PAGE, shape.max_model_len) if asked is None else asked
    try:
        precision = precision_for(accelerator.kind, setting(engine_args, "--precision"))
        found = fit(shape, precision, context, machine)
    except InvalidInput as error:
        raise Unprocessable(error.message, param="engine_args") from None
    if found.fits:
        return
    needed = (found.weights + context * found.kv_per_token) / GIGA
    every = machines(catalogue())
    remedy = nearest(shape, precision, context, every)
    same = nearest(shape, precision, context, (one for one in every if one.accelerator is accelerator))
    says = "nothing of the catalogue holds it"
    if remedy is not None:
        says = f"the nearest that holds it is {remedy.name} with {remedy.accelerator.memory_gb * remedy.count:g} GB"
        says += f"; of {accelerator.name} it takes {same.count}" if same and same.name != remedy.name else ""
    raise Unprocessable(
        f"{model} in {precision} with {context} tokens of context takes {needed:.1f} GB, and {machine.name} has "
        f"{machine.memory / GIGA:.1f} of {accelerator.memory_gb * machine.count:g} GB for it: {says}",
        code="does_not_fit",
        param="gpu",
    )
