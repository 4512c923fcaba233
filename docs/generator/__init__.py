"""Makes the pages of the documentation site that are not in docs/: the reference, and the files that pages link to.

`docs/hook.py` calls this package when MkDocs builds the site. All functions are pure: they return texts, and write no
files.
"""
