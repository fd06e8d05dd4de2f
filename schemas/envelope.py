"""The wire format: one header, one body, then one raw part for each array.

A message is a frozen dataclass with a class attribute ``KIND``. Its body is a msgpack map of the plain fields; arrays
travel as raw bytes in parts of their own, described in the body by :class:`ArrayRef`. Nothing is pickled.

Fields may only be added, with a default and at the end; a change of type raises :data:`PROTOCOL`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import msgpack
import numpy as np

from vcpipe.schemas.errors import ProtocolError

#: Raised with every incompatible change; compared once, when an actor reports Ready.
PROTOCOL = 1

#: Audio frames are numbered from 0; messages that belong to no frame carry this index.
NO_FRAME = -1

_DTYPES = {name: np.dtype(name) for name in ("float32", "int32", "int16", "uint16")}


@dataclass(frozen=True, slots=True)
class Header:
    """Where a message belongs and when it was sent.

    ``session``: id of the session ("" for none). ``epoch``: raised by every cancel; a stage drops older ones unstepped.
    ``frame_index``: audio frame or :data:`NO_FRAME`. ``seq``: rises by one a message of the sender.
    ``sent_ns``: ``time.monotonic_ns()`` of the sender (comparable on one machine only).
    """

    session: str
    epoch: int
    frame_index: int
    seq: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Description of an array field in a body: dtype name, shape and the number of its raw part."""

    dtype: str
    shape: tuple[int, ...]
    part: int


class Message(Protocol):
    """Any dataclass with a ``KIND``."""

    KIND: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


M = TypeVar("M", bound=Message)


def array_field(dtype: str, shape: tuple[int | None, ...], *, optional: bool = False) -> Any:
    """A numpy field of a message. ``None`` in ``shape`` accepts any length; ``optional`` allows (and defaults to) None."""
    metadata = {"dtype": dtype, "shape": shape}
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


def pack(header: Header, message: Message) -> list[bytes | memoryview]:
    """Message -> parts for ``send_multipart``. Raises ProtocolError for an array of another dtype or shape."""
    body: dict[str, Any] = {"kind": message.KIND}
    arrays: list[bytes | memoryview] = []
    for f in fields(message):
        value = getattr(message, f.name)
        if "dtype" in f.metadata and _is_given(message.KIND, f, value):
            _check_array(message.KIND, f, value.dtype.name, value.shape)
            body[f.name] = [value.dtype.name, list(value.shape), len(arrays)]
            # A view with a zero dimension cannot be cast to bytes; np.ascontiguousarray keeps 0-d shapes apart.
            arrays.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        else:
            body[f.name] = value
    head = [header.session, header.epoch, header.frame_index, header.seq, header.sent_ns]
    return [msgpack.packb(head), msgpack.packb(body), *arrays]


def unpack_header(part: Any) -> Header:
    """First part of a message -> :class:`Header`."""
    try:
        session, epoch, frame_index, seq, sent_ns = msgpack.unpackb(part)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"a message header must be 5 msgpack fields: {error}") from None
    if not isinstance(session, str) or not all(type(v) is int for v in (epoch, frame_index, seq, sent_ns)):
        raise ProtocolError("a message header must hold a string and four integers")
    return Header(session, epoch, frame_index, seq, sent_ns)


class Codec:
    """Unpacks the kinds it was given; any other kind is a ProtocolError."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._kinds = {kind.KIND: kind for kind in kinds}

    def unpack(self, parts: Sequence[Any]) -> tuple[Header, Any]:
        """Parts -> header and message.

        Arrays are views of the parts: they pin the received buffers, so turn them into something else at once or copy.
        """
        if len(parts) < 2:
            raise ProtocolError(f"a message has at least 2 parts, this one has {len(parts)}")
        header = unpack_header(parts[0])
        try:
            body = msgpack.unpackb(parts[1])
        except ValueError as error:
            raise ProtocolError(f"the body is not msgpack: {error}") from None
        if not isinstance(body, dict):
            raise ProtocolError(f"the body must be a map, not {type(body).__name__}")
        kind = body.pop("kind", None)
        message_type = self._kinds.get(kind) if isinstance(kind, str) else None
        if message_type is None:
            raise ProtocolError(f"unknown message kind {kind!r}; accepted: {', '.join(sorted(self._kinds))}")
        return header, _build(message_type, body, parts[2:])


def _build(message_type: type[M], body: dict[str, Any], arrays: Sequence[Any]) -> M:
    values: dict[str, Any] = {}
    kind = message_type.KIND
    for f in fields(message_type):
        if f.name not in body:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{kind}: field {f.name!r} is missing")
            continue
        value = body.pop(f.name)
        if "dtype" in f.metadata:
            values[f.name] = _read_array(kind, f, value, arrays) if _is_given(kind, f, value) else None
        else:
            _check_plain(message_type, f.name, value)
            values[f.name] = value
    if body:
        raise ProtocolError(f"{kind}: unknown field {next(iter(body))!r}")
    return message_type(**values)


def _is_given(kind: str, f: dataclasses.Field[Any], value: Any) -> bool:
    """Whether an array field holds something. ProtocolError for a None where the field is not optional."""
    if value is None and f.default is dataclasses.MISSING:
        raise ProtocolError(f"{kind}: field {f.name!r} is missing")
    return value is not None


def _read_array(kind: str, f: dataclasses.Field[Any], value: Any, arrays: Sequence[Any]) -> np.ndarray:
    try:
        ref = ArrayRef(value[0], tuple(value[1]), value[2])
        _check_array(kind, f, ref.dtype, ref.shape)
        return np.frombuffer(arrays[ref.part], _DTYPES[ref.dtype]).reshape(ref.shape)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ProtocolError(f"{kind}: field {f.name!r} is not an array part: {error}") from None


def _check_array(kind: str, f: dataclasses.Field[Any], dtype: str, shape: tuple[int, ...]) -> None:
    wanted = f.metadata["shape"]
    if dtype != f.metadata["dtype"]:
        raise ProtocolError(f"{kind}: field {f.name!r} is {dtype}, expected {f.metadata['dtype']}")
    if len(shape) != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
        raise ProtocolError(f"{kind}: field {f.name!r} has shape {shape}, expected {wanted}")


@cache
def _plain_types(message_type: type[Message]) -> dict[str, tuple[type, ...]]:
    """Accepted Python types of every plain field, from its annotation."""
    accepted = {}
    for name, hint in typing.get_type_hints(message_type).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        accepted[name] = tuple(typing.get_origin(option) or option for option in options)
    return accepted


def _check_plain(message_type: type[Message], name: str, value: Any) -> None:
    accepted = _plain_types(message_type)[name]
    # bool is an int in Python, and msgpack does not keep 1.0 apart from a float field given 1.
    if type(value) in accepted or (float in accepted and type(value) is int):
        return
    names = " or ".join(t.__name__ for t in accepted)
    raise ProtocolError(f"{message_type.KIND}: field {name!r} is {type(value).__name__}, expected {names}")
