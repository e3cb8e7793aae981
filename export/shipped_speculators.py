"""The speculators that come with specrun: `shipped/TARGET/METHOD/`, weights folders as training writes them.

They are for a target's weight files by their digests, whatever precision those are exported in.
"""

from __future__ import annotations

from pathlib import Path

from specrun.export.speculator_weights import TENSORS_NAME, read_description, read_speculator
from specrun.export.speculators import attach_speculator, check_fit, report_files
from specrun.models_cache.errors import SpecrunError, UnsupportedModelError
from specrun.models_cache.integrity import sha256_file
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import Manifest
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.speculator import InstalledSpeculator, find_speculator

SHIPPED = Path(__file__).parent / "shipped"


def shipped_speculators(manifest: Manifest, folder: Path | None = None) -> list[Path]:
    """The weights folders below `folder` (by default the package's own) that were made for a bundle's weights.

    Raises IntegrityError for a folder that is damaged.
    """
    ours = set(manifest.source.files.values())
    found = []
    for path in sorted((folder or SHIPPED).glob("*/*/speculator.json")):
        theirs = set(read_description(path.parent).target.source_files.values())
        if theirs and theirs <= ours:
            found.append(path.parent)
    return found


def ensure_shipped(
    bundle: Bundle, progress: Progress | None = None, folder: Path | None = None
) -> list[InstalledSpeculator]:
    """Attach the speculators that ship for a bundle's weights where it lacks them, and return those attached now.

    Another speculator of the same name stays; an older one that was shipped is replaced. A bundle exported without
    features gets only those that need none. Raises IntegrityError, CacheError.
    """
    attached = []
    for path in shipped_speculators(bundle.manifest, folder):
        name = read_description(path).name
        there = _installed(bundle, name)
        if there is not None:
            digest = sha256_file(path / TENSORS_NAME)
            if not there.manifest.shipped or there.manifest.files[TENSORS_NAME].sha256 == digest:
                continue
        speculator = read_speculator(path)
        try:
            check_fit(bundle, speculator)
        except UnsupportedModelError:
            continue
        attached.append(
            attach_speculator(
                bundle,
                speculator,
                force=there is not None,
                progress=progress or no_progress,
                extra_files=report_files(path),
                shipped=True,
            )
        )
    return attached


def _installed(bundle: Bundle, name: str) -> InstalledSpeculator | None:
    try:
        return find_speculator(bundle, name)
    except SpecrunError:
        return None  # absent, broken or made for another export: attached anew
