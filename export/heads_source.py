"""From what names heads to a speculator of a bundle: a weights folder, published heads here or on the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specrun.export.published_heads import PublishedHeads
from specrun.export.speculator_weights import JSON_NAME
from specrun.export.speculators import attach, attach_speculator
from specrun.models_cache.errors import IntegrityError, SourceError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.sources import REGISTRY, fetch_source
from specrun.models_cache.speculator import InstalledSpeculator

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Double quotes outside and single ones inside: sh, PowerShell and cmd all take it.
_CONVERT = (
    'python -c "import sys, torch; from safetensors.torch import save_file; '
    "save_file({k: v.contiguous().clone() for k, v in torch.load(sys.argv[1], map_location='cpu', "
    'weights_only=True).items()}, sys.argv[2])" {source} {target}'
)


@dataclass(frozen=True, slots=True)
class FoundHeads:
    """Heads on this disk: a folder that `write_speculator` wrote where `published` is None."""

    name: str
    path: Path
    published: PublishedHeads | None
    licence: str | None

    def attach(
        self, bundle: Bundle, name: str | None = None, *, force: bool = False, progress: Progress = no_progress
    ) -> InstalledSpeculator:
        """Attach them to a bundle. Raises as `speculators.attach`, UnsupportedModelError for a layout not known."""
        if self.published is None:
            return attach(bundle, self.path, name, force=force, progress=progress)
        progress(f"Reading {self.name}", 0, None)
        speculator = self.published.speculator(bundle, self.name, self.licence)
        return attach_speculator(bundle, speculator, name, force=force, progress=progress)


def find_heads(source: str, progress: Progress = no_progress) -> FoundHeads | None:
    """The heads that `source` names, fetched; None where it names an ordinary model, which can draft as it is.

    `source` is a folder with speculator.json, a folder with config.json and published heads in safetensors files, or a
    hub repository of such. Raises IntegrityError for heads in pickle files, with the command that converts them;
    SourceError, ModelNotFoundError.
    """
    path = Path(os.path.abspath(os.path.expanduser(source)))
    name = path.name if path.exists() else source.rstrip("/").rsplit("/", 1)[-1]
    name = name.lower().lstrip(".-") or "heads"
    if (path / JSON_NAME).is_file():
        return FoundHeads(name, path, None, None)
    if any(row.name == source for row in REGISTRY) or source.lower().endswith(".gguf"):
        return None
    _refuse_pickled_heads(path)
    try:
        fetched = fetch_source(source, progress=progress)
    except SourceError as error:
        if not isinstance(error.__cause__, IntegrityError):
            raise
        command = convert_command("HEADS/pytorch_model.bin", "HEADS/model.safetensors")
        raise SourceError(
            f"{source} has no safetensors weights on the hub, and specrun reads no pickle because loading one can run "
            f"code; download it with `hf download {source} --local-dir HEADS`, convert it with `{command}`, and give "
            "that folder"
        ) from error
    if not fetched.path.is_dir():
        return None
    published = PublishedHeads(fetched.path)
    return None if published.layout is None else FoundHeads(name, fetched.path, published, fetched.licence)


def convert_command(source: str, target: str) -> str:
    """The command that makes a safetensors file of a pickle of tensors without running what else it holds."""
    return _CONVERT.replace("{source}", _quoted(source)).replace("{target}", _quoted(target))


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path


def _refuse_pickled_heads(path: Path) -> None:
    files = [path] if path.is_file() else sorted(path.iterdir()) if (path / "config.json").is_file() else []
    pickles = [file for file in files if file.suffix.lower() in _PICKLES]
    if not pickles or any(file.suffix == ".safetensors" for file in files):
        return
    command = convert_command(str(pickles[0]), str(pickles[0].with_name("model.safetensors")))
    raise IntegrityError(
        f"{pickles[0]} is a pickle file, and specrun reads no pickle because loading one can run code; convert it "
        f"with `{command}` (in an environment that has torch) and give the folder again"
    )
