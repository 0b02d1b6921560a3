"""A test store of local files with injected faults: ``troubled:///PATH``."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem


class Troubled(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Local files; opening one in a mode in ``holds`` blocks until ``goes_on`` is set."""

    protocol = "troubled"
    is_away: ClassVar[bool] = False
    is_full: ClassVar[bool] = False
    holds: ClassVar[str] = ""
    seconds_per_write: ClassVar[float] = 0.0
    is_held: ClassVar[threading.Event] = threading.Event()
    goes_on: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).partition("://")[2] or str(path))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._be_there()
        return super().ls(path, detail=detail, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self._be_there()
        if mode[0] in self.holds:
            self.is_held.set()
            self.goes_on.wait()
        file = super()._open(path, mode, **kwargs)
        if "w" in mode and self.seconds_per_write:
            return _Slow(file, self.seconds_per_write)
        return _Full(file) if self.is_full and "w" in mode else file

    def _be_there(self) -> None:
        if self.is_away:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class _Slow:
    """A file with slow writes."""

    def __init__(self, file: Any, seconds: float) -> None:
        self._file, self._seconds = file, seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        threading.Event().wait(self._seconds)
        return int(self._file.write(content))


class _Full(_Slow):
    """A file that is full after 500 bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, 0.0)
        self._left = 500

    def write(self, content: bytes) -> int:
        self._left -= self._file.write(content[: self._left])
        if not self._left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(content)


@contextmanager
def troubled() -> Iterator[type[Troubled]]:
    """Register the store without faults."""
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    Troubled.is_held.clear()
    Troubled.goes_on.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"is_away": False, "is_full": False, "holds": "", "seconds_per_write": 0.0}.items():
                patch.setattr(Troubled, name, value)
            yield Troubled
    finally:
        Troubled.is_away, Troubled.is_full, Troubled.holds = False, False, ""
        Troubled.goes_on.set()
