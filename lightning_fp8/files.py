"""A run's own files: on this machine, or wherever fsspec reaches, as Lightning's checkpoints and logs do."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

#: How an address begins, but for its second slash: ``pathlib`` leaves one. A drive has one letter.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+:/"


def located(path: str | os.PathLike[str]) -> Path | str:
    """A path of this machine, or the address of a remote file (``s3://bucket/run/page.html``) as it is."""
    return path if isinstance(path, str) and _is_address(path) else Path(path)


def why_not_writable(path: str | os.PathLike[str]) -> str | None:
    """What keeps a file from being made or appended to, as far as that can be seen without doing it; None: nothing."""
    place = located(path)
    if isinstance(place, str):
        try:
            files, name = _remote(place)
            return "it is a directory" if files.isdir(name) else None
        except Exception as error:  # An unknown protocol, a missing package, credentials: each has its own.
            return str(error) or type(error).__name__
    if re.match(_SCHEME, str(place)):
        return "a pathlib.Path holds no address, for it has lost a slash: give it as text"
    try:
        nearest = next(p for p in (place, *place.absolute().parents) if p.exists())
    except OSError as error:
        return str(error)
    if place.is_dir():
        return "it is a directory"
    if nearest != place and not nearest.is_dir():
        return f"{nearest} is no directory"
    return None if os.access(nearest, os.W_OK) else f"{nearest} may not be written to"


def why_not_begun(path: str | os.PathLike[str]) -> str | None:
    """What keeps a file from being made or appended to, by making it where there is none; None: nothing."""
    hindrance = why_not_writable(path)
    if hindrance is None:
        try:
            append_text(path, "")
        except OSError as error:
            return str(error)
    return hindrance


def read_text(path: str | os.PathLike[str]) -> str:
    """What a file holds.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
    """
    place = located(path)
    if isinstance(place, Path):
        return place.read_text(encoding="utf-8")
    with _as_os_errors():
        files, name = _remote(place)
        return bytes(files.cat_file(name)).decode()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file anew, with its directory; no reader sees half of it.

    Raises:
        OSError: it cannot be written.
    """
    place = located(path)
    if isinstance(place, str):
        with _as_os_errors():
            files, name = _remote(place)
            files.makedirs(name.rpartition("/")[0], exist_ok=True)
            files.pipe_file(name, text.encode())
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def kind_of(path: str | os.PathLike[str]) -> Literal["file", "directory"] | None:
    """What there is; None: nothing.

    Raises:
        OSError: that cannot be seen.
    """
    place = located(path)
    if isinstance(place, Path):
        return "directory" if place.is_dir() else "file" if place.exists() else None
    with _as_os_errors():
        files, name = _remote(place)
        return "directory" if files.isdir(name) else "file" if files.exists(name) else None


@contextmanager
def local_copy(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file on this machine: itself, or a copy that lasts as long as the context.

    Raises:
        OSError: it cannot be read.
    """
    place = located(path)
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        with _as_os_errors():
            files, name = _remote(place)
            files.get_file(name, str(copy))
        yield copy


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Add to a file, or begin it, with its directory. A remote one is read and written anew: few can be added to.

    Raises:
        OSError: it cannot be written.
    """
    place = located(path)
    if isinstance(place, str):
        try:
            before = read_text(place)
        except FileNotFoundError:
            before = ""
        write_text(place, before + text)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a", encoding="utf-8") as file:
        file.write(text)


def _is_address(path: str) -> bool:
    return re.match(rf"([A-Za-z0-9+.-]+::)*{_SCHEME}/", path) is not None


def _remote(address: str) -> tuple[Any, str]:
    """The file system of an address, and the file's name there.

    Raises:
        ImportError: fsspec needs a package for it.
        ValueError: fsspec knows no such file system.
    """
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(address)
    return found


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Each remote file system has exceptions of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
