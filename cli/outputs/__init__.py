"""Pydantic models of the outputs of `-o json`. `hp-ext schema` prints their schemas, and tests check each output.

Later versions may add fields to an output. Existing fields keep their names and meanings.
"""
