"""The HTTP API of AWS's managed tiered checkpointing, served from the memory of this process.

Scripts for `amzn-sagemaker-checkpointing` 1.1.3 use the API without changes. `serve.py` starts it.
"""
