"""The wire format: one header, one body, then one raw part for each array.

A message is a frozen dataclass with a class attribute ``KIND``. Its body is a msgpack map of the plain fields; arrays
travel as raw bytes in parts of their own, described in the body by dtype name, shape and number of the part. Nothing is
pickled. :func:`join` makes the one packet in which they go through a socket.

Fields may only be added, with a default and at the end; a change of type raises :data:`PROTOCOL`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgpack
import numpy as np

from vcpipe.schemas.errors import ProtocolError

#: Raised with every incompatible change; compared once, when an actor reports Ready.
PROTOCOL = 3

#: Audio frames are numbered from 0; messages that belong to no frame carry this index.
NO_FRAME = -1

#: Types that a received value may have in the place of another.
_TAKEN_AS = {int: float, list: tuple}
_DTYPES = {name: np.dtype(name) for name in ("float32", "int32", "int16", "uint16")}
#: ``dtype.name`` is put together anew each time it is asked for, and that takes longer than packing the rest of a message.
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Header(NamedTuple):
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


class Message(Protocol):
    """Any dataclass with a ``KIND``."""

    KIND: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


M = TypeVar("M", bound=Message)


def array_field(dtype: str, shape: tuple[int | None, ...], *, optional: bool = False) -> Any:
    """A numpy field of a message. ``None`` in ``shape`` accepts any length; ``optional`` allows (and defaults to) None."""
    metadata = {"dtype": dtype, "shape": shape}
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Field:
    """What packing and unpacking ask of a field. ``dtype`` and ``shape``: of an array field; ``plain``: types of another."""

    name: str
    has_default: bool
    dtype: str | None
    shape: tuple[int | None, ...]
    plain: tuple[type, ...]


@cache
def _layout(message_type: type[Message]) -> tuple[_Field, ...]:
    """The fields in order. Looked up once a kind: asking the dataclass for every message is slow."""
    hints = typing.get_type_hints(message_type)
    layout = []
    for f in fields(message_type):
        hint = hints[f.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = tuple(typing.get_origin(option) or option for option in options)
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        layout.append(_Field(f.name, has_default, f.metadata.get("dtype"), f.metadata.get("shape", ()), plain))
    return tuple(layout)


def pack(header: Header, message: Message) -> list[bytes]:
    """Message -> its parts. Raises ProtocolError for an array of another dtype or shape."""
    body: dict[str, Any] = {"kind": message.KIND}
    arrays: list[bytes] = []
    for f in _layout(type(message)):
        value = getattr(message, f.name)
        if f.dtype is not None and _is_given(message.KIND, f, value):
            _check_array(message.KIND, f, _DTYPE_NAMES.get(value.dtype) or str(value.dtype), value.shape)
            body[f.name] = [f.dtype, value.shape, len(arrays)]
            arrays.append(value.tobytes())
        else:
            body[f.name] = value
    return [msgpack.packb(header), msgpack.packb(body), *arrays]


def join(parts: list[bytes]) -> bytes:
    """Parts -> the packet they go through a socket in, a msgpack list: one packet takes two thirds of three parts' time."""
    return msgpack.packb(parts)


def split(packet: bytes) -> list[Any]:
    """Inverse of :func:`join`. Raises ProtocolError for anything else."""
    try:
        parts = msgpack.unpackb(packet)
    except ValueError as error:
        raise ProtocolError(f"a packet must be msgpack: {error}") from None
    if not isinstance(parts, list):
        raise ProtocolError(f"a packet must be a list of parts, not {type(parts).__name__}")
    return parts


def unpack_header(part: Any) -> Header:
    """First part of a message -> :class:`Header`."""
    try:
        session, epoch, frame_index, seq, sent_ns = msgpack.unpackb(part)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"a message header must be 5 msgpack fields: {error}") from None
    if type(session) is not str or {type(epoch), type(frame_index), type(seq), type(sent_ns)} != {int}:
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
    for f in _layout(message_type):
        if f.name not in body:
            if not f.has_default:
                raise ProtocolError(f"{kind}: field {f.name!r} is missing")
            continue
        value = body.pop(f.name)
        if f.dtype is not None:
            values[f.name] = _read_array(kind, f, value, arrays) if _is_given(kind, f, value) else None
        else:
            _check_plain(kind, f, value)
            values[f.name] = tuple(value) if tuple in f.plain else value
    if body:
        raise ProtocolError(f"{kind}: unknown field {next(iter(body))!r}")
    return message_type(**values)


def _is_given(kind: str, f: _Field, value: Any) -> bool:
    """Whether an array field holds something. ProtocolError for a None where the field is not optional."""
    if value is None and not f.has_default:
        raise ProtocolError(f"{kind}: field {f.name!r} is missing")
    return value is not None


def _read_array(kind: str, f: _Field, value: Any, arrays: Sequence[Any]) -> np.ndarray:
    try:
        dtype, shape, part = value
        _check_array(kind, f, dtype, tuple(shape))
        return np.frombuffer(arrays[part], _DTYPES[dtype]).reshape(shape)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ProtocolError(f"{kind}: field {f.name!r} is not an array part: {error}") from None


def _check_array(kind: str, f: _Field, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype != f.dtype:
        raise ProtocolError(f"{kind}: field {f.name!r} is {dtype}, expected {f.dtype}")
    if len(shape) != len(f.shape) or any(w is not None and w != s for w, s in zip(f.shape, shape, strict=True)):
        raise ProtocolError(f"{kind}: field {f.name!r} has shape {shape}, expected {f.shape}")


def _check_plain(kind: str, f: _Field, value: Any) -> None:
    # bool is an int in Python; msgpack keeps neither 1.0 apart from a float field given 1 nor tuples from lists.
    if type(value) in f.plain or (_TAKEN_AS.get(type(value)) in f.plain):
        return
    names = " or ".join(t.__name__ for t in f.plain)
    raise ProtocolError(f"{kind}: field {f.name!r} is {type(value).__name__}, expected {names}")
