"""Windows that the speech decoder is trained on: put together from tables, they are what the codec makes of whole sessions."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from vcpipe.bench.mini.nets.codec import Codec  # noqa: E402
from vcpipe.bench.mini.nets.tts import SpeechDecoder, code_sum  # noqa: E402
from vcpipe.bench.mini.shape import CODEBOOKS, CODES, EOS, LATENT, PAD, mini_config  # noqa: E402
from vcpipe.bench.mini.sound import Bank, Clip  # noqa: E402
from vcpipe.bench.mini.timeline import REPLY_FRAME, REPLY_RATE, Reply, text_frames  # noqa: E402
from vcpipe.bench.mini.tokens import TextTokens, write_tokenizer  # noqa: E402
from vcpipe.bench.mini.train.tts import Settings, Trainer, prepare  # noqa: E402
from vcpipe.bench.mini.train.tts_data import Frames, Renderer, Windows  # noqa: E402

LENGTH = 46
OFFSETS = [0, 700]
WORDS = [(("It", 0.02, 0.2), ("is", 0.2, 0.4), ("eleven.", 0.41, 0.8)), (("Hello!", 0.02, 0.5),)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TextTokens:
    folder = tmp_path_factory.mktemp("start")
    write_tokenizer(folder, ["It is eleven.", "Hello!"])
    return TextTokens(folder)


@pytest.fixture(scope="module")
def codec() -> Codec:
    torch.manual_seed(0)
    codec = Codec(mini_config(300, ["<unk>"])["codec_config"] | {"base_channels": 8}).eval()
    codec.prvq.set_books(0.1 * torch.randn(CODEBOOKS, CODES, LATENT) * 0.8 ** torch.arange(CODEBOOKS)[:, None, None])
    return codec


@pytest.fixture(scope="module")
def bank() -> Bank:
    """Two replies of noise, 0.9 and 0.6 seconds long."""
    sound = np.random.default_rng(0).integers(-9000, 9000, int(1.5 * REPLY_RATE)).astype(np.int16)
    # Before a sound begins, the codec's spectrum sees it already, but recordings begin softly.
    sound[:20] = sound[int(0.9 * REPLY_RATE) :][:20] = 0
    places = [(0, int(0.9 * REPLY_RATE)), (int(0.9 * REPLY_RATE), len(sound) - int(0.9 * REPLY_RATE))]
    clips = [
        Clip(str(i), " ".join(word for word, *_ in words), "", words, "", "", "train", "answer", "", 0.0, *place)
        for i, (words, place) in enumerate(zip(WORDS, places, strict=True))
    ]
    return Bank(sound, REPLY_RATE, clips)


def renderer(bank: Bank, tokens: TextTokens, codec: Codec, spelling: float) -> Renderer:
    return Renderer(bank, tokens, codec, np.random.default_rng(0), spelling)


def test_windows_are_what_the_codec_makes_of_the_session(bank: Bank, tokens: TextTokens, codec: Codec) -> None:
    """A reply, one with an offset that is interrupted in its sixth frame of sound, another reply."""
    rendering = renderer(bank, tokens, codec, spelling=0.0)
    replies = rendering.render(bank.clips, OFFSETS, cuts=2)
    gaps, cuts = torch.tensor([[3, 5, 4]]), torch.tensor([[-1, 5, -1]])
    window = Windows(replies, torch.ones(4), LENGTH, interrupted=0.5).lay(torch.tensor([[2, 1, 0]]), gaps, cuts)

    sound, laid, start = np.zeros((LENGTH, REPLY_FRAME), np.float32).reshape(-1), [], 0
    for (clip, offset), gap, cut in zip([(1, 0), (0, 700), (0, 0)], gaps[0].tolist(), cuts[0].tolist(), strict=True):
        start += gap
        wave = np.pad(bank.cut(bank.clips[clip]), (offset, 0))
        words = [(word, begin + offset / REPLY_RATE, end) for word, begin, end in WORDS[clip]]
        reply = Reply.lay(words, len(wave), tokens, start)
        if cut >= 0:
            reply = reply.interrupted((reply.sound + cut - 3) * 1280)
            wave = wave[: cut * REPLY_FRAME + 220] * np.r_[np.ones(cut * REPLY_FRAME), np.linspace(1, 0, 220)]
        heard = sound[reply.sound * REPLY_FRAME :][: len(wave)]
        heard[:] = wave[: len(heard)]
        laid.append(reply)
        start = reply.end + 1
    np.testing.assert_array_equal(window.text[0].numpy(), text_frames(laid, LENGTH))
    assert (window.text == EOS).sum() == 3
    with torch.no_grad():
        wanted = codec.encode(torch.from_numpy(sound)[None])[0]
    silence = window.frames[0] == 0
    torch.testing.assert_close(rendering.latents()[window.frames[0]][2:], wanted[2:], atol=3e-3, rtol=0)
    assert 8 < silence.sum() < 20


def test_drawn_windows_hold_whole_replies_and_silence(bank: Bank, tokens: TextTokens, codec: Codec) -> None:
    torch.manual_seed(0)
    rendering = renderer(bank, tokens, codec, spelling=0.0)
    replies = rendering.render(bank.clips, OFFSETS, cuts=1)
    window = Windows(replies, torch.ones(4), LENGTH, interrupted=0.3).draw(32)
    assert window.text.shape == window.frames.shape == (32, LENGTH)
    assert int(window.frames.max()) < len(rendering.latents())
    assert {PAD, EOS} < set(window.text.flatten().tolist())
    # Where a frame of sound follows another of the same reply, it is the next one.
    steps = window.frames.diff(dim=1)[(window.frames[:, 1:] > 0) & (window.frames[:, :-1] > 0)]
    assert ((steps == 1).float().mean() > 0.9) and (steps != 0).all()


def test_words_are_spelled_in_further_renderings(bank: Bank, tokens: TextTokens, codec: Codec) -> None:
    replies = renderer(bank, tokens, codec, spelling=1.0).render(bank.clips[1:], OFFSETS, cuts=0)
    plain, spelled = ([i for i in row.tolist() if i not in (PAD, EOS)] for row in replies.text)
    assert plain == tokens.word("Hello!")
    assert tokens.text(spelled) == "Hello!"
    assert len(spelled) == len(" Hello!")
    assert replies.ends[1] >= len(spelled)


def test_a_step_of_training(bank: Bank, tokens: TextTokens, codec: Codec) -> None:
    """Gradients reach every trained weight; what the network says is kept for frames with sound, silence stays silence."""
    torch.manual_seed(0)
    sizes = mini_config(tokens.size, ["<unk>"])["tts_config"]
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {**small, "num_hidden_layers": 1, "character_encoder": sizes["character_encoder"] | small}
    data = prepare(bank, bank.clips, tokens, codec, [0, 1, 2, 5, 9], offsets=2, seed=0)
    decoder = SpeechDecoder(sizes, tokens)
    decoder.set_codebooks(codec.books, data.frames.silence)
    trainer = Trainer(decoder, data, Settings(batch=24, frames=LENGTH, without_text=0.3))
    numbers = trainer.loss(torch.zeros(()), speak=True)
    loss = numbers["loss"]
    loss.backward()
    assert all(torch.isfinite(value) for value in (loss, *numbers.values()))
    without = [name for name, weight in decoder.named_parameters() if weight.requires_grad and weight.grad is None]
    assert without == []
    changed = (data.frames.own != data.frames.sums).any(dim=-1)
    trainer.rehearse(24)
    assert 0 < changed.sum() < (data.frames.own != data.frames.sums).any(dim=-1).sum()
    assert not changed[0]


def test_sums_of_known_codebooks(codec: Codec) -> None:
    latents = torch.randn(50, 64)
    frames = Frames.of(latents, codec, codec.books, [0, 1, 2, 5, 9])
    codes = codec.quantise(latents[None])[0][0]
    torch.testing.assert_close(frames.known[:, 3], code_sum(codec.books[:5], codes[:, :5]))
    torch.testing.assert_close(frames.sums, code_sum(codec.books, codes))
    assert not frames.known[:, 0].any()
    assert frames.sums.data_ptr() != frames.own.data_ptr()
