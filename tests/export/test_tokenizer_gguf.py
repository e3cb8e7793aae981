"""Tokenizers of GGUF metadata against llama.cpp, whose answers are in data/."""

import json

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specrun.export.tokenizer import tokenizer_files
from specrun.export.tokenizer_build import PRE_TOKENIZERS, SentencePieceOptions, Vocabulary, unigram_json
from specrun.export.tokenizer_gguf import gguf_tokenizer
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

from ..tiny_tokenizers import Reader, golden, tiny

BYTE_LEVEL = ["tiny-default", "tiny-gpt-2", "tiny-llama-bpe", "tiny-qwen2", "tiny-smollm"]
SENTENCEPIECE = ["tiny-llama", "tiny-llama-noprefix", "tiny-t5", "tiny-t5-prefix"]
TEXTS = [case["text"] for case in golden("tiny-qwen2")["cases"]]


def encode(document: str, text: str, *, parse_special: bool = False) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_str(document)
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", BYTE_LEVEL + SENTENCEPIECE)
def test_ids_equal_llama_cpp(name):
    """Digits, CJK, emoji, combining marks, CRLF, control tokens as text...; imp#660 is the case of qwen2."""
    expected = golden(name)
    document, _, _, _ = gguf_tokenizer(Reader(**expected["metadata"]))
    for case in expected["cases"]:
        assert encode(document, case["text"]) == case["ids"], case["text"]
        assert encode(document, case["text"], parse_special=True) == case["parsed"], case["text"]


@pytest.mark.parametrize("name", BYTE_LEVEL + SENTENCEPIECE)
def test_special_ids_equal_llama_cpp(name):
    """rustformers/llm#446: the file's own EOS id is used, and every other id that ends a text."""
    expected = golden(name)
    _, _, special_ids, tokens = gguf_tokenizer(Reader(**expected["metadata"]))
    assert sorted(special_ids.eos) == expected["end_of_text"]
    assert special_ids.eos[0] == expected["eos"]
    assert special_ids.bos == (None if expected["bos"] < 0 else expected["bos"])
    assert special_ids.add_bos == expected["add_bos"]
    assert tokens == len(expected["metadata"]["tokens"])


def test_ids_through_a_gguf_file(tmp_path):
    metadata = golden("tiny-qwen2")["metadata"]
    writer = gguf.GGUFWriter(tmp_path / "ünï code.gguf", "qwen2")
    writer.add_tokenizer_model(metadata["model"])
    writer.add_tokenizer_pre(metadata["pre"])
    writer.add_token_list(metadata["tokens"])
    writer.add_token_types(metadata["token_type"])
    writer.add_token_merges(metadata["merges"])
    writer.add_eos_token_id(metadata["eos_token_id"])
    writer.add_bos_token_id(metadata["bos_token_id"])
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    files = tokenizer_files(tmp_path / "ünï code.gguf")
    assert files.tokenizer_json == gguf_tokenizer(Reader(**metadata))[0]
    assert files.chat_template == "{{ messages }}"
    assert files == tokenizer_files(tmp_path / "ünï code.gguf", gguf.GGUFReader(tmp_path / "ünï code.gguf"))


_SPLIT_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _published(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizers as the models' own tokenizer.json have them."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = {"qwen2": _SPLIT_QWEN2, "llama-bpe": _SPLIT_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")}
    if name in split:
        pattern = tokenizers.Regex(split[name])
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_ids_equal_the_original_tokenizer_json(name):
    """transformers#31630: "Hello", " Hello", "a  b" and all the others equal tokenizer.json."""
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    original.pre_tokenizer = _published(name)
    original.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(TEXTS * 2, trainer)
    document = tokenizers.Tokenizer.from_str(original.to_str())
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)

    merges = [" ".join(pair) for pair in json.loads(document.to_str())["model"]["merges"]]
    built, _, _, _ = gguf_tokenizer(Reader(model="gpt2", pre=name, tokens=tokens, merges=merges))
    for text in ["Hello", " Hello", "a  b", *TEXTS]:
        assert encode(built, text) == original.encode(text).ids, text


def test_qwen2_splits_like_the_reference():
    """imp#660: the digits one by one, the newline with the mark before it, the space by itself."""
    tokenizer = tiny("qwen2")
    pieces = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("a->b (x):\n 12345")]
    assert "".join(pieces) == "a->b (x):\n 12345"
    assert pieces[-6:] == [" ", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("name", ["llama", "llama-noprefix"])
def test_byte_fallback_leaves_no_unknown_token(name):
    """llama.cpp#28862: " this is 🦙." is spelt in bytes where there is no token."""
    tokenizer = tiny(name)
    ids = tokenizer.encode(" this is 🦙.", add_bos=False)
    assert tokenizer.encode("<unk>", parse_special=True, add_bos=False) == [0]
    assert 0 not in ids
    assert [token_id - 3 for token_id in ids if 3 <= token_id < 259] == list("🦙".encode())


def test_byte_fallback_of_unigram():
    """llama.cpp#28862, for a unigram vocabulary."""
    letters = ["▁", *"this.</0x41>", "▁this"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(letters)]
    pieces = len(texts) - 259
    types = [2, 3, 3, *[6] * 256, *[1] * pieces]
    scores = [0.0] * 259 + [-2.0 - index / 8 for index in range(pieces)]
    document = unigram_json(Vocabulary(texts, types, scores), _PREFIXED)
    text = " this is 🦙.</s><0x41>"
    ids = encode(document, text)
    assert not {0, 1, 2} & set(ids)
    assert bytes(token_id - 3 for token_id in ids if 3 <= token_id < 259) == "🦙".encode()
    assert tokenizers.Tokenizer.from_str(document).decode(ids) == text


_PREFIXED = SentencePieceOptions(space_prefix=True)


@pytest.mark.parametrize("pre", [None, "kimi-k2"])
def test_pre_tokenizer_unknown_or_missing(pre):
    """llama.cpp#7476: no guess; the message names what is known."""
    metadata = golden("tiny-qwen2")["metadata"] | {"pre": pre}
    if pre is None:
        del metadata["pre"]
    with pytest.raises(UnsupportedModelError) as raised:
        gguf_tokenizer(Reader(**metadata))
    message = str(raised.value)
    assert (pre or "tokenizer.ggml.pre") in message
    assert all(known in message for known in PRE_TOKENIZERS)


def test_sentencepiece_needs_no_pre_tokenizer():
    metadata = golden("tiny-llama")["metadata"]
    del metadata["pre"]
    assert gguf_tokenizer(Reader(**metadata))[3] == len(metadata["tokens"])


@pytest.mark.parametrize("model", [None, "bert", "rwkv"])
def test_tokenizer_model_unknown_or_missing(model):
    with pytest.raises(UnsupportedModelError, match=model or "no tokenizer"):
        gguf_tokenizer(Reader(**({} if model is None else {"model": model})))


def _byte_level(extra: list[str], types: list[int], **metadata) -> Reader:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters + extra
    return Reader(
        **{"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * len(letters) + types, "merges": []}
        | metadata
    )


def test_user_defined_tokens_are_found_in_any_text():
    document, _, _, _ = gguf_tokenizer(_byte_level(["<tool>", "<|im_end|>"], [4, 3]))
    assert encode(document, "<tool>") == [256]
    assert len(encode(document, "<|im_end|>")) == len("<|im_end|>")


def test_end_of_text_ids():
    """The ids that the file names come with every control or user defined token whose text is an end mark."""
    marks = ["<eot>", "<|im_end|>", "</s>", "<|eot_id|>", "<|file_sep|>", "<eom>"]
    reader = _byte_level(marks, [3, 3, 1, 4, 3, 3], eos_token_id=257, eot_token_id=256, eom_token_id=261)
    document, _, special_ids, _ = gguf_tokenizer(reader)
    assert special_ids.eos == (257, 256, 259, 260, 261)  # not 258: an ordinary token of that spelling is text
    assert len(encode(document, "<|eot_id|>")) == len("<|eot_id|>")  # an end mark is no user text


def test_end_of_text_ids_where_a_mark_only_closes_a_part():
    reader = _byte_level(["<|end|>", "<|return|>", "<|call|>"], [3, 3, 3], eos_token_id=257)
    assert gguf_tokenizer(reader)[2].eos == (257, 258)
    reader = _byte_level(["</s>", "<eos>", "<|tool_response>"], [3, 3, 3], eos_token_id=257)
    assert gguf_tokenizer(reader)[2].eos == (257, 258)


def test_ids_beyond_the_vocabulary_are_not_taken():
    special_ids = gguf_tokenizer(_byte_level([], [], eos_token_id=999, bos_token_id=999, add_bos_token=True))[2]
    assert special_ids == type(special_ids)(bos=None, eos=(), pad=None, add_bos=False)


def test_padding_of_the_vocabulary_is_not_counted():
    """vllm#7252: only real ids count."""
    document, _, _, tokens = gguf_tokenizer(_byte_level(["<|im_end|>", "[PAD257]", "[PAD258]"], [3, 5, 4]))
    assert tokens == 257
    assert tokenizers.Tokenizer.from_str(document).token_to_id("[PAD257]") is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, UnsupportedModelError, "'a' twice"),
        ({"token_type": [1]}, IntegrityError, "1 types"),
        ({"merges": ["ab"]}, IntegrityError, "'ab'"),
        ({"tokens": None}, IntegrityError, "tokenizer.ggml.tokens"),
    ],
)
def test_broken_metadata(change, error, message):
    metadata = golden("tiny-qwen2")["metadata"] | change
    with pytest.raises(error, match=message):
        gguf_tokenizer(Reader(**{key: value for key, value in metadata.items() if value is not None}))


def test_a_merge_of_unknown_tokens_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="tokenizers library"):
        tokenizer_files(tmp_path, _byte_level([], [], merges=["qq zz"]))
