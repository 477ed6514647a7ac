"""Where a model's tensors are: all of them moved at once, between host and accelerator."""

from __future__ import annotations

from typing import Any

import torch


def move(model: Any, device: torch.device) -> None:
    """Move every tensor that `model` holds, in itself or in its parts. One that two parts share stays shared."""
    moved: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def there(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        return moved[id(value)]

    def visit(owner: Any) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor):
                setattr(owner, name, there(value))
            for part in value if isinstance(value, list) else [value]:
                if type(part).__module__.startswith("data_plane.") and hasattr(part, "__dict__"):
                    visit(part)

    visit(model)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()
