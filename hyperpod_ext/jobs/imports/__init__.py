"""Parts that the imports of all kinds of job files share: placeholders, launchers' command lines, shell, the report."""
