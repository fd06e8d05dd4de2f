"""What the speech decoder draws for recordings, as the codec's decoder is trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from vcpipe.bench.mini.nets.codec import Codec  # noqa: E402
from vcpipe.bench.mini.nets.tts import SpeechDecoder  # noqa: E402
from vcpipe.bench.mini.shape import CODEBOOKS, CODES, LATENT, SPEECH_DELAY, mini_config  # noqa: E402
from vcpipe.bench.mini.sound import Bank, Clip  # noqa: E402
from vcpipe.bench.mini.timeline import REPLY_FRAME, REPLY_RATE, Reply, text_frames  # noqa: E402
from vcpipe.bench.mini.tokens import TextTokens, write_tokenizer  # noqa: E402
from vcpipe.bench.mini.train import codec_said  # noqa: E402
from vcpipe.bench.mini.train.codec_said import SaidReplies, load_speaker  # noqa: E402

OFFSETS = [0, 700]
WORDS = [(("It", 0.02, 0.2), ("is", 0.2, 0.4), ("eleven.", 0.41, 0.8)), (("Hello!", 0.02, 0.5),)]
FRAMES = 6


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, ["It is eleven.", "Hello!"])
    config = mini_config(TextTokens(tmp_path).size, ["<unk>"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def codec(start: Path) -> Codec:
    sizes = json.loads((start / "config.json").read_text())["codec_config"]
    codec = Codec(sizes | {"base_channels": 8}).eval()
    books = 0.1 * torch.randn(CODEBOOKS, CODES, LATENT) * 0.8 ** torch.arange(CODEBOOKS)[:, None, None]
    codec.prvq.set_books(books.bfloat16().float())
    return codec


@pytest.fixture
def bank() -> Bank:
    """Two replies of noise, 0.9 and 0.6 seconds long."""
    sound = np.random.default_rng(0).integers(-9000, 9000, int(1.5 * REPLY_RATE)).astype(np.int16)
    places = [(0, int(0.9 * REPLY_RATE)), (int(0.9 * REPLY_RATE), len(sound) - int(0.9 * REPLY_RATE))]
    clips = [
        Clip(str(i), " ".join(word for word, *_ in words), "", words, "", "", "train", "answer", "", 0.0, *place)
        for i, (words, place) in enumerate(zip(WORDS, places, strict=True))
    ]
    return Bank(sound, REPLY_RATE, clips)


def speaker_of(start: Path, books: torch.Tensor) -> SpeechDecoder:
    """With random weights, and so sure of itself that every draw is the same."""
    speaker = SpeechDecoder(json.loads((start / "config.json").read_text())["tts_config"], TextTokens(start)).eval()
    speaker.set_codebooks(books, torch.zeros(CODEBOOKS, dtype=torch.long))
    speaker.tts_model.mog_head.top_p = speaker.tts_model.mog_head.noise = 1e-9
    return speaker


def replies(bank: Bank, codec: Codec, speaker: SpeechDecoder, start: Path, times: int = 1) -> SaidReplies:
    sound = bank.on(torch.device("cpu"))
    return SaidReplies(bank, sound, bank.clips, codec, speaker, TextTokens(start), offsets=OFFSETS, times=times)


def test_draws_are_what_is_said_after_the_true_past(
    bank: Bank, codec: Codec, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second clip, begun 700 samples into its first frame, in a session of its own."""
    gap, length = 9, 40
    monkeypatch.setattr(codec_said, "_GAP", gap)
    monkeypatch.setattr(codec_said, "_MORE", 0)
    speaker = speaker_of(start, codec.books)
    said = replies(bank, codec, speaker, start)
    clip, zero = bank.clips[1], torch.tensor([0])
    recorded, latents = said.pieces(torch.tensor([3]), zero, FRAMES, zero)

    words = [(word, start + 700 / REPLY_RATE, end + 700 / REPLY_RATE) for word, start, end in clip.words]
    reply = Reply.lay(words, clip.samples + 700, TextTokens(start), gap)
    sound = np.zeros(length * REPLY_FRAME, np.float32)
    begin = reply.sound * REPLY_FRAME + 700
    sound[begin : begin + clip.samples] = bank.cut(clip)
    text = torch.from_numpy(text_frames([reply], length))[None]
    with torch.no_grad():
        # The encoder has to have heard silence for a while.
        sums = codec.quantise(codec.encode(torch.from_numpy(np.pad(sound, (8 * REPLY_FRAME, 0)))[None])[:, 8:])[1]
        hidden = speaker(sums.repeat(2, 1, 1), text.repeat(2, 1), torch.tensor([False, True]))
        model = speaker.tts_model
        wanted = model.refine(hidden[0], hidden[1], model.draws(length))[1]

    piece = slice(gap + SPEECH_DELAY, gap + SPEECH_DELAY + FRAMES)
    assert np.abs(recorded[0].numpy() - sound[piece.start * REPLY_FRAME : piece.stop * REPLY_FRAME]).max() == 0
    assert (latents[0] - wanted[piece]).abs().max() < 1e-4
    assert (latents[0] - sums[0, piece]).square().mean() > 0.5 * sums[0, piece].square().mean()


def test_around_a_reply_there_is_silence(bank: Bank, codec: Codec, start: Path) -> None:
    said = replies(bank, codec, speaker_of(start, codec.books), start)
    silence = codec.quantise(codec.encode(torch.zeros(1, 8 * REPLY_FRAME)))[1][0, -1]
    before, after = said.pieces(torch.tensor([0, 0]), torch.tensor([-4, 200]), 4, torch.tensor([0, 0]))[1]
    assert (before - silence).abs().max() < 1e-6
    assert (after - silence).abs().max() < 1e-6


def test_pieces_come_from_all_draws(bank: Bank, codec: Codec, start: Path) -> None:
    speaker = speaker_of(start, codec.books)
    speaker.tts_model.mog_head.top_p = speaker.tts_model.mog_head.noise = 1.0
    said = replies(bank, codec, speaker, start, times=2)
    both = said.pieces(torch.tensor([0, 0]), torch.tensor([2, 2]), 4, torch.tensor([0, 1]))
    assert torch.equal(*both[0])
    assert (both[1][0] - both[1][1]).abs().amax(-1).min() > 0.01
    recorded, latents = said.batch(50, FRAMES)
    assert recorded.shape == (50, FRAMES * REPLY_FRAME)
    assert latents.shape == (50, FRAMES, LATENT)
    # Most of it is sound.
    assert (recorded != 0).float().mean() > 0.5


def test_a_speaker_of_other_codes_is_refused(codec: Codec, start: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save_file(speaker_of(start, codec.books).state_dict(), str(run / "weights.safetensors"))
    load_speaker(run, start, codec)
    codec.prvq.set_books(2 * codec.books)
    with pytest.raises(ValueError, match="other codebooks"):
        load_speaker(run, start, codec)
