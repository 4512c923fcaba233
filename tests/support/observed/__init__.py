"""Behaviour that others can observe, as data: recorded in tests/observed/, compared after each change of the code.

`make observed` compares, `make observed ARGS=--write` records, and `make observed ARGS='--against COMMIT'` shows the
differences from a commit in whole texts.
"""
