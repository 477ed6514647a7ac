"""Serves the page. It holds no data: everything on it is read from the admin API, so the same roles apply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

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
_PAGES = {
    "/": ("index.html", "text/html"),
    "/static/app.js": ("app.js", "text/javascript"),
    "/static/view.js": ("view.js", "text/javascript"),
    "/static/style.css": ("style.css", "text/css"),
}


def add_pages(app: web.Application) -> None:
    for path, (name, kind) in _PAGES.items():
        app.router.add_get(path, _page(name, kind))


def _page(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    body = files("control_plane.dashboard").joinpath("static", name).read_bytes()

    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return serve
