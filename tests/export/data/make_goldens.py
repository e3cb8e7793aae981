"""Make the answers in this folder again: `python make_goldens.py`, or `python make_goldens.py smollm2.json FILE.gguf`.

Needs llama-cpp-python and gguf in one environment. Texts and tiny vocabularies are taken from the files themselves;
the files of `sentencepiece-*` come from the sentencepiece package and are not made here.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp

HERE = Path(__file__).parent


def write_gguf(path: Path, metadata: dict) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    arrays = {"tokens": writer.add_token_list, "token_type": writer.add_token_types}
    arrays |= {"scores": writer.add_token_scores, "merges": writer.add_token_merges}
    arrays |= {"model": writer.add_tokenizer_model, "pre": writer.add_tokenizer_pre}
    for key, value in metadata.items():
        if key in arrays:
            arrays[key](value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def answers(path: Path, texts: list[str]) -> dict:
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    vocabulary = model._model.vocab

    def ids(text: str, special: bool) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False, special=special)

    count = llama_cpp.llama_vocab_n_tokens(vocabulary)
    return {
        "cases": [{"text": text, "ids": ids(text, False), "parsed": ids(text, True)} for text in texts],
        "end_of_text": [token for token in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, token)],
        "add_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocabulary)),
        "bos": llama_cpp.llama_vocab_bos(vocabulary),
        "eos": llama_cpp.llama_vocab_eos(vocabulary),
    }


def remake(path: Path, model: Path | None) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "vocabulary.gguf"
            write_gguf(model, golden["metadata"])
        golden |= answers(model, [case["text"] for case in golden["cases"]])
    golden["reference"] = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}, vocab_only)"
    path.write_text(json.dumps(golden, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        remake(HERE / sys.argv[1], Path(sys.argv[2]))
    else:
        for tiny in sorted(HERE.glob("tiny-*.json")):
            remake(tiny, None)
