"""The language that the model is told of, where a client or a user names one."""

from __future__ import annotations

from typing import Any

#: What every present checkpoint of the model was trained on. It has no switch for others.
SPOKEN = "en"


def check_language(value: Any) -> None:
    """ValueError unless it is None or English: "en", in any case and for any region ("en-US")."""
    if value is None or (isinstance(value, str) and value.replace("_", "-").partition("-")[0].lower() == SPOKEN):
        return
    text = ascii(value)
    raise ValueError(f'language must be "{SPOKEN}" or left out: the model speaks no other, not {text[:40]}')
