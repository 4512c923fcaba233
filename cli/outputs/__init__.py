"""Models of the outputs under `-o json`. `hp-ext schema` publishes them; the tests check each output against its model.

Later versions may add fields; a field keeps its name and meaning.
"""
