import random
import time

import pytest
import tokenizers

from specrun.models_cache.errors import UsageError
from specrun.models_cache.manifest import SpecialIds
from specrun.runtime.text_stream import TextStream
from specrun.runtime.tokenizer import Tokenizer

from ..tiny_tokenizers import tiny

BYTE_TOKENS = tiny("llama-noprefix")  # ids 3..258 are single bytes


def raw(data: bytes) -> list[int]:
    """One token for each byte."""
    return [3 + byte for byte in data]


class Scripted:
    """A tokenizer whose token i has the bytes pieces[i]; None is a control token "<end>"."""

    def __init__(self, pieces, *, drops_first_space=False):
        self.pieces = pieces
        self.control_ids = frozenset(index for index, piece in enumerate(pieces) if piece is None)
        self._drops = drops_first_space

    def token_bytes(self, token_id):
        return self.pieces[token_id] or b""

    def token_text(self, token_id):
        return "<end>" if self.pieces[token_id] is None else self.pieces[token_id].decode("utf-8", "replace")

    def drops_first_space(self, prompt=()):
        return self._drops and not prompt


def run(pieces, stops=(), **options):
    """(deltas, flushed, stream) of a text given as token pieces: str, bytes or None."""
    coded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    stream = TextStream(Scripted(coded, **options), stops)
    deltas = []
    for token_id in range(len(coded)):
        deltas.append(stream.push(token_id))
        assert deltas[-1].kept_tokens == stream.kept_tokens >= stream.settled_tokens
        if deltas[-1].stopped:
            break
    return deltas, stream.finish(), stream


def text_of(pieces, stops=()):
    deltas, flushed, stream = run(pieces, stops)
    return "".join(delta.text for delta in deltas) + flushed, stream.kept_tokens, stream.stopped


def oracle(pieces, stops):
    """Text, kept tokens and whether it stopped, from the whole at once."""
    coded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    text = b"".join(coded).decode("utf-8", "replace")
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not found:
        return text, len(pieces), False
    text = text[: min(found)[1]]
    size, kept, at = len(text.encode()), 0, 0
    for index, piece in enumerate(coded):
        if piece and at < size:
            kept = index + 1
        at += len(piece)
    return text, kept, True


class TestCharacters:
    @pytest.mark.parametrize("text", ["🌍", "日本語", "é", "a🌍b", "👩‍👩‍👧‍👦", "\ufffd", "x\U0010ffff"])
    def test_no_character_is_split(self, text):
        """onnxruntime-genai#314, TensorRT-LLM#2595: each character comes with its last byte, whole."""
        stream = TextStream(BYTE_TOKENS)
        pieces = [stream.push(token_id).text for token_id in raw(text.encode())]
        assert [piece for piece in pieces if piece] == list(text)
        assert stream.finish() == ""

    def test_emoji_over_two_tokens(self):
        """ferrox#124: bytes F0 9F | 8C 8D."""
        deltas, flushed, _ = run([b"\xf0\x9f", b"\x8c\x8d"])
        assert [delta.text for delta in deltas] == ["", "🌍"]
        assert flushed == ""

    def test_character_over_a_block_edge(self):
        """lucebox#641: a CJK character over two tokens, with text around it."""
        whole = "漢".encode()
        deltas, flushed, _ = run([b"a" + whole[:1], whole[1:] + b"b" + whole[:2], whole[2:]])
        assert [delta.text for delta in deltas] == ["a", "漢b", "漢"]
        assert flushed == ""

    def test_limit_in_the_middle_of_an_emoji(self):
        """The documented flush: what is incomplete at the end becomes one U+FFFD, as in decode."""
        ids = raw("ok 🌍".encode()[:-1])
        stream = TextStream(BYTE_TOKENS)
        pieces = [stream.push(token_id).text for token_id in ids]
        assert "".join(pieces) == "ok "
        assert stream.finish() == "\ufffd"
        assert stream.finish() == ""
        assert BYTE_TOKENS.decode(ids) == "ok \ufffd"
        assert stream.kept_tokens == stream.settled_tokens == len(ids)

    @pytest.mark.parametrize("data", [b"\xf0\x9fA", b"\xff\xfe", b"\xe2\x82\xe2\x82\xac", b"\xc3\xc3\xa9", b"\x80a"])
    def test_bytes_that_are_no_utf8(self, data):
        text, kept, _ = text_of([bytes([byte]) for byte in data])
        assert text == data.decode("utf-8", "replace")
        assert kept == len(data)

    def test_byte_fallback_tokens(self):
        ids = BYTE_TOKENS.encode("this is 🦙 漢字", add_bos=False)
        stream = TextStream(BYTE_TOKENS)
        assert "".join([*(stream.push(token_id).text for token_id in ids), stream.finish()]) == "this is 🦙 漢字"


class TestStops:
    def test_stop_over_several_tokens(self):
        """vllm#3574: "A B C D E" with stop "C D" gives exactly "A B ", and nothing leaks."""
        deltas, flushed, stream = run(["A", " B", " C", " D", " E"], ["C D"])
        assert [delta.text for delta in deltas] == ["A", " B", " ", ""]
        assert deltas[-1].stopped
        assert deltas[-1].stop == "C D"
        assert flushed == ""
        assert stream.kept_tokens == 3  # the space of " C" was delivered

    def test_stop_inside_a_block(self):
        """sglang#23802: the tokens behind the stop do not count."""
        assert text_of(list("a b END c d e f g h"), ["END"]) == ("a b ", 4, True)

    def test_stop_in_the_middle_of_a_token(self):
        assert text_of(["ab STOP cd", "x"], ["STOP"]) == ("ab ", 1, True)
        assert text_of(["ab", "STOP cd"], ["STOP"]) == ("ab", 1, True)
        assert text_of(["STOP"], ["STOP"]) == ("", 0, True)

    def test_held_text_is_flushed(self):
        """llama.cpp#9867: text that only looked like a stop is delivered at the end."""
        deltas, flushed, stream = run(["a", " E", "N"], ["END"])
        assert [delta.text for delta in deltas] == ["a", " ", ""]
        assert flushed == "EN"
        assert stream.kept_tokens == 3

    def test_false_start_is_released(self):
        deltas, flushed, _ = run(["E", "N", "E", "N", "D", "!"], ["END"])
        assert [delta.text for delta in deltas] == ["", "", "EN", "", ""]
        assert flushed == ""

    def test_the_first_complete_stop_wins(self):
        for pieces in (["xabcd"], list("xabcd"), ["xab", "cd"]):
            assert text_of(pieces, ["abcd", "bc"])[0] == "xa"
            assert text_of(pieces, ["cd", "bcd"])[0] == "xa"

    def test_stop_that_ends_in_the_middle_of_a_character_run(self):
        whole = "🌍".encode()
        assert text_of([b"a" + whole[:2], whole[2:] + b"b"], ["🌍"]) == ("a", 1, True)
        assert text_of([b"a", whole[:2], whole[2:] + b"!b"], ["!"]) == ("a🌍", 3, True)

    def test_control_tokens(self):
        """A control token has no text; a stop that spells it stops there."""
        assert text_of(["a", None, "b"]) == ("ab", 3, False)
        assert text_of(["a", None, "b"], ["b"]) == ("a", 1, True)
        assert text_of(["a", None, "b"], ["<end>"]) == ("a", 1, True)
        deltas, _, stream = run(["a", "E", b"\xf0", None, "b"], ["END", "<end>"])
        assert "".join(delta.text for delta in deltas) == "aE\ufffd"
        assert deltas[-1].stop == "<end>"
        assert stream.kept_tokens == 3

    def test_pushes_after_a_stop_are_ignored(self):
        _, _, stream = run(["a", "."], ["."])
        assert stream.push(0).text == ""
        assert stream.push(0).stopped
        assert stream.kept_tokens == 1

    def test_stops_that_are_not_allowed_yet(self):
        """vllm#21987: before the minimum a stop is text; a later one may begin inside it."""
        stream = TextStream(Scripted([b"\n", b"a", b"\n"]), ["\n"])
        deltas = [stream.push(index, may_stop=index >= 2) for index in range(3)]
        assert [(delta.text, delta.stopped) for delta in deltas] == [("\n", False), ("a", False), ("", True)]
        assert stream.kept_tokens == 2
        stream = TextStream(Scripted([b"a", b"x"]), ["a", "ab"])
        assert [stream.push(0, may_stop=False).text, stream.push(1).text] == ["", "ax"]

    def test_settled_tokens(self):
        stream = TextStream(Scripted([b"a", b" E", b"N", None, b"x"]), ["END"])
        settled = []
        for index in range(5):
            stream.push(index)
            settled.append(stream.settled_tokens)
        assert settled == [1, 2, 2, 2, 5]

    @pytest.mark.parametrize("stops", [[""], ["a", ""], "abc"])
    def test_stops_that_cannot_be(self, stops):
        with pytest.raises(UsageError, match="stop string"):
            TextStream(BYTE_TOKENS, stops)

    @pytest.mark.parametrize("seed", range(300))
    def test_random_texts_and_splits(self, seed):
        """transformers#48039: for every text, stop and split, the same cut as on the whole text."""
        rng = random.Random(seed)
        alphabet = rng.choice(["ab", "ab🌍", "aé漢🌍 \n", "abcd"])
        data = "".join(rng.choices(alphabet, k=rng.randint(0, 40))).encode()
        if seed % 3 == 0 and data:  # not even UTF-8
            broken = bytearray(data)
            for _ in range(3):
                broken[rng.randrange(len(broken))] = rng.choice([0xF0, 0x9F, 0x80, 0xE2, 0xFF, 0x41])
            data = bytes(broken)
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        pieces, at = [], 0
        while at < len(data):
            size = rng.choice([0, 1, 1, 2, 3, 5])
            pieces.append(data[at : at + size])
            at += size
        text, kept, stopped = text_of(pieces, stops)
        if seed % 3 == 0 and stopped:
            assert (text, stopped) == oracle(pieces, stops)[::2]
            return
        assert (text, kept, stopped) == oracle(pieces, stops)


class TestFirstSpace:
    def test_the_stream_equals_decode(self):
        tokenizer = tiny("llama")
        ids = tokenizer.encode("the end of the world", add_bos=False)
        for prompt in ([], [tokenizer.special_ids.bos], tokenizer.encode("Once")):
            stream = TextStream(tokenizer, prompt=prompt)
            text = "".join([*(stream.push(token_id).text for token_id in ids), stream.finish()])
            assert text == tokenizer.decode(ids, prompt=prompt)
            assert text.startswith(" ") is (len(prompt) > 1)

    def test_only_one_space_of_the_first_text_is_dropped(self):
        _, _, stream = run([None, b" ", b" a"], drops_first_space=True)
        assert stream.kept_tokens == 3
        assert text_of_first([None, b" ", b" a"]) == " a"
        assert text_of_first([b"  a"]) == " a"
        assert text_of_first([b"a", b" b"]) == "a b"


def text_of_first(pieces):
    deltas, flushed, _ = run(pieces, drops_first_space=True)
    return "".join(delta.text for delta in deltas) + flushed


def test_real_tokens_join_to_the_decoded_text():
    tokenizer = tiny("qwen2")
    rng = random.Random(7)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.tokens) for _ in range(60)]
        stream = TextStream(tokenizer, ["zzzz", "\n\n\n"])
        text = "".join(stream.push(token_id).text for token_id in ids)
        if not stream.stopped:
            assert text + stream.finish() == tokenizer.decode(ids)


def test_cost_does_not_grow_with_the_text():
    def seconds(count: int) -> float:
        stream = TextStream(BYTE_TOKENS, ["<never>"])
        start = time.perf_counter()
        for _ in range(count):
            stream.push(3 + 97)
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(40_000) < 150 * max(seconds(2_000), 1e-3)


def test_a_real_tokenizer_fits():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = Tokenizer(inner.to_str(), SpecialIds(None, (), None, False), 1)
    assert TextStream(tokenizer).push(0).text == "a"
