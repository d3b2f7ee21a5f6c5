"""The page for people at `/`: a chat with the model, and how the server is doing.

It is plain files; what it shows it asks of the API, with a key that its user types in.
"""

from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.frontend.errors import ApiError

STATIC_DIR = Path(__file__).parent / "static"
_INDEX = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_FILES = {path.name: path.read_bytes() for path in STATIC_DIR.iterdir() if path.suffix in _TYPES}
"""Read once: a request never decides which file of the machine is opened."""


async def answer(request: HttpRequest) -> Response:
    """The page, or the file that the path names. Raises ApiError 404."""
    name = request.path_params.get("name", _INDEX)
    content = _FILES.get(name)
    if content is None:
        raise ApiError(404, f"The page has no file {name!r}")
    return Response(content, headers=_HEADERS, media_type=_TYPES[Path(name).suffix])
