"""A fake stage that does not start as it should; the environment variable ``FAKE_START`` says how."""

from __future__ import annotations

import os
import sys

from fakes import FakeStage

from vcpipe.actors.stage import Progress, StageConfig
from vcpipe.schemas.errors import ConfigError, WeightsError


def load(config: StageConfig, progress: Progress) -> FakeStage:
    way = os.environ["FAKE_START"]
    if way == "config":
        raise ConfigError("hidden_size is missing in config.json; accepted: a positive integer")
    if way == "weights":
        raise WeightsError("3 tensors are missing, llm.layers.0.norm.weight among them")
    if way == "bug":
        raise ZeroDivisionError("division by zero")
    if way == "exit":
        print("libmlx.so: cannot open shared object file", file=sys.stderr, flush=True)
        os._exit(127)
    if way == "protocol":
        sys.modules["__main__"].PROTOCOL = 99  # type: ignore[attr-defined]
    return FakeStage(config.stage)
