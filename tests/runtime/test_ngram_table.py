"""Suffix lookup: which match wins, exact rewind, earlier texts, files."""

import os

import numpy as np
import pytest

from specrun.models_cache.errors import CacheError, IntegrityError, UsageError
from specrun.runtime.ngram_table import CANDIDATES, Match, NgramTable


def filled(tokens, **settings):
    table = NgramTable(**settings)
    table.extend(tokens)
    return table


def reference(text, max_tokens, max_n=5, eos_ids=(), earlier=()):
    """The documented rule, by scanning."""
    for length in range(min(max_n, len(text)), 0, -1):
        most = CANDIDATES if length == max_n else 1
        places = [(text, place) for place in followed(text, text[-length:], eos_ids)[:most]]
        older = [(body, place) for body in reversed(earlier) for place in followed(body, text[-length:], eos_ids)]
        best = max(places + older[:most], key=lambda found: whole_length(text, *found, length, max_n), default=None)
        if best is not None:
            body, place = best
            found = list(body[place : place + max_tokens])
            while body is text and len(found) < max_tokens:
                found.append((text + found)[place + len(found)])
            cut = next((i for i, token in enumerate(found) if token in eos_ids), len(found))
            return Match(whole_length(text, body, place, length, max_n), tuple(found[:cut]))
    return None


def followed(body, suffix, eos_ids):
    """Where in a text something stands behind a suffix, the newest place first."""
    places = range(len(body) - 1, len(suffix) - 1, -1)
    return [place for place in places if body[place - len(suffix) : place] == suffix and body[place] not in eos_ids]


def whole_length(text, body, place, length, max_n):
    """A match of the longest n-gram counts all tokens before it that are the same, up to 32."""
    lengths = range(length, 33 if length == max_n else length + 1)
    return max(n for n in lengths if n == length or (n <= place and body[place - n : place] == text[-n:]))


@pytest.mark.parametrize("alphabet", [2, 3, 6, 40])
def test_equals_the_scanning_rule(alphabet):
    rng = np.random.default_rng(alphabet)
    for _ in range(60):
        texts = [rng.integers(0, alphabet, int(rng.integers(0, 30))).tolist() for _ in range(3)]
        eos_ids = {0} if rng.random() < 0.5 else set()
        max_n = int(rng.integers(1, 7))
        table = NgramTable(max_n, eos_ids=eos_ids)
        table.add_text(texts[0])
        table.add_text(texts[1])
        for end, token in enumerate(texts[2], 1):
            table.extend([token])
            for limit in (1, 4, 9):
                assert table.lookup(limit) == reference(texts[2][:end], limit, max_n, eos_ids, texts[:2])


def test_rewind_then_append_equals_a_fresh_table():
    rng = np.random.default_rng(1)
    table, text = NgramTable(4, eos_ids={3}), []
    for _ in range(400):
        if rng.random() < 0.4:
            length = int(rng.integers(0, len(text) + 1))
            table.rewind_to(length)
            del text[length:]
        else:
            more = rng.integers(0, 5, int(rng.integers(0, 12))).tolist()
            table.extend(more)
            text += more
        fresh = filled(text, max_n=4, eos_ids={3})
        assert (table._text, table._followers, table._undo) == (fresh._text, fresh._followers, fresh._undo)
        assert table.lookup(6) == fresh.lookup(6)
        assert len(table) == len(text)
    for wrong in (-1, len(text) + 1):
        with pytest.raises(ValueError, match="cannot rewind"):
            table.rewind_to(wrong)


def test_vllm_22437_longest_then_most_recent_match_wins():
    """vllm#22437: the longest suffix first; among equals the most recent occurrence."""
    assert filled([1, 2, 10, 9, 2, 11, 9, 1, 2]).lookup(1) == Match(2, (10,))
    assert filled([1, 2, 10, 1, 2, 11, 9, 1, 2]).lookup(1) == Match(2, (11,))


@pytest.mark.parametrize("prompt", [[], [4], [4, 5], [4, 5, 6]])
def test_vllm_7047_nothing_matches_nothing_is_proposed(prompt):
    """vllm#7047: prompts of 1, 2 and 3 distinct tokens."""
    assert filled(prompt).lookup(4) is None


def test_transformers_31301_an_eos_is_never_copied():
    """transformers#31301: cut before the EOS; an occurrence followed by one is passed over for an older one."""
    assert filled([1, 2, 7, 99, 8, 1, 2], eos_ids={99}).lookup(4) == Match(2, (7,))
    assert filled([1, 2, 7, 6, 1, 2, 99, 5, 1, 2], eos_ids={99}).lookup(2) == Match(2, (7, 6))
    assert filled([1, 99, 1], eos_ids={99}).lookup(4) is None


def test_vllm_41758_a_period_is_continued_through_the_proposal():
    """vllm#41758: 'red blue red blue red blue' proposes as much as is asked for."""
    assert filled([1, 2, 1, 2, 1, 2]).lookup(7) == Match(4, (1, 2, 1, 2, 1, 2, 1))
    assert filled([6, 6]).lookup(3) == Match(1, (6, 6, 6))
    assert filled([1, 2, 3, 1]).lookup(8) == Match(1, (2, 3, 1, 2, 3, 1, 2, 3))


def test_transformers_46790_repeated_tail_without_an_eos():
    """transformers#46790: ids 5,6,7,8,9,10,11,7,8."""
    assert filled([5, 6, 7, 8, 9, 10, 11, 7, 8]).lookup(3) == Match(2, (9, 10, 11))


def test_no_tokens_are_asked_for():
    assert filled([1, 1, 1]).lookup(0) is None
    assert filled([1, 1, 1]).lookup(-1) is None


def test_ngrams_of_different_lengths_and_ids_do_not_collide():
    big = 2**32 - 2
    assert filled([0, 0, 5, 1, 0]).lookup(1) == Match(1, (5,))
    assert filled([big, 7, 0, big]).lookup(1) == Match(1, (7,))
    assert filled([0, 5, 9, 0, 0, 6, 0, 0]).lookup(1) == Match(2, (6,))
    for wrong in (-1, 2**32 - 1):
        with pytest.raises(UsageError, match="not a token id"):
            NgramTable().extend([wrong])
    with pytest.raises(UsageError, match="max_n"):
        NgramTable(0)


def test_earlier_texts_come_after_own_matches_of_the_same_length():
    table = NgramTable()
    table.add_text([1, 2, 30, 31])
    table.add_text([1, 2, 40, 41])
    table.extend([2, 50, 1, 2])
    assert table.lookup(9) == Match(2, (40, 41))  # longer than the own match of one token; the newest text
    table.extend([60, 1, 2])
    assert table.lookup(2) == Match(2, (60, 1))
    table.rewind_to(1)
    assert table.lookup(1) == Match(1, (40,))


def test_earlier_texts_do_not_run_into_each_other():
    table = NgramTable()
    table.add_text([1, 2, 3])
    table.add_text([4, 5, 6])
    table.extend([3])
    assert table.lookup(4) is None
    table.extend([2])
    assert table.lookup(4) == Match(1, (3,))


def test_earlier_texts_are_bounded_and_the_oldest_goes_first():
    table = NgramTable(earlier_tokens=10)
    for start in (10, 20, 30):
        table.add_text(range(start, start + 4))
        table.add_text([])
    assert table.earlier_size == 8
    for token, found in ((10, None), (20, Match(1, (21, 22, 23))), (30, Match(1, (31, 32, 33)))):
        table.rewind_to(0)
        table.extend([token])
        assert table.lookup(5) == found
    table.add_text(range(100, 125))
    assert table.earlier_size == 10
    assert set(table._earlier_followers.values()) == set(range(13, 22))
    table.rewind_to(0)
    table.extend([115])
    assert table.lookup(2) == Match(1, (116, 117))
    nothing = NgramTable(earlier_tokens=0)
    nothing.add_text([1, 2, 3])
    assert nothing.earlier_size == 0


def test_dropping_a_text_keeps_what_newer_texts_hold():
    table = NgramTable(earlier_tokens=6)
    table.add_text([1, 2, 3])
    table.add_text([1, 2, 4])
    table.add_text([7, 8, 9])
    table.extend([1, 2])
    assert table.lookup(1) == Match(2, (4,))


POOL = [(4, 1, 2), (7, 8), (7, 0, 1, 2)]


@pytest.fixture
def saved(tmp_path):
    table = NgramTable()
    table.add_text([1, 2, 3, 4])
    table.add_text([5, 2, 9])
    for token, *gram in POOL:
        table.pool.add(token, tuple(gram), 3)
    path = tmp_path / "ünïcode texts.npz"
    table.save(path)
    return path


def test_save_and_load(saved):
    table = NgramTable.load(saved, tokens=10)
    assert table._earlier == [[1, 2, 3, 4], [5, 2, 9]]
    assert list(table.pool) == POOL
    table.extend([1, 2])
    assert table.lookup(2) == Match(2, (3, 4))
    assert os.listdir(saved.parent) == [saved.name]
    assert NgramTable.load(saved, tokens=10, earlier_tokens=3).earlier_size == 3
    NgramTable().save(saved)
    assert NgramTable.load(saved, tokens=10).earlier_size == 0


def test_ids_of_another_vocabulary_are_refused(saved):
    with pytest.raises(IntegrityError, match="token 9 is outside a vocabulary of 9"):
        NgramTable.load(saved, tokens=9)


def test_cut_files_are_refused(saved):
    data = saved.read_bytes()
    for size in (0, 1, 30, len(data) // 2, len(data) - 30, len(data) - 1):
        saved.write_bytes(data[:size])
        with pytest.raises(IntegrityError, match="name another file"):
            NgramTable.load(saved, tokens=10)


def test_flipped_bytes_are_refused_or_change_nothing(saved):
    data = saved.read_bytes()
    refused = 0
    for place in range(len(data)):
        saved.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            table = NgramTable.load(saved, tokens=10)
            assert table._earlier == [[1, 2, 3, 4], [5, 2, 9]]
            assert list(table.pool) == POOL
        except IntegrityError:
            refused += 1
    assert refused > len(data) // 2


def rewrite(path, **changed):
    arrays = {
        "format": np.array(2, np.int64),
        "tokens": np.array([1, 2, 3], np.uint32),
        "lengths": np.array([3], np.int64),
        "pool": np.array([4, 5, 6], np.uint32),
        "pool_lengths": np.array([3], np.int64),
    }
    np.savez(path, **{name: value for name, value in {**arrays, **changed}.items() if value is not None})


@pytest.mark.parametrize(
    "changed",
    [
        {"format": np.array(3, np.int64)},
        {"pool": None},
        {"pool": np.array([4, 5, 10], np.uint32)},
        {"pool": np.array([[4, 5, 6]], np.uint32)},
        {"pool_lengths": None},
        {"pool_lengths": np.array([2], np.int64)},
        {"pool_lengths": np.array([2, 1], np.int64)},
        {"format": np.array([1, 1], np.int64)},
        {"format": None},
        {"tokens": np.array([1, 2, 3], np.int64)},
        {"tokens": np.array([[1, 2, 3]], np.uint32)},
        {"tokens": np.array([1, "a", None], object)},
        {"lengths": np.array([2], np.int64)},
        {"lengths": np.array([4], np.int64)},
        {"lengths": np.array([4, -1], np.int64)},
        {"lengths": np.array([3, 0], np.int64)},
        {"lengths": np.array([], np.int64)},
        {"lengths": None},
    ],
)
def test_files_with_other_contents_are_refused(tmp_path, changed):
    path = tmp_path / "texts.npz"
    rewrite(path)
    assert NgramTable.load(path, tokens=10).earlier_size == 3
    assert list(NgramTable.load(path, tokens=10).pool) == [(4, 5, 6)]
    rewrite(path, **changed)
    with pytest.raises(IntegrityError):
        NgramTable.load(path, tokens=10)


def test_files_of_the_time_before_the_pool(tmp_path):
    path = tmp_path / "texts.npz"
    rewrite(path, format=np.array(1, np.int64), pool=None, pool_lengths=None)
    table = NgramTable.load(path, tokens=10)
    assert table._earlier == [[1, 2, 3]]
    assert len(table.pool) == 0


def test_a_header_that_claims_more_than_the_file_holds(tmp_path):
    path = tmp_path / "texts.npz"
    np.savez_compressed(path, format=np.array(1), tokens=np.zeros(10**6, np.uint32), lengths=np.array([10**6]))
    with pytest.raises(IntegrityError, match="compressed"):
        NgramTable.load(path, tokens=10)


def test_folders_that_refuse(tmp_path):
    with pytest.raises(CacheError, match="Cannot read"):
        NgramTable.load(tmp_path / "missing.npz", tokens=10)
    with pytest.raises(CacheError, match="Cannot write"):
        NgramTable().save(tmp_path / "missing" / "texts.npz")


def test_a_long_match_counts_its_whole_length_up_to_32():
    run = list(range(100, 150))
    table = filled([*run, 7, *run[:20]])
    assert table.lookup(1) == Match(20, (120,))
    table = filled([*run, 7, *run])
    assert table.lookup(1) == Match(32, (7,))


def test_the_longest_match_wins_beyond_the_table() -> None:
    """Of several places of one n-gram the one before which most tokens are the same, in whichever text it is."""
    run = [10, 11, 12, 13, 14, 15]
    table = filled([1, *run, 40, 2, *run, 41, 3, *run, 42, 2, *run])
    assert table.lookup(1) == Match(7, (41,))
    earlier = filled([4, *run, 42, 3, *run], max_n=5)
    for text in ([8, 3, *run, 50], [2, 3, *run, 51], [5, *run, 52]):
        earlier.add_text(text)
    assert earlier.lookup(1) == Match(7, (51,))  # the newest of two equal ones
    earlier.rewind_to(0)
    earlier.extend([2, 3, *run, 60, 8, 3, *run])
    assert earlier.lookup(1) == Match(8, (50,))
    earlier.extend([50, 8, 3, *run])
    assert earlier.lookup(1) == Match(8, (50,))  # now of the text itself
    earlier.rewind_to(len(earlier) - 9)
    earlier.add_text([*range(100, 100 + earlier.earlier_tokens - 17)])  # all but the newest texts are dropped
    assert earlier.lookup(1) == Match(7, (60,))


def test_a_repeated_request_is_found_as_a_whole() -> None:
    """Phrases that return do not lead astray: the whole text is proposed token by token from its first run."""
    phrase = [1, 2, 3, 4, 5, 6]
    text = [7, *phrase, 20, 8, *phrase, 21, 9, *phrase, 22, 30, *phrase, 23]
    table = NgramTable()
    table.add_text(text)
    for end in range(6, len(text)):
        table.rewind_to(0)
        table.extend(text[:end])
        match = table.lookup(4)
        assert match is not None
        assert match.tokens == tuple(text[end : end + 4]), end


def test_agreement_tells_how_the_occurrence_before_went_on():
    assert filled([1, 2, 3, 9, 1, 2]).lookup(3).agreement == ("alone", "alone", "alone")
    assert filled([1, 2, 3, 4, 1, 2, 3, 5, 1, 2]).lookup(3).agreement == ("agree", "differ", "alone")
    assert filled([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]).lookup(2).agreement == ("differ", "alone")
    table = filled([7, 1, 2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2])
    assert table.lookup(2).agreement == ("agree", "agree")
    table.rewind_to(8)
    assert table.lookup(2).agreement == ("alone", "alone")
