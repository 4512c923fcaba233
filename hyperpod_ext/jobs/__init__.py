"""The laptop side: make_plan → render → submit → JobHandle. Nothing here runs inside a container."""
