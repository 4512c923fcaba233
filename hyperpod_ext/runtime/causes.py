"""An exception in one line, with the place in the user's own code. Imports nothing heavy."""

from __future__ import annotations

import traceback
from pathlib import Path

import hyperpod_ext

_OURS = str(Path(hyperpod_ext.__file__).parent)


def one_line(error: BaseException) -> str:
    """`ValueError: bad sample (train.py:57)`: the innermost line that is neither a library's nor ours."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if _is_users(frame.filename)] or list(frames)
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {text}{where}"


def _is_users(filename: str) -> bool:
    return not (filename.startswith((_OURS, "<")) or "site-packages" in filename or "/lib/python3" in filename)
