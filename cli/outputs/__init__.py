"""Models of the outputs of `-o json`. `hp-ext schema` publishes the models; tests check each output against its model.

Later versions may add fields; a field keeps its name and meaning.
"""
