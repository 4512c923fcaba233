"""Replacements for the AWS packages that training scripts import, on top of this project's runtime. docs/compat-aws.md
lists all names.

Scripts can import the replacements under AWS's names, but only in a job with `compat: aws`.
"""
