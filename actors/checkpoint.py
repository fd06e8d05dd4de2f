"""Checkpoint folders: finding one, its config in one known form, its tokenizer. No MLX: the parent imports this too.

Three kinds of folder hold a VoiceChat model: NVIDIA's own (a NeMo training config, one float32 file, no tokenizer), the
public MLX conversions (a runtime config, shards, a tokenizer), and early conversions (MLX shards beside the NeMo config).
All come out of :func:`read_config` as the same dictionary.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcpipe.actors.defaults import MODEL_TYPE, check_config, fill_defaults
from vcpipe.actors.nemo import from_nemo, is_nemo, read_vocabulary
from vcpipe.actors.shards import shard_files
from vcpipe.schemas.errors import ConfigError
from vcpipe.schemas.geometry import FrameGeometry

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Where tokenizer.json comes from: the base model of the language part.
TOKENIZER_SOURCE = "nvidia/NVIDIA-Nemotron-Nano-9B-v2"

#: Files of a Hub repository that are used; a second, consolidated copy of the weights is not.
_HUB_FILES = [
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "rnnt_tokenizer/vocab.json",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(name_or_folder: str, *, needs_tokenizer: bool = True) -> Path:
    """An existing folder, or a Hub name (``owner/name``, downloaded or taken from the cache) -> a complete folder.

    Raises ConfigError where there is no such folder or Hub repository, or where config.json, tokenizer.json or the weights
    are missing.
    """
    folder = Path(name_or_folder).expanduser()
    if not name_or_folder or not folder.is_dir():
        if folder.is_file():
            raise ConfigError(f"{name_or_folder} is a file; a checkpoint is a folder with config.json, or a Hub name")
        if not _HUB_NAME.fullmatch(name_or_folder):
            raise ConfigError(
                f"there is no folder {name_or_folder!r}; accepted: a checkpoint folder or a Hub name owner/name"
            )
        folder = _download(name_or_folder)
    _config_path(folder)
    shard_files(folder)
    if needs_tokenizer:
        _tokenizer_path(folder)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The runtime config of a checkpoint folder: every key of ``defaults.DEFAULTS``, checked; others are kept, unused.

    Missing keys and sub-dictionaries take the values of the 11B VoiceChat model (not of other models with the same
    parts). ``text_config.hybrid_override_pattern`` is always a string, ``audio_config.encoder.att_context_size`` a list
    of pairs, ``quantization`` a dictionary or None. Raises ConfigError naming the key, what it holds and what is accepted.
    """
    path = _config_path(folder)
    try:
        source = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain_float)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(source, dict) or not source:
        raise ConfigError(f"{path} is empty; expected the config of a VoiceChat checkpoint")
    if is_nemo(source):
        source = from_nemo(source)
    elif source.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"{path} has model_type {source.get('model_type')!r}; accepted: {MODEL_TYPE!r}, or the NeMo config of a "
            "VoiceChat model (model.stt and model.speech_generation)"
        )
    if source.get("rnnt_vocabulary") is None:
        source["rnnt_vocabulary"] = read_vocabulary(folder)
    config = fill_defaults(source)
    check_config(config)
    return config


def geometry(config: dict[str, Any]) -> FrameGeometry:
    """The frame clock of a config returned by :func:`read_config`."""
    return FrameGeometry(
        input_sample_rate=config["input_sample_rate"],
        output_sample_rate=config["output_sample_rate"],
        frame_duration_s=config["frame_duration"],
        codebooks=config["tts_config"]["num_quantizers"],
    )


def is_random(config: dict[str, Any]) -> bool:
    """Whether the checkpoint says that weights of it are random numbers: what it speaks is noise."""
    marker = config.get("vcpipe")
    return isinstance(marker, dict) and marker.get("random_weights") is True


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the language model. Raises ConfigError naming the missing file and where it comes from.

    Text is split by the rules tokenizer.json itself carries. tokenizer_config.json of the public folders also says
    ``fix_mistral_regex: true``; transformers acts on it only where config.json is of the Mistral family (or names no
    model), so for a VoiceChat folder it changes nothing there, and prompt ids are the same here.
    """
    from tokenizers import Tokenizer

    path = _tokenizer_path(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _config_path(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json; expected a checkpoint folder of VoiceChat")
    return path


def _tokenizer_path(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; copy it there from {TOKENIZER_SOURCE} on the Hub")
    return path


def _plain_float(entry: dict[str, Any]) -> Any:
    """{"__float__": "Infinity"} -> inf: a way to write in strict JSON what the bare token Infinity says elsewhere."""
    if entry.keys() == {"__float__"}:
        return float(entry["__float__"])
    return entry


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    looked = f"there is no folder {name}, and"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["consolidated.safetensors"]))
    except GatedRepoError:
        raise ConfigError(
            f"{looked} the Hub gives {name} only to those who accepted its terms; log in with hf auth login"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(
            f"{looked} the Hub has no {name}; accepted: a checkpoint folder or a Hub name owner/name"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ConfigError(
            f"{looked} {name} is not in the Hub's cache and the Hub cannot be reached (offline, or HF_HUB_OFFLINE is "
            "set); download it first or give a folder"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{looked} {name} could not be downloaded from the Hub: {error}") from None
