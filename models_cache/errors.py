"""The exception tree. Every message is one sentence that says what is wrong and how to mend it.

SpecrunError                  exit code 1
├── UsageError                exit code 2: an option or a combination of options that cannot be
│   └── ContextLengthError    exit code 1: the request does not fit the context; names both numbers
├── ModelNotFoundError        no bundle or source of that name
├── SourceError               a source (hub, package index, folder) did not give what was asked
├── IntegrityError            a file is not what it must be: digest, size, truncation, LFS pointer, missing shard
├── ManifestError             manifest.json is not valid, or of another schema version
│   └── OtherKindError        a bundle, but of another kind: a reward model where a language model is wanted
├── CacheError                the cache folder cannot be written, is full or is locked
├── UnsupportedModelError     a family, rope type, tokenizer or tensor type that specrun does not know
├── VocabularyMismatchError   target and draft do not share a tokenizer
├── JobError                  an offline job cannot begin or go on with its files
├── ScoreError                what scores candidates failed: a command, a function, a reward model
└── BackendError              ONNX Runtime is missing, too old, or refused a graph
"""


class SpecrunError(Exception):
    """Base of every error that specrun raises on purpose."""

    exit_code = 1


class UsageError(SpecrunError, ValueError):
    """An option has a value that cannot be, or options contradict each other."""

    exit_code = 2


class ContextLengthError(UsageError):
    """The request needs more positions than the context has."""

    exit_code = 1


class ModelNotFoundError(SpecrunError):
    """No bundle and no source has this name."""


class SourceError(SpecrunError):
    """A source did not give the files that were asked of it."""


class IntegrityError(SpecrunError):
    """A file does not hold what it must hold."""


class ManifestError(SpecrunError):
    """A manifest is missing, malformed or of another schema version."""


class OtherKindError(ManifestError):
    """A bundle holds a model of another kind than the one wanted."""


class CacheError(SpecrunError):
    """The cache folder cannot be used."""


class UnsupportedModelError(SpecrunError):
    """The model uses something that specrun does not know."""


class VocabularyMismatchError(SpecrunError):
    """Target and draft do not share a tokenizer."""


class JobError(SpecrunError):
    """An offline job cannot begin or go on with its files."""


class ScoreError(SpecrunError):
    """A score could not be had."""


class BackendError(SpecrunError):
    """ONNX Runtime is missing, lacks something, or refused a graph."""
