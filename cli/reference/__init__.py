"""Commands that show rules, fields, instance types, templates and the state of this machine."""
