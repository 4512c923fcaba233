"""The HTTP API of AWS's managed tiered checkpointing, served from the memory of this process.

Scripts that use `amzn-sagemaker-checkpointing` 1.1.3 can use this API without changes. `serve.py` starts the API.
"""
