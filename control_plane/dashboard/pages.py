"""Serves the page. It holds no data: everything on it is read from the admin API, so the same roles apply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from aiohttp import web

# no other host, no inline code, no frames: what a script from outside could do ends here
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_CHARTS = {"/static/uplot.js": "uPlot.iife.js", "/static/uplot.css": "uPlot.min.css"}


def add_pages(app: web.Application) -> None:
    for file in files("control_plane.dashboard").joinpath("static").iterdir():
        kind = _KINDS.get(Path(file.name).suffix)
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            app.router.add_get(path, _page(file.read_bytes(), kind))
    folder = _charts_folder()
    for path, name in _CHARTS.items():
        # an empty script brings no library: the page then shows numbers without drawing them
        body = (folder / name).read_bytes() if folder else b""
        app.router.add_get(path, _page(body, _KINDS[Path(name).suffix]))


def _charts_folder() -> Path | None:
    """Where the wheel `uplot-python` keeps uPlot. Its Python part, which wants numpy, is not imported."""
    spec = find_spec("uplot")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "static"
        if all((folder / name).is_file() for name in _CHARTS.values()):
            return folder
    return None


def _page(body: bytes, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(request: web.Request) -> web.Response:
        response = web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
        response.enable_compression()
        return response

    return serve
