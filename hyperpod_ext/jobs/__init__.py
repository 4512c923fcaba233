"""The laptop side: make_plan → render → submit → JobHandle. This package does not run inside containers."""
