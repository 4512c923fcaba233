"""What is there to be used: rules, fields, instance types, templates, this machine."""
