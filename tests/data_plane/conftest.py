from __future__ import annotations

from hypothesis import settings

# the machine may be busy: how long an example takes says nothing about it
settings.register_profile("ingle", parent=settings(), deadline=None)
settings.load_profile("ingle")
