"""Tokenizers of real files against llama.cpp, whose answers are in data/."""

import pytest

from specrun.export.tokenizer import tokenizer_files
from specrun.runtime.tokenizer import Tokenizer

from ..tiny_tokenizers import golden
from ..weights import qwen_gguf, smollm2_gguf


def check(files, expected, *, ordinary_in_the_file=frozenset()):
    tokenizer = Tokenizer(files.tokenizer_json, files.special_ids, files.tokens)
    for case in expected["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]
        if not any(text in case["text"] for text in ordinary_in_the_file):
            assert tokenizer.encode(case["text"], parse_special=True) == case["parsed"], case["text"]
    ends = [end for end in expected["end_of_text"] if tokenizer.token_text(end) not in ordinary_in_the_file]
    assert sorted(files.special_ids.eos) == ends
    assert files.special_ids.eos[0] == expected["eos"]


@pytest.mark.weights
def test_smollm2_equals_llama_cpp():
    files = tokenizer_files(smollm2_gguf())
    check(files, golden("smollm2"))
    assert files.tokens == 49152
    assert "<|im_start|>" in files.chat_template
    case = next(case for case in golden("smollm2")["cases"] if case["text"] == "a->b (x):\n 12345")
    assert case["ids"][:8] == [81, 22690, 82, 365, 104, 727, 3805, 33]


@pytest.mark.weights
@pytest.mark.slow
def test_qwen_equals_llama_cpp():
    """imp#660. "</s>" is an ordinary token of Qwen2: llama.cpp takes it for an end of text, specrun does not."""
    files = tokenizer_files(qwen_gguf())
    check(files, golden("qwen2"), ordinary_in_the_file={"</s>"})
    assert files.tokens == 151665
