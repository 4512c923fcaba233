"""Adapters that run the training loops of other libraries under `@resilient`.

Each file has an adapter for one library. Scripts import:

    from hyperpod_ext.integrations.lightning import ResilientTrainer
    from hyperpod_ext.integrations.lightning_checkpoint import HyperpodCheckpointIO
    from hyperpod_ext.integrations.hugging_face import ResilientTrainer
    from hyperpod_ext.integrations.accelerate import ResilientAccelerator
    from hyperpod_ext.integrations.titan import RunCheckpointer
    from hyperpod_ext.integrations.deepspeed import keep_engine

No module outside of this package imports the adapters, so the libraries need not be installed.
"""
