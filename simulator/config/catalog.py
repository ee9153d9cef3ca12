"""Files that ship with the product, found by name from anywhere, in a checkout as in an installed wheel."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from simulator.config.misplaced_file import CLUSTER, PROFILE, STACK, WORKLOAD, FileUse, expecting
from simulator.errors import InputError, nearest_names
from simulator.input_files import as_path, brief, closest, read_text

FileKind = Literal["workload", "cluster", "profile", "stack"]

_PACKAGE = Path(__file__).resolve().parent.parent
#: The wheel carries `topologies/` and `workloads/` inside the package; a checkout has them beside it.
_DATA = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent

FOLDERS: dict[FileKind, Path] = {
    "workload": _DATA / "workloads",
    "cluster": _DATA / "topologies",
    "profile": _PACKAGE.parent / "calibration" / "profiles",
    "stack": _PACKAGE.parent / "calibration" / "stacks",
}

_USES: dict[FileKind, FileUse] = {"workload": WORKLOAD, "cluster": CLUSTER, "profile": PROFILE, "stack": STACK}

#: Kind -> what `llmsim list` calls its files.
_LISTS: dict[FileKind, str] = {
    "workload": "workloads",
    "cluster": "topologies",
    "profile": "profiles",
    "stack": "stacks",
}


def names(kind: FileKind) -> list[str]:
    """Return the names of the shipped files of a kind, sorted."""
    return sorted(path.stem for path in FOLDERS[kind].glob("*.yaml"))


def is_shipped(kind: FileKind, name: object) -> bool:
    """Return True where a shipped file of a kind has this name, which may be anything that a file says.

    The folder is not listed for it: a workload asks for several names.

    >>> is_shipped("cluster", "dgx_a100"), is_shipped("cluster", "../topologies/dgx_a100"), is_shipped("cluster", None)
    (True, False, False)
    """
    named = isinstance(name, str) and os.path.basename(name) == name
    return named and os.path.isfile(f"{FOLDERS[kind]}{os.sep}{name}.yaml")


def name_of(path: str) -> str:
    """Return the name of a shipped file, and any other path as it is."""
    return Path(path).stem if Path(path).parent in FOLDERS.values() else path


def find(
    kind: FileKind, reference: str, *, base: Path | None = None, file: object = None, key: str | None = None
) -> Path:
    """Return the file that a name or a path means.

    A text with a slash or a YAML suffix is a path. It is looked for beside the file that names it (``base``, a folder),
    then in the current directory. Any other text is a shipped name, or else a file of the current directory.

    Raises `InputError`, naming ``file`` and ``key`` as the place of the reference, where there is no such file.
    """
    path = as_path(reference, base=base, file=file, key=key)
    is_path = "/" in reference or "\\" in reference or path.suffix in (".yaml", ".yml")
    if not is_path and is_shipped(kind, reference):
        return FOLDERS[kind] / f"{reference}.yaml"
    if reference.strip() and path.exists():  # the path of an empty text is the current directory
        return path
    shipped_names = names(kind)
    near = closest(path.stem if is_path else reference, shipped_names)
    if near and kind in ("profile", "stack") and _number(near) != _number(reference):
        near = None  # an A10 is no A100
    listed = nearest_names(path.stem if is_path else reference, shipped_names, f"llmsim list {_LISTS[kind]}")
    raise InputError(
        f"no {kind} file of this name" if not is_path else "no such file",
        file=file,
        key=key,
        found=brief(reference),
        allowed=f"a path, or one of {listed or '(none is shipped)'}",
        fix=f"{kind} {near}" if near else None,
    )


def seen_from(folder: Path, reference: str) -> str:
    """Return a path as a file in ``folder`` writes it: a relative one starts there.

    >>> seen_from(Path("jobs"), "config.json"), seen_from(Path(), "config.json"), seen_from(Path("jobs"), "~/one.json")
    ('../config.json', 'config.json', '~/one.json')
    """
    is_whole = reference.startswith("~") or Path(reference).is_absolute()
    return reference if is_whole else Path(os.path.relpath(reference, folder)).as_posix()


def _number(name: str) -> list[str]:
    """Return the digits in the first word of a name: the number of a GPU's model."""
    return re.findall(r"\d+", re.split("[-_]", name)[0])


T = TypeVar("T")


def load(
    kind: FileKind,
    reference: str | Path,
    parse: Callable[[str, Path], T],
    *,
    base: Path | None = None,
    file: object = None,
    key: str | None = None,
) -> T:
    """Parse the text of the file that `find` finds. Raises `InputError`."""
    path = find(kind, str(reference), base=base, file=file, key=key)
    with expecting(_USES[kind], path):
        return parse(read_text(path), path)


def check_gpu(
    kind: FileKind,
    name: str,
    own_gpu: str,
    gpu: str,
    gpu_of: Callable[[str], str],
    *,
    file: object = None,
    key: str | None,
) -> None:
    """Raise `InputError` where a profile or stack ``name``, of the GPU ``own_gpu``, is not one of ``gpu``; ``file`` and
    ``key`` chose it, ``gpu_of`` says which GPU a shipped one is of."""
    if own_gpu == gpu:
        return
    matching = [other for other in names(kind) if gpu_of(other) == gpu]
    raise InputError(
        f"{name} is a {kind} of another GPU",
        file=file,
        key=key,
        found=own_gpu,
        allowed=f"{kind}s of {gpu}: {', '.join(matching) or '(none is shipped)'}",
        fix=f"{'calibration' if kind == 'profile' else kind}: {matching[0]}" if matching else None,
    )
