"""The one boundary to huggingface_hub: its calls are made and its exceptions become SourceError here.

huggingface_hub is imported on use only. HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN mean what they mean there.
"""

from __future__ import annotations

import importlib
import inspect
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specrun.models_cache.errors import SourceError
from specrun.models_cache.progress import Progress

CHECK_SECONDS = 4.0
_ALLOWED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "LICENSE*", "README.md"]
# Sub-folders hold other formats of the same weights, and consolidated files the same weights a second time.
_IGNORED = ["*/*", "consolidated*.safetensors"]


def fetch_hub_file(repo: str, file: str, progress: Progress) -> Path:
    """Return the path of one file of a hub repository in the hub's own cache, downloading what is missing.

    Raises SourceError.
    """
    import huggingface_hub
    from huggingface_hub import constants

    # huggingface_hub 0, which the extra `optimum` holds to, takes no bar for one file: it then comes without progress.
    known = inspect.signature(huggingface_hub.hf_hub_download).parameters
    bars: dict[str, Any] = {"tqdm_class": _bar(f"{repo}/{file}", progress)} if "tqdm_class" in known else {}

    def call(local: bool) -> str:
        path: str = huggingface_hub.hf_hub_download(
            repo,
            file,
            local_files_only=local,
            etag_timeout=CHECK_SECONDS,
            endpoint=constants.ENDPOINT,
            **bars,
        )
        return path

    # The file itself is asked for: the answer redirects to the host that stores it, which may be blocked.
    return Path(_ask(repo, f"{repo}/resolve/main/{quote(file)}", call))


def fetch_hub_folder(repo: str, progress: Progress) -> Path:
    """Return the folder of a hub repository's safetensors weights, tokenizer and licence in the hub's own cache.

    Pickle files are never asked for. Raises SourceError.
    """
    import huggingface_hub
    from huggingface_hub import constants

    def call(local: bool) -> str:
        return huggingface_hub.snapshot_download(
            repo,
            allow_patterns=_ALLOWED,
            ignore_patterns=_IGNORED,
            local_files_only=local,
            etag_timeout=CHECK_SECONDS,
            max_workers=4,
            tqdm_class=_bar(repo, progress),
            endpoint=constants.ENDPOINT,
        )

    return Path(_ask(repo, f"api/models/{repo}", call))


def _ask(repo: str, probe: str, call: Callable[[bool], str]) -> str:
    """Make the call, or ask the local cache only where the hub does not answer soon (its own client waits long)."""
    from huggingface_hub import constants, errors

    offline = constants.HF_HUB_OFFLINE
    trouble = "HF_HUB_OFFLINE is set" if offline else _unreachable(probe)
    try:
        return call(trouble is not None)
    except errors.LocalEntryNotFoundError as error:
        if trouble is None:
            raise SourceError(f"the hub did not give {repo} ({_line(error)}); check the network") from error
        fix = "unset it" if offline else "check the network, HF_ENDPOINT and the proxy settings"
        raise SourceError(f"{repo} is not in the hub's local cache and {trouble}; {fix}") from error
    except errors.GatedRepoError as error:
        raise SourceError(f"{repo} is gated; accept its terms on {constants.ENDPOINT} and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{constants.ENDPOINT} has no repository {repo} that you may read; check the name, or set HF_TOKEN"
        ) from error
    except errors.EntryNotFoundError as error:
        raise SourceError(f"the repository {repo} has no such file ({_line(error)}); check the file name") from error
    # OSError is in: a hub file that cannot be written must not end the search for another source.
    except (_transport_error(), OSError, ValueError, AssertionError, RuntimeError) as error:
        raise SourceError(f"the hub did not give {repo} ({_line(error)}); try again") from error


def _unreachable(probe: str) -> str | None:
    """Say why the hub cannot be used, or None when it answers for the path `probe` within `CHECK_SECONDS`."""
    import huggingface_hub
    from huggingface_hub import constants

    outcome: list[str | None] = []

    def check() -> None:
        try:
            response = huggingface_hub.get_session().head(f"{constants.ENDPOINT}/{probe}", timeout=CHECK_SECONDS * 0.75)
            status = response.status_code
            busy = status >= 500 or status in (407, 429)
            outcome.append(f"{constants.ENDPOINT} answers with status {status}" if busy else None)
        except (_transport_error(), OSError, ValueError) as error:
            outcome.append(f"{constants.ENDPOINT} cannot be reached ({_line(error)})")

    # A thread, as no timeout of a client bounds the name lookup.
    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    return outcome[0] if outcome else f"{constants.ENDPOINT} does not answer within {CHECK_SECONDS:.0f} s"


def _transport_error() -> type[Exception]:
    """The base of the HTTP client's errors: requests' in huggingface_hub 0, httpx's in 1, httpx2's since 2."""
    from huggingface_hub import errors

    kind: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return kind


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _bar(label: str, progress: Progress) -> Any:
    """A tqdm class that draws nothing and reports to `progress` the furthest of the byte bars."""
    base: Any = importlib.import_module("tqdm").tqdm
    furthest = [0, 0]

    def display(self: Any, *_: Any, **__: Any) -> None:
        if self.unit != "B":
            return
        furthest[0] = max(furthest[0], int(self.n))
        furthest[1] = max(furthest[1], int(self.total or 0))
        progress(f"downloading {label}", furthest[0], furthest[1] or None)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        base.__init__(self, *args, **{**kwargs, "file": io.StringIO(), "disable": False})

    return type("ProgressBar", (base,), {"__init__": init, "display": display, "monitor_interval": 0})
