"""A form with a file: read within bounds of size and time, the file on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO

import python_multipart  # noqa: F401 - Starlette's parser needs it and would say so only with the first upload
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

#: Most fields of a form, and the longest of them in bytes.
_MAX_FIELDS, _MAX_FIELD_BYTES = 64, 2**16
#: What a form may have beside its file, in bytes.
_OVERHEAD_BYTES = 2**18
#: So long the rest of a form that is refused is read on, so that its sender sees the answer.
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bounds of an uploaded file: its size, the length of its audio; the time between two pieces of it, and of all of it."""

    max_bytes: int = 100 * 2**20
    max_seconds: float = 4 * 3600.0
    pause_s: float = 30.0
    total_s: float = 1800.0


class UploadError(MultiPartException):
    """What is wrong with a request, with its HTTP status; ``param``: the field.

    Of Starlette's kind, so that its parser closes what was spooled.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


async def read_form(request: Request, limits: UploadLimits) -> FormData:
    """The fields of a multipart form; who calls closes it. Raises UploadError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise UploadError(400, "send multipart/form-data, with the audio in the field file", "file")
    most = limits.max_bytes + _OVERHEAD_BYTES
    stream = request.stream()
    try:
        with contextlib.suppress(ValueError):
            if int(request.headers.get("content-length", "")) > most:
                raise _too_large(limits)
        pieces = _bounded(stream, most, limits)
        parser = MultiPartParser(
            request.headers, pieces, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
        )
        return await parser.parse()
    except UploadError as error:
        if error.status == 413:
            await _drain(stream)
        raise
    except MultiPartException as error:
        raise UploadError(400, f"the form cannot be read: {error.message}") from None


async def _bounded(stream: AsyncIterator[bytes], most: int, limits: UploadLimits) -> AsyncGenerator[bytes, None]:
    loop, taken = asyncio.get_running_loop(), 0
    until = loop.time() + limits.total_s
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream), min(limits.pause_s, until - loop.time()))
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            text = f"nothing of the form came for {limits.pause_s:g} s, or its end not within {limits.total_s:g} s"
            raise UploadError(408, text) from None
        except ClientDisconnect:
            raise UploadError(400, "the form was not sent to its end") from None
        taken += len(piece)
        if taken > most:
            raise _too_large(limits)
        yield piece


async def _drain(stream: AsyncIterator[bytes]) -> None:
    async def read_on() -> None:
        async for _ in stream:
            pass

    with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect, RuntimeError):
        await asyncio.wait_for(read_on(), _DRAIN_S)


def _too_large(limits: UploadLimits) -> UploadError:
    return UploadError(413, f"the file is larger than {limits.max_bytes} bytes", "file")


def uploaded_file(form: FormData, limits: UploadLimits) -> BinaryIO:
    """The file of the form on disk, at its beginning; who calls closes it. Raises UploadError."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise UploadError(400, "the form has no file in the field file", "file")
    if (upload.size or 0) > limits.max_bytes:
        raise _too_large(limits)
    upload.file.seek(0)
    return os.fdopen(os.dup(upload.file.fileno()), "rb")  # asking for the number is what puts a small file on disk
