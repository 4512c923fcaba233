"""The HTTP API of AWS's managed tiered checkpointing, served from this process's memory.

Scripts written for `amzn-sagemaker-checkpointing` 1.1.3 run against it as they are. `serve.py` starts it.
"""
