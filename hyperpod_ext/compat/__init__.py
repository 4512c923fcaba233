"""Replacements for AWS's packages for training scripts, on this project's runtime. docs/compat-aws.md lists all names.

In a job with `compat: aws`, and in no other job, a script can import these modules under AWS's names.
"""
