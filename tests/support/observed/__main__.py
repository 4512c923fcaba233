"""Compare what the code shows with the record in tests/observed/, or write the record.

A difference is a change that users can see: undo it, or record it in the same commit and say why.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants.table import MOVED

from observed import pool, record


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    sections = options.only or list(record.SECTIONS)
    if options.write:
        for section in sections:
            record.write(section, record.observe(section))
        return 0
    if options.whole:
        texts = {section: record.observe(section, whole=True) for section in sections}
        options.whole.write_text(json.dumps(texts))
        return 0
    found = against(options.against, sections) if options.against else record.changed(sections, fast=options.fast)
    for one in found:
        print(one)
    print(f"{len(found)} differences" + (_NEXT if found else ""))
    return 1 if found else 0


_NEXT = ". Whole texts: make observed ARGS='--against main'. To record them: make observed ARGS=--write"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make observed", description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what the code shows now")
    parser.add_argument("--only", action="append", choices=[*record.SECTIONS], help="this section; may come again")
    parser.add_argument("--fast", action="store_true", help="the part that the fast tests look at")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit's code, in whole texts")
    parser.add_argument("--whole", type=Path, metavar="FILE", help="write whole texts to this file, and stop")
    return parser.parse_args(arguments)


def against(commit: str, sections: Sequence[str]) -> list[str]:
    """Differences between this tree and the code of a commit, with whole texts."""
    now = {section: record.observe(section, whole=True) for section in sections}
    with tempfile.TemporaryDirectory(prefix="observed-") as folder:
        before = _observed_at(commit, sections, Path(folder))
    return [one for section in sections for one in record.differences(section, before[section], now[section])]


def _observed_at(commit: str, sections: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    tree, texts = folder / "tree", folder / "texts.json"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=pool.ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    for package, place in MOVED.items():
        (tree / package.replace(".", "/")).symlink_to(tree / place)
    if not (tree / "tests/support/observed").exists():
        shutil.rmtree(tree / "tests/support")
        shutil.copytree(pool.ROOT / "tests/support", tree / "tests/support")
    pool.FILE.parent.mkdir(exist_ok=True)
    (tree / "tests/observed").mkdir(exist_ok=True)
    shutil.copy(pool.FILE, tree / "tests/observed")
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests/support'}", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [word for section in sections for word in ("--only", section)]
    subprocess.run([sys.executable, "-m", "observed", "--whole", texts, *words], cwd=tree, env=environment, check=True)
    found: dict[str, dict[str, Any]] = json.loads(texts.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
