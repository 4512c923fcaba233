"""Reference of rules, fields, instance types, templates and this machine."""
