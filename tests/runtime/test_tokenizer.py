import subprocess
import sys
import threading

import pytest
import tokenizers

from specrun.models_cache.errors import IntegrityError, UnsupportedModelError, UsageError, VocabularyMismatchError
from specrun.models_cache.manifest import SpecialIds
from specrun.runtime.tokenizer import Tokenizer

from ..tiny_tokenizers import golden, tiny

NAMES = ["default", "gpt-2", "llama-bpe", "qwen2", "smollm", "llama", "llama-noprefix", "t5", "t5-prefix"]
NO_SPECIALS = SpecialIds(None, (), None, False)


@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_llama_cpp(name):
    tokenizer = tiny(name, add_bos=False)
    for case in golden(f"tiny-{name}")["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], parse_special=True) == case["parsed"]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("t5")])  # t5 here has unknown tokens
def test_decode_gives_the_text_back(name):
    tokenizer = tiny(name)
    for case in golden(f"tiny-{name}")["cases"]:
        assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_the_library(name):
    tokenizer = tiny(name)
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    for case in golden(f"tiny-{name}")["cases"]:
        assert tokenizer.decode(case["parsed"]) == inner.decode(case["parsed"])


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_one_bos(name):
    """llama-cpp-python#1501: BOS is put in front once; llama.cpp#15086: one that stands there already is kept."""
    tokenizer = tiny(name, add_bos=True)
    bos = tokenizer.special_ids.bos
    text = tokenizer.token_text(bos)
    assert tokenizer.encode("Hello")[0] == bos
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("Hello").count(bos) == 1
    assert tokenizer.encode(text + "Hello", parse_special=True) == tokenizer.encode("Hello")
    assert tokenizer.encode("Hello", add_bos=False) == tokenizer.encode("Hello")[1:]
    assert tokenizer.encode(text).count(bos) == 1  # what the user typed is text
    assert tiny(name, add_bos=False).encode("Hello") == tokenizer.encode("Hello")[1:]


def test_control_tokens_in_a_text():
    """transformers#29279: user text that spells a control token stays text."""
    tokenizer = tiny("qwen2")
    (end,) = tokenizer.encode("<|im_end|>", parse_special=True)
    assert end in tokenizer.special_ids.eos
    ids = tokenizer.encode("a <|im_end|> b")
    assert end not in ids
    assert tokenizer.decode(ids) == "a <|im_end|> b"
    assert tokenizer.decode([*ids, end]) == "a <|im_end|> b"
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.encode_parts(["a ", end, " b"]) == tokenizer.encode("a <|im_end|> b", parse_special=True)


def test_user_defined_tokens_have_a_text():
    tokenizer = tiny("qwen2")
    ids = tokenizer.encode("x<tool>y")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "x<tool>y"


def test_token_bytes():
    tokenizer = tiny("qwen2")
    ids = tokenizer.encode("🌍")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🌍".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.decode(ids[:-1]) == "\ufffd"
    sentencepiece = tiny("llama")
    assert sentencepiece.token_bytes(3 + 0xF0) == b"\xf0"
    assert sentencepiece.decode([3 + 0xE2, 3 + 0x82, 3 + 0xAC]) == "€"


@pytest.mark.parametrize("token_id", [-1, 434, 10**6])
def test_ids_that_do_not_exist(token_id):
    """vllm#7252: an id of the vocabulary's padding is an error, not a text."""
    with pytest.raises(UsageError, match="0 to 433"):
        tiny("qwen2").token_bytes(token_id)


def test_first_space_of_sentencepiece():
    """The space before the first word is no text; behind a prompt with text it is."""
    tokenizer = tiny("llama")
    ids = tokenizer.encode("the end", add_bos=False)
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.decode(ids, prompt=[tokenizer.special_ids.bos]) == "the end"
    prompt = tokenizer.encode("Once upon")
    assert tokenizer.decode(ids, prompt=prompt) == " the end"
    assert tokenizer.decode(prompt) + tokenizer.decode(ids, prompt=prompt) == tokenizer.decode(prompt + ids)
    assert tiny("llama-noprefix").decode(tokenizer.encode(" the", add_bos=False)) == "  the"
    assert tiny("qwen2").decode(tiny("qwen2").encode(" the")) == " the"


def document(**change) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<0x41>": 2}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    for name, value in change.items():
        setattr(tokenizer, name, value)
    return tokenizer.to_str()


def test_metaspace_decoders():
    metaspace = tokenizers.decoders.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(
        document(model=tokenizers.models.WordLevel({"▁a": 0, "▁b": 1}), decoder=metaspace), NO_SPECIALS, 2
    )
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.decode([1], prompt=[0]) == " b"
    never = document(decoder=tokenizers.decoders.Metaspace(prepend_scheme="never"))
    assert not Tokenizer(never, NO_SPECIALS, 3).drops_first_space()


def test_prefix_of_the_first_word_only():
    """A tokenizer that puts a space before the first word puts none after a control token."""
    model = tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2, "<s>": 3}, [("▁", "a")])
    pre = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    text = document(model=model, pre_tokenizer=pre, decoder=tokenizers.decoders.Metaspace(prepend_scheme="first"))
    inner = tokenizers.Tokenizer.from_str(text)
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner.to_str(), SpecialIds(3, (), None, True), 4)
    assert tokenizer.encode("<s>a", parse_special=True) == [3, 1]
    assert tokenizer.encode_parts([3, "a"]) == [3, 1]
    assert tokenizer.encode_parts(["a", 3, "a"]) == [3, 2, 3, 1]
    assert tokenizer.encode_parts(["a"], add_bos=False) == [2]


@pytest.mark.parametrize("decoder", [tokenizers.decoders.WordPiece(), tokenizers.decoders.CTC(), None])
def test_decoders_without_fixed_token_texts_are_refused(decoder):
    text = document(decoder=decoder) if decoder is not None else document().replace('{"type":"Fuse"}', "null")
    if decoder is None:
        assert '"decoder": null' in text or '"decoder":null' in text
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Tokenizer(text, NO_SPECIALS, 3)


def test_truncation_and_padding_of_the_file_are_ignored():
    """ollama#3839: the start or end of a prompt is never dropped."""
    inner = tokenizers.Tokenizer.from_str(tiny("qwen2")._inner.to_str())
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = Tokenizer(inner.to_str(), NO_SPECIALS, 434)
    assert tokenizer.encode("one two three four five six") == tiny("qwen2").encode("one two three four five six")


def test_text_that_is_no_unicode():
    with pytest.raises(UsageError, match="position 1"):
        tiny("qwen2").encode("a\ud800b")


class TestVocabularies:
    def test_equal(self):
        a, b = tiny("qwen2"), tiny("qwen2")
        assert a.first_difference(b) is None
        a.require_same_vocabulary(b)

    def test_two_tokens_swapped(self):
        """llama.cpp#3812: same size, two tokens swapped: the first that differs is named."""
        tokens = {"a": 0, "b": 1, "c": 2, "d": 3}
        swapped = {"a": 0, "d": 1, "c": 2, "b": 3}
        target = Tokenizer(document(model=tokenizers.models.WordLevel(tokens)), NO_SPECIALS, 4)
        draft = Tokenizer(document(model=tokenizers.models.WordLevel(swapped)), NO_SPECIALS, 4)
        assert target.first_difference(draft) == (1, "b", "d")
        with pytest.raises(VocabularyMismatchError, match=r"id 1 is 'b' in the target and 'd' in the draft"):
            target.require_same_vocabulary(draft)

    def test_another_number_of_real_tokens(self):
        """transformers#46936: other tokenizers are refused, whichever has more tokens."""
        small = Tokenizer(document(model=tokenizers.models.WordLevel({"a": 0})), NO_SPECIALS, 1)
        large = Tokenizer(document(model=tokenizers.models.WordLevel({"a": 0, "b": 1})), NO_SPECIALS, 2)
        assert small.first_difference(large) == (1, None, "b")
        assert large.first_difference(small) == (1, "b", None)

    def test_padding_does_not_matter(self):
        """vllm#7252: the same real tokens, one vocabulary padded."""
        padded = document(model=tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD2]": 2}))
        plain = document(model=tokenizers.models.WordLevel({"a": 0, "b": 1}))
        assert Tokenizer(padded, NO_SPECIALS, 2).first_difference(Tokenizer(plain, NO_SPECIALS, 2)) is None


def test_from_folder(tmp_path):
    folder = tmp_path / "ünï code"
    folder.mkdir()
    with pytest.raises(IntegrityError, match=r"tokenizer"):
        Tokenizer.from_folder(folder, NO_SPECIALS, 434)
    (folder / "tokenizer.json").write_text(tiny("qwen2")._inner.to_str(), encoding="utf-8")
    assert Tokenizer.from_folder(folder, NO_SPECIALS, 434).chat_template is None
    (folder / "chat_template.jinja").write_text("{{ 'é' }}\n", encoding="utf-8")
    assert Tokenizer.from_folder(folder, NO_SPECIALS, 434).chat_template == "{{ 'é' }}\n"
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder, NO_SPECIALS, 434)


def test_several_threads():
    tokenizer = tiny("qwen2")
    cases = golden("tiny-qwen2")["cases"]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            for case in cases:
                ordinary = tokenizer.encode(case["text"]) == case["ids"]
                parsed = tokenizer.encode(case["text"], parse_special=True) == case["parsed"]
                if not (ordinary and parsed and tokenizer.decode(case["ids"]) == case["text"]):
                    wrong.append(case["text"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_import_is_light():
    code = (
        "import sys, specrun.runtime.tokenizer, specrun.runtime.text_stream, specrun.runtime.chat_template;"
        "print([name for name in ('jinja2', 'torch', 'transformers', 'onnx', 'gguf', 'click') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
