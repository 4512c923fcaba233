"""Rendering and submitting jobs from the user's machine: make_plan → render → submit → JobHandle.

Containers of jobs do not run this package.
"""
