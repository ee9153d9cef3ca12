"""``python -m documentation``: writes what is generated into docs/ and README.md. ``--check`` only compares."""

from __future__ import annotations

import sys

from documentation.pages import ROOT, generated


def main(check: bool) -> int:
    """Write every generated page that differs from its file; return 1 where ``check`` finds one."""
    stale = [(path, text) for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in stale:
        print(path.relative_to(ROOT), "is out of date" if check else "written")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
