"""`headstart patch-speculators`: hidden-state capture of speculators 0.3 and 0.4 for multimodal wrappers.

For people who are bound to speculators <= 0.4 with vLLM <= 0.16: its `custom_worker.py` takes the text model from one
fixed attribute and replaces its `forward` by a copy of Llama's, after the model was loaded. The changed file finds the
text model in any wrapper and reads its layers by hooks (`custom_worker.py.txt`). It stands alone: headstart need not be
in that environment.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart import files
from headstart.errors import UserError
from headstart.patches import releases, splice
from headstart.patches.environment import Installed

DONE = "Patched custom_worker.py to handle multimodal wrappers"

Kind = Literal["original", "patched", "edited", "unknown"]

_MARK = "# Changed by `headstart patch-speculators`; its --revert restores the original.\n"
_DIGESTS = "# sha256 of the original: {}\n# sha256 of this file without these two lines: {}\n"
_WRITTEN = re.compile(_DIGESTS.replace("{}", "([0-9a-f]{64})"))


@dataclass(frozen=True)
class Change:
    """What would be done to a file: nothing where `after` equals `before`.

    keeps: `before` is what the backup is to hold. reverts: the backup takes the file's place.
    """

    file: Path
    backup: Path
    before: bytes
    after: bytes
    keeps: bool = False
    reverts: bool = False

    @property
    def diff(self) -> str:
        """Unified, as `patch -p1` takes it in the folder of the file; empty when nothing changes."""
        old, new = (data.decode(errors="replace").splitlines(keepends=True) for data in (self.before, self.after))
        return "".join(difflib.unified_diff(old, new, f"a/{self.file.name}", f"b/{self.file.name}"))

    def apply(self) -> None:
        """Write the file whole or not at all, with its old permissions; the backup first.

        Raises:
            UserError: the place cannot be written to.
        """
        try:
            if self.reverts:
                self.backup.replace(self.file)
            elif self.after != self.before:
                self._write()
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise
            raise UserError(f"{error.filename} cannot be written", do="run it as the environment's owner") from None

    def _write(self) -> None:
        if self.keeps:
            with files.replacing(self.backup) as temporary:
                shutil.copy2(self.file, temporary)
        with files.replacing(self.file) as temporary:  # a new file: the old one may be a hard link into a cache
            temporary.write_bytes(self.after)
            shutil.copymode(self.file, temporary)


def kind_of(data: bytes) -> Kind:
    """original: as released; patched: as we wrote it; edited: that, and changed since; unknown: anything else."""
    if releases.known(_sha256(data)):
        return "original"
    digests = _digests(data)
    if digests is None:
        return "unknown"
    return "patched" if digests[1] == _sha256(_WRITTEN.sub("", _text(data), count=1).encode()) else "edited"


def patching(installed: Installed, *, force: bool = False) -> Change:
    """The change that brings our capture in; none when it is in already.

    Raises:
        UserError: the contents are not known and `force` is not given, or lack what is to be replaced.
    """
    data = installed.file.read_bytes()
    kind = kind_of(data)
    if kind in ("edited", "unknown") and not force:
        raise _refusal(installed, data, kind)
    original = data if kind in ("original", "unknown") else _kept(installed, data)
    if original is None and kind == "patched":  # its backup is gone: there is nothing to make it anew from
        return Change(installed.file, installed.backup, data, data)
    after = patched(original or data, installed.file)
    return Change(installed.file, installed.backup, data, after, keeps=original == data)


def reverting(installed: Installed, *, force: bool = False) -> Change:
    """The change that restores the original bytes; none when they are there already.

    Raises:
        UserError: there is no backup; or it or the file changed since and `force` is not given.
    """
    data = installed.file.read_bytes()
    kind = kind_of(data)
    if kind == "original":
        return Change(installed.file, installed.backup, data, data)
    again = f"pip install --force-reinstall --no-deps speculators=={installed.version}"
    if not installed.backup.is_file():
        raise UserError(f"there is no backup: {installed.backup}", do=f"restore the file by: {again}")
    if not force and kind != "patched":
        raise UserError(f"{installed.file} is not as it was written", do="--force restores the backup nevertheless")
    if not force and _kept(installed, data) is None:
        raise UserError(f"{installed.backup} is not what was kept", do=f"--force restores it nevertheless; or {again}")
    return Change(installed.file, installed.backup, data, installed.backup.read_bytes(), reverts=True)


def patched(original: bytes, file: Path) -> bytes:
    """The contents that take the place of `original`; the same original always gives the same bytes.

    Raises:
        UserError: the contents lack what is to be replaced.
    """
    try:
        text = splice.after_docstring(splice.spliced(original.decode()), _MARK)
        compile(text, str(file), "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{file} cannot be patched: {error}",
            looked_for=f"{splice.REPLACED_FUNCTION}, and {splice.REPLACED_METHOD} of class {splice.CLASS}",
        ) from None
    return text.replace(_MARK, _MARK + _DIGESTS.format(_sha256(original), _sha256(text.encode())), 1).encode()


def told(installed: Installed, change: Change) -> list[str]:
    """What `change` did, line by line."""
    versions = f"speculators {installed.version}, vLLM {installed.vllm or 'not installed'}"
    lines = [f"environment: {installed.python}: {versions}", f"file: {change.file}"]
    if change.after == change.before:
        state = "patched already" if _digests(change.before) else "the original"
        return [*lines, f"nothing was changed: custom_worker.py is {state}"]
    if change.reverts:
        return [*lines, f"restored: {_size(change.after)}, from {change.backup}, which is gone"]
    kept = (
        f"kept: {_size(change.before)}, as {change.backup}" if change.keeps else f"backup: {change.backup}, as before"
    )
    cannot = releases.not_mended(installed.version, installed.vllm)
    written = [kept, f"written: {_size(change.after)}; headstart patch-speculators --revert brings the original back"]
    return [*lines, *written, *_list("mended", releases.MENDED), *_list("not mended", cannot), releases.LAYER_IDS, DONE]


def _digests(data: bytes) -> tuple[str, str] | None:
    """What a file that we wrote says of itself: the digest of its original, and of itself without that."""
    found = _WRITTEN.search(_text(data))
    return (found[1], found[2]) if found else None


def _kept(installed: Installed, data: bytes) -> bytes | None:
    """The backup, if it is the original that `data` was made from."""
    digests = _digests(data)
    if digests is None or not installed.backup.is_file():
        return None
    original = installed.backup.read_bytes()
    return original if _sha256(original) == digests[0] else None


def _refusal(installed: Installed, data: bytes, kind: Kind) -> UserError:
    what = "changed since it was patched" if kind == "edited" else "is not as any known release has it"
    known = (f"{release.sha256[:16]} ({', '.join(release.versions)})" for release in releases.RELEASES)
    return UserError(
        f"{installed.file} {what} (speculators {installed.version}, sha256 {_sha256(data)[:16]})",
        looked_for=f"sha256 {', '.join(known)}",
        do="--force --dry-run shows what would be done nevertheless, --force does it",
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _list(title: str, items: tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"  - {item}" for item in items)]


def _size(data: bytes) -> str:
    return f"{len(data.splitlines())} lines, sha256 {_sha256(data)}"
