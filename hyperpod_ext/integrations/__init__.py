"""`@resilient` for the training loops of other libraries, one file for each:

    from hyperpod_ext.integrations.lightning import ResilientTrainer
    from hyperpod_ext.integrations.lightning_checkpoint import HyperpodCheckpointIO
    from hyperpod_ext.integrations.hugging_face import ResilientTrainer
    from hyperpod_ext.integrations.accelerate import ResilientAccelerator
    from hyperpod_ext.integrations.titan import RunCheckpointer

No other module imports these files, so their libraries are optional.
"""
