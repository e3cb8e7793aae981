"""Tokenizers of safetensors folders."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specrun.export.tokenizer import tokenizer_files
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

from ..tiny_tokenizers import DATA, golden

SPECIALS = ["<s>", "</s>", "<|im_end|>", "<pad>"]


def tokenizer_json(*, writes_bos: bool = False, nested: bool = False) -> str:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if writes_bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template]) if nested else template
    return tokenizer.to_str()


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


def test_tokenizer_json_is_taken_verbatim(folder):
    document = json.dumps(json.loads(tokenizer_json()), indent=3)
    files = tokenizer_files(folder(tokenizer__json=document))
    assert files.tokenizer_json == document
    assert files.tokens == 260
    assert files.chat_template is None


def test_eos_ids_are_the_union_of_all_files(folder):
    """vllm#4180: generation_config.json knows ids that the tokenizer does not; the tokenizer's own comes first."""
    path = folder(
        tokenizer__json=tokenizer_json(),
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>", "pad_token": "<pad>"},
        generation_config__json={"eos_token_id": [257, 258, 9]},
        config__json={"eos_token_id": 10, "text_config": {"eos_token_id": [11, 9]}},
    )
    special_ids = tokenizer_files(path).special_ids
    assert special_ids.eos == (258, 257, 9, 10, 11)
    assert (special_ids.bos, special_ids.pad, special_ids.add_bos) == (256, 259, False)


def test_special_ids_without_a_tokenizer_config(folder):
    path = folder(
        tokenizer__json=tokenizer_json(),
        special_tokens_map__json={"eos_token": "</s>"},
        config__json={"bos_token_id": 256, "eos_token_id": None, "pad_token_id": -1},
    )
    special_ids = tokenizer_files(path).special_ids
    assert (special_ids.bos, special_ids.eos, special_ids.pad) == (256, (257,), None)


@pytest.mark.parametrize(
    ("config", "writes_bos", "add_bos"),
    [
        ({"bos_token": "<s>"}, False, False),
        ({"bos_token": "<s>"}, True, True),
        ({"bos_token": "<s>", "add_bos_token": True}, False, True),
        ({"bos_token": "<s>", "add_bos_token": False}, True, False),
        ({"bos_token": None, "add_bos_token": True}, False, False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_add_bos(folder, config, writes_bos, add_bos, nested):
    path = folder(tokenizer__json=tokenizer_json(writes_bos=writes_bos, nested=nested), tokenizer_config__json=config)
    assert tokenizer_files(path).special_ids.add_bos is add_bos


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": "ü\n"}, "ü\n"),
        ({"chat_template__json": {"chat_template": "B"}}, "B"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"tokenizer_config__json": {"chat_template": [{"name": "only", "template": "O"}]}}, "O"),
        ({"tokenizer_config__json": {"chat_template": []}}, None),
    ],
)
def test_chat_template(folder, files, expected):
    assert tokenizer_files(folder(tokenizer__json=tokenizer_json(), **files)).chat_template == expected


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, UnsupportedModelError, "neither tokenizer.json nor tokenizer.model"),
        ({"tokenizer__json": "version https://git-lfs.github.com/spec/v1\n"}, IntegrityError, "git lfs pull"),
        ({"tokenizer__json": "{"}, UnsupportedModelError, "tokenizers library"),
        ({"tokenizer__json": tokenizer_json(), "config__json": "{"}, IntegrityError, "config.json is not valid JSON"),
        ({"tokenizer__json": tokenizer_json(), "config__json": "[]"}, IntegrityError, "JSON object"),
    ],
)
def test_broken_folders(folder, files, error, message):
    with pytest.raises(error, match=message):
        tokenizer_files(folder(**files))


def test_text_that_is_not_utf8(folder):
    path = folder()
    (path / "tokenizer.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(IntegrityError, match="UTF-8"):
        tokenizer_files(path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_model_without_a_tokenizer_json(folder, kind):
    """A folder with only tokenizer.model is converted; ids equal sentencepiece's own (llama.cpp#28862: no UNK)."""
    path = folder(tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>"})
    (path / "tokenizer.model").write_bytes((DATA / f"sentencepiece-{kind}.model").read_bytes())
    files = tokenizer_files(path)
    assert (files.special_ids.bos, files.special_ids.eos, files.special_ids.add_bos) == (1, (2,), True)
    tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    tokenizer.encode_special_tokens = True
    for case in golden(f"sentencepiece-{kind}")["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids) == case["decoded"]
        assert 0 not in ids


def _model() -> bytes:
    return (DATA / "sentencepiece-bpe.model").read_bytes()


def test_tokens_added_to_a_sentencepiece_model(folder):
    path = folder(added_tokens__json={"<|im_end|>": 400, "<|im_start|>": 401})
    (path / "tokenizer.model").write_bytes(_model())
    files = tokenizer_files(path)
    assert files.tokens == 402
    assert tokenizers.Tokenizer.from_str(files.tokenizer_json).encode("<|im_end|>").ids == [400]
    (path / "added_tokens.json").write_text('{"<|im_end|>": 402}')
    with pytest.raises(UnsupportedModelError, match="402"):
        tokenizer_files(path)


@pytest.mark.parametrize("cut", [0, 1, 100, 5000])
def test_cut_sentencepiece_model(folder, cut):
    path = folder()
    (path / "tokenizer.model").write_bytes(_model()[:cut])
    with pytest.raises(IntegrityError, match=r"tokenizer\.model"):
        tokenizer_files(path)


def test_sentencepiece_word_model_is_refused(folder):
    piece = b"\x0a\x01a"
    word_model = b"\x0a" + bytes([len(piece)]) + piece + b"\x12\x02\x18\x03\x1a\x00"
    path = folder()
    (path / "tokenizer.model").write_bytes(word_model)
    with pytest.raises(UnsupportedModelError, match="word or character"):
        tokenizer_files(path)
