"""Models with known answers: a next-token table, and eight tokens with known probabilities."""

from __future__ import annotations

import string

import numpy as np

from .tiny_bundles import VOCABULARY, chain_table, token_id

END_ID, TURN_END_ID = 0, 2


def ids(*pieces: str) -> list[int]:
    """Ids of tokens as the vocabulary spells them ("Ġ" is the space)."""
    return [token_id(piece) for piece in pieces]


# Each row is a text that the table model writes, token by token.
LOWER = ids(*string.ascii_lowercase)  # "a" .. "z", end of turn, "1", "2", ...
STOPPED = ids("A", "Ġb", "Ġ", "E", "N", "D", "Ġc", "F", "G", "H", "I", "J", "K", "L")  # "A b END cFGHIJKL"
EARLY_END = ids("M", "O", "!", "P", "Q", "R")  # table-eos: "!" ends the text
LINES = ids(
    "S", "Ċ", "T", "U", "V", "W", "X", "Y", "Z", "?", "@", "#", "$", "%", "&", "*", "(", ")", "+", ",", "-", "."
)
EARTH = "🌍"  # F0 9F 8C 8D
CJK = "日語"  # E6 97 A5 E8 AA 9E
LOOP = ids("<", "=", ">", "^", "<")


def _byte_ids(text: str) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    spelt = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [token_id(character) for piece, _ in spelt for character in piece]


# No byte of these has two followers.
EARTH_IDS = [token_id("["), *_byte_ids(EARTH), token_id("]"), token_id("{")]
CJK_IDS = [token_id("|"), *_byte_ids(CJK), token_id("~"), token_id("}")]
TABLE = chain_table(
    [*LOWER, TURN_END_ID, *ids("1", "2", "3", "4", "5", "6", "7", "8", "9")],
    STOPPED,
    EARLY_END,
    LINES,
    EARTH_IDS,
    CJK_IDS,
    LOOP,
)

# Eight tokens; every other one has no chance.
TOY_IDS = ids(*"abcdefgh")
TOY_SIZE = len(TOY_IDS)


def _toy(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = np.full((VOCABULARY, VOCABULARY), -30.0)
    logits[:, TOY_IDS] = rng.standard_normal((1, TOY_SIZE)) * 1.2
    logits[np.ix_(TOY_IDS, TOY_IDS)] = rng.standard_normal((TOY_SIZE, TOY_SIZE)) * 1.2
    return logits


TOY_LOGITS = _toy(11)
TOY_DRAFT_LOGITS = TOY_LOGITS + _toy(12) * 0.5 * (TOY_LOGITS > -20)
