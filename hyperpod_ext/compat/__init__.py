"""AWS's packages for training scripts, on this project's runtime. docs/compat-aws.md lists their names.

A script finds them under AWS's names in a job with `compat: aws`, and in no other.
"""
