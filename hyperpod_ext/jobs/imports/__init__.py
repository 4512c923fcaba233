"""Shared parts of all imports: placeholders, command lines of launchers, shell scripts, the report."""
