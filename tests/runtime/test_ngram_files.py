"""Files of earlier texts that `save` did not write, and how much of a file is taken."""

import contextlib
import zipfile

import numpy as np
import pytest

from specrun.models_cache.errors import IntegrityError
from specrun.runtime.ngram_table import NgramTable

from .test_ngram_table import rewrite


def members(path, **contents):
    """A file as `rewrite` makes it, with the bytes of some members replaced."""
    rewrite(path)
    with zipfile.ZipFile(path) as archive:
        data = {name: archive.read(name) for name in archive.namelist()} | contents
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in data.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "header",
    [
        b"(" * 200 + b"\n",
        b"{'descr': ('<u4',), 'fortran_order': False, 'shape': (3,), }\n",
        b"{'descr': '<q9', 'fortran_order': False, 'shape': (3,), }\n",
        b"{'descr': '<u4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }\n",
        b"{'descr': '<u4', 'fortran_order': False, 'shape': (-3,), }\n",
        b"",
    ],
)
def test_headers_that_cannot_be(tmp_path, header):
    path = tmp_path / "texts.npz"
    sound = b"{'descr': '<u4', 'fortran_order': False, 'shape': (3,), }\n"
    for content, refused in ((sound, False), (header, True)):
        data = b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content + bytes(12)
        members(path, **{"tokens.npy": data})
        with pytest.raises(IntegrityError, match="name another file") if refused else contextlib.nullcontext():
            NgramTable.load(path, tokens=10)


@pytest.mark.parametrize("length", [2, 33])
def test_a_pool_larger_than_any_that_is_kept(tmp_path, length):
    path = tmp_path / "texts.npz"
    count = 4096 * 32 + 1 if length == 2 else 1
    rewrite(path, pool=np.ones(count * length, np.uint32), pool_lengths=np.full(count, length))
    with pytest.raises(IntegrityError, match="other n-grams than are kept"):
        NgramTable.load(path, tokens=10)
    rewrite(path, tokens=np.ones(5 << 20, np.uint32), lengths=np.array([5 << 20]))
    with pytest.raises(IntegrityError, match="too large"):
        NgramTable.load(path, tokens=10)


def test_lengths_whose_sum_wraps_around(tmp_path):
    path = tmp_path / "texts.npz"
    rewrite(path, lengths=np.array([2**62, 2**62, 2**62, 2**62, 3]))
    with pytest.raises(IntegrityError, match="name another file"):
        NgramTable.load(path, tokens=10)


@pytest.mark.parametrize("room", range(12))
def test_the_newest_texts_are_taken_as_if_all_had_been_added(tmp_path, room):
    path, texts = tmp_path / "texts.npz", [[1, 2], [3, 4, 5], [6], [7, 8, 9, 1]]
    table = NgramTable(earlier_tokens=room)
    whole = NgramTable()
    for text in texts:
        table.add_text(text)
        whole.add_text(text)
    whole.save(path)
    assert NgramTable.load(path, tokens=10, earlier_tokens=room)._earlier == table._earlier
