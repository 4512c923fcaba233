"""Rendering and submitting jobs from the user's machine: make_plan → render → submit → JobHandle.

The containers of a job do not import this package.
"""
