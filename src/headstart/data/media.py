"""Images of conversations: found, looked at and hashed when they are read; refused when they have changed since.

Nothing here decodes an image: the first bytes tell whether it is one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from headstart import files
from headstart.data.content import NOT_TEXT, Unusable, short
from headstart.errors import GateError, UserError
from headstart.types import Media

MISSING = "image not found"
NO_IMAGE = "not an image"
REMOTE = "image on the web"

_HEAD = 16  # bytes that tell the format
_FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
_DATA = "data:"


def find(reference: Any, folder: Path | None) -> Media:
    """The image that a row names: a path (relative to `folder`), a `file:` or `data:` URL, {"url": ...}, or {"bytes": ...} as
    Parquet sets have it.

    Raises:
        Unusable: there is no such file, it is no image, it is on the web, or there is no folder to look in.
    """
    if isinstance(reference, dict):
        if isinstance(reference.get("bytes"), bytes):
            return _inline(reference["bytes"])
        reference = reference.get("url") or reference.get("path")
    if not isinstance(reference, str) or folder is None:
        raise Unusable(NOT_TEXT, f"image {short(reference)}")
    if reference.startswith(_DATA):
        return _inline(_decode(reference))
    if reference.startswith(("http:", "https:")):
        raise Unusable(REMOTE, reference)
    return _file(url2pathname(urlsplit(reference).path) if reference.startswith("file:") else reference, folder)


def read(media: Media) -> bytes:
    """The image as it was hashed.

    Raises:
        GateError: it cannot be read any more, or has other bytes than then.
    """
    try:
        content = _decode(media.source) if media.source.startswith(_DATA) else Path(media.source).read_bytes()
    except OSError as error:
        raise GateError(f"the image {media.source} cannot be read: {error.strerror}") from None
    if (found := _sha256(content)) != media.sha256:
        raise GateError(
            f"the image {named(media)} has changed since the prompts were prepared",
            looked_for=f"sha256 {media.sha256[:16]}..., found {found[:16]}...",
            do="put the old file back, or run headstart prepare again",
        )
    return content


def check(media: Iterable[tuple[Media, ...]]) -> dict[str, int]:
    """Read every image of the prompts once; returns how many of a kind one prompt has at most.

    Raises:
        GateError: one is gone or has changed.
    """
    most: Counter[str] = Counter()
    seen: set[Media] = set()
    for group in media:
        most |= Counter(item.kind for item in group)
        for item in group:
            if item not in seen:
                read(item)
                seen.add(item)
    return dict(most)


def named(media: Media) -> str:
    return media.source if len(media.source) < 200 else media.source[:60] + "..."


def _file(name: str, folder: Path) -> Media:
    try:
        path = (folder / files.home(name)).absolute()
        content = path.read_bytes()
    except (OSError, ValueError, UserError):  # also a name too long, with a null character, or of no user
        raise Unusable(MISSING, name) from None
    if not _is_image(content):
        raise Unusable(NO_IMAGE, name)
    return Media("image", str(path), _sha256(content))


def _inline(content: bytes) -> Media:
    """An image that comes within the row, and stays within it: in one spelling, whatever it came in."""
    if not _is_image(content):
        raise Unusable(NO_IMAGE, "inline")
    return Media("image", f"{_DATA};base64,{base64.b64encode(content).decode()}", _sha256(content))


def _decode(uri: str) -> bytes:
    """Content of a `data:` URI (RFC 2397)."""
    header, _, body = uri.partition(",")
    raw = unquote_to_bytes(body)
    try:
        return base64.b64decode(raw) if header.endswith(";base64") else raw
    except binascii.Error:
        raise Unusable(NO_IMAGE, "inline") from None


def _is_image(content: bytes) -> bool:
    webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    avif = content[4:12] in (b"ftypavif", b"ftypheic")
    return webp or avif or content[:_HEAD].startswith(_FORMATS)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
