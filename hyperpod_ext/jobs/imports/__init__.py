"""What imports of every kind share: placeholders and their values, launchers' command lines, the report."""
