"""`@resilient` for training loops that are somebody else's, one file for each:

    from hyperpod_ext.integrations.lightning import ResilientTrainer
    from hyperpod_ext.integrations.lightning_checkpoint import HyperpodCheckpointIO
    from hyperpod_ext.integrations.hugging_face import ResilientTrainer
    from hyperpod_ext.integrations.accelerate import ResilientAccelerator
    from hyperpod_ext.integrations.titan import RunCheckpointer

Nothing else imports these, and so nothing else needs the libraries.
"""
