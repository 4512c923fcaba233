"""The per-node process that starts workers, notices when one dies, and replaces that one alone.

`python -m hyperpod_ext.runtime.agent` takes torchrun's flags. It never imports torch: it must start at
once and answer at once while every core is busy training.
"""
