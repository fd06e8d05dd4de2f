"""Errors a caller may want to tell apart. Every message names what was seen and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from vcpipe.schemas.events import Event


class VcpipeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(VcpipeError):
    """An option, a checkpoint's config or a missing file: the user can mend it."""


class AudioInputError(ConfigError):
    """An audio file or device that cannot be used as input."""


class WeightsError(VcpipeError):
    """Tensors that are missing, unexpected, of a wrong shape or not finite. Names the stage and the tensors."""


class ProtocolError(VcpipeError):
    """A message between processes that does not have the declared form."""


class ActorStartupError(VcpipeError):
    """A stage did not become ready: it failed, died or took too long while loading."""


class ActorDiedError(VcpipeError):
    """A stage's process ended while it was needed. Carries its own traceback where it left one."""


class PipelineClosedError(VcpipeError):
    """The pipeline is closed; start another one."""


class SessionClosedError(VcpipeError, RuntimeError):
    """The session was flushed, cancelled or ended by an error; open another one."""


class TurnError(VcpipeError, RuntimeError):
    """A call out of the order in which a speech turn goes: reset_turn, push_text, end_text, drain."""


class ContextLimitError(VcpipeError, RuntimeError):
    """The session reached its ``max_streaming_seconds``; flush and cancel still work.

    ``events``: what the frames before the limit gave in the same push.
    """

    def __init__(self, message: str, events: Sequence[Event] = ()) -> None:
        super().__init__(message)
        self.events = list(events)


class BacklogError(VcpipeError, BufferError):
    """More PCM or text was given than a session may hold back. Nothing of the refused piece was taken."""


class FrameContractError(VcpipeError):
    """A stage broke the frame contract (one report, all codes, all samples for every frame)."""


class StageTimeoutError(VcpipeError):
    """A stage gave no answer within its bound."""


class RemoteError(VcpipeError):
    """A server that a client talks to refused, failed or went away."""
